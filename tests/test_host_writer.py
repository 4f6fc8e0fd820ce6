"""Writing files of Engram rows: in any order, whole or not at all, and never so that they fill a disk."""

from __future__ import annotations

import errno
import os
import re
import shutil
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from host_tables import LARGE, random_table
from models import NANO

from tinyds41.formats import ENGRAM
from tinyds41.infer import host_table, host_writer
from tinyds41.infer.host_layout import HEADER_BYTES
from tinyds41.infer.host_table import HostTable
from tinyds41.infer.host_writer import PROBED, leaves_holes, new_table

resource = pytest.importorskip("resource")
ROWS, WIDTH = NANO.engram_num_embeddings[0], NANO.engram_head_dim
ROW_BYTES = 33  # 32 codes of a byte and one scale
LARGE_BYTES = HEADER_BYTES + 264 * LARGE.engram_num_embeddings[0]


@pytest.mark.parametrize("numbers", [[0, 1], [[0]], []])
def test_single_rows_need_a_number_each(tmp_path, numbers):
    with pytest.raises(ValueError, match="numbers of shape"), new_table(tmp_path / "t", NANO, 0) as writer:
        writer.scatter(torch.tensor(numbers), torch.ones(1, WIDTH))
    assert not (tmp_path / "t").exists()


def test_rows_may_be_written_in_any_order(tmp_path):
    """Rows never written are zeros; such a file has no digest."""
    weight = torch.randn(ROWS, WIDTH)
    with new_table(tmp_path / "t", NANO, 0) as writer:
        writer.write(100, weight[100:103])
        writer.scatter(torch.tensor([7, 155, 0]), weight[[7, 155, 0]])
    table = HostTable(tmp_path / "t", NANO, 0)
    written = [0, 7, 100, 101, 102, 155]
    assert torch.equal(table.take(torch.tensor(written)), ENGRAM.fake_quant(weight[written]))
    others = torch.tensor([row for row in range(ROWS) if row not in written])
    assert not table.take(others).any()
    with pytest.raises(ValueError, match="no digest"):
        table.verify()


def test_rows_that_do_not_fit_are_not_written(tmp_path):
    for start, shape, error in ((155, (2, 32), IndexError), (-1, (1, 32), IndexError), (0, (1, 64), ValueError)):
        match = r"rows -?\d+\.\.-?\d+ are not in a table of 156|rows of shape \(1, 64\)"
        with pytest.raises(error, match=match), new_table(tmp_path / "t", NANO, 0) as writer:
            writer.write(start, torch.zeros(shape))
    assert not list(tmp_path.iterdir())


def test_a_table_written_in_pieces_is_the_same_file(tmp_path, monkeypatch):
    _, weight = random_table(tmp_path / "whole")
    monkeypatch.setattr(host_table, "CHUNK_ROWS", 7)
    HostTable.create(tmp_path / "pieces", weight, NANO, 0).verify()
    assert (tmp_path / "pieces").read_bytes() == (tmp_path / "whole").read_bytes()


