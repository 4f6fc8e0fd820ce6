"""The reliability diagram of a drafter: what it said of its tokens against what became of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes

from tinyds41.show.style import Style, label_right, new_axes, require_data, styled
from tinyds41.train.calibrate import Bin, calibration_error


@styled
def plot_reliability(
    style: Style, bins: Mapping[str, Sequence[Bin]], *, model: str, ax: Axes | None = None
) -> Axes:
    """Mean survival foretold in each bin against the share of blocks accepted; dashed: what calibrated means.

    Below the dashed line a drafter believes too much. Each curve is named with its calibration error.

    bins: by name, as `train.calibrate.reliability` gives them.
    Raises: ValueError for no bins, an empty one, or a mean outside 0..1.
    Source: spec 10.5.
    """
    require_data(bins, "bins")
    for name, curve in bins.items():
        require_data(curve, f"bins of {name}")
        for part in curve:
            _check(name, part)
    ax = ax or new_axes(style, height=0.6)
    palette = style.palette
    ax.set(xlim=(0, 1), ylim=(0, 1), aspect="equal")
    ax.plot([0, 1], [0, 1], color=palette.muted, linestyle="--", linewidth=0.8)
    looks = ((palette.orange, ":", "s"), (palette.blue, "-", "o"), (palette.green, "-.", "^"))
    labels = []
    for (name, curve), (colour, line, marker) in zip(bins.items(), itertools.cycle(looks)):
        ax.plot([part.prediction for part in curve], [part.outcome for part in curve], color=colour, linestyle=line,
                marker=marker, markersize=style.font / 2, clip_on=False, zorder=3)  # fmt: skip
        labels.append((curve[-1].outcome, f"  {name}: error {calibration_error(curve):.1%}".replace("%", " %"), colour))
    label_right(ax, labels)
    ax.set(xlabel="survival foretold, mean of a bin", ylabel="share of blocks accepted so far")
    ax.set_title(f"Survival of drafts, {model}")
    return ax


def _check(name: str, part: Bin) -> None:
    for what, value in (("prediction", part.prediction), ("outcome", part.outcome)):
        if not (math.isfinite(value) and 0 <= value <= 1):
            raise ValueError(f"{name}: {what} {value}: this plot shows means between 0 and 1")
    if part.count < 1:
        raise ValueError(f"{name}: a bin of {part.count} blocks")
