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
    return apply(_Experts, x, weight, order, counts.tolist(), w1, w2, w3, limit)


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
    """Weighs the visits and sums those of a token. Shapes: -> [n,D]."""
    weighted_mD = at_least_fp32(outputs) * weight.flatten()[order].unsqueeze(-1)
    return _sum_of_visits(weighted_mD, _inverse(order), weight.shape)


def _sum_of_visits(visits_mD: Tensor, back: Tensor, shape: torch.Size) -> Tensor:
    """No atomics: the same sum on every run. Shapes: visits sorted by expert [n*A,D] -> [n,D]."""
    return visits_mD.index_select(0, back).unflatten(0, shape).sum(1)


def _inverse(order: Tensor) -> Tensor:
    return torch.empty_like(order).index_put_((order,), torch.arange(order.shape[0], device=order.device))


class _Experts(torch.autograd.Function):
    """All visits of all experts: only the products go expert by expert.

    Autograd would put together the experts' gradients from as many arrays, and add up by address what a permutation
    moves. Differs: as `_SwiGLU`.

    Shapes: x [n,D], weight [n,A], order [n*A], w1 and w3 [E,F,D], w2 [E,D,F] -> [n,D] in at least fp32.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, order: Tensor, counts: list[int], w1, w2, w3, limit) -> Tensor:
        x, w1, w2, w3 = (_in_autocast(tensor) for tensor in (x, w1, w2, w3))
        visits_mD = x.index_select(0, order // weight.shape[1])
        gate_mF = at_least_fp32(_products(visits_mD, counts, w1.mT)).clamp_(max=limit)
        up_mF = at_least_fp32(_products(visits_mD, counts, w3.mT)).clamp_(-limit, limit)
        outputs_mD = _products(F.silu(gate_mF).mul_(up_mF).to(x.dtype), counts, w2.mT)
        ctx.counts, ctx.limit = counts, limit
        ctx.save_for_backward(visits_mD, weight, order, w1, w2, w3, gate_mF, up_mF)
        return _back_to_tokens(outputs_mD, order, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        visits_mD, weight, order, w1, w2, w3, gate_mF, up_mF = ctx.saved_tensors
        dtype, counts, back = visits_mD.dtype, ctx.counts, _inverse(order)
        given_mD = grads[0].to(dtype).index_select(0, order // weight.shape[1])
        factor_m1 = weight.flatten()[order].unsqueeze(-1)
        to_hidden_mF = at_least_fp32(_products(given_mD, counts, w2))
        hidden_mF, to_gate_mF, to_up_mF = _gate_gradients(gate_mF, up_mF, to_hidden_mF * factor_m1, ctx.limit)
        # A weight's gradient is the output times what is given: w2 hidden . given = hidden . (given w2).
        to_weight = (to_hidden_mF * hidden_mF).sum(-1).index_select(0, back).view(weight.shape).to(weight.dtype)
        to_gate_mF, to_up_mF = to_gate_mF.to(dtype), to_up_mF.to(dtype)
        to_w1, to_w3 = (_outer_products(to_mF, visits_mD, counts) for to_mF in (to_gate_mF, to_up_mF))
        to_w2 = _outer_products(given_mD, (hidden_mF * factor_m1).to(dtype), counts)
        to_visits_mD = _products(to_gate_mF, counts, w1).add_(_products(to_up_mF, counts, w3))
        return _sum_of_visits(to_visits_mD, back, weight.shape), to_weight, None, None, to_w1, to_w2, to_w3, None


def _in_autocast(x: Tensor) -> Tensor:
    """In the type that autocast asks for: it does not see products into given memory."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) and x.dtype != torch.float64 else x


def _products(rows_mX: Tensor, counts: list[int], matrices_EXY: Tensor) -> Tensor:
    """Each expert's rows times its matrix. Shapes: -> [m,Y]."""
    out_mY = rows_mX.new_empty(rows_mX.shape[0], matrices_EXY.shape[2])
    for rows, matrix, out in zip(rows_mX.split(counts), matrices_EXY.unbind(), out_mY.split(counts), strict=True):
        torch.mm(rows, matrix, out=out)
    return out_mY


def _outer_products(left_mX: Tensor, right_mY: Tensor, counts: list[int]) -> Tensor:
    """The sum of left times right over each expert's rows. Shapes: -> [E,X,Y]."""
    out_EXY = left_mX.new_empty(len(counts), left_mX.shape[1], right_mY.shape[1])
    for left, right, out in zip(left_mX.split(counts), right_mY.split(counts), out_EXY.unbind(), strict=True):
        torch.mm(left.mT, right, out=out)
    return out_EXY


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
        hidden, to_gate, to_up = _gate_gradients(gate, up, at_least_fp32(grad @ w2), ctx.limit)
        to_gate, to_up = to_gate.to(x.dtype), to_up.to(x.dtype)
        to_x = torch.addmm(to_gate @ w1, to_up, w3)
        return to_x, to_gate.mT @ x, grad.mT @ hidden.to(x.dtype), to_up.mT @ x, None


def _gate_gradients(gate: Tensor, up: Tensor, to_hidden: Tensor, limit: float) -> tuple[Tensor, Tensor, Tensor]:
    """silu(gate) up, and what its gradient gives to gate and up. Shapes: all [n,F]."""
    share = gate.sigmoid()
    silu = gate * share
    # silu'(a) = s + a s (1 - s), s = sigmoid(a); where a clamp holds the value, nothing flows.
    slope = torch.addcmul(share, silu, 1 - share).mul_(gate < limit)
    to_gate = slope.mul_(to_hidden).mul_(up)
    to_up = (to_hidden * silu).mul_(up.abs() < limit)
    return silu.mul_(up), to_gate, to_up
