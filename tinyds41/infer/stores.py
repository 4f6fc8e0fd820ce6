"""Where cached rows lie: `Growing` keeps every row of the past, `Recent` the latest few."""

from __future__ import annotations

import torch
from torch import Tensor

from tinyds41.formats import Format, Rows

FIRST_CHUNK = 1024  # rows; every further chunk at least doubles the store, so a million rows are eleven chunks
ENDLESS = 1 << 62  # rows or tokens, more than there will ever be
SLACK = 256  # spare rows: of a `Growing` behind a prompt, of a `Recent` before its latest rows move to the front


class SplitRows(Rows):
    """Rows that lie in several tensors, one behind the other, read as one store."""

    def __init__(self, parts: list[Rows]):
        first = parts[0]
        self.parts, self.data = parts, first.data
        self.format, self.width, self.dtype = first.format, first.width, first.dtype

    @property
    def shape(self) -> tuple[int, int, int]:
        return (self.parts[0].shape[0], sum(part.shape[1] for part in self.parts), self.width)

    def narrow(self, start: int, length: int) -> Rows:
        if not 0 <= start <= start + length <= self.shape[1]:
            raise IndexError(f"entries {start}..{start + length - 1} are not in a store of {self.shape[1]}")
        if length == 0:
            return self.parts[0].narrow(0, 0)
        chosen, offset = [], 0
        for part in self.parts:
            low, high = max(start, offset), min(start + length, offset + part.shape[1])
            if low < high:
                chosen.append(part.narrow(low - offset, high - low))
            offset += part.shape[1]
        return chosen[0] if len(chosen) == 1 else SplitRows(chosen)

    def all(self) -> Tensor:
        return torch.cat([part.all() for part in self.parts], 1)

    def _gather(self, index: Tensor, has_missing: bool) -> Tensor:
        rows, offset = self.data.new_zeros(*index.shape, self.data.shape[2]), 0
        for part in self.parts:
            inside = (index >= offset) & (index < offset + part.shape[1])
            batch, *place = inside.nonzero(as_tuple=True)
            if len(batch):
                rows[(batch, *place)] = part.data[batch, index[(batch, *place)] - offset]
            offset += part.shape[1]
        return rows


