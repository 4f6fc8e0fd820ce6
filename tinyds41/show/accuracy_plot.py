"""Shares of right answers as curves: over the steps of a training, or over a size that each model was trained with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator

from tinyds41.show.style import Style, label_right, new_axes, require_data, require_places, styled

KINDS = ("blue", "orange", "green", "purple")  # colour of each kind of question, in every figure the same
LOOKS = (("-", "o"), ("--", "s"), (":", "^"))  # of each model


@dataclass(frozen=True)
class Curve:
    """One kind of question put to one model (or one series of models).

    shares: 0..1, by step or size. kind, look: places in KINDS and LOOKS.
    """

    label: str
    shares: Mapping[int, float]
    kind: int = 0
    look: int = 0


@styled
def plot_accuracy(
    style: Style, curves: Sequence[Curve], *, setting: str, model: str, baselines: Mapping[str, float] | None = None,
    log: bool = False, ax: Axes | None = None,
) -> Axes:  # fmt: skip
    """Curves of right answers, labelled at their right end with their last value; baselines are dashed.

    setting: what the horizontal axis counts. log: powers of two are evenly apart.
    Raises: ValueError for a share outside 0..1, a curve without shares, or a place that the axis lacks.
    """
    require_data(curves, "shares")
    for curve in curves:
        require_data(curve.shares, f"shares of {curve.label}")
        require_places(setting, curve.shares if log else ())
    baselines = baselines or {}
    drawn = [(curve.label, share) for curve in curves for share in curve.shares.values()]
    for name, share in (*drawn, *baselines.items()):
        if not 0 <= share <= 1:
            raise ValueError(f"{name}: {share} is no share, which is between 0 and 1")
    ax = ax or new_axes(style)
    places = sorted({place for curve in curves for place in curve.shares})
    if log:
        ax.set_xscale("log", base=2)
        ax.xaxis.set_minor_locator(NullLocator())
    ax.set(ylim=(-0.02, 1.02), xlim=(places[0], places[-1]) if len(places) > 1 else None)
    ax.set_xticks(places, [f"{place:,}" for place in places])
    labels = []
    for curve in curves:
        colour, (line, marker) = getattr(style.palette, KINDS[curve.kind]), LOOKS[curve.look]
        mine = sorted(curve.shares)
        ax.plot(mine, [curve.shares[place] for place in mine], color=colour, linestyle=line, marker=marker,
                markersize=style.font / 2, clip_on=False, zorder=3)  # fmt: skip
        labels.append((curve.shares[mine[-1]], f"  {curve.label} {curve.shares[mine[-1]]:.2f}", colour))
    for name, share in baselines.items():
        ax.axhline(share, color=style.palette.muted, linestyle="--", linewidth=0.8)
        labels.append((share, f"  {name} {share:.2f}", style.palette.muted))
    label_right(ax, labels)
    ax.set(xlabel=f"{setting} (log scale)" if log else setting, ylabel="share of right answers, 0 to 1")
    ax.set_title(f"Right answers of {model}")
    return ax
