"""Quantities against a number of tokens, both axes log: a slope tells what grows with the text and how fast."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullLocator

from tinyds41.show.cost_plots import tokens
from tinyds41.show.style import Style, label_right, new_axes, require_data, styled


@styled
def plot_by_context(
    style: Style, values: Mapping[str, Mapping[int, float]], *, title: str, ylabel: str,
    xlabel: str = "context, tokens", baselines: Mapping[str, float] | None = None, ax: Axes | None = None,
) -> Axes:  # fmt: skip
    """One curve per name against tokens, named where it ends; the last one stands out.

    Dashed: levels that do not depend on tokens, such as the bytes of weights.

    values: by name, then by tokens.
    Raises: ValueError for no values, or for a number that a log axis cannot show.
    """
    require_data([value for curve in values.values() for value in curve], "values")
    levels = {name: {1: level} for name, level in (baselines or {}).items()}
    for name, curve in (*values.items(), *levels.items()):
        if any(n <= 0 or y <= 0 for n, y in curve.items()):
            raise ValueError(f"{name}: a log axis shows positive numbers only")
    ax = ax or new_axes(style, height=0.5)
    palette = style.palette
    others = ((palette.orange, "--", "s"), (palette.green, "-.", "^"), (palette.purple, ":", "v"),
              (palette.muted, (0, (8, 2)), "D"))  # fmt: skip
    looks = [*itertools.islice(itertools.cycle(others), len(values) - 1), (palette.blue, "-", "o")]
    places = [n for curve in values.values() for n in curve]
    heights = [y for curve in (*values.values(), *levels.values()) for y in curve.values()]
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set(xlim=(min(places), max(places)), ylim=(min(heights) / 2, max(heights) * 2))
    labels = []
    for (name, curve), (colour, line, marker) in zip(values.items(), looks, strict=True):
        xs = sorted(curve)
        ax.plot(xs, [curve[x] for x in xs], color=colour, linestyle=line, marker=marker, markersize=style.font / 2.5,
                clip_on=False, zorder=3)  # fmt: skip
        labels.append((curve[xs[-1]], f"  {name}", colour))
    for name, level in (baselines or {}).items():
        ax.axhline(level, color=palette.ink, linestyle="--", linewidth=0.8)
        ax.annotate(name, (0.01, level), xycoords=("axes fraction", "data"), xytext=(0, 2), va="bottom",
                    textcoords="offset points", fontsize="small")  # fmt: skip
    label_right(ax, labels)
    ax.xaxis.set_major_formatter(FuncFormatter(lambda n, _: tokens(int(n))))
    ax.yaxis.set_minor_locator(NullLocator())
    ax.set(xlabel=f"{xlabel} (log scale)", ylabel=f"{ylabel} (log scale)")
    ax.set_title(title)
    return ax
