"""Plots of what a run did: selections over the context, expert load, loss."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from tinyds41.plan import SWA
from tinyds41.show.observations import ExpertLoad, Span
from tinyds41.show.style import (
    Style,
    label_right,
    name_kinds,
    new_axes,
    on_cividis,
    require_data,
    require_numbers,
    styled,
)

KINDS = {"selected": "selected entries", "pool": "candidate pool", "window": "window", "visible": "visible"}
SMOOTHED = 20  # steps whose mean labels the training curve: one small batch is noise


@dataclass(frozen=True)
class LossPoint:
    """One measured loss. Units: nats per token.

    kind: "train", "held out", or "unigram", the loss of counting tokens alone: a baseline at whatever step.
    """

    step: int
    kind: str
    loss: float


@styled
def plot_selection(style: Style, spans: Sequence[Span], *, model: str, ax: Axes | None = None) -> Axes:
    """What each layer saw and chose for one query.

    Drawn are window, candidate pool and selected entries over the context.
    """
    require_data(spans, "spans")
    layers = sorted({span.layer for span in spans})
    windows = [span.last for span in spans if span.kind == "window"]
    require_data(windows, "span of kind 'window'")
    query = max(windows)
    ax = ax or new_axes(style, height=min(1.15, 0.2 + 0.036 * len(layers)))
    palette = style.palette
    looks = {  # height, colour, order: areas first, chosen entries on top
        "visible": (0.1, palette.faint, 1), "pool": (0.72, palette.sky, 2),
        "window": (0.44, palette.green, 3), "selected": (0.72, palette.ink, 4),
    }  # fmt: skip
    for kind, (height, colour, order) in looks.items():
        mine = [span for span in spans if span.kind == kind]
        # At least a thousandth of the axis, or an entry of a long context would vanish.
        widths = [max(span.last - span.first + 1, query / 1000) for span in mine]
        ax.barh([span.layer for span in mine], widths, left=[span.first for span in mine], height=height,
                align="center", color=colour, linewidth=0, zorder=order)  # fmt: skip
    for layer in layers:
        ax.annotate(_choice(spans, layer), (1.01, layer), xycoords=("axes fraction", "data"), va="center",
                    fontsize="small", annotation_clip=False)  # fmt: skip
    modes = {span.layer: span.mode for span in spans}
    ax.set_yticks(layers, [f"{layer} {modes[layer]}" for layer in layers])
    ax.set(xlim=(0, query + 1), ylim=(layers[-1] + 0.6, layers[0] - 0.6), xlabel="position in the context, tokens")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.tick_params(axis="y", length=0)
    present = {span.kind for span in spans}
    name_kinds(ax, [(looks[kind][1], name) for kind, name in KINDS.items() if kind in present])
    ax.set_title(f"What each layer of {model} reads for the query at {query:,}", pad=2.2 * style.font)
    return ax


def _choice(spans: Sequence[Span], layer: int) -> str:
    """The text at the right of a layer: how much it chose, or from whom the choice comes."""
    mine = [span for span in spans if span.layer == layer]
    chosen = [span for span in mine if span.kind == "selected"]
    if not chosen:
        return "window only" if mine[0].mode == SWA else "no entry yet"
    if chosen[0].source != layer:
        return f"as layer {chosen[0].source}"
    ratio = chosen[0].last - chosen[0].first + 1
    reach = [span for span in mine if span.kind == "pool"] or [span for span in mine if span.kind == "visible"]
    n_reach = sum(span.last - span.first + 1 for span in reach) // ratio
    return f"{len(chosen)} of {n_reach:,}"


@styled
def plot_expert_load(style: Style, loads: Sequence[ExpertLoad], *, model: str, ax: Axes | None = None) -> Axes:
    """Visits of each expert in each layer, relative to an even share (1.0).

    Raises: ValueError for a layer whose experts no token visited.
    """
    require_data(loads, "expert loads")
    for layer in sorted({load.layer for load in loads}):
        if not any(load.tokens for load in loads if load.layer == layer):
            raise ValueError(f"layer {layer}: no tokens visited its experts")
    n_layers, n_experts = max(load.layer for load in loads) + 1, max(load.expert for load in loads) + 1
    # The label of the colour bar needs its length, however few the layers.
    ax = ax or new_axes(style, height=min(0.8, max(0.5, 0.2 + 0.04 * n_layers)))
    share = np.zeros((n_layers, n_experts))
    for load in loads:
        share[load.layer, load.expert] = load.tokens
    share /= np.maximum(share.mean(axis=1, keepdims=True), 1e-12)
    top = max(2.0, share.max())
    image = ax.imshow(share, cmap="cividis", vmin=0, vmax=top, aspect="auto")
    if n_experts <= 16 and n_layers <= 16:
        for (layer, expert), value in np.ndenumerate(share):
            ax.annotate(f"{value:.1f}", (expert, layer), ha="center", va="center", color=on_cividis(value / top))
    bar = ax.figure.colorbar(image, ax=ax, pad=0.02)
    bar.set_label("visits, relative to an even share")
    bar.outline.set_visible(False)
    ax.set(xlabel="routed expert", ylabel="layer", yticks=_ticks(n_layers), xticks=_ticks(n_experts))
    ax.spines[:].set_visible(False)
    ax.set_title(f"Expert load of {model}: busiest {share.max():.1f}, idlest {share.min():.1f}")
    return ax


def _ticks(n: int) -> range:
    return range(0, n, max(1, 2 ** math.ceil(math.log2(n / 12))) if n > 12 else 1)


@styled
def plot_loss(
    style: Style, points: Sequence[LossPoint], *, model: str, vocab_size: int | None = None, ax: Axes | None = None
) -> Axes:
    """Loss against step; the dashed baselines are a uniform guess over the vocabulary and counting tokens alone.

    The number at the training curve's end is the mean of its last steps.
    """
    require_data(points, "losses")
    require_numbers((f"{point.kind} loss at step {point.step}", point.loss) for point in points)
    ax = ax or new_axes(style)
    palette = style.palette
    labels = []
    for kind, (colour, line, marker) in {
        "train": (palette.blue, "-", None), "held out": (palette.orange, "--", "o"),
    }.items():  # fmt: skip
        mine = [point for point in points if point.kind == kind]
        if mine:
            # One point makes no line: it needs its marker.
            ax.plot([p.step for p in mine], [p.loss for p in mine], color=colour, linestyle=line,
                    marker=marker or ("o" if len(mine) == 1 else None), markersize=style.font / 2.5,
                    clip_on=not marker, zorder=3)  # fmt: skip
            last = [p.loss for p in mine][-SMOOTHED if kind == "train" else -1 :]
            end = sum(last) / len(last)
            labels.append((end, f"{kind} {end:.2f}", colour))
    for point in points:
        if point.kind == "unigram":
            ax.axhline(point.loss, color=palette.purple, linestyle="--", linewidth=0.8)
            labels.append((point.loss, f"unigram {point.loss:.2f}", palette.purple))
    if vocab_size is not None:
        _draw_uniform_guess(ax, vocab_size, palette.muted)
    n_smoothed = min(SMOOTHED, sum(point.kind == "train" for point in points))
    ax.set(xlim=(0, max(point.step for point in points) or 1), ylim=ax.get_ylim(), ylabel="loss, nats per token",
           xlabel="step" + (f" (train: mean of the last {n_smoothed})" if n_smoothed > 1 else ""))  # fmt: skip
    label_right(ax, labels)
    ax.set_title(f"Loss of {model}")
    return ax


@styled
def plot_curves(
    style: Style, curves: Mapping[str, Mapping[int, float]], *, xlabel: str, ylabel: str, model: str,
    baseline: tuple[float, str] | None = None, ax: Axes | None = None,
) -> Axes:  # fmt: skip
    """Quantities of several runs or models against steps or counts, each named and valued at its right end.

    The first is orange and dashed, the second blue. baseline: a value to compare with and what it is, dashed.
    """
    require_data(curves, "values")
    for name, curve in curves.items():
        require_data(curve, f"values of {name}")
        require_numbers((f"{name} at {place}", value) for place, value in curve.items())
    ax = ax or new_axes(style)
    palette = style.palette
    looks = [(palette.orange, "--"), (palette.blue, "-"), (palette.green, ":"), (palette.purple, "-.")]
    labels = []
    for (name, curve), (colour, line) in zip(curves.items(), itertools.cycle(looks)):
        places = sorted(curve)
        ax.plot(places, [curve[place] for place in places], color=colour, linestyle=line)
        labels.append((curve[places[-1]], f"{name} {curve[places[-1]]:.2f}", colour))
    if baseline is not None:
        ax.axhline(baseline[0], color=palette.muted, linestyle="--", linewidth=0.8)
        ax.annotate(baseline[1], (0.02, baseline[0]), xycoords=("axes fraction", "data"), xytext=(0, 2), va="bottom",
                    textcoords="offset points", color=palette.muted)  # fmt: skip
    places = [place for curve in curves.values() for place in curve]
    ax.set(xlim=(min(places), max(max(places), min(places) + 1)), ylim=ax.get_ylim(), xlabel=xlabel, ylabel=ylabel)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    label_right(ax, labels)
    quantity = ylabel.split(",")[0]  # without its unit
    ax.set_title(f"{quantity[:1].upper()}{quantity[1:]}: {model}")
    return ax


def _draw_uniform_guess(ax: Axes, vocab_size: int, colour: str) -> None:
    guess = math.log(vocab_size)
    ax.axhline(guess, color=colour, linestyle="--", linewidth=0.8)
    ax.annotate(f"uniform guess, ln {vocab_size:,} = {guess:.2f}", (0.5, guess), xycoords=("axes fraction", "data"),
                xytext=(0, 2), textcoords="offset points", ha="center", va="bottom", color=colour)  # fmt: skip
    ax.update_datalim([(0, 1.08 * guess)])
    ax.autoscale_view()
