"""The schedule editor: what each layer is, what that costs, or why it cannot be."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from matplotlib.axes import Axes

from tinyds41.config import Config
from tinyds41.cost.kv_bytes import kv_bytes, plain_number
from tinyds41.cost.rows import scored_entries
from tinyds41.plan import FULL, REINDEX, REUSE, SWA, LayerPlan
from tinyds41.show.explorer import explorer, require_widgets
from tinyds41.show.plan_plot import plot_layer_plan
from tinyds41.show.style import PAGE, Style, new_axes, styled

Mode = tuple[str, int]  # what a layer is meant to be: SWA, FULL, REINDEX or REUSE, and tokens per entry
RATIOS = (1, 2, 4)  # offered besides those of the config
NO_POOL = "none"


def modes_of(config: Config) -> list[Mode]:
    """What each layer is, as `schedule` takes it."""
    return [(layer.mode, layer.ratio) for layer in config.plan()]


def schedule(config: Config, modes: Sequence[Mode], candidate: int | None) -> Config:
    """The config in which each layer is what `modes` says and `candidate` forms the pool, None for no pool.

    Raises: ValueError for a mode that does not exist or one too few; the config's own, where the schedule contradicts
        itself.
    Source: spec 1.
    """
    if len(modes) != config.num_hidden_layers:
        raise ValueError(f"{len(modes)} modes for num_hidden_layers={config.num_hidden_layers}: every layer needs one")
    for layer, (mode, _) in enumerate(modes):
        if mode not in (SWA, FULL, REINDEX, REUSE):
            raise ValueError(f"layer {layer}: mode {mode!r} is none of {SWA}, {FULL}, {REINDEX}, {REUSE}")
    ratios = [0 if mode == SWA else ratio for mode, ratio in modes]
    return config.replace(
        compress_ratios=[*ratios, *config.compress_ratios[len(modes) :]],  # draft blocks keep theirs
        kv_source_layer_ids=[layer for layer, (mode, _) in enumerate(modes) if mode == FULL],
        index_source_layer_ids=[layer for layer, (mode, _) in enumerate(modes) if mode in (FULL, REINDEX)],
        candidate_source_layer_id=candidate,
    )


@styled
def plan_view(
    style: Style, config: Config, *, context: int | None = None, name: str = "the model", ax: Axes | None = None
) -> Axes:
    """The layer plan, and below it what the schedule costs: cache bytes, and index rows that one token scores.

    context: tokens before and with that token; None for the most that the model can have.
    Raises: ValueError for a context that the model cannot have.
    Lesson: 04.
    """
    context = config.max_position_embeddings if context is None else context
    full, pool = (sum(rows.values()) for rows in scored_entries(config, context))
    cache = kv_bytes(config)
    ax = plot_layer_plan(config.plan(), model=name, style=style, ax=ax or new_axes(style, height=0.55))
    ax.set_xlabel("\n".join([
        "layer",
        textwrap.fill(f"tokens per entry: {_ratios(config.plan())}", 56),
        f"cache: {plain_number(cache.bytes_per_token):,} bytes per token, windows {cache.window_bytes:,} bytes",
        f"index rows scored by a token at {context:,}: {full + pool:,}",
        f"({full:,} in full scans, {pool:,} in the pool)",
    ]))  # fmt: skip
    return ax


def _ratios(plan: Sequence[LayerPlan]) -> str:
    """Runs of layers of one ratio, in words."""
    parts = []
    for ratio, run in groupby(plan, key=lambda layer: layer.ratio):
        layers = [layer.layer for layer in run]
        parts.append(f"{ratio or 'none'} in {layers[0]}" + (f"–{layers[-1]}" if len(layers) > 1 else ""))
    return ", ".join(parts)


def explore_plan(config: Config, *, name: str = "the model", style: Style = PAGE) -> Any:
    """A choice per layer, one of the pool's source and one of the context, above `plan_view` or the config's refusal.

    Raises: ImportError without ipywidgets.
    Lesson: 04.
    """
    widgets, modes = require_widgets(), modes_of(config)
    look = {"layout": {"width": "200px"}, "style": {"description_width": "70px"}}
    options = _options(config)
    controls = {f"layer {layer}": widgets.Dropdown(options=options, value=mode, description=f"layer {layer}", **look)
                for layer, mode in enumerate(modes)}  # fmt: skip
    sources = [(NO_POOL, None), *((str(layer), layer) for layer in range(len(modes)))]
    controls["pool of"] = widgets.Dropdown(
        options=sources, value=config.candidate_source_layer_id, description="pool of", **look)  # fmt: skip
    contexts = [(f"{context:,}", context) for context in _contexts(config)]
    controls["context"] = widgets.Dropdown(
        options=contexts, value=contexts[-1][1], description="context", **look)  # fmt: skip

    def view(**values: Any) -> Axes:
        wanted = schedule(config, [values[f"layer {layer}"] for layer in range(len(modes))], values["pool of"])
        return plan_view(wanted, context=values["context"], name=name, style=style)

    return explorer(view, controls)


def _options(config: Config) -> list[tuple[str, Mode]]:
    """Every mode with every ratio; a layer with its window only has none."""
    ratios = sorted({*RATIOS, *(layer.ratio for layer in config.plan() if layer.ratio)})
    return [
        (SWA, (SWA, 0)),
        *((f"{mode} {ratio}", (mode, ratio)) for mode in (FULL, REINDEX, REUSE) for ratio in ratios),
    ]


def _contexts(config: Config) -> list[int]:
    """Powers of two up to the longest context, which ends the list."""
    longest = config.max_position_embeddings
    return [*(2**power for power in range(4, longest.bit_length()) if 2**power < longest), longest]
