"""The routed experts of one layer: a loop over experts, and its twin of grouped matrix products."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from tinyds41 import few_tokens
from tinyds41.few_tokens import are_few
from tinyds41.graph import apply
from tinyds41.mixing import at_least_fp32


def experts(x: Tensor, index: Tensor, weight: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, limit: float) -> Tensor:
    """sum_a weight_a expert_{index_a}(x).

    Tokens sorted by expert, one matrix product per expert and matrix.

    Shapes: x [n,D], index and weight [n,A], w1 and w3 [E,F,D], w2 [E,D,F] -> [n,D] in at least fp32. Source: spec 8.
    """
    if are_few(len(x), x):  # sorting the visits would take longer than their products
        return few_tokens.experts(x, index, weight, w1, w2, w3, limit)
    order, counts = _by_expert(index, w1.shape[0])
    parts = x.index_select(0, order // index.shape[1]).split(counts.tolist())
    # unbind, not w1[e]: the gradient of each w1[e] is an array of zeros as large as all experts.
    matrices = zip(w1.unbind(), w2.unbind(), w3.unbind(), strict=True)
    outputs = [swiglu(part, *of_expert, limit) for part, of_expert in zip(parts, matrices, strict=True) if len(part)]
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
    flat_nD = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    if len(flat_nD) > 0 and are_few(len(flat_nD), x):
        return few_tokens.swiglu(flat_nD, w1, w2, w3, limit).view(*x.shape[:-1], w2.shape[0])
    return apply(_SwiGLU, flat_nD, w1, w2, w3, limit).view(*x.shape[:-1], w2.shape[0])


class _SwiGLU(torch.autograd.Function):
    """The formula with a backward pass that keeps x and two products.

    Autograd's would keep six arrays. Differs: a value on its limit passes no
    gradient, where torch's clamp passes it on.

    Shapes: x [n,D], w1 and w3 [F,D], w2 [D,F] -> [n,D].
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, limit: float) -> Tensor:
        gate, up = at_least_fp32(x @ w1.mT).clamp_(max=limit), at_least_fp32(x @ w3.mT).clamp_(-limit, limit)
        ctx.limit = limit
        ctx.save_for_backward(x, w1, w2, w3, gate, up)
        return F.silu(gate).mul_(up).to(x.dtype) @ w2.mT

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        x, w1, w2, w3, gate, up = ctx.saved_tensors
        grad = grads[0].to(x.dtype)  # under autocast it is narrower than what was saved
        share = gate.sigmoid()
        silu = gate * share
        to_w2 = grad.mT @ (silu * up).to(x.dtype)
        to_hidden = at_least_fp32(grad @ w2)
        # silu'(a) = s + a s (1 - s), s = sigmoid(a); where a clamp holds the value, nothing flows.
        slope = torch.addcmul(share, silu, 1 - share).mul_(gate < ctx.limit)
        to_gate = slope.mul_(to_hidden).mul_(up).to(x.dtype)
        to_up = to_hidden.mul_(silu).mul_(up.abs() < ctx.limit).to(x.dtype)
        to_x = torch.addmm(to_gate @ w1, to_up, w3)
        return to_x, to_gate.mT @ x, to_w2, to_up.mT @ x, None
