"""Imitation of attention: how the index sources learn what their choice, which passes no gradient, cannot teach."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tinyds41.formats import INDEX, Rows
from tinyds41.model.block import Block
from tinyds41.model.context import Sequence
from tinyds41.model.indexer import Indexer
from tinyds41.model.transformer import Model
from tinyds41.ops import attention_mass, index_scores


def sample_queries(step: int, length: int, n: int, seed: int) -> Tensor:
    """Positions on which a step teaches the indexer, ascending.

    They depend on (seed, step) alone. Shapes: [n].
    """
    # The 1 keeps this stream apart from the corpus, which draws from [seed, step].
    generator = np.random.default_rng([seed, step, 1])
    return torch.from_numpy(np.sort(generator.choice(length, size=min(n, length), replace=False)))


@dataclass(frozen=True)
class Teacher:
    """Where attention looks when nothing is hidden from it.

    For one index source and the sampled queries.

    Shapes: mass [B,n,T] sums to 1 over the visible entries, visible [B,n,T], sighted [B,n]: sees any entry at all.
    """

    mass: Tensor
    visible: Tensor
    sighted: Tensor


@torch.no_grad()
def teachers(model: Model, ctx: Sequence, queries: Tensor) -> dict[int, Teacher]:
    """A teacher per index source: the attention mass of all layers that follow its selection.

    Summed over heads and layers.

    Shapes: queries [n] positions of the row. Source: spec 12.
    """
    found = {}
    for source in (layer for layer in model.plan if layer.selects):
        entries = ctx.entries(source.kv_source)
        entry = torch.arange(entries.kv.shape[1], device=queries.device)
        first_Bn, last_Bn = entries.first[:, queries], entries.last[:, queries]
        visible_BnT = (entry >= first_Bn.unsqueeze(-1)) & (entry < last_Bn.unsqueeze(-1))
        followers = [layer.layer for layer in model.plan if layer.index_source == source.layer]
        mass_LBnT = torch.stack([_mass(model, ctx, layer, queries, entries.kv, visible_BnT) for layer in followers])
        found[source.layer] = Teacher(_normalised(mass_LBnT.sum(0)), visible_BnT, last_Bn > first_Bn)
    return found


def _mass(model: Model, ctx: Sequence, layer: int, queries: Tensor, entries: Rows, visible_BnT: Tensor) -> Tensor:
    """One layer's mass on the entries, summed over heads. Shapes: -> [B,n,T]."""
    assert ctx.trace is not None
    path = f"layers.{layer}.attn"
    row_nW = queries.unsqueeze(-1) + torch.arange(1 - model.config.sliding_window, 1, device=queries.device)
    absent_BnW = row_nW < ctx.trace[f"{path}.window_first"][:, queries].unsqueeze(-1)
    near_BnWC = Rows(ctx.trace[f"{path}.window_kv"]).take(row_nW.expand_as(absent_BnW).masked_fill(absent_BnW, -1))
    _, far_BnHT = attention_mass(
        ctx.trace[f"{path}.q"][:, queries], near_BnWC, absent_BnW, entries.all(), ~visible_BnT,
        _block(model, layer).attn.attn_sink,
    )  # fmt: skip
    return far_BnHT.sum(2)


def is_dense(step: int, steps: int, share: float) -> bool:
    """Whether a step still teaches all visible entries: the first `share` of a training. Source: spec 12."""
    return step < round(share * steps)


def indexer_loss(
    model: Model, ctx: Sequence, queries: Tensor, teaching: dict[int, Teacher] | None = None, *, dense: bool = True
) -> Tensor:
    """KL(attention mass || softmax of the index scores), the mean over queries, then over sources.

    dense: over all visible entries. Otherwise over what a source chose, or, where a pool restricts it, over its pool:
        both the mass and the softmax are of these entries alone and sum to 1 there.
    Gradients reach indexer weights alone: the teacher is detached, and so are the indexer's inputs.

    Shapes: queries [n] positions of the row. Units: nats. Source: spec 12, which does not say
        over what the mass is normalised behind the dense phase. Here it is the set: so the loss is 0 where both agree.
    """
    teaching = teachers(model, ctx, queries) if teaching is None else teaching
    losses = []
    for source, teacher in teaching.items():
        inside_BnT = taught(model, ctx, source, queries, teacher, dense=dense)
        # A second division would change the last bit of what sums to 1 already.
        mass_BnT = teacher.mass if dense else _normalised(teacher.mass.masked_fill(~inside_BnT, 0))
        scores_BnT = _index_scores(model, ctx, source, queries).masked_fill(~inside_BnT, -torch.inf)
        # Masked again behind the softmax: -inf times a mass of 0 is NaN, and so is a softmax of -inf alone.
        log_share_BnT = scores_BnT.log_softmax(-1).masked_fill(~inside_BnT, 0)
        kl_Bn = (torch.xlogy(mass_BnT, mass_BnT) - mass_BnT * log_share_BnT).sum(-1)
        losses.append(kl_Bn.sum() / teacher.sighted.sum().clamp(min=1))
    return torch.stack(losses).mean() if losses else torch.zeros((), device=queries.device)


