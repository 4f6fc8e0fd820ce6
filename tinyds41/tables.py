"""Aligned text: the one layout of everything that is printed in columns."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

GAP = "  "


def aligned(head: Sequence[str], rows: Iterable[Sequence[str]], *, left: Collection[int] = (0,)) -> list[str]:
    """One line per row, the head first, each column as wide as its widest cell.

    Columns in `left` start at their left edge, as words do; all others end at their right edge, as numbers do.
    No line ends in spaces.

    Raises: ValueError for a row that has more or fewer cells than the head.
    """
    table = [tuple(head), *(tuple(row) for row in rows)]
    for row in table:
        if len(row) != len(head):
            raise ValueError(f"a row of {len(row)} cells under {len(head)} columns: {row}")
    widths = [max(len(row[column]) for row in table) for column in range(len(head))]
    return [_line(row, widths, left) for row in table]


def _line(row: Sequence[str], widths: Sequence[int], left: Collection[int]) -> str:
    cells = (
        cell.ljust(width) if column in left else cell.rjust(width)
        for column, (cell, width) in enumerate(zip(row, widths, strict=True))
    )
    return GAP.join(cells).rstrip()
