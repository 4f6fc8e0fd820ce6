"""Writes a figure for print and screen, with the data it shows beside it."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import asdict, is_dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

PNG_DPI = 200


def save_figure(ax: Axes, folder: str | Path, name: str, rows: Sequence[Any]) -> list[Path]:
    """Writes NAME.svg, NAME.png and NAME.csv and returns their paths.

    The same figure gives the same bytes.

    rows: what the figure shows, as dataclasses or mappings that all have the same columns.
    Raises: ValueError for a name with a folder in it, no rows, or rows of different columns; OSError when a file
        cannot be written.
    """
    if not name or Path(name).name != name:
        raise ValueError(f"name={name!r}: a plain file name without a folder is needed")
    table = [_flat(row) for row in rows]
    _check(table, name)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    figure = ax.get_figure(root=True)
    assert isinstance(figure, Figure)
    paths = [folder / f"{name}.{kind}" for kind in ("svg", "png", "csv")]
    # No date and no random ids: a picture that did not change is the same file.
    with rc_context({"svg.hashsalt": "tinyds41", "savefig.facecolor": figure.get_facecolor()}):
        figure.savefig(paths[0], metadata={"Date": None})
        figure.savefig(paths[1], dpi=PNG_DPI)
    with paths[2].open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(table[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(table)
    return paths


def _check(table: list[dict[str, Any]], name: str) -> None:
    if not table:
        raise ValueError(f"{name}: a figure without rows has nothing to show")
    for number, row in enumerate(table):
        if list(row) != list(table[0]):
            raise ValueError(f"{name}: row {number} has columns {list(row)}, row 0 has {list(table[0])}")


def _flat(row: Any) -> dict[str, Any]:
    if is_dataclass(row) and not isinstance(row, type):
        row = asdict(row)
    if not isinstance(row, Mapping):
        raise ValueError(f"a row is a dataclass or a mapping, got {type(row).__name__}")
    return {str(column): _cell(value) for column, value in row.items()}


def _cell(value: Any) -> Any:
    """A CSV cell: whole fractions as integers, lists separated by spaces, None empty."""
    if isinstance(value, Fraction):
        return value.numerator if value.denominator == 1 else float(value)
    return " ".join(map(str, value)) if isinstance(value, (list, tuple)) else value
