"""The pool explorer: one query's candidates under other sizes of pool and selection."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from matplotlib.axes import Axes
from torch import Tensor

from tinyds41.model.transformer import Model
from tinyds41.model.variant import variant
from tinyds41.plan import LayerPlan
from tinyds41.show.explorer import explorer, require_widgets
from tinyds41.show.index_observations import CANDIDATE_NAMES, candidates
from tinyds41.show.index_plots import plot_candidates
from tinyds41.show.style import PAGE, Style
from tinyds41.trace import Trace


@torch.no_grad()
def pool_view(
    model: Model, ids: Tensor, *, query: int, candidate_topk_blocks: int | None = None, index_topk: int | None = None,
    layer: int | None = None, row: int = 0, name: str = "the model", style: Style = PAGE, ax: Axes | None = None,
) -> Axes:  # fmt: skip
    """`plot_candidates` for a fixed setting: what the explorer shows, as a plain function.

    The same weights run under the changed sizes, so later layers see what their input then is.

    Shapes: ids int64 [B,S], one document per row, of which `row` is shown. candidate_topk_blocks, index_topk: None for
        those of the model. layer: the one that forms the pool (None), or one that chooses inside it. name: the model's.
    Raises: ValueError for a model without a pool, a layer outside it, a query outside `ids` or one that sees no entry.
    Lesson: 05.
    """
    sizes = {"candidate_topk_blocks": candidate_topk_blocks, "index_topk": index_topk}
    changes = {size: value for size, value in sizes.items() if value is not None}
    config = model.config.replace(**changes)
    source = _pool_layers(model)[0]
    if source.ratio > query + 1 > 0:
        raise ValueError(f"query={query} sees no entry of layer {source.layer}: its first one ends at token "
                         f"{source.ratio - 1}")  # fmt: skip
    trace = Trace(*CANDIDATE_NAMES, queries=[query])
    (variant(model, **changes) if changes else model)(ids.to(model.device), trace=trace)
    ax = plot_candidates(candidates(trace, config, query, layer, row), model=name, style=style, ax=ax)
    setting = f"candidate_topk_blocks={config.candidate_topk_blocks} of {config.candidate_block_size} entries"
    ax.set_xlabel(f"{ax.get_xlabel()}\n({setting}, index_topk={config.index_topk})")
    return ax


def explore_pool(
    model: Model, ids: Tensor, *, row: int = 0, name: str = "the model", style: Style = PAGE, **start: int
) -> Any:
    """Sliders for the query, `candidate_topk_blocks` and `index_topk`, and a choice of layer, above `pool_view`.

    start: first values by the argument of `pool_view`; those of the model, and the last query, where not given.
    Raises: ImportError without ipywidgets; ValueError as `pool_view`, or for a start that is no control.
    Lesson: 05.
    """
    widgets = require_widgets()
    ranges = _ranges(model, ids.shape[-1])
    sizes = {"candidate_topk_blocks": model.config.candidate_topk_blocks, "index_topk": model.config.index_topk}
    first = {"query": ids.shape[-1] - 1, **sizes, "layer": _pool_layers(model)[0].layer}
    unknown = sorted(set(start) - set(first))
    if unknown:
        raise ValueError(f"no control is called {unknown[0]!r}: they are {', '.join(first)}")
    values = {**first, **start}
    look = {"style": {"description_width": "initial"}, "layout": {"width": "60%"}}
    controls = {}
    for control, (low, high) in ranges.items():
        value = values[control]
        if not low <= value <= high:
            raise ValueError(f"{control}={value} is outside {low}..{high}")
        # A run per picture: drawn when the slider is let go, not on the way.
        controls[control] = widgets.IntSlider(value, low, high, description=control, continuous_update=False, **look)
    known = [one.layer for one in _pool_layers(model)]
    if values["layer"] not in known:
        layer = values["layer"]
        raise ValueError(f"layer={layer} neither forms the candidate pool nor chooses inside it: one of {known}")
    layers = [(f"{one.layer} ({'forms the pool' if one.forms_pool else 'inside the pool'})", one.layer)
              for one in _pool_layers(model)]  # fmt: skip
    controls["layer"] = widgets.Dropdown(options=layers, value=values["layer"], description="layer", **look)
    return explorer(partial(pool_view, model, ids, row=row, name=name, style=style), controls)


def _pool_layers(model: Model) -> list[LayerPlan]:
    """The layer that forms the pool, then those that choose inside it."""
    found = [layer for layer in model.plan if layer.forms_pool or layer.pooled]
    if not found:
        raise ValueError("no layer forms a candidate pool: candidate_source_layer_id is None")
    return found


def _ranges(model: Model, length: int) -> dict[str, tuple[int, int]]:
    """Least and greatest value of each slider: up to the setting where nothing is left out."""
    ratio = _pool_layers(model)[0].ratio
    n_entries = max(1, length // ratio)
    n_blocks = -(-n_entries // model.config.candidate_block_size)
    return {
        "query": (ratio - 1, length - 1),
        "candidate_topk_blocks": (1, max(n_blocks, model.config.candidate_topk_blocks)),
        "index_topk": (1, max(n_entries, model.config.index_topk)),
    }
