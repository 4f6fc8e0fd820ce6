"""What grows with the context: rows that each layer touches, and quantities relative to a short context."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from tinyds41.show.cost_plots import tokens
from tinyds41.show.style import Style, label_right, name_kinds, new_axes, require_data, styled


@styled
def plot_rows_by_layer(
    style: Style, scored: Mapping[int, Mapping[int, int]], attended: Mapping[int, int], *, model: str,
    ax: Axes | None = None,
) -> Axes:  # fmt: skip
    """Rows that one token touches, by layer, log axis: bars at the longest context, black marks at the shortest.

    scored: index rows by context, then by layer. attended: rows of window and selection, by layer.
    """
    require_data(scored, "contexts")
    require_data(attended, "layers")
    ax = ax or new_axes(style)
    palette, short, long = style.palette, min(scored), max(scored)
    layers = [layer for layer, rows in scored[long].items() if rows]
    ax.bar(layers, [scored[long][layer] for layer in layers], width=0.8, color=palette.orange)
    ax.plot(layers, [scored[short][layer] for layer in layers], linestyle="", marker="_", color=palette.ink,
            markersize=1.4 * style.font, markeredgewidth=2)  # fmt: skip
    ax.plot(list(attended), list(attended.values()), linestyle="", marker="o", color=palette.blue,
            markersize=style.font / 3, zorder=3)  # fmt: skip
    for layer in layers:
        ax.annotate(tokens(scored[long][layer]), (layer, scored[long][layer]), xytext=(0, 2), ha="center", va="bottom",
                    textcoords="offset points")  # fmt: skip
    name_kinds(ax, [(palette.orange, f"scored at {tokens(long)}"), (palette.ink, f"scored at {tokens(short)}"),
                    (palette.blue, "attended to")])  # fmt: skip
    every = [*attended.values(), *(rows for by_layer in scored.values() for rows in by_layer.values() if rows)]
    ax.set_yscale("log")
    ax.set(ylim=(min(every) / 2, 3 * max(every)), xlim=(-1, max(attended) + 1), xlabel="layer",
           ylabel="rows for one token (log scale)")  # fmt: skip
    ax.yaxis.set_major_locator(LogLocator(base=10))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda rows, _: f"{rows:,.0f}"))
    ax.yaxis.set_minor_locator(NullLocator())
    ax.set_title(f"Rows that one token of {model} touches", pad=2.2 * style.font)
    return ax


@styled
def plot_growth(
    style: Style, values: Mapping[str, Mapping[int, float]], *, title: str, log: bool = False, ax: Axes | None = None
) -> Axes:
    """Quantities against context, each divided by its own value at the first context, and labelled with the growth.

    values: by name, then by context, in any unit. log: the vertical axis too.
    Raises: ValueError for a value that is not positive, or curves that begin at different contexts.
    """
    require_data([value for curve in values.values() for value in curve.values()], "values")
    starts = {min(curve, default=None) for curve in values.values()}
    if len(starts) > 1:
        raise ValueError(f"curves begin at different contexts: {sorted(map(str, starts))}")
    for name, curve in values.items():
        if min(curve.values()) <= 0:
            raise ValueError(f"{name} has the value {min(curve.values())}: growth needs positive ones")
    ax = ax or new_axes(style)
    palette = style.palette
    looks = zip((palette.blue, palette.orange, palette.green, palette.purple, palette.ink), ("-", "--", "-.", ":", "-"),
                ("o", "s", "^", "v", "D"), strict=True)  # fmt: skip
    contexts = sorted({context for curve in values.values() for context in curve})
    grown = {name: {n: curve[n] / curve[contexts[0]] for n in sorted(curve)} for name, curve in values.items()}
    ax.set_xscale("log", base=2)
    ax.axhline(1, color=palette.muted, linestyle="--", linewidth=0.8)
    labels = []
    for (name, curve), (colour, line, marker) in zip(grown.items(), itertools.cycle(looks)):
        ax.plot(list(curve), list(curve.values()), color=colour, linestyle=line, marker=marker, clip_on=False, zorder=3,
                markersize=style.font / 2)  # fmt: skip
        last = curve[max(curve)]
        labels.append((last, f"  {name} {last:,.0f}×" if last >= 100 else f"  {name} {last:.2f}×", colour))
    highest = max(value for curve in grown.values() for value in curve.values())
    if log:
        ax.set_yscale("log")
    ax.set(xlim=(contexts[0], contexts[-1]), ylim=(0.8, 1.3 * highest) if log else (0, 1.08 * highest))
    label_right(ax, labels, apart=0.08)
    ax.xaxis.set_major_formatter(FuncFormatter(lambda n, _: tokens(int(n))))
    if log:
        ax.yaxis.set_major_formatter(FuncFormatter(lambda times, _: f"{times:g}"))
        ax.yaxis.set_minor_locator(NullLocator())
    scale = " (log scale)" if log else ""
    ax.set(xlabel="context, tokens (log scale)", ylabel=f"times the value at {tokens(contexts[0])}{scale}")
    ax.set_title(title)
    return ax
