"""Mixing of residual streams in plain PyTorch: coefficients, and the one pass that applies them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tinyds41 import few_tokens
from tinyds41.few_tokens import are_few
from tinyds41.graph import apply
from tinyds41.sinkhorn import sinkhorn

# Values of one piece of the streams. On a CPU each piece passes through all steps below while it is in the cache; as a
# whole the streams would come from memory once per step, and a training step would spend its time on that.
PIECE = 1 << 18


def at_least_fp32(x: Tensor) -> Tensor:
    """`x` in fp32, or untouched when it is wider (spec 15)."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def hyper_coefficients(
    streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, *, n_iters: int, eps: float, norm_eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """pre, post and comb of one sub-layer from the streams before it, and these streams.

    Who goes on with the streams that come back sums both their gradients in one pass over memory instead of two.

    Shapes: streams [B,S,N,D], fn [(2+N)N, N*D], scale [3], base [(2+N)N] -> pre [B,S,N], post [B,S,N],
        comb [B,S,N,N] (source, target), doubly normalised, in at least fp32; streams as given. Source: spec 7.
    """
    n_streams = streams.shape[2]
    if are_few(streams.shape[:2].numel(), streams):
        return *few_tokens.coefficients(streams, fn, scale, base, n_iters, eps, norm_eps), streams
    flat_nX = at_least_fp32(streams).flatten(0, 1).flatten(1)
    t_nX, same_nX = apply(_NormedLinear, flat_nX, at_least_fp32(fn), norm_eps)
    t_BSX = t_nX.unflatten(0, streams.shape[:2])
    scale, base = at_least_fp32(scale), at_least_fp32(base)
    t_pre, t_post, t_comb = t_BSX.split([n_streams, n_streams, n_streams**2], -1)
    b_pre, b_post, b_comb = base.split([n_streams, n_streams, n_streams**2])
    pre = torch.sigmoid(t_pre * scale[0] + b_pre) + eps
    post = 2 * torch.sigmoid(t_post * scale[1] + b_post)
    logits_BSNN = (t_comb * scale[2] + b_comb).unflatten(-1, (n_streams, n_streams))
    comb_BSNN = sinkhorn(logits_BSNN, n_iters, eps)
    return pre, post, comb_BSNN, same_nX.view(streams.shape).to(streams.dtype)


def pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The tensors [n, ...] cut alike along their tokens.

    On a CPU a piece is what a cache holds of the first tensor.
    """
    first = tensors[0]
    tokens = max(1, PIECE // max(1, first[0].numel())) if first.device.type == "cpu" else max(1, first.shape[0])
    return zip(*(tensor.split(tokens) for tensor in tensors), strict=True)


class _NormedLinear(torch.autograd.Function):
    """fn (x / rms(x)), computed as (fn x) / rms(x), and x: its gradients meet here.

    No normalised copy of the streams, forward or backward.

    Shapes: x [n,X], fn [Y,X] -> [n,Y], [n,X].
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, fn: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        scale, product = x.new_empty(x.shape[0], 1), x.new_empty(x.shape[0], fn.shape[0])
        for part, size, out in pieces(x, scale, product):
            torch.linalg.vector_norm(part, dim=-1, keepdim=True, out=size)
            torch.mm(part, fn.mT, out=out)
        scale.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, fn, scale, product)
        return product * scale, x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        x, fn, scale, product = ctx.saved_tensors
        to_product, to_x, to_fn = grads[0] * scale, torch.empty_like(x), torch.zeros_like(fn)
        # d scale / d x = -scale^3 x / X
        along_x = (grads[0] * product).sum(-1, keepdim=True) * scale**3 / -x.shape[-1]
        for part, also, out, given, along in pieces(x, grads[1], to_x, to_product, along_x):
            torch.addmm(also, given, fn, out=out)
            out.addcmul_(part, along)
            to_fn.addmm_(given.mT, part)
        return to_x, to_fn, None


def collapse(streams: Tensor, mix: Tensor) -> Tensor:
    """u = sum_i mix_i X_i. Shapes: [B,S,N,D], [B,S,N] -> [B,S,D]. Source: spec 7."""
    return (mix.unsqueeze(-2) @ at_least_fp32(streams)).squeeze(-2).to(streams.dtype)


def hyper_step(streams: Tensor, y: Tensor, post: Tensor, comb: Tensor, mix: Tensor) -> tuple[Tensor, Tensor]:
    """X_k = post_k y + sum_j comb[j,k] X_j, and the next input u = sum_k mix_k X_k, in one pass.

    Shapes: streams [B,S,N,D], y [B,S,D], comb [B,S,N,N] (source, target). Source: spec 7.
    """
    if are_few(streams.shape[:2].numel(), streams):
        return few_tokens.step(streams, y, post, comb, mix)
    new_nND, u_nD = apply(_HyperStep, *(at_least_fp32(x).flatten(0, 1) for x in (streams, y, post, comb, mix)))
    return new_nND.view(streams.shape).to(streams.dtype), u_nD.view(y.shape).to(streams.dtype)


class _HyperStep(torch.autograd.Function):
    """The step and its gradients, piece by piece.

    Autograd's own backward pass would expand y and u to every stream.
    Shapes: streams [n,N,D], y [n,D], post and mix [n,N], comb [n,N,N] (source, target) -> [n,N,D], [n,D].
    """

    @staticmethod
    def forward(ctx: Any, streams: Tensor, y: Tensor, post: Tensor, comb: Tensor, mix: Tensor) -> tuple:
        new, u = torch.empty_like(streams, memory_format=torch.contiguous_format), torch.empty_like(y)
        towards_nNN = comb.mT.contiguous()  # (target, source): a strided operand of bmm costs six times as much
        for x, add, by, factor, weight, out, row in pieces(streams, y, post, towards_nNN, mix, new, u):
            torch.bmm(factor, x, out=out)
            out.addcmul_(by.unsqueeze(-1), add.unsqueeze(1))
            torch.bmm(weight.unsqueeze(1), out, out=row.unsqueeze(1))
        ctx.save_for_backward(streams, y, post, towards_nNN, mix, new)
        return new, u

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        streams, y, post, towards_nNN, mix, new = ctx.saved_tensors
        to_x = torch.empty_like(streams, memory_format=torch.contiguous_format)
        to_y, to_post, to_comb, to_mix = (torch.empty_like(x) for x in (y, post, towards_nNN, mix))
        inputs, outputs = (streams, y, post, towards_nNN, mix, new, *grads), (to_x, to_y, to_post, to_comb, to_mix)
        for piece in pieces(*inputs, *outputs):
            _step_gradients(*piece)
        return to_x, to_y, to_post, to_comb, to_mix


def _step_gradients(x, y, post, towards, mix, new, to_new, to_u, to_x, to_y, to_post, to_comb, to_mix) -> None:
    """Gradients of one piece, written into the last five.

    Row vectors stand on the left: matrix times column takes eight times as long here.
    """
    u_n1D, y_n1D = to_u.unsqueeze(1), y.unsqueeze(1)
    # u = mix new, so the new streams receive that as well
    all_nND = torch.addcmul(to_new, mix.unsqueeze(-1), u_n1D)
    torch.bmm(towards.mT, all_nND, out=to_x)
    torch.bmm(post.unsqueeze(1), all_nND, out=to_y.unsqueeze(1))
    torch.bmm(y_n1D, all_nND.mT, out=to_post.unsqueeze(1))
    torch.bmm(x, all_nND.mT, out=to_comb)
    torch.bmm(u_n1D, new.mT, out=to_mix.unsqueeze(1))
