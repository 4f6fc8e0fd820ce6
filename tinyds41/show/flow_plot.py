"""The data flow as a picture: which layers run for which tokens, and whose global entries each layer reads."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from tinyds41.plan import LayerPlan
from tinyds41.show.plan_plot import mode_looks
from tinyds41.show.style import Style, new_axes, require_data, styled

# Places on the horizontal axis, the prompt being 0..1.
DECODE, TOKEN, RAILS, RAIL = 1.1, 0.1, 1.27, 0.05


@styled
def plot_data_flow(
    style: Style, plan: Sequence[LayerPlan], *, model: str, tokens: int, in_decoder: int, mode: str,
    ax: Axes | None = None,
) -> Axes:  # fmt: skip
    """Prefill at the left, to scale along the prompt; one generated token beside it; the first layer below.

    Rails at the right lead from each layer that writes global entries to the layers that read them, in both phases.

    plan: `config.plan()`. tokens: length of the prompt. in_decoder, mode: `cost.prefill.decoder_tokens(config, tokens,
        mode)`, and the mode.
    Raises: ValueError for a prompt without tokens, or a decoder on more tokens than it has.
    Source: spec 5.
    """
    require_data(plan, "layers")
    if tokens < 1:
        raise ValueError(f"tokens={tokens}: the prompt needs at least one")
    if not 0 <= in_decoder <= tokens:
        raise ValueError(f"in_decoder={in_decoder} of tokens={tokens}: a decoder runs on none to all of a prompt")
    ax = ax or new_axes(style, height=min(style.tallest, 0.3 + 0.032 * len(plan)))
    looks = mode_looks(style.palette)
    boundary = next((layer.layer for layer in plan if layer.half == "decoder"), len(plan))
    share = in_decoder / tokens
    for layer in plan:
        runs = 1.0 if layer.half == "encoder" else share
        for left, width in ((1 - runs, runs), (DECODE, TOKEN)):
            if width:
                ax.add_patch(Rectangle((left, layer.layer - 0.36), width, 0.72, linewidth=0.7, **looks[layer.mode]))
    if boundary < len(plan) and share < 1:
        _draw_skipped(ax, boundary, len(plan), share, style)
    end = _draw_rails(ax, plan, style)
    _name_columns(ax, len(plan), tokens, in_decoder, boundary, style)
    ax.set(xlim=(-0.01, end + 0.03), ylim=(-0.7, len(plan) - 0.5))
    step = 1 if len(plan) <= (48 if style.medium == "page" else 24) else 2
    ax.set_yticks(range(0, len(plan), step), [f"{layer.layer} {layer.mode}" for layer in plan[::step]])
    if len(plan) > 24:
        ax.tick_params(axis="y", labelsize=0.7 * style.font)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    ax.set_title(
        f"Data flow of {model}: a prompt of {tokens:,} tokens, then decode; decoder: {mode}", pad=2.2 * style.font
    )
    return ax


def _draw_skipped(ax: Axes, boundary: int, n_layers: int, share: float, style: Style) -> None:
    """What the decoder leaves out: only its first layer's projections see the other tokens."""
    palette = style.palette
    ax.add_patch(Rectangle((0, boundary - 0.18), 1 - share, 0.36, linewidth=0.7, facecolor=palette.paper,
                           edgecolor=palette.blue, linestyle="--"))  # fmt: skip
    if share > 0.6:  # no room for words
        return
    ax.annotate("global KV and index keys only", ((1 - share) / 2, boundary + 0.18), xytext=(0, 1.5), ha="center",
                va="bottom", textcoords="offset points", fontsize="small")  # fmt: skip
    ax.annotate("not run", ((1 - share) / 2, (boundary + n_layers) / 2), ha="center", va="center",
                color=palette.muted)  # fmt: skip


def _draw_rails(ax: Axes, plan: Sequence[LayerPlan], style: Style) -> float:
    """From each writer of global entries to its readers; rails that overlap stand side by side. Returns their end."""
    palette, right = style.palette, RAILS
    taken: list[list[int]] = []  # layers on each lane
    for source in (layer.layer for layer in plan if layer.writes_globals):
        readers = [layer.layer for layer in plan if layer.kv_source == source]
        lane = next((i for i, layers in enumerate(taken) if max(layers) < source), len(taken))
        taken[lane : lane + 1] = [[*(taken[lane] if lane < len(taken) else []), *readers]]
        x = RAILS + lane * RAIL
        right = max(right, x)
        ax.plot([DECODE + TOKEN, x, x], [source, source, readers[-1]], color=palette.blue, linewidth=style.font / 8)
        ax.plot([x], [source], color=palette.blue, marker="s", markersize=0.4 * style.font)
        for reader in readers[1:]:
            ax.annotate("", (DECODE + TOKEN + 0.005, reader), (x, reader),
                        arrowprops={"arrowstyle": "-|>", "color": palette.blue, "shrinkA": 0, "shrinkB": 0,
                                    "linewidth": style.font / 12, "mutation_scale": 0.7 * style.font})  # fmt: skip
    return right


def _name_columns(ax: Axes, n_layers: int, tokens: int, in_decoder: int, boundary: int, style: Style) -> None:
    above = {"xytext": (0, 1), "textcoords": "offset points", "va": "bottom"}
    top = n_layers - 0.5
    ax.annotate("prefill", (0, top), ha="left", weight="bold", **above)
    ax.annotate("decode", (DECODE + TOKEN / 2, top), ha="center", weight="bold", **above)
    if boundary < n_layers:
        ax.axhline(boundary - 0.5, color=style.palette.ink, linestyle="--", linewidth=0.9)
        if 0 < in_decoder < tokens:
            ax.annotate(f"last {in_decoder:,}", (1, top), ha="right", **above)
    ax.set_xticks([0, 1, DECODE + TOKEN / 2], ["0", f"{tokens:,}", "one token"])
    ax.set_xlabel("position in the prompt, tokens; dashed line: encoder below, decoder above;\n"
                  "rails: global KV from the layer that writes it (square) to those that read it (arrows)")  # fmt: skip
