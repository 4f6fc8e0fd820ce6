"""The three losses of training: next token, expert balance, and the indexer's imitation of attention."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tinyds41.formats import INDEX, Rows
from tinyds41.model.block import Block
from tinyds41.model.context import PADDING, Sequence
from tinyds41.model.indexer import Indexer
from tinyds41.model.transformer import Model
from tinyds41.ops import attention_mass, index_scores
from tinyds41.trace import Trace

IGNORED = -100

# What the losses read from a run; the graph is kept, and nothing is copied.
TRACED = (
    "layers.*.ffn.scores", "layers.*.ffn.experts", "layers.*.attn.input", "layers.*.attn.query_latent",
    "layers.*.attn.q", "layers.*.attn.window_kv", "layers.*.attn.window_first", "layers.*.compressor.latent",
    "layers.*.compressor.positions", "layers.*.indexer.selection", "layers.*.indexer.pool",
)  # fmt: skip


def run(model: Model, ids: Tensor, documents: Tensor | None = None) -> tuple[Tensor, Sequence]:
    """Logits, and the context with the trace that the losses below read.

    Shapes: ids [B,S] -> [B,S,V].
    """
    model.check(ids)
    ctx = Sequence(model.config, ids, documents, Trace(*TRACED, detach=False))
    return model.logits(model.decode(model.encode(ids, ctx), ctx)), ctx


def targets(ids: Tensor, documents: Tensor | None) -> Tensor:
    """The next token of each position.

    IGNORED where it belongs to another document, or is padding.

    Shapes: ids and documents [B,S+1] -> [B,S].
    """
    if documents is None:
        return ids[:, 1:]
    inside = (documents[:, 1:] == documents[:, :-1]) & (documents[:, 1:] != PADDING)
    return ids[:, 1:].masked_fill(~inside, IGNORED)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean loss of the next token over the positions that have one; 0 when none has.

    Shapes: logits [B,S,V], targets [B,S]. Units: nats per token.
    """
    total = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED, reduction="sum")
    return total / (targets != IGNORED).sum().clamp(min=1)


# ---------------------------------------------------------------------------------------------- expert balance


def expert_counts(experts: Tensor, n_experts: int, alive: Tensor) -> Tensor:
    """How often each sequence chose each expert, padding aside.

    Shapes: [B,S,A], alive [B,S] -> float32 [B,E].
    """
    chosen_BSA = alive.unsqueeze(-1).expand_as(experts).float()
    counts_BE = torch.zeros(experts.shape[0], n_experts, device=experts.device)
    return counts_BE.scatter_add_(1, experts.flatten(1), chosen_BSA.flatten(1))


def balance_loss(scores: Tensor, experts: Tensor, alive: Tensor) -> Tensor:
    """sum_e f_e P_e per sequence, then the mean over sequences.

    1 when every expert gets the same.

    f_e = E / (k T) * (times e was chosen), P_e = mean over tokens of s_e / sum s. Only P carries a gradient.

    Shapes: scores [B,S,E], experts [B,S,A], alive [B,S]. Source: spec 8. Differs: a packed row is one sequence.
    """
    n_tokens_B1 = alive.sum(1, keepdim=True).clamp(min=1)
    share_BE = expert_counts(experts, scores.shape[-1], alive) / (n_tokens_B1 * experts.shape[-1])
    probability_BSE = scores / scores.sum(-1, keepdim=True)
    mean_BE = (probability_BSE * alive.unsqueeze(-1)).sum(1) / n_tokens_B1
    return scores.shape[-1] * (share_BE * mean_BE).sum(-1).mean()


def balance(model: Model, ctx: Sequence) -> tuple[Tensor, Tensor]:
    """The balance loss summed over layers, and what each expert got.

    Shapes: -> scalar, float32 [L,E].
    """
    assert ctx.trace is not None
    losses, loads = [], []
    for layer in model.plan:
        scores = ctx.trace[f"layers.{layer.layer}.ffn.scores"]
        experts = ctx.trace[f"layers.{layer.layer}.ffn.experts"]
        losses.append(balance_loss(scores, experts, ctx.alive))
        loads.append(expert_counts(experts, model.config.n_routed_experts, ctx.alive).sum(0))
    return torch.stack(losses).sum(), torch.stack(loads)


# ---------------------------------------------------------------------------------------------- the indexer


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
        mass_BnT = mass_LBnT.sum(0)
        # A query without entries has no mass: 0 / tiny stays 0.
        mass_BnT = mass_BnT / mass_BnT.sum(-1, keepdim=True).clamp(min=torch.finfo(mass_BnT.dtype).tiny)
        found[source.layer] = Teacher(mass_BnT, visible_BnT, last_Bn > first_Bn)
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


def indexer_loss(model: Model, ctx: Sequence, queries: Tensor, teaching: dict[int, Teacher] | None = None) -> Tensor:
    """KL(attention mass || softmax of the index scores) over the visible entries.

    The mean over queries, then over sources.

    Gradients reach indexer weights alone: the teacher is detached, and so are the indexer's inputs.

    Shapes: queries [n] positions of the row. Units: nats. Source: spec 12.
    """
    teaching = teachers(model, ctx, queries) if teaching is None else teaching
    losses = []
    for source, teacher in teaching.items():
        scores_BnT = _index_scores(model, ctx, source, queries).masked_fill(~teacher.visible, -torch.inf)
        # Masked again behind the softmax: -inf times a mass of 0 is NaN, and so is a softmax of -inf alone.
        log_share_BnT = scores_BnT.log_softmax(-1).masked_fill(~teacher.visible, 0)
        kl_Bn = (torch.xlogy(teacher.mass, teacher.mass) - teacher.mass * log_share_BnT).sum(-1)
        losses.append(kl_Bn.sum() / teacher.sighted.sum().clamp(min=1))
    return torch.stack(losses).mean() if losses else torch.zeros((), device=queries.device)


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
            pool = ctx.trace[f"layers.{config.candidate_source_layer_id}.indexer.pool"][:, queries]
            padding = -teacher.mass.shape[-1] % config.candidate_block_size
            blocks = F.pad(teacher.mass, (0, padding)).unflatten(-1, (-1, config.candidate_block_size)).sum(-1)
            room = config.candidate_topk_blocks * config.candidate_block_size
            pooled = _mean_inside(blocks, pool, n_visible_Bn > room)
        found[layer.layer] = Recall(kept, pooled)
    return found


def _mean_inside(mass_BnX: Tensor, index_BnK: Tensor, counted_Bn: Tensor) -> float | None:
    """Mean over the counted queries of the mass at the listed places; -1 lists none."""
    inside_BnK = mass_BnX.gather(-1, index_BnK.clamp(min=0)).masked_fill(index_BnK < 0, 0)
    return float(inside_BnK.sum(-1)[counted_Bn].mean()) if counted_Bn.any() else None
