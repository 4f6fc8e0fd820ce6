"""Plots of low-precision rows: where the values of a block land, and what the size of a block does to the error."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator

from tinyds41.show.style import Style, label_right, new_axes, require_data, styled


@styled
def plot_block(
    style: Style, values: Sequence[float], stored: Sequence[float], grid: Sequence[float], *, model: str,
    ax: Axes | None = None,
) -> Axes:  # fmt: skip
    """The values of one block, what is stored of each, and the levels that there are.

    grid: the levels, already times the block's scale.
    Raises: ValueError when values and stored differ in number, or a stored value is no level.
    """
    require_data(values, "values")
    if len(values) != len(stored):
        raise ValueError(f"{len(values)} values, but {len(stored)} stored ones")
    for value in stored:
        if not any(abs(value - level) <= 1e-6 * max(map(abs, grid)) for level in grid):
            raise ValueError(f"{value} is none of the {len(grid)} levels")
    ax = ax or new_axes(style)
    palette = style.palette
    for level in grid:
        ax.axhline(level, color=palette.faint, linewidth=0.8, zorder=0)
    for channel, (value, kept) in enumerate(zip(values, stored, strict=True)):
        ax.plot([channel, channel], [value, kept], color=palette.muted, linewidth=0.8, zorder=1)
    channels = range(len(values))
    ax.plot(channels, values, color=palette.blue, linestyle="", marker="o", markerfacecolor=palette.paper,
            markersize=style.font / 1.5)  # fmt: skip
    ax.plot(channels, stored, color=palette.orange, linestyle="", marker="_", markersize=1.3 * style.font,
            markeredgewidth=style.font / 4)  # fmt: skip
    ax.annotate("○ value", (0, 1.02), xycoords="axes fraction", color=palette.blue)
    ax.annotate("━ stored", (0.16, 1.02), xycoords="axes fraction", color=palette.orange)
    ax.annotate("lines: the levels", (0.34, 1.02), xycoords="axes fraction", color=palette.muted)
    ax.set_xticks(channels, [str(channel) for channel in channels])
    ax.set(xlabel="channel of the block", ylabel="value")
    ax.set_title(f"One block of {len(values)} channels, {model}", pad=2.2 * style.font)
    return ax


@styled
def plot_error_by_block(
    style: Style, errors: Mapping[str, Mapping[int, float]], row_bytes: Mapping[int, int], *, released: int, model: str,
    ax: Axes | None = None,
) -> Axes:  # fmt: skip
    """Relative error of stored rows by channels per scale, both axes logarithmic; under each block size its bytes.

    errors: by curve, then by block size. row_bytes: by block size. released: the block size in use, dashed.
    Raises: ValueError for an error that is not positive, or a block size without its bytes.
    """
    require_data([error for curve in errors.values() for error in curve], "errors")
    for name, curve in errors.items():
        for block, error in curve.items():
            if error <= 0:
                raise ValueError(f"{name}: an error of {error} at block {block} has no place on a log axis")
            if block not in row_bytes:
                raise ValueError(f"{name}: no bytes for block {block}, only for {sorted(row_bytes)}")
    ax = ax or new_axes(style)
    palette = style.palette
    blocks = sorted({block for curve in errors.values() for block in curve})
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.axvline(released, color=palette.muted, linestyle="--", linewidth=0.8)
    ax.annotate(f"released: {released}", (released, 1.02), xycoords=("data", "axes fraction"), ha="center",
                color=palette.muted, fontsize="small")  # fmt: skip
    looks = zip((palette.blue, palette.orange, palette.green), ("-", "--", ":"), ("o", "s", "^"), strict=True)
    labels = []
    for (name, curve), (colour, line, marker) in zip(errors.items(), itertools.cycle(looks)):
        mine = sorted(curve)
        ax.plot(mine, [curve[block] for block in mine], color=colour, linestyle=line, marker=marker, zorder=3,
                markersize=style.font / 2, clip_on=False)  # fmt: skip
        labels.append((curve[mine[-1]], f"  {name} {curve[mine[-1]]:.2f}", colour))
    if len(blocks) > 1:
        ax.set_xlim(blocks[0], blocks[-1])
    low, high = (pick(error for curve in errors.values() for error in curve.values()) for pick in (min, max))
    ax.set_ylim(low / 1.3, high * 1.3)
    label_right(ax, labels)
    ax.set_xticks(blocks, [f"{block}\n{row_bytes[block]} B" for block in blocks])
    ax.xaxis.set_minor_locator(NullLocator())
    ticks = [tick for tick in (0.02, 0.05, 0.1, 0.2, 0.5, 1.0) if low / 1.3 <= tick <= high * 1.3]
    ax.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    ax.yaxis.set_minor_locator(NullLocator())
    ax.set(xlabel="channels per scale (log scale), and bytes of a row of 512", ylabel="relative error")
    ax.set_title(f"FP4 rows of {model}", pad=2.2 * style.font)
    return ax
