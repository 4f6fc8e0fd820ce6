"""Losses of training: next token and expert balance; the indexers' own is in `indexer_loss.py`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tinyds41.mixing import at_least_fp32
from tinyds41.model.context import PADDING, Sequence
from tinyds41.model.transformer import Model
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


def cross_entropy(logits: Tensor, targets: Tensor, n_targets: Tensor | None = None) -> Tensor:
    """Loss of the next token: its sum divided by `n_targets`, by default those that are there; 0 when none is.

    Shapes: logits [B,S,V], targets [B,S], n_targets []. Units: nats per token.
    """
    logits_XV = at_least_fp32(logits).flatten(0, 1)
    total = F.cross_entropy(logits_XV, targets.flatten(), ignore_index=IGNORED, reduction="sum")
    n_targets = (targets != IGNORED).sum() if n_targets is None else n_targets
    return total / n_targets.clamp(min=1)


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
    counts_BE = expert_counts(experts, scores.shape[-1], alive).to(at_least_fp32(scores).dtype)
    share_BE = counts_BE / (n_tokens_B1 * experts.shape[-1])
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
