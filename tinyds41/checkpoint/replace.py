"""Puts a finished folder in the place of an old one: at every moment one of them is whole."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tinyds41.checkpoint.layout import is_model_file, is_model_folder


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """Yields an empty folder beside `folder`, which takes its name once the block has succeeded.

    No file system call exchanges two folders everywhere, so the old one first steps aside to `.NAME.previous`. A
    crash before that leaves the old model; after it, `ModelFolder` reads the one that stepped aside and the next
    save puts it back; once the new one has the name, the old one is deleted. A block that fails changes nothing.

    Raises: FileExistsError when `folder` holds what no save has written.
    """
    partial = _beside(folder, "partial")
    folder.parent.mkdir(parents=True, exist_ok=True)
    _clear_up(folder)
    check_replaceable(folder)
    if partial.exists():  # of a save that was killed
        shutil.rmtree(partial)
    partial.mkdir()
    try:
        yield partial
        _flush(partial)
        _swap(partial, folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def left_by_an_interrupted_save(folder: Path) -> Path | None:
    """The old model, when a save was killed between its two renames."""
    previous = _beside(folder.resolve(), "previous")
    return previous if not folder.exists() and is_model_folder(previous) else None


def _beside(folder: Path, kind: str) -> Path:
    return folder.with_name(f".{folder.name}.{kind}")


def _swap(partial: Path, folder: Path) -> None:
    previous = _beside(folder, "previous")
    if folder.exists():
        folder.rename(previous)
    try:
        partial.rename(folder)
    except BaseException:
        if previous.exists():
            previous.rename(folder)
        raise
    _flush_folder(folder.parent)
    # The save is done; what cannot be deleted now is deleted by the next one.
    shutil.rmtree(previous, ignore_errors=True)


def _clear_up(folder: Path) -> None:
    """Ends what an interrupted save has begun: back with the old model, or away with it."""
    previous = _beside(folder, "previous")
    if not previous.exists():
        return
    if not folder.exists():
        previous.rename(folder)
    elif is_model_folder(folder):
        shutil.rmtree(previous)
    else:
        raise FileExistsError(f"{previous} is left of an interrupted save and {folder} is no model: remove one of them")


def check_replaceable(folder: Path) -> None:
    """Raises: FileExistsError naming what no save has written."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise FileExistsError(f"{folder} is a file: a model is a folder")
    names = sorted(entry.name for entry in folder.iterdir())
    foreign = [name for name in names if not is_model_file(name)]
    if foreign:
        raise FileExistsError(f"{folder} holds {foreign[0]}, which is no part of a model: nothing was overwritten")
    if names and not is_model_folder(folder):
        raise FileExistsError(f"{folder} holds {names[0]} but no model: nothing was overwritten")


def _flush(folder: Path) -> None:
    """Waits until the files are on the disk.

    A rename may otherwise get there before their content.
    """
    for file in folder.iterdir():
        with file.open("r+b") as handle:
            os.fsync(handle.fileno())
    _flush_folder(folder)


def _flush_folder(folder: Path) -> None:
    if os.name != "posix":  # elsewhere a folder cannot be opened
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
