"""Files that appear when they are whole: nobody sees half of one, and what was there stays until then."""

from __future__ import annotations

import pytest

from tinyds41.whole_file import whole_file, write_whole


def test_a_text_takes_its_name_once_it_is_whole_in_folders_that_are_made(tmp_path):
    file = tmp_path / "new" / "run" / "result.json"
    with whole_file(file) as partial:
        partial.write_text("half")
        assert not file.exists() and partial.parent == file.parent
    assert file.read_text() == "half"
    write_whole(file, "né\n")
    assert file.read_bytes() == "né\n".encode() and list(file.parent.iterdir()) == [file]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_what_fails_leaves_the_file_before_and_no_rubbish(tmp_path, error):
    file = tmp_path / "result.json"
    file.write_text("before")
    with pytest.raises(error), whole_file(file) as partial:
        partial.write_text("half")
        raise error
    assert file.read_text() == "before" and list(tmp_path.iterdir()) == [file]


def test_a_folder_of_that_name_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(IsADirectoryError, match="is a folder, a file is needed"), whole_file(tmp_path):
        pytest.fail("begun all the same")


def test_it_is_on_the_disk_before_it_has_the_name(tmp_path, monkeypatch):
    """A power cut may otherwise leave an empty file where a good one was."""
    done = []
    monkeypatch.setattr("tinyds41.whole_file.os.fsync", lambda number: done.append("flushed"))
    replace = __import__("os").replace
    monkeypatch.setattr("tinyds41.whole_file.os.replace", lambda *names: done.append("named") or replace(*names))
    write_whole(tmp_path / "x", "text")
    assert done == ["flushed", "named"]
