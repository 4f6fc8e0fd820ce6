"""The routed experts of one layer: a loop over experts, and its twin of grouped matrix products."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tinyds41.mixing import at_least_fp32


def experts(x: Tensor, index: Tensor, weight: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, limit: float) -> Tensor:
    """sum_a weight_a expert_{index_a}(x).

    Tokens sorted by expert, one matrix product per expert and matrix.

    Shapes: x [n,D], index and weight [n,A], w1 and w3 [E,F,D], w2 [E,D,F] -> [n,D] in at least fp32. Source: spec 8.
    """
    order, counts = _by_expert(index, w1.shape[0])
    parts = x.index_select(0, order // index.shape[1]).split(counts.tolist())
    outputs = [swiglu(part, w1[e], w2[e], w3[e], limit) for e, part in enumerate(parts) if part.shape[0]]
    return _back_to_tokens(torch.cat(outputs), order, weight)


def experts_grouped(
    x: Tensor, index: Tensor, weight: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, limit: float
) -> Tensor:
    """The same with one grouped product per matrix; float64, which `grouped_mm` lacks, takes the loop.

    Raises: RuntimeError (from torch) for rows that are no multiple of 16 bytes.
    """
    if x.dtype == torch.float64:
        return experts(x, index, weight, w1, w2, w3, limit)
    order, counts = _by_expert(index, w1.shape[0])
    ends = counts.cumsum(0).to(torch.int32)
    sorted_nD = x.index_select(0, order // index.shape[1])
    gate = at_least_fp32(F.grouped_mm(sorted_nD, w1.mT, offs=ends)).clamp(max=limit)
    up = at_least_fp32(F.grouped_mm(sorted_nD, w3.mT, offs=ends)).clamp(-limit, limit)
    outputs = F.grouped_mm((F.silu(gate) * up).to(x.dtype), w2.mT, offs=ends)
    return _back_to_tokens(outputs, order, weight)


def _by_expert(index: Tensor, n_experts: int) -> tuple[Tensor, Tensor]:
    """Visits sorted by expert, then by token, and how many each expert gets. Shapes: [n,A] -> [n*A], [E]."""
    flat = index.flatten()
    return flat.argsort(stable=True), torch.bincount(flat, minlength=n_experts)


def _back_to_tokens(outputs: Tensor, order: Tensor, weight: Tensor) -> Tensor:
    """Weighs the visits and sums those of a token: no atomics, the same sum on every run. Shapes: -> [n,D]."""
    weighted_nD = at_least_fp32(outputs) * weight.flatten()[order].unsqueeze(-1)
    back = torch.empty_like(order).index_put_((order,), torch.arange(order.shape[0], device=order.device))
    return weighted_nD.index_select(0, back).unflatten(0, weight.shape).sum(1)


def swiglu(x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, limit: float) -> Tensor:
    """w2( silu(min(w1 x, c)) * clamp(w3 x, -c, c) ), c = swiglu_limit. Source: spec 2."""
    gate = at_least_fp32(F.linear(x, w1)).clamp(max=limit)
    up = at_least_fp32(F.linear(x, w3)).clamp(-limit, limit)
    return F.linear((F.silu(gate) * up).to(x.dtype), w2)