class Growing:
    """Rows of every batch row, packed where there is a format; growth adds a chunk and moves nothing.

    lengths: rows stored per batch row.
    """

    def __init__(self, batch: int, width: int, form: Format | None, dtype: torch.dtype, device: torch.device):
        self.format, self.width, self.dtype, self.device = form, width, dtype, device
        self.row = (width, dtype) if form is None else (form.row_bytes(width), torch.uint8)
        self.batch, self.lengths = batch, [0] * batch
        self.chunks: list[Tensor] = []
        self._shared: list[bool] = []  # with a fork, until one of both writes

    @property
    def capacity(self) -> int:
        return sum(chunk.shape[1] for chunk in self.chunks)

    @property
    def row_bytes(self) -> int:
        """Units: bytes of one row, from the buffers' own type."""
        return self.row[0] * self.row[1].itemsize

    def reserve(self, n_rows: int) -> None:
        """Makes room for n_rows in all."""
        missing = n_rows - self.capacity
        if missing > 0:
            size = max(missing + SLACK, self.capacity, FIRST_CHUNK)
            # Zeros, because what lies there is multiplied by 0 where a query has nothing to choose.
            self.chunks.append(torch.zeros(self.batch, size, self.row[0], dtype=self.row[1], device=self.device))
            self._shared.append(False)

    def append(self, rows: Tensor, counts: list[int]) -> None:
        """Encodes and stores the first counts[b] of rows [B,G,width] behind batch row b."""
        data = rows.to(self.row[1]) if self.format is None else self.format.encode(rows)
        self.reserve(max(length + count for length, count in zip(self.lengths, counts, strict=True)))
        if len(set(self.lengths)) == len(set(counts)) == 1:
            self._write(slice(None), self.lengths[0], data[:, : counts[0]])
        else:
            for b, (length, count) in enumerate(zip(self.lengths, counts, strict=True)):
                self._write(slice(b, b + 1), length, data[b : b + 1, :count])
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]

    def append_packed(self, data: Tensor) -> None:
        """Stores rows [B,G,row] that are already in the store's form behind rows of equal length."""
        self.reserve(self.lengths[0] + data.shape[1])
        self._write(slice(None), self.lengths[0], data)
        self.lengths = [length + data.shape[1] for length in self.lengths]

    def _write(self, batch: slice, start: int, data: Tensor) -> None:
        offset, stop = 0, start + data.shape[1]
        for number, chunk in enumerate(self.chunks):
            low, high = max(start, offset), min(stop, offset + chunk.shape[1])
            if low < high:
                if self._shared[number]:
                    self.chunks[number] = chunk = chunk.clone()
                    self._shared[number] = False
                chunk[batch, low - offset : high - offset] = data[:, low - start : high - start]
            offset += chunk.shape[1]

    def rows(self) -> Rows:
        """All rows up to the longest batch row's."""
        length, parts = max(self.lengths), []
        for chunk in self.chunks:
            parts.append(Rows(chunk[:, :length], self.format, self.width, self.dtype))
            length -= chunk.shape[1]
            if length <= 0:
                return parts[0] if len(parts) == 1 else SplitRows(parts)
        empty = torch.empty(self.batch, 0, self.row[0], dtype=self.row[1], device=self.device)
        return Rows(empty, self.format, self.width, self.dtype)

    def stored(self, b: int, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows of one batch row as they lie in memory. Shapes: -> [stop - start, row], to the last one without stop."""
        stop = self.lengths[b] if stop is None else stop
        parts, offset = [torch.empty(0, self.row[0], dtype=self.row[1], device=self.device)], 0
        for chunk in self.chunks:
            low, high = max(start, offset), min(stop, offset + chunk.shape[1])
            if low < high:
                parts.append(chunk[b, low - offset : high - offset])
            offset += chunk.shape[1]
        return parts[1] if len(parts) == 2 else torch.cat(parts)

    def fork(self) -> Growing:
        """A copy that shares the chunks until one of both writes into them."""
        twin = Growing(self.batch, self.width, self.format, self.dtype, self.device)
        twin.chunks, twin.lengths = list(self.chunks), list(self.lengths)
        self._shared, twin._shared = [True] * len(self.chunks), [True] * len(self.chunks)
        return twin

    def reorder(self, rows: list[int]) -> None:
        index = torch.tensor(rows, device=self.device)
        self.chunks = [chunk.index_select(0, index) for chunk in self.chunks]
        self._shared = [False] * len(self.chunks)
        self.batch, self.lengths = len(rows), [self.lengths[b] for b in rows]


class Recent:
    """The latest rows of every batch row, the newest of all in one common slot.

    So a step over the whole batch appends in one place, whatever the rows' lengths; `start` says from which slot on
    a batch row has any.
    """

    def __init__(self, batch: int, row: tuple[int, ...], dtype: torch.dtype, keep: int, device: torch.device):
        self.keep, self.end, self.start = keep, 0, [0] * batch
        self.buffer = torch.zeros(batch, keep + SLACK, *row, dtype=dtype, device=device)

    def held(self, b: int) -> int:
        """Rows that batch row b has."""
        return self.end - self.start[b]

    def append(self, rows: Tensor, pads: list[int] | None, past: int) -> tuple[Tensor, list[int]]:
        """Takes new rows [B,S,...] and returns them behind up to `past` earlier ones, and where each row's begin.

        pads[b]: how many of the first new rows are padding; the earlier rows of b move up to the rest.
        """
        n_new = rows.shape[1]
        past = min(past, self.end)
        if pads is not None:
            return self._append_padded(rows, pads, past)
        if n_new <= SLACK:
            self._make_room(n_new)
            self.buffer[:, self.end : self.end + n_new] = rows
            self.end += n_new
            view = self.buffer[:, self.end - n_new - past : self.end]
            return view, [start - (self.end - n_new - past) for start in self.start]
        return self._replace(torch.cat([self.buffer[:, : self.end], rows], 1), self.start, past + n_new)

    def _append_padded(self, rows: Tensor, pads: list[int], past: int) -> tuple[Tensor, list[int]]:
        both = torch.cat([self.buffer[:, : self.end], rows], 1)
        for b, n in enumerate(pads):
            if n:
                both[b, n : self.end + n] = self.buffer[b, : self.end]
        start = [first + n for first, n in zip(self.start, pads, strict=True)]
        return self._replace(both, start, past + rows.shape[1])

    def _replace(self, rows: Tensor, start: list[int], shown: int) -> tuple[Tensor, list[int]]:
        """Keeps the latest of `rows`, and returns the last `shown` of them."""
        kept = min(self.keep, rows.shape[1])
        dropped = rows.shape[1] - kept
        self.buffer[:, :kept] = rows[:, dropped:]
        self.end, self.start = kept, [min(max(first - dropped, 0), kept) for first in start]
        return rows[:, rows.shape[1] - shown :], [first - (rows.shape[1] - shown) for first in start]

    def _make_room(self, n_new: int) -> None:
        if self.end + n_new > self.buffer.shape[1]:
            self._replace(self.buffer[:, : self.end].clone(), self.start, 0)

    def drop(self, counts: list[int]) -> None:
        """Takes back the last counts[b] rows of each batch row."""
        least = min(counts)
        for b, n in enumerate(counts):
            if n > least:  # up to the common slot
                moved = self.buffer[b, : self.end - n].clone()
                self.buffer[b, n - least : self.end - least] = moved
                self.start[b] += n - least
        self.end -= least

    def forget(self, b: int) -> None:
        """Batch row b has no rows from here on."""
        self.start[b] = self.end

    def latest(self, b: int, n: int) -> Tensor:
        """The last n rows of batch row b, or those it has."""
        return self.buffer[b, self.end - min(n, self.held(b)) : self.end]

    def fork(self) -> Recent:
        twin = Recent.__new__(Recent)
        twin.keep, twin.end, twin.start, twin.buffer = self.keep, self.end, list(self.start), self.buffer.clone()
        return twin

    def reorder(self, rows: list[int]) -> None:
        self.buffer = self.buffer.index_select(0, torch.tensor(rows, device=self.buffer.device))
        self.start = [self.start[b] for b in rows]
