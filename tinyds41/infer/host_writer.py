"""Writes a file of Engram rows, whole or in part; it is refused before it fills a disk."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from torch import Tensor

from tinyds41.config import Config
from tinyds41.formats import ENGRAM
from tinyds41.infer.host_layout import HEADER_BYTES, file_bytes, header_page, table_fields

PROBED = 1 << 24  # bytes that a file may leave empty anywhere; before it leaves more, the file system is asked


class TableWriter:
    """Puts rows into a new table, in any order; what is never written stays zero and takes no room on the disk."""

    def __init__(self, file: BinaryIO, fields: dict[str, int]):
        self.fields, self.row_bytes = fields, ENGRAM.row_bytes(fields["width"])
        self._file, self._next, self._digest = file, 0, hashlib.sha256()
        self._end, self._empty, self._may_have_holes = HEADER_BYTES, 0, False

    def write(self, start: int, values: Tensor) -> None:
        """Rows start, start + 1, ..., rounded to FP8. Shapes: values [n, width].

        Raises: ValueError for another width; IndexError for rows outside the table; OSError where it cannot be written,
            or would fill up what it leaves empty.
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

    def finish(self) -> None:
        """The header, once all rows are there. Raises: OSError as `write`."""
        digest = self._digest.hexdigest() if self._next == self.fields["rows"] else None
        self._leave_empty(file_bytes(self.fields))
        self._file.truncate(file_bytes(self.fields))
        self._file.seek(0)
        self._file.write(header_page(self.fields, digest))
        self._file.flush()
        os.fsync(self._file.fileno())

    def _packed(self, values: Tensor) -> bytes:
        if values.ndim != 2 or values.shape[1] != self.fields["width"]:
            raise ValueError(f"rows of shape {tuple(values.shape)}, expected (n, {self.fields['width']})")
        return ENGRAM.encode(values.detach().cpu()).numpy().tobytes()

    def _put(self, start: int, packed: bytes) -> None:
        stop, n_rows = start + len(packed) // self.row_bytes, self.fields["rows"]
        if start < 0 or stop > n_rows:
            raise IndexError(f"rows {start}..{stop - 1} are not in a table of {n_rows:,}")
        begin = HEADER_BYTES + start * self.row_bytes
        self._leave_empty(begin)
        self._file.seek(begin)
        self._file.write(packed)
        self._end = max(self._end, begin + len(packed))

    def _leave_empty(self, stop: int) -> None:
        """Counts what lies between the file's end and `stop`; much of it must take no room."""
        self._empty += max(0, stop - self._end)
        if self._empty > PROBED and not self._may_have_holes:
            self._require_holes()
            self._may_have_holes = True

    def _require_holes(self) -> None:
        folder, n_bytes = Path(self._file.name).parent, file_bytes(self.fields)
        if not leaves_holes(folder):
            raise OSError(errno.EOPNOTSUPP, f"all {n_bytes:,} bytes of a table of which few rows are written would take"
                          " room in this file system; choose a folder in another", str(folder))  # fmt: skip
        try:
            self._file.truncate(n_bytes)  # not at the end: what the system cannot make should fail at once
        except OSError as error:
            raise OSError(error.errno, f"{error.strerror}: no file of {n_bytes:,} bytes", str(folder)) from None


@contextmanager
def new_table(path: str | Path, config: Config, table: int, *, whole: bool = False) -> Iterator[TableWriter]:
    """A table to be written; it appears under its name when the block has succeeded, else nothing does.

    Until then it is `.NAME.<random>.partial`, which only a killed process leaves behind. Who has the old file open
    goes on reading it. whole: all rows will be written, so there must be room for them.

    Raises: ValueError as `table_fields`; IsADirectoryError; OSError where it cannot be written, or, if `whole`, has no
        room.
    """
    path, fields = Path(path), table_fields(config, table)
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder: a table is one file")
    path.parent.mkdir(parents=True, exist_ok=True)
    if whole:
        require_room(path, file_bytes(fields))
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


def require_room(path: Path, n_bytes: int) -> None:
    """Raises: OSError naming the bytes of a file and the bytes that its disk has left."""
    free = shutil.disk_usage(path.parent).free
    if n_bytes > free:
        raise OSError(errno.ENOSPC, f"a table of {n_bytes:,} bytes, the disk has {free:,} left", str(path))


def leaves_holes(folder: Path) -> bool:
    """Whether a file in this folder that is only made long takes no room; False where the system does not tell.

    Raises: OSError where no file can be made.
    """
    with tempfile.TemporaryFile(dir=folder) as probe:
        probe.truncate(PROBED)
        os.fsync(probe.fileno())  # some file systems count what a file takes only then
        blocks = getattr(os.fstat(probe.fileno()), "st_blocks", None)
    return blocks is not None and 512 * blocks < PROBED // 2
