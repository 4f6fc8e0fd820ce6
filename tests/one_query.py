"""One decoded token by the model's own operations: what they score, gather and attend to."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tinyds41 import ops
from tinyds41.config import Config
from tinyds41.formats import Rows
from tinyds41.plan import LayerPlan


def choose(config: Config, context: int) -> tuple[dict[int, int], dict[int, ops.Selection]]:
    """What each index source scores, by layer, and what it selects, for the last of `context` tokens."""
    scored: dict[int, int] = {}
    selections: dict[int, ops.Selection] = {}
    n_heads, width = config.index_n_heads, config.index_head_dim
    for layer in config.plan():
        if not layer.selects:
            continue
        n_entries, counts = context // layer.ratio, []
        visible = torch.tensor([[n_entries]])
        source = selections.get(config.candidate_source_layer_id) if layer.pooled else None
        index, pool = ops.score_and_select(
            torch.randn(1, 1, n_heads, width), torch.randn(1, 1, n_heads), Rows(torch.randn(1, n_entries, width)),
            torch.zeros_like(visible), visible, config.index_topk, block_size=config.candidate_block_size,
            pool=None if source is None else source.pool,
            form_blocks=config.candidate_topk_blocks if layer.forms_pool else 0, count=counts.append)  # fmt: skip
        scored[layer.layer] = sum(counts)
        selections[layer.layer] = ops.Selection(index, Rows(torch.randn(1, n_entries, config.head_dim)), pool)
    return scored, selections


def attend(
    config: Config, context: int, layer: LayerPlan, selection: ops.Selection | None,
    count: Callable[[int], None] | None = None,
) -> Tensor:  # fmt: skip
    """One layer's attention over its window, which decode holds ready, and a selection."""
    held = min(context, config.sliding_window)
    window = ops.Window(Rows(torch.randn(1, held, config.head_dim)), torch.tensor([[0]]), config.sliding_window)
    q = torch.randn(1, 1, config.num_attention_heads, config.head_dim)
    return ops.attend(q, window, selection, torch.zeros(config.num_attention_heads), count=count)


def attend_everywhere(config: Config, context: int, selections: dict[int, ops.Selection]) -> dict[int, int]:
    """All layers' attention. Returns the rows of global KV that each gathered; Reuse layers find them gathered."""
    gathered: dict[int, int] = {}
    for layer in config.plan():
        counts: list[int] = []
        selection = None if layer.index_source is None else selections[layer.index_source]
        with torch.no_grad():
            attend(config, context, layer, selection, counts.append)
        if counts:
            gathered[layer.layer] = sum(counts)
    return gathered


def weights_alone() -> ops.Ops:
    """Attention, selection and stream mixing stubbed out: every product left has a weight in it."""
    return ops.Ops(
        attend=lambda q, window, selection, sink, count=None: q,
        score_and_select=lambda q, *rest, **options: (
            torch.zeros(*q.shape[:2], 1, dtype=torch.long), torch.zeros(*q.shape[:2], 1, dtype=torch.long)),
        hyper_step=lambda streams, y, post, comb, mix: (streams, y),
    )  # fmt: skip
