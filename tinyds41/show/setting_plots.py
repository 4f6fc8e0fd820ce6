"""Plots of one trained model under changed settings: what a knob does to its loss."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator

from tinyds41.show.style import Style, new_axes, require_data, styled


@styled
def plot_loss_by_setting(
    style: Style, losses: Mapping[int, float], *, setting: str, trained: int, model: str, ax: Axes | None = None
) -> Axes:
    """Held-out loss under each value of a setting, log axis.

    Dashed and filled: the value it was trained with.

    losses: nats per token, by value.
    Raises: ValueError when the value it was trained with is not among them.
    """
    require_data(losses, "losses")
    if trained not in losses:
        raise ValueError(f"trained={trained} is not among the values {sorted(losses)}")
    ax = ax or new_axes(style)
    values = sorted(losses)
    ax.plot(values, [losses[value] for value in values], color=style.palette.blue, marker="o",
            markerfacecolor=style.palette.paper, markersize=style.font / 1.7)  # fmt: skip
    ax.plot([trained], [losses[trained]], color=style.palette.orange, linestyle="", marker="o", zorder=3,
            markersize=style.font / 1.4)  # fmt: skip
    ax.axhline(losses[trained], color=style.palette.muted, linestyle="--", linewidth=0.8)
    boxed = {"facecolor": style.palette.paper, "edgecolor": "none", "pad": 1}  # readable where the curve passes behind
    for value in values:
        ax.annotate(f"{losses[value]:.2f}", (value, losses[value]), xytext=(0, 0.7 * style.font), ha="center",
                    textcoords="offset points", bbox=boxed)  # fmt: skip
    ax.set_xscale("log", base=2)
    ax.set_xticks(values, [str(value) for value in values])
    ax.xaxis.set_minor_locator(NullLocator())
    ax.margins(y=0.18)
    ax.set(xlabel=f"{setting} while evaluating (log scale)", ylabel="held-out loss, nats per token")
    ax.annotate(f"trained with {trained}", (trained, losses[trained]), xytext=(0, -1.8 * style.font), ha="center",
                textcoords="offset points", color=style.palette.orange)  # fmt: skip
    ax.set_title(f"Loss of {model} when {setting} is changed after training")
    return ax
