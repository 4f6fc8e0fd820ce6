"""The log of a run: whole lines, each step once, readable while it grows."""

from __future__ import annotations

import json

import pytest

from tinyds41.train import step_log
from tinyds41.train.step_log import FILE_NAME, StepLog, read_log


def write(folder, steps, first=0):
    with StepLog(folder, first) as log:
        for step in steps:
            log.write(step, {"loss": 0.5 * step, "load": [[1.0]]})


def test_every_step_is_a_line_that_is_there_when_the_step_ends(tmp_path):
    with StepLog(tmp_path / "new" / "run") as log:
        log.write(0, {"loss": 1.5})
        assert read_log(tmp_path / "new" / "run") == [{"step": 0, "loss": 1.5}]


def test_a_new_run_begins_a_new_log_and_a_resumed_one_goes_on(tmp_path):
    write(tmp_path, range(5))
    write(tmp_path, (3, 4, 5), first=3)
    assert [line["step"] for line in read_log(tmp_path)] == [0, 1, 2, 3, 4, 5]
    write(tmp_path, (0,))
    assert [line["step"] for line in read_log(tmp_path)] == [0]


def test_half_a_line_of_a_killed_run_is_dropped(tmp_path):
    write(tmp_path, range(3))
    with (tmp_path / FILE_NAME).open("a") as file:
        file.write('{"step": 3, "lo')
    assert len(read_log(tmp_path)) == 3
    write(tmp_path, (3,), first=3)
    assert [line["step"] for line in read_log(tmp_path)] == [0, 1, 2, 3]


@pytest.mark.parametrize("line", [b"not json", b"[]", b"{}", b'{"step": null}', b'{"step": 1e999}', b"\xff"])
def test_a_line_that_is_no_step_is_named_and_nothing_is_overwritten(tmp_path, line):
    (tmp_path / FILE_NAME).write_bytes(b'{"step": 0}\n' + line + b"\n")
    with pytest.raises(ValueError, match=rf"{FILE_NAME}, line 2 is no step of a log"):
        StepLog(tmp_path, 1)
    assert len((tmp_path / FILE_NAME).read_bytes().splitlines()) == 2


def test_a_missing_log_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=rf"no log at .*{FILE_NAME}"):
        read_log(tmp_path)


def test_plain_numbers_go_to_tensorboard_where_it_is_installed(tmp_path, monkeypatch):
    shown = []

    class Board:
        def __init__(self, folder, purge_step):
            shown.append(("from", purge_step))

        def add_scalar(self, name, value, step):
            shown.append((name, value, step))

        def close(self):
            shown.append("closed")

    monkeypatch.setattr(step_log, "find_spec", lambda name: object())
    monkeypatch.setattr(step_log, "import_module", lambda name: type("module", (), {"SummaryWriter": Board}))
    write(tmp_path, (2, 3), first=2)
    assert shown == [("from", 2), ("loss", 1.0, 2), ("loss", 1.5, 3), "closed"]
    monkeypatch.setattr(step_log, "find_spec", lambda name: None)
    write(tmp_path, (0,))
    assert len(shown) == 4 and json.loads((tmp_path / FILE_NAME).read_text())["loss"] == 0


def test_the_real_tensorboard_reads_it(tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    write(tmp_path, range(3))
    assert list((tmp_path / step_log.BOARD_FOLDER).glob("events*"))
