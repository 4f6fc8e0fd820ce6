"""Mixing of residual streams in plain PyTorch: coefficients, and the one pass that applies them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tinyds41.sinkhorn import sinkhorn


def at_least_fp32(x: Tensor) -> Tensor:
    """`x` in fp32, or untouched when it is wider (spec 15)."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def hyper_coefficients(
    streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, *, n_iters: int, eps: float, norm_eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """pre [B,S,N], post [B,S,N] and the doubly normalised comb [B,S,N,N] (source, target) of one sub-layer.

    Shapes: streams [B,S,N,D], fn [(2+N)N, N*D], scale [3], base [(2+N)N]. At least fp32. Source: spec 7.
    """
    n_streams = streams.shape[2]
    t_BSX = _NormedLinear.apply(at_least_fp32(streams).flatten(2), at_least_fp32(fn), norm_eps)
    scale, base = at_least_fp32(scale), at_least_fp32(base)
    t_pre, t_post, t_comb = t_BSX.split([n_streams, n_streams, n_streams**2], -1)
    b_pre, b_post, b_comb = base.split([n_streams, n_streams, n_streams**2])
    pre = torch.sigmoid(t_pre * scale[0] + b_pre) + eps
    post = 2 * torch.sigmoid(t_post * scale[1] + b_post)
    logits_BSNN = (t_comb * scale[2] + b_comb).unflatten(-1, (n_streams, n_streams))
    return pre, post, sinkhorn(logits_BSNN, n_iters, eps)


class _NormedLinear(torch.autograd.Function):
    """fn (x / rms(x)), computed as (fn x) / rms(x): no normalised copy of the streams, forward or backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fn: Tensor, eps: float) -> Tensor:
        scale = (torch.linalg.vector_norm(x, dim=-1, keepdim=True).square() / x.shape[-1]).add_(eps).rsqrt_()
        product = F.linear(x, fn)
        ctx.save_for_backward(x, fn, scale, product)
        return product * scale

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        x, fn, scale, product = ctx.saved_tensors
        grad_product = grads[0] * scale
        # d scale / d x = -scale^3 x / X
        towards_x = (grads[0] * product).sum(-1, keepdim=True) * scale**3 / -x.shape[-1]
        grad_x = (grad_product @ fn).addcmul_(x, towards_x)
        return grad_x, grad_product.flatten(0, -2).mT @ x.flatten(0, -2), None


def collapse(streams: Tensor, mix: Tensor) -> Tensor:
    """u = sum_i mix_i X_i. Shapes: [B,S,N,D], [B,S,N] -> [B,S,D]. Source: spec 7."""
    return (mix.unsqueeze(-2) @ at_least_fp32(streams)).squeeze(-2).to(streams.dtype)


def hyper_step(streams: Tensor, y: Tensor, post: Tensor, comb: Tensor, mix: Tensor) -> tuple[Tensor, Tensor]:
    """X_k = post_k y + sum_j comb[j,k] X_j, and the next input u = sum_k mix_k X_k, in one pass.

    Shapes: streams [B,S,N,D], y [B,S,D], comb [B,S,N,N] (source, target). Source: spec 7.
    """
    new_BSND, u_BSD = _HyperStep.apply(at_least_fp32(streams), at_least_fp32(y), post, comb, mix)
    return new_BSND.to(streams.dtype), u_BSD.to(streams.dtype)


class _HyperStep(torch.autograd.Function):
    """The step with a backward pass of small matrix products; autograd's would expand y to every stream twice."""

    @staticmethod
    def forward(ctx: Any, streams: Tensor, y: Tensor, post: Tensor, comb: Tensor, mix: Tensor) -> tuple:
        # The copy of comb is N x N per token; without it the batched product walks its rows with a stride, 6x slower.
        new_BSND = comb.mT.contiguous() @ streams
        new_BSND.addcmul_(post.unsqueeze(-1), y.unsqueeze(-2))
        ctx.save_for_backward(streams, y, post, comb, mix, new_BSND)
        return new_BSND, (mix.unsqueeze(-2) @ new_BSND).squeeze(-2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        streams, y, post, comb, mix, new_BSND = ctx.saved_tensors
        grad_new, grad_u = grads
        u_BS1D = grad_u.unsqueeze(-2)
        # The gradient of the new streams is grad_new + mix grad_u; its second part is carried along as a factor of
        # grad_u, so that no third array of the streams' size is written.
        grad_streams = comb.contiguous() @ grad_new  # X_j receives comb[j,k] from each k
        grad_streams.addcmul_(comb @ mix.unsqueeze(-1), u_BS1D)
        grad_y = (post.unsqueeze(-2) @ grad_new).squeeze(-2)
        grad_y.addcmul_((post * mix).sum(-1, keepdim=True), grad_u)
        grad_post = torch.addcmul((grad_new * y.unsqueeze(-2)).sum(-1), mix, (grad_u * y).sum(-1, keepdim=True))
        grad_comb = streams @ grad_new.mT  # [j,k] = X_j . gradient of X_k
        grad_comb.addcmul_((streams * u_BS1D).sum(-1, keepdim=True), mix.unsqueeze(-2))
        return grad_streams, grad_y, grad_post, grad_comb, (new_BSND * u_BS1D).sum(-1)
