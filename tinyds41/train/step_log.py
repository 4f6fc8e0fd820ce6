"""A line of JSON per training step, to be watched while a run goes on and plotted behind it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any

from tinyds41.whole_file import write_whole

FILE_NAME = "log.jsonl"
BOARD_FOLDER = "tensorboard"


class StepLog:
    """`log.jsonl` in a run's folder: one object per step, on the disk when the step ends.

    A run that goes on from step n keeps the lines before n and writes the others anew, so no step stands there twice.
    Where the package tensorboard is installed, numbers go into the folder `tensorboard` as well.

    Raises: OSError when the folder cannot be written; ValueError for a line that is no JSON object with a step, naming
        it. A last line without its end, as a killed run leaves, is dropped.
    """

    def __init__(self, folder: Path, first_step: int = 0):
        self.path = folder / FILE_NAME
        kept = [line for step, line in _lines(self.path) if step < first_step]
        write_whole(self.path, "".join(kept))
        self._file = self.path.open("a", encoding="utf-8")
        self._board = board(folder / BOARD_FOLDER, first_step)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """One step; of `values`, plain numbers go to TensorBoard too."""
        self._file.write(json.dumps({"step": step, **values}) + "\n")
        self._file.flush()
        if self._board is not None:
            for name, value in values.items():
                if isinstance(value, int | float):
                    self._board.add_scalar(name, value, step)

    def close(self) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()

    def __enter__(self) -> StepLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def read_log(folder: str | Path) -> list[dict[str, Any]]:
    """The steps of a run's log, in order. Raises: FileNotFoundError naming the file; ValueError as `StepLog`."""
    path = Path(folder) / FILE_NAME
    if not path.is_file():
        raise FileNotFoundError(f"no log at {path}")
    return [json.loads(line) for _, line in _lines(path)]


def _lines(path: Path) -> list[tuple[int, str]]:
    """(step, line) of every whole line."""
    if not path.is_file():
        return []
    found = []
    for number, data in enumerate(path.read_bytes().splitlines(keepends=True), 1):
        if not data.endswith(b"\n"):
            break
        try:
            line = data.decode()
            found.append((int(json.loads(line)["step"]), line))
        except (ValueError, KeyError, TypeError, OverflowError):  # the first: also bytes that are not UTF-8
            raise ValueError(f"{path}, line {number} is no step of a log: {data.strip()[:60]!r}") from None
    return found


def board(folder: Path, first_step: int) -> Any | None:
    """A TensorBoard writer whose later steps are purged, or None where it is not installed."""
    if find_spec("tensorboard") is None:
        return None
    writer: Callable[..., Any] = import_module("torch.utils.tensorboard").SummaryWriter
    return writer(str(folder), purge_step=first_step)
