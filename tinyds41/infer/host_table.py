"""A table of Engram rows in a file: packed FP8, mapped into memory, read by row number."""

from __future__ import annotations

import hashlib
import mmap
import os
import time
import weakref
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tinyds41 import few_codec
from tinyds41.config import Config
from tinyds41.formats import ENGRAM
from tinyds41.infer.host_layout import CHUNK_ROWS, HEADER_BYTES, read_header, require_fields, table_fields
from tinyds41.infer.host_writer import new_table

PROBE, SLOW = 8, 30e-6  # rows that show whether the file is in memory, and the seconds per row that it is not


class _OpenFile:
    """A file and its mapped rows. Both are let go when the last who reads them is done."""

    def __init__(self, path: Path):
        try:
            self.descriptor = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            raise FileNotFoundError(f"no table at {path}: engram_to_host writes one") from None
        weakref.finalize(self, os.close, self.descriptor)
        self.rows = np.empty(0, np.void)

    def map(self, row_bytes: int) -> None:
        mapped = mmap.mmap(self.descriptor, 0, access=mmap.ACCESS_READ)
        if hasattr(mapped, "madvise"):  # neighbours of a row are not wanted: without this 32 pages come with each
            mapped.madvise(mmap.MADV_RANDOM)
        self.rows = np.frombuffer(mapped, np.dtype((np.void, row_bytes)), offset=HEADER_BYTES)


class HostTable:
    """One layer's table, open for reading; the rows asked for are read and decoded, no others.

    Layout: a header page (JSON and its checksum), then `ENGRAM.row_bytes(width)` bytes a row, 264 in `flash`.

    Raises: FileNotFoundError, IsADirectoryError; ValueError for a file that is no table, damaged, of another version,
        length or config, naming what it has and what is needed. Once closed, it can only be asked for its sizes.
    Source: spec 3, 4.9, 9.4. Lesson: 10.
    """

    def __init__(self, path: str | Path, config: Config, table: int):
        self.path, wanted = Path(path), table_fields(config, table)
        self.n_rows, self.width = wanted["rows"], wanted["width"]
        self.row_bytes = ENGRAM.row_bytes(self.width)
        if self.path.is_dir():
            raise IsADirectoryError(f"{self.path} is a folder: a table is one file")
        self.is_slow = False  # whether the latest rows, if more than `PROBE`, came from the disk, as far as time tells
        file = _OpenFile(self.path)
        self.header = read_header(self.path, os.read(file.descriptor, HEADER_BYTES))
        require_fields(self.path, self.header, wanted)
        self._check_length(file)
        file.map(self.row_bytes)
        self._file: _OpenFile | None = file

    @classmethod
    def create(cls, path: str | Path, weight: Tensor, config: Config, table: int) -> HostTable:
        """Writes a table of floats [rows, width] as `new_table` does, and opens it.

        Raises: ValueError for another shape than the config's; OSError where it cannot be written, or has no room.
        """
        fields = table_fields(config, table)
        shape = fields["rows"], fields["width"]
        if weight.shape != shape:
            raise ValueError(f"a table of shape {tuple(weight.shape)}, the config's is {shape}")
        with new_table(path, config, table, whole=True) as writer:
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
        if index.dtype == torch.bool or index.is_floating_point() or index.is_complex():
            raise TypeError(f"rows are numbered by whole numbers, got {index.dtype}")
        file, numbers = self._opened(), index.detach().cpu().reshape(-1).long().numpy()
        if len(numbers) == 0:
            return np.empty((0, self.row_bytes), np.uint8)
        lowest, highest = int(numbers.min()), int(numbers.max())
        if lowest < 0 or highest >= self.n_rows:
            raise IndexError(f"rows {lowest}..{highest} are not in a table of {self.n_rows:,}")
        self._check_length(file)  # a mapped page behind the end of a file would end the process
        if len(numbers) > PROBE:
            self._probe(file.rows, numbers[:PROBE])
            if self.is_slow:
                self._announce(file, numbers[PROBE:])
        return file.rows.take(numbers).view(np.uint8).reshape(-1, self.row_bytes)

    def _probe(self, rows: np.ndarray, numbers: np.ndarray) -> None:
        started = time.perf_counter()
        rows.take(numbers)
        self.is_slow = time.perf_counter() - started > SLOW * len(numbers)

    def _announce(self, file: _OpenFile, numbers: np.ndarray) -> None:
        """Asks the system for the pages of these rows together: a mapped file is read page by page, each awaited."""
        if not hasattr(os, "posix_fadvise"):
            return
        first = HEADER_BYTES + numbers * self.row_bytes
        for page in np.unique(np.concatenate([first, first + self.row_bytes - 1]) // mmap.PAGESIZE).tolist():
            os.posix_fadvise(file.descriptor, page * mmap.PAGESIZE, mmap.PAGESIZE, os.POSIX_FADV_WILLNEED)

    @property
    def apparent_bytes(self) -> int:
        """Units: bytes, the file's length. Raises: ValueError once closed."""
        return os.fstat(self._opened().descriptor).st_size

    @property
    def stored_bytes(self) -> int:
        """Units: bytes that the file takes on the disk; less than its length where rows were never written.

        Raises: ValueError once closed.
        """
        return os.fstat(self._opened().descriptor).st_blocks * 512

    def verify(self) -> None:
        """Reads the whole table.

        Raises: ValueError naming both digests where they differ; for rows that were not written in order; once closed.
        """
        file, wanted, digest = self._opened(), self.header["sha256"], hashlib.sha256()
        if wanted is None:
            raise ValueError(f"{self.path} has no digest: its rows were not written one after the other")
        for start in range(0, self.n_rows, CHUNK_ROWS):
            # By the descriptor: another file may have taken the name since.
            place, size = HEADER_BYTES + start * self.row_bytes, CHUNK_ROWS * self.row_bytes
            digest.update(os.pread(file.descriptor, size, place))
        if digest.hexdigest() != wanted:
            raise ValueError(f"{self.path} is damaged: its rows have digest {digest.hexdigest()}, written was {wanted}")

    def close(self) -> None:
        """No more rows are read; the file is let go once what is being read is finished."""
        self._file = None

    def _opened(self) -> _OpenFile:
        if self._file is None:
            raise ValueError(f"{self.path} is closed")
        return self._file

    def _check_length(self, file: _OpenFile) -> None:
        expected, found = HEADER_BYTES + self.n_rows * self.row_bytes, os.fstat(file.descriptor).st_size
        if found != expected:
            rows = f"{self.n_rows:,} rows of {self.row_bytes}"
            raise ValueError(f"{self.path} has {found:,} bytes, {rows} need {expected:,}")
