"""Which rows of the cache one token touches: index rows it scores, rows it attends to, rows that are gathered."""

from __future__ import annotations

import torch
from torch import Tensor

from tinyds41.config import Config
from tinyds41.cost.limits import check_context
from tinyds41.plan import LayerPlan


def scored_entries(config: Config, context: int) -> tuple[dict[int, int], dict[int, int]]:
    """Entries that one token's indexers score, by layer.

    Against everything visible, and inside the pool.

    A pool is scored in whole blocks, also where its newest block is only partly full. Source: spec 4.4, 4.5.
    """
    contexts = _one(config, context)
    full, pool = {}, {}
    for layer in config.plan():
        if layer.selects:
            (pool if layer.pooled else full)[layer.layer] = int(scored(config, layer, contexts))
    return full, pool


def attended_rows(config: Config, context: int) -> dict[int, int]:
    """Rows that one token's attention works on, by layer.

    Its window and, where it has one, its selection.

    Slots that a selection leaves empty are worked on too; that happens only where a pool holds fewer than K.
    Source: spec 4.1, 4.7.
    """
    contexts = _one(config, context)
    return {layer.layer: int(near(config, contexts) + chosen(config, layer, contexts)) for layer in config.plan()}


def gathered_rows(config: Config, context: int) -> dict[int, int]:
    """Rows of global KV that one token's attention gathers, charged to the layer that made the selection.

    The Reuse layers that follow it share them: what `Counters.rows_decoded` counts.
    """
    contexts = _one(config, context)
    return {layer.layer: int(chosen(config, layer, contexts)) for layer in config.plan() if layer.selects}


def pool_shares(config: Config, context: int) -> tuple[float, float]:
    """Parts of the visible entries that the pool holds at most, and that a selection inside it keeps.

    Raises: ValueError for a config without a pool. Source: spec 4.5.
    """
    contexts = _one(config, context)
    layer = next((layer for layer in config.plan() if layer.pooled), None)
    if layer is None:
        raise ValueError("no layer chooses inside a candidate pool: candidate_source_layer_id is "
                         f"{config.candidate_source_layer_id}")  # fmt: skip
    visible = max(1, context // layer.ratio)
    held = min(visible, int(scored(config, layer, contexts)))
    return held / visible, int(chosen(config, layer, contexts)) / visible


def scored(config: Config, layer: LayerPlan, contexts: Tensor) -> Tensor:
    """Index rows that a query of an index source scores, for each of many contexts."""
    visible = contexts // layer.ratio
    if not layer.pooled:
        return visible
    blocks = -(-visible // config.candidate_block_size)
    return blocks.clamp(max=config.candidate_topk_blocks) * config.candidate_block_size


def chosen(config: Config, layer: LayerPlan, contexts: Tensor) -> Tensor:
    """Selected rows that a query attends to, for each of many contexts; none in a layer with a window only."""
    return (contexts // layer.ratio if layer.ratio else torch.zeros_like(contexts)).clamp(max=config.index_topk)


def near(config: Config, tokens: Tensor) -> Tensor:
    """Window rows that a query attends to when its layer has run on so many tokens, its own included."""
    return tokens.clamp(max=config.sliding_window)


def _one(config: Config, context: int) -> Tensor:
    check_context(context, config.max_position_embeddings)
    return torch.tensor(context)
