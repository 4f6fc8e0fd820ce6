"""The layer plan as a picture: what each layer is, and whose entries and choices it reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

from tinyds41.plan import FULL, REINDEX, REUSE, SWA, LayerPlan
from tinyds41.show.style import Palette, Style, new_axes, require_data, styled

LANES = ("mode", "global KV of", "selection of", "pool: ■ forms, □ inside", "Engram")


@styled
def plot_layer_plan(style: Style, plan: Sequence[LayerPlan], *, model: str, ax: Axes | None = None) -> Axes:
    """One column per layer, one lane per question of the plan. Source: spec 1.

    plan: `config.plan()`.
    """
    require_data(plan, "layers")
    ax = ax or new_axes(style, height=0.42)
    colours = style.palette
    _draw_modes(ax, plan, colours)
    _draw_spans(ax, 1, [layer.kv_source for layer in plan], colours)
    _draw_spans(ax, 2, [layer.index_source for layer in plan], colours)
    _draw_pool(ax, plan, colours)
    for layer in plan:
        if layer.engram is not None:
            ax.plot(layer.layer, 4, marker="D", markersize=0.6 * style.font, color=colours.green)
    _draw_boundary(ax, plan, colours)
    _frame(ax, plan, model)
    return ax


def mode_looks(palette: Palette) -> dict[str, dict]:
    """Fill and hatch of each mode: told apart by lightness and pattern, not by hue alone."""
    return {
        SWA: {"facecolor": palette.paper, "edgecolor": palette.muted},
        FULL: {"facecolor": palette.blue, "edgecolor": palette.paper},
        REINDEX: {"facecolor": palette.orange, "edgecolor": palette.paper, "hatch": "////"},
        REUSE: {"facecolor": palette.faint, "edgecolor": palette.muted},
    }


def _draw_modes(ax: Axes, plan: Sequence[LayerPlan], palette: Palette) -> None:
    looks = mode_looks(palette)
    for layer in plan:
        ax.add_patch(Rectangle((layer.layer - 0.42, -0.36), 0.84, 0.72, linewidth=0.7, **looks[layer.mode]))
    present = [mode for mode in looks if any(layer.mode == mode for layer in plan)]
    ax.legend([Patch(linewidth=0.7, **looks[mode]) for mode in present], present, ncols=len(present),
              loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0.1, handlelength=1.2,
              columnspacing=1.2)  # fmt: skip


def _runs(values: Sequence[int | None]) -> Iterator[tuple[int, int, int]]:
    """Stretches of one value: (value, first layer, last layer); None is no stretch."""
    first = 0
    for layer in range(1, len(values) + 1):
        if layer == len(values) or values[layer] != values[first]:
            value = values[first]
            if value is not None:
                yield value, first, layer - 1
            first = layer


def _draw_spans(ax: Axes, lane: int, sources: Sequence[int | None], palette: Palette) -> None:
    for source, first, last in _runs(sources):
        ax.add_patch(Rectangle((first - 0.42, lane - 0.3), last - first + 0.84, 0.6, facecolor=palette.faint,
                               edgecolor=palette.muted, linewidth=0.7))  # fmt: skip
        ax.annotate(str(source), ((first + last) / 2, lane), ha="center", va="center")


def _draw_pool(ax: Axes, plan: Sequence[LayerPlan], palette: Palette) -> None:
    for layer in plan:
        if layer.forms_pool or layer.pooled:
            face = palette.purple if layer.forms_pool else palette.paper
            ax.add_patch(Rectangle((layer.layer - 0.42, 2.7), 0.84, 0.6, facecolor=face, edgecolor=palette.purple))


def _draw_boundary(ax: Axes, plan: Sequence[LayerPlan], palette: Palette) -> None:
    boundary = next((layer.layer for layer in plan if layer.half == "decoder"), None)
    if boundary is None:
        return
    ax.axvline(boundary - 0.5, color=palette.ink, linestyle="--", linewidth=0.9)
    for text, x, side in (("encoder ", boundary - 0.55, "right"), (" decoder", boundary - 0.45, "left")):
        ax.annotate(text, (x, 4.62), ha=side, va="center", color=palette.muted)


def _frame(ax: Axes, plan: Sequence[LayerPlan], model: str) -> None:
    step = 1 if len(plan) <= 16 else 2 if len(plan) <= 24 else 4
    ax.set(xlim=(-0.7, len(plan) - 0.3), ylim=(4.9, -0.6), xticks=range(0, len(plan), step), xlabel="layer")
    ax.set_yticks(range(len(LANES)), LANES)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    ax.set_title(f"Layer plan of {model}")