def taught(model: Model, ctx: Sequence, source: int, queries: Tensor, teacher: Teacher, *, dense: bool) -> Tensor:
    """The entries over which a source imitates attention, see `indexer_loss`. Shapes: -> [B,n,T] bool."""
    if dense:
        return teacher.visible
    assert ctx.trace is not None
    if not model.plan[source].pooled:
        return _listed(ctx.trace[f"layers.{source}.indexer.selection"][:, queries], teacher.mass.shape[-1])
    size, n_entries = model.config.candidate_block_size, teacher.mass.shape[-1]
    blocks = _listed(_pool(model, ctx, queries), -(-n_entries // size))
    return blocks.repeat_interleave(size, -1)[..., :n_entries] & teacher.visible


def _listed(index_BnK: Tensor, n: int) -> Tensor:
    """Which of 0..n-1 are listed; -1 lists none. Shapes: [B,n,K] -> bool [B,n,n]."""
    listed = torch.zeros(*index_BnK.shape[:2], n + 1, dtype=torch.bool, device=index_BnK.device)
    return listed.scatter_(-1, index_BnK.masked_fill(index_BnK < 0, n), True)[..., :n]


def _pool(model: Model, ctx: Sequence, queries: Tensor) -> Tensor:
    """The blocks of each query's pool, -1 = none. Shapes: -> [B,n,P]."""
    assert ctx.trace is not None
    return ctx.trace[f"layers.{model.config.candidate_source_layer_id}.indexer.pool"][:, queries]


def _normalised(mass_BnT: Tensor) -> Tensor:
    """To a sum of 1; a query without entries has no mass, and 0 / tiny stays 0."""
    return mass_BnT / mass_BnT.sum(-1, keepdim=True).clamp(min=torch.finfo(mass_BnT.dtype).tiny)


def _index_scores(model: Model, ctx: Sequence, source: int, queries: Tensor) -> Tensor:
    """The scores of one index source again, now with a graph. Shapes: -> [B,n,T]."""
    assert ctx.trace is not None
    block = _block(model, source)
    kv_block = _block(model, block.layer.kv_source)
    x_BnD = ctx.trace[f"layers.{source}.attn.input"][:, queries]
    latent_BnQ = ctx.trace[f"layers.{source}.attn.query_latent"][:, queries]
    rotation = ctx.rotation(block.rope, x_BnD.dtype)[:, queries]
    q_BnIJ, weight_BnI = _indexer(block).queries(x_BnD, latent_BnQ, rotation)
    latent_BTC = ctx.trace[f"{kv_block.path}.compressor.latent"]
    positions_BT = ctx.trace[f"{kv_block.path}.compressor.positions"]
    keys_BTJ = _indexer(kv_block).keys(latent_BTC, kv_block.rope.rotation(positions_BT, latent_BTC.dtype))
    if model.config.quantize_cache:  # as the context stores them
        keys_BTJ = INDEX.fake_quant(keys_BTJ)
    return index_scores(q_BnIJ, weight_BnI, keys_BTJ)


def _block(model: Model, layer: int | None) -> Block:
    assert layer is not None
    block = model.layers[layer]
    assert isinstance(block, Block)
    return block


def _indexer(block: Block) -> Indexer:
    assert block.indexer is not None
    return block.indexer


@dataclass(frozen=True)
class Recall:
    """Share of the attention mass that survives a choice, 0..1.

    None when no query saw more than it may keep.
    """

    selection: float | None
    pool: float | None


@torch.no_grad()
def recall(
    model: Model, ctx: Sequence, queries: Tensor, teaching: dict[int, Teacher] | None = None
) -> dict[int, Recall]:
    """Per index source, the mean mass inside the top-K and inside the pool.

    Only queries that had to leave some out count.

    Source: spec 12.
    """
    assert ctx.trace is not None
    config = model.config
    teaching = teachers(model, ctx, queries) if teaching is None else teaching
    found = {}
    for layer in (model.plan[source] for source in teaching):
        teacher = teaching[layer.layer]
        n_visible_Bn = teacher.visible.sum(-1)
        selection = ctx.trace[f"layers.{layer.layer}.indexer.selection"][:, queries]
        kept = _mean_inside(teacher.mass, selection, n_visible_Bn > config.index_topk)
        pooled = None
        if layer.forms_pool or layer.pooled:
            padding = -teacher.mass.shape[-1] % config.candidate_block_size
            blocks = F.pad(teacher.mass, (0, padding)).unflatten(-1, (-1, config.candidate_block_size)).sum(-1)
            room = config.candidate_topk_blocks * config.candidate_block_size
            pooled = _mean_inside(blocks, _pool(model, ctx, queries), n_visible_Bn > room)
        found[layer.layer] = Recall(kept, pooled)
    return found


def _mean_inside(mass_BnX: Tensor, index_BnK: Tensor, counted_Bn: Tensor) -> float | None:
    """Mean over the counted queries of the mass at the listed places; -1 lists none."""
    inside_BnK = mass_BnX.gather(-1, index_BnK.clamp(min=0)).masked_fill(index_BnK < 0, 0)
    return float(inside_BnK.sum(-1)[counted_Bn].mean()) if counted_Bn.any() else None
