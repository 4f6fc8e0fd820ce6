"""Plots of optimisers: values in the order of their size, and losses by learning rate."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, NullLocator

from tinyds41.show.setting_plots import draw_marked
from tinyds41.show.style import Style, label_right, new_axes, require_data, require_numbers, require_places, styled


@styled
def plot_ranked(
    style: Style, values: Mapping[str, Sequence[float]], *, what: str, ylabel: str, model: str, ax: Axes | None = None
) -> Axes:
    """Values of each kind from the largest to the smallest, log axis, named at their right end.

    Such as singular values before and after Newton-Schulz, or lengths of rows. The first is orange and dashed.

    what: the things that are put in order. ylabel: their value, with its unit.
    Raises: ValueError for a value that a log axis cannot show.
    """
    require_data(values, "values")
    for name, curve in values.items():
        require_data(curve, f"values of {name}")
        require_numbers(((f"a value of {name}", value) for value in curve), positive=True)
    ax = ax or new_axes(style)
    palette = style.palette
    looks = [(palette.orange, "--"), (palette.blue, "-"), (palette.green, ":")]
    ax.set_yscale("log")
    labels = []
    for (name, curve), (colour, line) in zip(values.items(), itertools.cycle(looks)):
        ordered = sorted(curve, reverse=True)
        ax.plot(range(1, len(ordered) + 1), ordered, color=colour, linestyle=line)
        labels.append((ordered[-1], name, colour))
    ax.set_xlim(1, max(2, *map(len, values.values())))
    # Equal values would leave the axis without a height.
    heights = [value for curve in values.values() for value in curve]
    ax.set_ylim(min(heights) / 2, max(heights) * 2)
    ax.yaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set(xlabel=f"{what}, largest first", ylabel=f"{ylabel} (log scale)")
    label_right(ax, labels)
    ax.set_title(f"{what[:1].upper()}{what[1:]}: {model}")
    return ax


@styled
def plot_loss_by_rate(
    style: Style, losses: Mapping[str, Mapping[float, float]], *, model: str, ax: Axes | None = None
) -> Axes:
    """Loss after training at each learning rate, log axis; each optimiser is named, with its best, at the right end.

    The first is orange and dashed, the second blue.

    losses: nats per token, by optimiser, then by rate.
    Raises: ValueError for a rate that a log axis does not have, or a loss that is no finite number.
    """
    require_data(losses, "losses")
    for name, curve in losses.items():
        require_data(curve, f"losses of {name}")
        require_places(f"{name}: learning rate", curve)
        require_numbers((f"{name} at {rate}", loss) for rate, loss in curve.items())
    ax = ax or new_axes(style)
    palette = style.palette
    looks = [(palette.orange, "--", "s"), (palette.blue, "-", "o"), (palette.green, ":", "^"),
             (palette.purple, "-.", "v")]  # fmt: skip
    rates = sorted({rate for curve in losses.values() for rate in curve})
    ax.set_xscale("log", base=2)
    # From 0, which no loss is below: what is left to learn is the height.
    ax.set(ylim=(0, 1.08 * max(loss for curve in losses.values() for loss in curve.values()) or 1))
    ax.set_xlim((rates[0], rates[-1]) if len(rates) > 1 else (rates[0] / 2, rates[0] * 2))
    ax.set_xticks(rates, [f"{rate:g}" for rate in rates])
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set(xlabel="learning rate at its peak (log scale)", ylabel="loss, nats per token")
    draw_marked(style, ax, losses, looks, lambda name, curve: f"  {name}, best {min(curve.values()):.2f}")
    ax.set_title(f"Loss by learning rate: {model}")
    return ax
