"""The persistent cache: blocks of bytes on disk, each under a hash of all tokens up to its end."""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
import struct
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tinyds41.infer.store_blocks import DamagedBlockError, NoRoomError, StoreBlocks
from tinyds41.infer.store_file import VERSION, is_damage

LIFETIME_S = 72 * 3600.0


@dataclass
class StoreCounters:
    """What one `Store` did since it was opened. Units: whole blocks, unless the name says bytes or writes."""

    hits: int = 0  # `read` returned them
    misses: int = 0  # `read` was asked for them and did not
    damaged: int = 0  # did not fit their checksum; among the misses
    blocks_written: int = 0
    bytes_written: int = 0  # of their payloads
    expired: int = 0  # removed: not used within their lifetime
    evicted_early: int = 0  # removed for the byte budget, before their lifetime ended
    without_room: int = 0  # not written: with all that leads to it, the block exceeds the budget
    failed_writes: int = 0  # calls of `write` that could not save all: disk full, read-only, locked, store off


class Store:
    """Blocks of bytes on disk, each under a hash of all tokens up to its end; several processes may share the file.

    A payload is opaque here. Only whole blocks are stored, of `block_tokens` tokens each from the start of a text.
    model_key names config, weights and what a payload is made of. A namespace keeps users apart: the same tokens in
    another one have other keys and are saved again, so it sees and measures nothing but a miss.

    Removed are blocks not used (read or written) for `lifetime_s` and, least recently used first, what exceeds
    `budget_bytes`. THE BUDGET WINS over the lifetime: `counters.evicted_early` says how often it did. A prefix counts
    as used whenever what continues it is, so the end of a text goes first: a hit gets shorter, it does not vanish.

    Saving never stops the caller. What fails (disk full, a read-only folder, a lock that is not released) is rolled
    back, counted, and warned of once per Store. A block whose bytes were changed is a miss, counted and deleted.
    A file whose structure is broken, or that is no database, is left as it is, and the store is off: after one
    warning it finds and saves nothing until somebody moves the file away. (Not we: another process may be opening it,
    and SQLite finds a file's log by its name.)

    All threads of a process may use one Store; a forked process opens its own. The file is private (mode 0600) and
    belongs on a local disk.

    Units: budget_bytes counts payloads; for those of 10 KB and more the file takes up to a tenth more, some 4 MB of
    log beside it, and does not shrink: freed pages are used again. lifetime_s in seconds of `clock`, which all
    processes share.
    Raises: ValueError for sizes that cannot be, a folder, a file of another model, block size, version or program,
    and for use after `close`.
    Source: TR 3.2, spec 6.
    """

    def __init__(
        self, path: str | os.PathLike[str], model_key: str, *, block_tokens: int = 256,
        budget_bytes: int | None = None, lifetime_s: float = LIFETIME_S, clock: Callable[[], float] = time.time,
    ):  # fmt: skip
        if block_tokens < 1 or (budget_bytes or 0) < 0 or not lifetime_s > 0:
            raise ValueError(f"block_tokens={block_tokens}, budget_bytes={budget_bytes}, lifetime_s={lifetime_s}: "
                             "at least 1, not negative, more than 0")  # fmt: skip
        self.path, self.model_key, self.block_tokens = Path(path), model_key, block_tokens
        if self.path.is_dir():
            raise ValueError(f"{self.path} is a folder: a store is a file")
        self.budget_bytes, self.lifetime_s, self.counters = budget_bytes, lifetime_s, StoreCounters()
        self._clock, self._lock = clock, threading.Lock()
        self._closed = self._warned = False
        self._blocks: StoreBlocks | None = None
        try:
            self._blocks = StoreBlocks(self.path, {"model_key": model_key, "block_tokens": str(block_tokens)})
        except (OSError, sqlite3.Error) as error:
            self._fail(error)
        self._try(self._tidy)

    def keys(self, ids: Sequence[int], namespace: str = "") -> list[bytes]:
        """A key for each whole block: SHA-256 of the key before it and of the block's tokens.

        The first follows on a hash of version, model, block size and namespace.
        Raises: ValueError for ids that are not whole numbers of 64 bits.
        """
        root = json.dumps([VERSION, self.model_key, self.block_tokens, namespace])
        key, keys, n = hashlib.sha256(root.encode()).digest(), [], self.block_tokens
        for start in range(0, len(ids) - n + 1, n):
            try:
                tokens = struct.pack(f"<{n}q", *ids[start : start + n])
            except struct.error as error:
                raise ValueError(f"ids {start}..{start + n - 1} cannot be hashed: {error}") from error
            key = hashlib.sha256(key + tokens).digest()
            keys.append(key)
        return keys

    def find(self, ids: Sequence[int], namespace: str = "") -> int:
        """Tokens of the longest stored prefix; no payload is read, so a damaged one still counts."""
        keys, oldest, n = self.keys(ids, namespace), self._clock() - self.lifetime_s, 0
        try:
            while (blocks := self._opened()) and n < len(keys) and blocks.has(keys[n], oldest):
                n += 1
        except sqlite3.Error as error:
            self._fail(error)
        return n * self.block_tokens

    def read(self, ids: Sequence[int], namespace: str = "") -> list[bytes]:
        """Payloads, in order, of the longest prefix whose checksums fit; a damaged block is deleted and ends it."""
        keys, now, payloads = self.keys(ids, namespace), self._clock(), []
        try:
            for key in keys:
                blocks = self._opened()
                payload = blocks.payload(key, now - self.lifetime_s) if blocks else None
                if payload is None:
                    break
                payloads.append(payload)
        except DamagedBlockError:
            self._count(damaged=1)
            self._try(lambda blocks: blocks.delete(keys[len(payloads)]))
        except sqlite3.Error as error:
            self._fail(error)
        self._count(hits=len(payloads), misses=len(keys) - len(payloads))
        # A reader waits for no writer: where one is at work, this use goes unmarked.
        self._try(lambda blocks: blocks.touch(keys[: len(payloads)], now, wait=False))
        return payloads

    def write(self, ids: Sequence[int], payload_of: Callable[[int, int], bytes], namespace: str = "") -> int:
        """Saves the blocks that are not yet stored, in order, up to the first that cannot be saved.

        payload_of(start, end): the bytes of the block of tokens start..end-1; asked for missing blocks alone, and
        while no lock is held. Units: returns the bytes of the payloads written.
        """
        keys, now, n_bytes = self.keys(ids, namespace), self._clock(), 0
        blocks = self._opened()
        if not keys:
            return 0
        if blocks is None or not blocks.writable:
            self._fail(blocks.why if blocks else None, n_writes=1)
            return 0
        try:
            self._expire(blocks, now)
            stored = blocks.touch(keys, now)
            for depth, key in enumerate(keys):
                if key not in stored:
                    start = depth * self.block_tokens
                    payload = payload_of(start, start + self.block_tokens)
                    added = self._add(blocks, keys[: depth + 1], payload, now)
                    if added is None:
                        break
                    n_bytes += added
        except sqlite3.Error as error:
            self._fail(error, n_writes=1)
        return n_bytes

    def bytes_stored(self) -> int:
        """Bytes of all payloads in the file, whoever wrote them."""
        blocks = self._opened()
        try:
            return blocks.n_bytes() if blocks else 0
        except sqlite3.Error as error:
            self._fail(error)
            return 0

    def close(self) -> None:
        self._closed = True
        if self._blocks is not None:
            self._blocks.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _add(self, blocks: StoreBlocks, keys: list[bytes], payload: bytes, now: float) -> int | None:
        """Bytes written, 0 where another process was first; None where there is no room."""
        if not isinstance(payload, bytes):
            raise TypeError(f"the payload of block {len(keys) - 1} has to be bytes, got {type(payload).__name__}")
        try:
            added, evicted = blocks.add(keys, payload, now, self.budget_bytes)
        except NoRoomError:
            self._count(without_room=1)
            return None
        n_bytes = len(payload) if added else 0
        self._count(blocks_written=int(added), bytes_written=n_bytes, evicted_early=evicted)
        return n_bytes

    def _expire(self, blocks: StoreBlocks, now: float) -> None:
        while expired := blocks.expire(now - self.lifetime_s):
            self._count(expired=expired)

    def _tidy(self, blocks: StoreBlocks) -> None:
        blocks.count_bytes()
        self._expire(blocks, self._clock())
        while evicted := blocks.shrink(self.budget_bytes):
            self._count(evicted_early=evicted)

    def _opened(self) -> StoreBlocks | None:
        """None where the store is off."""
        if self._closed:
            raise ValueError(f"the store {self.path} is closed")
        return self._blocks

    def _try(self, action: Callable[[StoreBlocks], object]) -> None:
        """Housekeeping: where it cannot be done now, a later call does it."""
        blocks = self._opened()
        if blocks is not None and blocks.writable:
            try:
                action(blocks)
            except sqlite3.Error as error:
                if is_damage(error):
                    self._fail(error)

    def _fail(self, error: Exception | None, *, n_writes: int = 0) -> None:
        """One warning for all that happens to this Store; a damaged file is not used again."""
        self._count(failed_writes=n_writes)
        blocks, what = self._blocks, "what cannot be saved is computed again"
        if blocks is None or (error is not None and is_damage(error)):
            what, self._blocks = "nothing is found or saved from here on", None
            if blocks is not None:
                blocks.close()
        with self._lock:
            first, self._warned = not self._warned, True
        if first:
            warnings.warn(f"store {self.path}: {what}: {error}", RuntimeWarning, stacklevel=3)

    def _count(self, **amounts: int) -> None:
        with self._lock:
            for name, amount in amounts.items():
                setattr(self.counters, name, getattr(self.counters, name) + amount)
