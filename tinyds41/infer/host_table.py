"""A table of Engram rows in a file: packed FP8, mapped into memory, read by row number."""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import time
import uuid
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from tinyds41 import few_codec
from tinyds41.config import Config
from tinyds41.formats import ENGRAM
from tinyds41.model.engram import checked_primes

VERSION = 1
HEADER_BYTES = 4096  # rows begin on a page of their own
MAGIC = b"tinyds41 engram rows"
CHUNK_ROWS = 1 << 16  # encoded or hashed at a time
PROBE, SLOW = 8, 30e-6  # rows that show whether the file is in memory, and the seconds per row that it is not
# What decides, beside layer, rows and width, which n-gram a row belongs to.
_HASHED = ("vocab_size", "engram_vocab_size", "engram_max_ngram_size", "engram_n_heads",
           "engram_compressed_vocab_size", "engram_pad_token_id")  # fmt: skip


class HostTable:
    """One layer's table, open for reading; the rows asked for are read and decoded, no others.

    Layout: a header page (JSON and its checksum), then `ENGRAM.row_bytes(width)` bytes a row, 264 in `flash`.

    Raises: FileNotFoundError, IsADirectoryError; ValueError for a file that is no table, damaged, of another version,
        length or config, naming what it has and what is needed.
    Source: spec 3, 4.9, 9.4. Lesson: 10.
    """

    def __init__(self, path: str | Path, config: Config, table: int):
        self.path, wanted = Path(path), table_fields(config, table)
        self.n_rows, self.width = wanted["rows"], wanted["width"]
        self.row_bytes = ENGRAM.row_bytes(self.width)
        if self.path.is_dir():
            raise IsADirectoryError(f"{self.path} is a folder: a table is one file")
        self.is_slow = False  # whether the latest rows came from the disk, as far as time tells
        try:
            self._descriptor = os.open(self.path, os.O_RDONLY)
        except FileNotFoundError:
            raise FileNotFoundError(f"no table at {self.path}: engram_to_host writes one") from None
        weakref.finalize(self, os.close, self._descriptor)
        self.header = _read_header(self.path, os.read(self._descriptor, HEADER_BYTES))
        _compare(self.path, self.header, wanted)
        self._check_length()
        mapped = mmap.mmap(self._descriptor, 0, access=mmap.ACCESS_READ)
        if hasattr(mapped, "madvise"):  # neighbours of a row are not wanted: without this 32 pages come with each
            mapped.madvise(mmap.MADV_RANDOM)
        self._rows: np.ndarray | None = np.frombuffer(mapped, np.dtype((np.void, self.row_bytes)), offset=HEADER_BYTES)

    @classmethod
    def create(cls, path: str | Path, weight: Tensor, config: Config, table: int) -> HostTable:
        """Writes a table of floats [rows, width] as `new_table` does, and opens it.

        Raises: ValueError for another shape than the config's; OSError where it cannot be written.
        """
        fields = table_fields(config, table)
        shape = fields["rows"], fields["width"]
        if weight.shape != shape:
            raise ValueError(f"a table of shape {tuple(weight.shape)}, the config's is {shape}")
        with new_table(path, config, table) as writer:
            for start, rows in enumerate(weight.detach().split(CHUNK_ROWS)):
                writer.write(start * CHUNK_ROWS, rows)
        return cls(path, config, table)

    def take(self, index: Tensor) -> Tensor:
        """These rows, decoded. Shapes: int64 [...] -> float32 [..., width], on the CPU.

        Raises: IndexError for a row outside the table; TypeError for numbers that are not whole; ValueError when the
            file has become shorter, or is closed.
        """
        packed = self.packed(index)
        if len(packed) == 0:
            return torch.zeros(*index.shape, self.width)
        split = ENGRAM.code_bytes(self.width)
        # By NumPy also where there are many: a second thread of PyTorch would start a second set of threads.
        values = few_codec.from_codes(packed[:, :split], packed[:, split:], ENGRAM.element, ENGRAM.scale)
        return torch.from_numpy(values).view(*index.shape, self.width)

    def packed(self, index: Tensor) -> np.ndarray:
        """These rows as they lie in the file. Shapes: int64 [...] -> uint8 [n, row_bytes]. Raises as `take`."""
        if index.dtype == torch.bool or index.is_floating_point():
            raise TypeError(f"rows are numbered by whole numbers, got {index.dtype}")
        rows, numbers = self._rows, index.detach().cpu().reshape(-1).long().numpy()
        if rows is None:
            raise ValueError(f"{self.path} is closed")
        if len(numbers) == 0:
            return np.empty((0, self.row_bytes), np.uint8)
        lowest, highest = int(numbers.min()), int(numbers.max())
        if lowest < 0 or highest >= self.n_rows:
            raise IndexError(f"rows {lowest}..{highest} are not in a table of {self.n_rows:,}")
        self._check_length()  # a mapped page behind the end of a file would end the process
        if len(numbers) > PROBE:
            self._probe(rows, numbers[:PROBE])
            if self.is_slow:
                self._announce(numbers[PROBE:])
        return rows.take(numbers).view(np.uint8).reshape(-1, self.row_bytes)

    def _probe(self, rows: np.ndarray, numbers: np.ndarray) -> None:
        started = time.perf_counter()
        rows.take(numbers)
        self.is_slow = time.perf_counter() - started > SLOW * len(numbers)

    def _announce(self, numbers: np.ndarray) -> None:
        """Asks the system for the pages of these rows together: a mapped file is read page by page, each awaited."""
        if not hasattr(os, "posix_fadvise"):
            return
        first = HEADER_BYTES + numbers * self.row_bytes
        for page in np.unique(np.concatenate([first, first + self.row_bytes - 1]) // mmap.PAGESIZE).tolist():
            os.posix_fadvise(self._descriptor, page * mmap.PAGESIZE, mmap.PAGESIZE, os.POSIX_FADV_WILLNEED)

    @property
    def apparent_bytes(self) -> int:
        """Units: bytes, the file's length."""
        return os.fstat(self._descriptor).st_size

    @property
    def stored_bytes(self) -> int:
        """Units: bytes that the file takes on the disk; less than its length where rows were never written."""
        return os.fstat(self._descriptor).st_blocks * 512

    def verify(self) -> None:
        """Reads the whole table. Raises: ValueError naming both digests, or that rows were written out of order."""
        wanted, digest = self.header["sha256"], hashlib.sha256()
        if wanted is None:
            raise ValueError(f"{self.path} has no digest: its rows were not written one after the other")
        with self.path.open("rb") as file:
            file.seek(HEADER_BYTES)
            while piece := file.read(CHUNK_ROWS * self.row_bytes):
                digest.update(piece)
        if digest.hexdigest() != wanted:
            raise ValueError(f"{self.path} is damaged: its rows have digest {digest.hexdigest()}, written was {wanted}")

    def close(self) -> None:
        """No more rows are read; what is being read is finished."""
        self._rows = None

    def _check_length(self) -> None:
        expected, found = HEADER_BYTES + self.n_rows * self.row_bytes, self.apparent_bytes
        if found != expected:
            rows = f"{self.n_rows:,} rows of {self.row_bytes}"
            raise ValueError(f"{self.path} has {found:,} bytes, {rows} need {expected:,}")


class TableWriter:
    """Puts rows into a new table, in any order; what is never written stays zero and takes no room on the disk."""

    def __init__(self, file: BinaryIO, fields: dict[str, int]):
        self.fields, self.row_bytes = fields, ENGRAM.row_bytes(fields["width"])
        self._file, self._next, self._digest = file, 0, hashlib.sha256()

    def write(self, start: int, values: Tensor) -> None:
        """Rows start, start + 1, ..., rounded to FP8. Shapes: values [n, width].

        Raises: ValueError for another width; IndexError for rows outside the table.
        """
        packed = self._packed(values)
        self._put(start, packed)
        if start == self._next:
            self._digest.update(packed)
            self._next += len(values)
        else:
            self._next = -1  # no digest of rows in another order

    def scatter(self, numbers: Tensor, values: Tensor) -> None:
        """Single rows anywhere. Shapes: int64 [n], [n, width].

        Raises: as `write`, and ValueError when there are not as many numbers as rows.
        """
        if numbers.shape != values.shape[:1]:
            raise ValueError(f"numbers of shape {tuple(numbers.shape)} for values of shape {tuple(values.shape)}")
        packed, size, self._next = self._packed(values), self.row_bytes, -1
        for place, number in enumerate(numbers.tolist()):
            self._put(number, packed[place * size : (place + 1) * size])

    def _packed(self, values: Tensor) -> bytes:
        if values.ndim != 2 or values.shape[1] != self.fields["width"]:
            raise ValueError(f"rows of shape {tuple(values.shape)}, expected (n, {self.fields['width']})")
        return ENGRAM.encode(values.detach().cpu()).numpy().tobytes()

    def _put(self, start: int, packed: bytes) -> None:
        stop, n_rows = start + len(packed) // self.row_bytes, self.fields["rows"]
        if start < 0 or stop > n_rows:
            raise IndexError(f"rows {start}..{stop - 1} are not in a table of {n_rows:,}")
        self._file.seek(HEADER_BYTES + start * self.row_bytes)
        self._file.write(packed)

    def finish(self) -> None:
        """The header, once all rows are there."""
        n_rows = self.fields["rows"]
        digest = self._digest.hexdigest() if self._next == n_rows else None
        self._file.truncate(HEADER_BYTES + n_rows * self.row_bytes)
        self._file.seek(0)
        self._file.write(_header({"version": VERSION, **self.fields, "sha256": digest}))
        self._file.flush()
        os.fsync(self._file.fileno())


@contextmanager
def new_table(path: str | Path, config: Config, table: int) -> Iterator[TableWriter]:
    """A table to be written; it appears under its name when the block has succeeded, else nothing does.

    Until then it is `.NAME.<random>.partial`, which only a killed process leaves behind. Who has the old file open
    goes on reading it. Raises: ValueError as `table_fields`; OSError where it cannot be written.
    """
    path, fields = Path(path), table_fields(config, table)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")
    try:
        with partial.open("xb") as file:
            writer = TableWriter(file, fields)
            yield writer
            writer.finish()
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def table_fields(config: Config, table: int) -> dict[str, int]:
    """What a table's file must agree with: numbers, rather than a hash of them, so that an error can name both.

    Raises: ValueError for a table that the config does not have, or when engram_num_embeddings is not what the primes
        add up to.
    """
    if not 0 <= table < len(config.engram_layer_ids):
        raise ValueError(f"table={table}: the config has {len(config.engram_layer_ids)}, counted from 0")
    checked_primes(config, table)
    fields = {"layer": config.engram_layer_ids[table], "rows": config.engram_num_embeddings[table],
              "width": config.engram_head_dim}  # fmt: skip
    return {**fields, **{name: getattr(config, name) for name in _HASHED}}


def _header(content: dict[str, Any]) -> bytes:
    text = json.dumps(content).encode()
    page = b"\n".join([MAGIC, text, hashlib.sha256(text).hexdigest().encode(), b""])
    return page.ljust(HEADER_BYTES, b"\0")


def _read_header(path: Path, page: bytes) -> dict[str, Any]:
    magic, *rest = page.split(b"\n", 3)
    if magic != MAGIC or len(rest) != 3:
        raise ValueError(f"{path} is no table of Engram rows: it begins with {page[:24]!r}")
    text, digest, padding = rest
    if hashlib.sha256(text).hexdigest().encode() != digest or padding.strip(b"\0") or len(page) != HEADER_BYTES:
        raise ValueError(f"{path}: its header is damaged")
    return json.loads(text)


def _compare(path: Path, header: dict[str, Any], wanted: dict[str, int]) -> None:
    wrong = [f"{name} {header.get(name)}, needed {value}" for name, value in {"version": VERSION, **wanted}.items()
             if header.get(name) != value]  # fmt: skip
    if wrong:
        raise ValueError(f"{path} is another table: it has {'; '.join(wrong)}")