@contextmanager
def files_no_longer_than(n_bytes):
    """What a full disk does: the system refuses to write on."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("room", [HEADER_BYTES - 1, HEADER_BYTES + 1000, HEADER_BYTES + ROWS * 33 - 1])
def test_a_full_disk_leaves_what_was_there(tmp_path, room):
    _, weight = random_table(tmp_path / "t")
    before = (tmp_path / "t").read_bytes()
    with files_no_longer_than(room), pytest.raises(OSError, match="large"):
        HostTable.create(tmp_path / "t", weight + 1, NANO, 0)
    assert [file.name for file in tmp_path.iterdir()] == ["t"] and (tmp_path / "t").read_bytes() == before


def test_a_place_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        random_table(tmp_path / "file" / "t")
    if os.geteuid():  # root may write anywhere
        (tmp_path / "closed").mkdir(mode=0o500)
        with pytest.raises(PermissionError):
            random_table(tmp_path / "closed" / "t")


def test_a_killed_writer_leaves_no_table(tmp_path):
    """Only a hidden file, which the next writer does not stumble over."""
    pid = os.fork()
    if pid == 0:
        with new_table(tmp_path / "t", NANO, 0) as writer:
            writer._put(0, bytes(ROWS * ROW_BYTES))  # no torch: its threads are not in this process
            os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert not (tmp_path / "t").exists() and len(list(tmp_path.glob(".t.*.partial"))) == 1
    assert random_table(tmp_path / "t")[0].take(torch.tensor([5])).any()


def test_a_folder_is_refused_before_rows_are_written(tmp_path):
    (tmp_path / "t").mkdir()
    with pytest.raises(IsADirectoryError, match="t is a folder"), new_table(tmp_path / "t", NANO, 0):
        pytest.fail("nothing may be written")


# ---- room ----


class Filled:
    """A file that is filled with zeros where it is made longer, as some file systems do it."""

    def __init__(self, file):
        self.file = file

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.close()

    def fileno(self):
        return self.file.fileno()

    def truncate(self, size):
        self.file.write(bytes(size))
        self.file.flush()


def test_whether_a_file_may_have_holes_is_measured(tmp_path, monkeypatch):
    sparse = leaves_holes(tmp_path)
    temporary = host_writer.tempfile.TemporaryFile
    monkeypatch.setattr(host_writer.tempfile, "TemporaryFile", lambda dir: Filled(temporary(dir=dir)))
    assert not leaves_holes(tmp_path) and not list(tmp_path.iterdir())
    monkeypatch.undo()
    monkeypatch.setattr(host_writer.os, "fstat", lambda _: SimpleNamespace(st_size=PROBED))  # it does not tell
    assert not leaves_holes(tmp_path)
    monkeypatch.undo()
    with (tmp_path / "long").open("wb") as file:
        file.truncate(2 * PROBED)
    assert sparse == (os.stat(tmp_path / "long").st_blocks * 512 < PROBED)


@pytest.mark.parametrize("rows", [[], [1000], [500_000_000 // 264], list(range(0, 100_000, 1000))])
def test_a_file_that_would_fill_up_is_refused_before_it_does(tmp_path, monkeypatch, rows):
    """Empty at its end, or in one place, or a little in many; at most some 16 MB are written."""
    monkeypatch.setattr(host_writer, "leaves_holes", lambda folder: folder != tmp_path)
    sizes, unlink = [], host_writer.Path.unlink
    monkeypatch.setattr(host_writer.Path, "unlink",
                        lambda path, **kw: (sizes.append(path.stat().st_size), unlink(path, **kw)))  # fmt: skip
    refused = rf"all {LARGE_BYTES:,} bytes .* choose a folder in another: '{re.escape(str(tmp_path))}'"
    with pytest.raises(OSError, match=refused), new_table(tmp_path / "t", LARGE, 0) as writer:
        writer.scatter(torch.tensor(rows, dtype=torch.long), torch.ones(len(rows), 256))
    assert len(sizes) == 1 and sizes[0] < PROBED + HEADER_BYTES + 264 and not list(tmp_path.iterdir())


def test_small_tables_may_have_holes_anywhere(tmp_path, monkeypatch):
    monkeypatch.setattr(host_writer, "leaves_holes", lambda folder: pytest.fail("nobody need ask"))
    with new_table(tmp_path / "t", NANO, 0) as writer:
        writer.scatter(torch.tensor([150, 3]), torch.ones(2, WIDTH))
    table = HostTable(tmp_path / "t", NANO, 0)
    assert table.take(torch.tensor([3, 150])).all() and not table.take(torch.tensor([4, 149, 155])).any()


def test_a_file_system_is_asked_once(tmp_path, monkeypatch):
    if not leaves_holes(tmp_path):
        pytest.skip(f"no sparse files in {tmp_path}")
    asked = []
    monkeypatch.setattr(host_writer, "leaves_holes", lambda folder: asked.append(folder) or True)
    with new_table(tmp_path / "t", LARGE, 0) as writer:
        for row in (100_000, 200_000, 300_000):
            writer.write(row, torch.ones(1, 256))
    assert asked == [tmp_path] and os.path.getsize(tmp_path / "t") == LARGE_BYTES


def test_a_file_that_is_too_long_for_its_system_is_refused_with_its_size(tmp_path):
    """Before its last row is written, which an error about a write would not tell."""
    refused = pytest.raises(OSError, match=f"large: no file of {LARGE_BYTES:,} bytes")
    with files_no_longer_than(PROBED), refused as told, new_table(tmp_path / "t", LARGE, 0) as writer:
        writer.write(100_000, torch.ones(1, 256))
        pytest.fail("the first row should not be written")
    assert told.value.errno == errno.EFBIG and not list(tmp_path.iterdir())


@pytest.mark.parametrize("left", [0, HEADER_BYTES + ROWS * ROW_BYTES - 1, HEADER_BYTES + ROWS * ROW_BYTES])
def test_a_whole_table_is_refused_where_the_disk_has_no_room(tmp_path, monkeypatch, left):
    """Nothing is written first. A table of few rows is not asked how long its file is."""
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=left))
    needed = HEADER_BYTES + ROWS * ROW_BYTES
    if left < needed:
        with pytest.raises(OSError, match=f"a table of {needed:,} bytes, the disk has {left:,} left: .*t'") as told:
            random_table(tmp_path / "t")
        assert told.value.errno == errno.ENOSPC and not list(tmp_path.iterdir())
    else:
        random_table(tmp_path / "t")[0].verify()
    with new_table(tmp_path / "part", NANO, 0) as writer:
        writer.write(3, torch.ones(1, WIDTH))
