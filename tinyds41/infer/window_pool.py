"""Encoder windows of recent prefixes in host memory: what a hit finds there need not run again."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from tinyds41.memory import total_bytes

LIFETIME_S = 300.0
SHARE = 10  # the default budget is the machine's memory divided by this


@dataclass
class PoolCounters:
    """What a `WindowPool` did. Units: values."""

    hits: int = 0
    misses: int = 0
    expired: int = 0  # removed: not used within their lifetime
    evicted_early: int = 0  # removed for the byte budget, before their lifetime ended
    too_large: int = 0  # not kept: larger than the whole budget


@dataclass(frozen=True)
class _Held:
    value: object
    n_bytes: int
    used: float


class WindowPool:
    """Values of stated sizes under keys, in memory, for minutes: what was used least recently goes first.

    A value stays until it was not used (put or got) for `lifetime_s`, or the budget needs its place. A value larger
    than the budget is not kept and drives out nothing. Nobody watches the clock: what has expired is dropped, and its
    memory freed, when the pool is next asked anything. Values are handed out as they are: do not write into them.

    All threads of a process may use one pool.

    Units: budget_bytes in bytes as `put` states them, by default a tenth of the machine's (or container's) memory;
    lifetime_s in seconds of `clock`.
    Raises: ValueError for a negative budget or size, a lifetime that is not above 0, and without a budget where the
    system does not tell how much memory there is.
    Source: spec 6.
    """

    def __init__(self, *, budget_bytes: int | None = None, lifetime_s: float = LIFETIME_S,
                 clock: Callable[[], float] = time.monotonic):  # fmt: skip
        if budget_bytes is None:
            total = total_bytes()
            if total is None:
                raise ValueError("the system does not tell its memory: budget_bytes is needed")
            budget_bytes = total // SHARE
        if budget_bytes < 0 or not lifetime_s > 0:
            raise ValueError(f"budget_bytes={budget_bytes}, lifetime_s={lifetime_s}: not negative, and more than 0")
        self.budget_bytes, self.lifetime_s, self.counters = budget_bytes, lifetime_s, PoolCounters()
        self._clock, self._lock = clock, threading.Lock()
        self._held: OrderedDict[bytes, _Held] = OrderedDict()  # by last use, oldest first
        self._bytes = 0

    def put(self, key: bytes, n_bytes: int, value: object) -> None:
        """Keeps the value under the key, in place of what was there."""
        if n_bytes < 0:
            raise ValueError(f"n_bytes={n_bytes}: a size is not negative")
        with self._lock:
            now = self._expire()
            self._drop(key)
            if n_bytes > self.budget_bytes:
                self.counters.too_large += 1
                return
            while self._bytes + n_bytes > self.budget_bytes:
                self._drop(next(iter(self._held)))
                self.counters.evicted_early += 1
            self._held[key] = _Held(value, n_bytes, now)
            self._bytes += n_bytes

    def get(self, key: bytes) -> object | None:
        """The value, None where there is none."""
        with self._lock:
            now = self._expire()
            held = self._held.pop(key, None)
            if held is None:
                self.counters.misses += 1
                return None
            self.counters.hits += 1
            self._held[key] = _Held(held.value, held.n_bytes, now)
            return held.value

    def clear(self) -> None:
        """Forgets all values; the counters go on."""
        with self._lock:
            self._held.clear()
            self._bytes = 0

    def __len__(self) -> int:
        with self._lock:
            self._expire()
            return len(self._held)

    @property
    def bytes_held(self) -> int:
        with self._lock:
            self._expire()
            return self._bytes

    def _expire(self) -> float:
        """Drops what has expired, which lies at the front; returns the time."""
        now = self._clock()
        while self._held:
            key, oldest = next(iter(self._held.items()))
            if now - oldest.used <= self.lifetime_s:
                break
            self._drop(key)
            self.counters.expired += 1
        return now

    def _drop(self, key: bytes) -> None:
        held = self._held.pop(key, None)
        if held is not None:
            self._bytes -= held.n_bytes
