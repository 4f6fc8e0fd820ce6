"""A save replaces a model as a whole or not at all, and never touches anything else."""

import os
import shutil
from pathlib import Path

import pytest
from folders import assert_same_bits, files_of, nano_model

from tinyds41.checkpoint import replace, write
from tinyds41.checkpoint.read import load
from tinyds41.checkpoint.replace import replacing
from tinyds41.checkpoint.write import save


class Killed(BaseException):
    """Stands for the end of the process: no handler of ordinary errors may see it."""


@pytest.fixture(scope="module")
def models():
    """An old and a new model."""
    return nano_model(), nano_model(index_topk=2)


def test_a_model_is_replaced_with_no_file_of_the_old_one_left(tmp_path, models):
    old, new = models
    save(old, tmp_path / "model", max_shard_bytes=200_000)
    save(new, tmp_path / "model")
    assert files_of(tmp_path / "model") == files_of(save(new, tmp_path / "other"))
    assert {path.name for path in tmp_path.iterdir()} == {"model", "other"}


@pytest.mark.parametrize("failing", ["save_file", "json.dumps", "os.chmod"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_save_that_fails_leaves_the_old_model(tmp_path, models, monkeypatch, failing, error):
    old, new = models
    before = files_of(save(old, tmp_path / "model"))

    def fail(*args, **kwargs):
        raise error

    module, _, name = failing.rpartition(".")
    monkeypatch.setattr(write if not module else getattr(write, module), name, fail)
    with pytest.raises(type(error)):
        save(new, tmp_path / "model")
    monkeypatch.undo()
    assert files_of(tmp_path / "model") == before
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_save_that_fails_leaves_nothing_where_nothing_was(tmp_path, models, monkeypatch):
    monkeypatch.setattr(write, "save_file", lambda *args, **kwargs: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        save(models[0], tmp_path / "model")
    assert not list(tmp_path.iterdir())


def replace_killed_at(monkeypatch, folder, step):
    """Saves a file `config.json` with content "new" by `replacing`, but the process ends at a file system call.

    Steps count every rename and every deletion; a killed process does not clean up either.
    """
    count = 0

    def counted(call):
        def run(*args, **kwargs):
            nonlocal count
            if count >= step:
                raise Killed
            count += 1
            return call(*args, **kwargs)

        return run

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", counted(Path.rename))
        patch.setattr(shutil, "rmtree", counted(shutil.rmtree))
        with pytest.raises(Killed), replacing(folder) as partial:
            (partial / "config.json").write_text("new")
            (partial / "model.safetensors").write_text("new")


@pytest.mark.parametrize(("step", "found"), [(0, "old"), (1, "old"), (2, "new")])
def test_a_killed_save_leaves_the_old_model_or_the_new_one(tmp_path, monkeypatch, step, found):
    """Steps: the old one aside, the new one in place, the old one away. Whatever is left, the next save succeeds."""
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_text("old")
    replace_killed_at(monkeypatch, folder, step)
    whole = folder if folder.exists() else replace.left_by_an_interrupted_save(folder)
    assert whole is not None
    assert files_of(whole) == {"config.json": found.encode(), "model.safetensors": found.encode()}
    with replacing(folder) as partial:
        (partial / "config.json").write_text("newer")
    assert files_of(folder) == {"config.json": b"newer"}
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_rename_that_fails_brings_the_old_model_back(tmp_path, models, monkeypatch):
    save(models[0], tmp_path / "model")
    rename = Path.rename

    def refused_for_the_new(path, target):
        if path.name == ".model.partial":
            raise PermissionError(f"cannot rename {path}")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refused_for_the_new)
    with pytest.raises(PermissionError):
        save(models[1], tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert_same_bits(load(tmp_path / "model").state_dict(), models[0].state_dict())


def test_between_the_two_renames_the_old_model_loads(tmp_path, models):
    save(models[0], tmp_path / "model").rename(tmp_path / ".model.previous")
    assert_same_bits(load(tmp_path / "model").state_dict(), models[0].state_dict())


def test_a_failed_save_after_an_interrupted_one_brings_the_old_model_back(tmp_path, models, monkeypatch):
    save(models[0], tmp_path / "model").rename(tmp_path / ".model.previous")
    monkeypatch.setattr(write, "save_file", lambda *args, **kwargs: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        save(models[1], tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert_same_bits(load(tmp_path / "model").state_dict(), models[0].state_dict())


def test_the_only_copy_of_an_old_model_is_never_deleted(tmp_path, models):
    save(models[0], tmp_path / "model").rename(tmp_path / ".model.previous")
    (tmp_path / "model").mkdir()
    with pytest.raises(FileExistsError, match=r"\.model\.previous is left of an interrupted save"):
        save(models[1], tmp_path / "model")
    assert_same_bits(load(tmp_path / ".model.previous").state_dict(), models[0].state_dict())


@pytest.mark.parametrize("name", ["notes.txt", "optimizer.safetensors", ".git"])
def test_a_folder_with_anything_else_in_it_is_not_replaced(tmp_path, models, name):
    for folder in (tmp_path / "empty", save(models[0], tmp_path / "model")):
        folder.mkdir(exist_ok=True)
        (folder / name).write_text("mine")
        before = files_of(folder)
        with pytest.raises(FileExistsError, match=f"{folder} holds {name}, which is no part of a model"):
            save(models[1], folder)
        assert files_of(folder) == before
    assert {path.name for path in tmp_path.iterdir()} == {"empty", "model"}


def test_a_folder_with_only_a_config_is_not_a_model(tmp_path, models):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(FileExistsError, match=r"holds config\.json but no model"):
        save(models[0], tmp_path)


def test_a_file_is_not_replaced(tmp_path, models):
    (tmp_path / "model").write_text("mine")
    with pytest.raises(FileExistsError, match="is a file"):
        save(models[0], tmp_path / "model")
    with pytest.raises(OSError, match=str(tmp_path / "model")):
        save(models[0], tmp_path / "model" / "inner")


def test_new_folders_are_made_and_empty_ones_filled(tmp_path, models):
    save(models[0], tmp_path / "a" / "b")
    (tmp_path / "c").mkdir()
    assert save(models[0], tmp_path / "c") == tmp_path / "c"
    assert files_of(tmp_path / "a" / "b") == files_of(tmp_path / "c")


def test_a_link_keeps_pointing_at_the_model(tmp_path, models):
    save(models[0], tmp_path / "real")
    os.symlink(tmp_path / "real", tmp_path / "link")
    save(models[1], tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert_same_bits(load(tmp_path / "real").state_dict(), models[1].state_dict())


def test_content_is_on_the_disk_before_the_new_folder_gets_its_name(tmp_path, models, monkeypatch):
    """The order of calls is all a test can see: every file and the folder, the rename, the parent."""
    calls = []
    fsync, rename = os.fsync, Path.rename
    monkeypatch.setattr(os, "fsync", lambda fd: calls.append(os.readlink(f"/proc/self/fd/{fd}")) or fsync(fd))
    monkeypatch.setattr(Path, "rename", lambda self, target: calls.append("rename") or rename(self, target))
    if not Path("/proc/self/fd").exists():
        pytest.skip("this system does not tell which file a descriptor is")
    folder = save(models[0], tmp_path / "model")
    partial = tmp_path / ".model.partial"
    flushed = calls[calls.index("rename") + 1 :]  # the first rename gives a shard its number
    assert set(flushed[:-3]) == {str(partial / path.name) for path in folder.iterdir()}
    assert flushed[-3:] == [str(partial), "rename", str(tmp_path)]
