"""Quantities against distance: how far something reaches, and where it ends."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from tinyds41.show.style import Style, label_right, new_axes, require_data, require_numbers, styled


@styled
def plot_by_distance(
    style: Style, values: Mapping[str, Mapping[int, float]], *, title: str, ylabel: str,
    borders: Mapping[str, int] | None = None, baseline: tuple[str, float] | None = None, log: bool = False,
    xlabel: str = "distance, tokens", ax: Axes | None = None,
) -> Axes:  # fmt: skip
    """One curve per name against the distance in tokens; a thin line of its colour marks where it must end.

    values: by name, then by distance; on a log axis what is not positive is left out. borders: the last distance that
    a curve can reach, by its name. baseline: a text and a level, such as chance.
    Raises: ValueError for no values, one that is no finite number, or a border without its curve.
    """
    require_data(values, "values")
    for name, curve in values.items():
        require_data(curve, f"values of {name}")
        require_numbers((f"{name} at distance {distance}", value) for distance, value in curve.items())
    require_numbers([baseline] if baseline else [])
    if strangers := set(borders or {}) - set(values):
        raise ValueError(f"borders of {sorted(strangers)}, but the curves are {list(values)}")
    ax = ax or new_axes(style)
    palette = style.palette
    colours = (palette.blue, palette.orange, palette.green, palette.purple, palette.ink)
    looks = list(zip(colours, ("-", "--", "-.", ":", "-"), ("o", "s", "^", "v", "D"), strict=True))
    last = max(distance for curve in values.values() for distance in curve)
    shown = {name: {d: y for d, y in sorted(curve.items()) if y > 0 or not log} for name, curve in values.items()}
    require_data([y for curve in shown.values() for y in curve], "positive values")
    if log:
        ax.set_yscale("log")
    labels = []
    for (name, curve), (colour, line, marker) in zip(shown.items(), itertools.cycle(looks)):
        ax.plot(list(curve), list(curve.values()), color=colour, linestyle=line, marker=marker, zorder=3,
                markersize=style.font / 3, clip_on=False)  # fmt: skip
        if curve:
            labels.append((list(curve.values())[-1], f"  {name}", colour))
        if name in (borders or {}):
            assert borders is not None
            ax.axvline(borders[name] + 0.5, color=colour, linewidth=0.8, linestyle="--", zorder=1)
            ax.annotate(f"{borders[name]}", (borders[name] + 0.5, 1.01), xycoords=("data", "axes fraction"),
                        ha="center", color=colour, fontsize="small")  # fmt: skip
    if baseline is not None:
        text, level = baseline
        ax.axhline(level, color=palette.muted, linestyle="--", linewidth=0.8)
        ax.annotate(text, (0.005, level), xycoords=("axes fraction", "data"), xytext=(0, 2), va="bottom",
                    textcoords="offset points", color=palette.muted, fontsize="small")  # fmt: skip
    # A border at the last distance still needs room for its line.
    ax.set_xlim(0, max([last, *(border + 1 for border in (borders or {}).values())]))
    ax.set_ylim(*((None, None) if log else (-0.02, 1.02)))
    label_right(ax, labels)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set(xlabel=xlabel, ylabel=ylabel)
    ax.set_title(title, pad=2.2 * style.font)
    return ax
