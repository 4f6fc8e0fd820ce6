"""Throughput by load: the scheduler of drafted tokens beside fixed lengths and thresholds."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullLocator

from tinyds41.infer.simulate import Throughput, best_fixed
from tinyds41.show.style import Style, label_right, new_axes, require_data, require_numbers, styled

THRESHOLD_LOOKS = ((":", "s"), ("-.", "^"), ((0, (1, 3)), "v"), ((0, (5, 1, 1, 1, 1, 1)), "D"))


@styled
def plot_schedule(
    style: Style, rows: Sequence[Throughput], *, model: str, relative: bool = False, ax: Axes | None = None
) -> Axes:
    """Tokens per second of all requests against their number, a curve per way of choosing lengths, named at its end.

    relative: over the best fixed length at each load, where small differences show; dashed: as many as that.
    Raises: ValueError for no rows, tokens per second that are not above 0, a load without a fixed length (relative).
    Source: spec 10.6.
    """
    require_data(rows, "rows")
    require_numbers(((f"{row.name} at {row.requests} requests", row.tokens_per_second) for row in rows), positive=True)
    curves = _curves(rows, relative)
    ax = ax or new_axes(style, height=0.6)
    loads = sorted({row.requests for row in rows})
    ax.set_xscale("log", base=2)
    ax.set_yscale("linear" if relative else "log")
    heights = [speed for curve in curves.values() for speed in curve.values()]
    room = 0.05 * (max(heights) - min(heights)) + 0.01 if relative else 0.0
    ax.set(xlim=(loads[0], loads[-1]) if len(loads) > 1 else None,
           ylim=(min(heights) - room, max(heights) + room) if relative else (min(heights) / 1.2, max(heights) * 1.2))
    if relative:
        ax.axhline(1.0, color=style.palette.ink, linestyle="--", linewidth=0.8)
    labels = []
    for (name, curve), look in zip(curves.items(), _looks(style, rows), strict=True):
        places = sorted(curve)
        ax.plot(places, [curve[place] for place in places], markersize=style.font / 2.5, clip_on=False, **look)
        labels.append((curve[places[-1]], f"  {name}", look["color"]))
    label_right(ax, labels, apart=0.075)
    ax.set_xticks(loads, [f"{load:,}" for load in loads])
    ax.xaxis.set_minor_locator(NullLocator())
    if not relative:
        ax.yaxis.set_major_formatter(FuncFormatter(lambda speed, _: f"{speed:,.0f}"))
        ax.yaxis.set_minor_locator(NullLocator())
    ax.set(xlabel="concurrent requests (log scale)",
           ylabel="throughput over the best fixed length" if relative else "tokens per second (log scale)")
    ax.set_title(f"Throughput by load, {model}")
    return ax


def _curves(rows: Sequence[Throughput], relative: bool) -> dict[str, dict[int, float]]:
    best = best_fixed(rows)
    curves: dict[str, dict[int, float]] = {}
    for row in rows:
        if relative and row.requests not in best:
            raise ValueError(f"no fixed length at {row.requests} requests to compare {row.name} with")
        over = best[row.requests].tokens_per_second if relative else 1.0
        curves.setdefault(row.name, {})[row.requests] = row.tokens_per_second / over
    return curves


def _looks(style: Style, rows: Sequence[Throughput]) -> list[dict]:
    """Fixed lengths thin and alike, the scheduler thick, each threshold with a line of its own."""
    kinds = {row.name: row.kind for row in rows}
    palette, looks, n_thresholds = style.palette, [], 0
    for kind in kinds.values():
        if kind == "scheduler":
            look = {"color": palette.blue, "linestyle": "-", "marker": "o", "linewidth": style.font / 4, "zorder": 4}
        elif kind == "threshold":
            line, marker = THRESHOLD_LOOKS[n_thresholds % len(THRESHOLD_LOOKS)]
            look = {"color": palette.orange, "linestyle": line, "marker": marker, "zorder": 3}
            n_thresholds += 1
        else:
            look = {"color": palette.muted, "linestyle": "--", "linewidth": style.font / 10, "zorder": 2}
        looks.append(look)
    return looks
