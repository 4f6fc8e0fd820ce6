"""Files that appear under their name when they are whole: what was there before stays until then."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yields a path beside `path`; the file written there takes its name once the block has succeeded.

    Folders are made. A block that fails leaves what was there; a killed process leaves `.NAME.<process>` beside it.

    Raises: IsADirectoryError for a folder of that name, before anything is written; OSError where it cannot be.
    """
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder, a file is needed")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield partial
        with partial.open("r+b") as file:  # a rename may otherwise get to the disk before the content
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def write_whole(path: Path, text: str) -> None:
    """Writes UTF-8. Raises: as `whole_file`."""
    with whole_file(path) as partial:
        partial.write_text(text, encoding="utf-8")
