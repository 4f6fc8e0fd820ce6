"""Whether counts look drawn from given chances."""

from __future__ import annotations

# The 99th percentiles of chi-square with 1 to 12 degrees of freedom (any table of statistics).
LIMITS = (6.635, 9.210, 11.345, 13.277, 15.086, 16.812, 18.475, 20.090, 21.666, 23.209, 24.725, 26.217)


def chi_square_at_one_percent(counts: list[int], chances: list[float]) -> bool:
    """Pearson's sum of squares at its limit for 1 %; what has no chance must not occur."""
    total = sum(counts)
    if any(count for count, chance in zip(counts, chances, strict=True) if chance == 0):
        return False
    cells = [(count, chance * total) for count, chance in zip(counts, chances, strict=True) if chance > 0]
    found = sum((count - expected) ** 2 / expected for count, expected in cells)
    return found <= LIMITS[len(cells) - 2]
