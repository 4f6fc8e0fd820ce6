"""Engram rows from a file in the place of a table: rows sent for ahead are read while earlier layers compute."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tinyds41.infer.host_layout import CHUNK_ROWS
from tinyds41.infer.host_table import HostTable
from tinyds41.memory import require_bytes

LEAST = 256  # rows worth a thread; fewer, as of one decoded token, are read sooner than it wakes up (docs/LOG.md)
MOST_WAITING = 4  # orders that may wait for their use; of more the oldest is given up


@dataclass
class RowReads:
    """What was read from a table, and who waited for it.

    Units: rows as often as they were asked for (repeats count), bytes of packed rows, seconds. `ready` rows were there
    when the layer came, for `waited` ones it waited. `late` ones, whose turn had not come, it read itself, as it did
    `direct` ones, which nobody had sent for or whose reading failed. `unused` ones, sent for in vain, count only there.
    """

    ready: int = 0
    waited: int = 0
    late: int = 0
    direct: int = 0
    unused: int = 0
    failed: int = 0  # those among `direct` whose reading ahead failed
    read_bytes: int = 0
    read_seconds: float = 0.0  # that reading took, wherever it ran
    stood_seconds: float = 0.0  # that layers stood still for rows
    send_seconds: float = 0.0  # that sending for rows took, which is no part of the two

    @property
    def rows(self) -> int:
        return self.ready + self.waited + self.late + self.direct

    @property
    def hidden(self) -> float | None:
        """Share of the reading time during which layers computed; None before anything was read."""
        return max(0.0, 1 - self.stood_seconds / self.read_seconds) if self.read_seconds else None


def total(reads: Iterable[RowReads]) -> RowReads:
    """The sum over several tables."""
    tables = [dataclasses.astuple(one) for one in reads]
    return RowReads(*map(sum, zip(*tables, strict=True))) if tables else RowReads()


class HostRows(nn.Module):
    """What `Engram.embed` is when its table lies in a file: it has no parameters, and the table is never in memory.

    `fetch` sends for rows that will be read, by one thread of this object's own. `forward` takes what was sent for if
    its addresses are the same, number by number, and else reads by itself: what was fetched can only change the time.
    Rows are read-only: no gradient reaches them, as with a frozen table.

    prefetch: False for a table that is only read when asked. least: fewer rows are read when asked for.
    The thread ends with `close`, with this object, and with the interpreter.

    Shapes: addresses int64 [...] -> float32 [..., width] on the CPU. Raises: as `HostTable.take`.
    Source: spec 9.4. Lesson: 10.
    """

    def __init__(self, table: HostTable, *, prefetch: bool = True, least: int = LEAST):
        super().__init__()
        self.table, self.prefetch, self.least = table, prefetch, least
        self.num_embeddings, self.embedding_dim = table.n_rows, table.width
        self.reads = RowReads()
        self._begin()

    def _begin(self) -> None:
        self._process, self._lock = os.getpid(), threading.Lock()
        self._waiting: list[_Order] = []
        self._thread: ThreadPoolExecutor | None = None

    def wants(self, n_rows: int) -> bool:
        """Whether to send for so many: few rows only while the file comes from the disk."""
        return self.prefetch and (n_rows >= self.least or self.table.is_slow)

    def fetch(self, rows: Tensor) -> None:
        """Sends for these rows, unless they are too few (`wants`) or already sent for."""
        if not self.wants(rows.numel()):
            return
        started = time.perf_counter()
        self._check_process()
        rows = rows.detach().cpu()
        with self._lock:
            # Asked again: `close` may have come in between, and nobody would end another thread.
            if self.prefetch and not any(order.is_for(rows) for order in self._waiting):
                self._send(rows.clone())  # a copy: the caller may write into its own
            while len(self._waiting) > MOST_WAITING:
                self._give_up(self._waiting.pop(0))
            self.reads.send_seconds += time.perf_counter() - started

    def _send(self, rows: Tensor) -> None:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "engram rows")
        with suppress(RuntimeError):  # the interpreter is ending
            self._waiting.append(_Order(rows, self._thread.submit(_timed_take, self.table, rows)))

    def forward(self, rows: Tensor) -> Tensor:
        started, rows = time.perf_counter(), rows.detach().cpu()
        order = self._collect(rows)
        kind, read = ("direct", None) if order is None else order.outcome()
        values, seconds = (self.table.take(rows), None) if read is None else read
        self._count(kind, rows.numel(), time.perf_counter() - started, seconds)
        return values

    def _collect(self, rows: Tensor) -> _Order | None:
        """The order for just these addresses, whatever was ordered before or after it."""
        self._check_process()
        with self._lock:
            for place, order in enumerate(self._waiting):
                if order.is_for(rows):
                    return self._waiting.pop(place)
        return None

    def _count(self, kind: str, n_rows: int, stood: float, seconds: float | None) -> None:
        with self._lock:
            reads = self.reads
            for name in ("failed", "direct") if kind == "failed" else (kind,):
                setattr(reads, name, getattr(reads, name) + n_rows)
            reads.read_bytes += n_rows * self.table.row_bytes
            reads.read_seconds += stood if seconds is None else seconds
            reads.stood_seconds += stood

    def _give_up(self, order: _Order) -> None:
        order.read.cancel()
        self.reads.unused += order.rows.numel()

    def reset(self) -> None:
        """Gives up what was sent for and not used; counts begin anew."""
        self._check_process()
        with self._lock:
            while self._waiting:
                self._give_up(self._waiting.pop())
            self.reads = RowReads()

    def close(self) -> None:
        """Ends the thread, once what it reads is read. From here on rows are read when asked for.

        The table stays open: copies and variants of a model read from it too.
        """
        self._check_process()
        with self._lock:
            self.prefetch = False
            thread, self._thread = self._thread, None
            while self._waiting:
                self._give_up(self._waiting.pop())
        if thread is not None:
            thread.shutdown(cancel_futures=True)

    def _check_process(self) -> None:
        """A forked process has no threads: what its parent sent for never comes."""
        if os.getpid() != self._process:
            self._begin()

    @property
    def weight(self) -> Tensor:
        """The whole table, decoded, for who saves it.

        Shapes: float32 [rows, width]. Raises: MemoryError where it cannot fit; ValueError as `HostTable.take`.
        """
        n_rows, width = self.num_embeddings, self.embedding_dim
        require_bytes(4 * n_rows * width, torch.device("cpu"), f"a table of {n_rows:,} rows of {width}")
        whole = torch.empty(n_rows, width)
        for start in range(0, n_rows, CHUNK_ROWS):  # at once, the packed rows and the numbers would need room as well
            piece = whole[start : start + CHUNK_ROWS]
            piece.copy_(self.table.take(torch.arange(start, start + len(piece))))
        return whole

    def __deepcopy__(self, memo: dict[int, Any]) -> HostRows:
        """A copied model reads the same file, which nobody writes to, by a thread of its own."""
        return HostRows(self.table, prefetch=self.prefetch, least=self.least)


@dataclass
class _Order:
    """Rows that were sent for. Shapes: rows int64 [...], read -> values [..., width], seconds."""

    rows: Tensor
    read: Future[tuple[Tensor, float]]

    def is_for(self, rows: Tensor) -> bool:
        return self.rows.shape == rows.shape and torch.equal(self.rows, rows)

    def outcome(self) -> tuple[str, tuple[Tensor, float] | None]:
        """How the order stood when it was called for, and what was read; waits for a reading that has begun."""
        if self.read.cancel():
            return "late", None
        kind = "ready" if self.read.done() else "waited"
        return ("failed", None) if self.read.exception() is not None else (kind, self.read.result())


def _timed_take(table: HostTable, rows: Tensor) -> tuple[Tensor, float]:
    started = time.perf_counter()
    values = table.take(rows)
    return values, time.perf_counter() - started
