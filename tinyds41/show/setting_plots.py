"""Plots of one trained model under changed settings: what a knob does to its loss."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator

from tinyds41.show.style import Style, label_right, new_axes, require_data, require_numbers, require_places, styled


@styled
def plot_loss_by_setting(
    style: Style, losses: Mapping[int, float], *, setting: str, trained: int, model: str, ax: Axes | None = None
) -> Axes:
    """Held-out loss under each value of a setting, log axis.

    Dashed and filled: the value it was trained with.

    losses: nats per token, by value.
    Raises: ValueError when the value it was trained with is not among them, or a loss is no finite number.
    """
    require_data(losses, "losses")
    require_places(setting, losses)
    require_numbers((f"loss at {value}", loss) for value, loss in losses.items())
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


@styled
def plot_quality_by_setting(
    style: Style, values: Mapping[str, Mapping[int, float]], *, setting: str, trained: int, model: str,
    ylabel: str = "share, 0 to 1", ax: Axes | None = None,
) -> Axes:  # fmt: skip
    """Quantities between 0 and 1 under each value of a setting, log axis, such as accuracy and recall.

    Each is labelled at its right end. Dashed: the value the model was trained with.

    values: by quantity, then by value of the setting.
    Raises: ValueError for a quantity outside 0..1, or when the value it was trained with is not among the values.
    """
    require_data([value for curve in values.values() for value in curve], "values")
    for quantity, curve in values.items():
        _check_curve(quantity, curve, trained)
        require_places(setting, curve)
    ax = ax or new_axes(style)
    palette = style.palette
    looks = [
        (palette.blue, "-", "o"),
        (palette.orange, "--", "s"),
        (palette.green, ":", "^"),
        (palette.purple, "-.", "v"),
    ]
    settings = sorted({value for curve in values.values() for value in curve})
    ax.set_xscale("log", base=2)
    ax.set(ylim=(-0.02, 1.02), xlim=(settings[0], settings[-1]) if len(settings) > 1 else None)
    ax.axvline(trained, color=palette.muted, linestyle="--", linewidth=0.8)
    ax.annotate(f"trained with {trained}", (trained, 1.02), xycoords=("data", "axes fraction"), ha="center",
                color=palette.muted, fontsize="small")  # fmt: skip
    draw_marked(style, ax, values, looks, lambda quantity, curve: f"  {quantity} {curve[max(curve)]:.2f}")
    ax.set_xticks(settings, [f"{value:,}" for value in settings])
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set(xlabel=f"{setting} while evaluating (log scale)", ylabel=ylabel)
    ax.set_title(f"{setting} of {model}, changed after training", pad=2.2 * style.font)
    return ax


def draw_marked(
    style: Style, ax: Axes, curves: Mapping[str, Mapping[Any, float]], looks: Sequence[tuple[str, str, str]],
    label: Callable[[str, Mapping[Any, float]], str],
) -> None:  # fmt: skip
    """Curves with a mark at each value, and at their right end what `label` says of (name, curve).

    looks: colour, line and mark, taken in turns.
    """
    labels = []
    for (name, curve), (colour, line, marker) in zip(curves.items(), itertools.cycle(looks)):
        places = sorted(curve)
        ax.plot(places, [curve[place] for place in places], color=colour, linestyle=line, marker=marker,
                markersize=style.font / 1.8, clip_on=False, zorder=3)  # fmt: skip
        labels.append((curve[places[-1]], label(name, curve), colour))
    label_right(ax, labels)


def _check_curve(quantity: str, curve: Mapping[int, float], trained: int) -> None:
    require_data(curve, f"values of {quantity}")
    if trained not in curve:
        raise ValueError(f"{quantity}: trained={trained} is not among the values {sorted(curve)}")
    for value, share in curve.items():
        if not 0 <= share <= 1:
            raise ValueError(f"{quantity} is {share} at {value}: this plot shows quantities between 0 and 1")
