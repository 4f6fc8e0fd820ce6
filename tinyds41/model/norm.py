"""RMSNorm, the only normalisation of the model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from tinyds41 import few_tokens
from tinyds41.few_tokens import are_few
from tinyds41.graph import apply
from tinyds41.mixing import at_least_fp32
from tinyds41.model.width import check_width


class RMSNorm(nn.Module):
    """y = w * x / sqrt(mean(x^2) + eps), in at least fp32, cast back.

    Shapes: [..., width]. Source: spec 2.
    """

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        check_width(x, self.weight.shape[0], "RMSNorm")
        if are_few(x.numel() // x.shape[-1], x):
            return few_tokens.norm(x, self.weight, self.eps)
        return apply(_RMSNorm, at_least_fp32(x), at_least_fp32(self.weight), self.eps).to(x.dtype)


class _RMSNorm(torch.autograd.Function):
    """The formula with a backward pass that keeps x and one number per row.

    Autograd's would keep three arrays.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        scaled = x * scale
        to_weight = (grads[0] * scaled).flatten(0, -2).sum(0)
        to_scaled = grads[0] * weight
        # scaled = x s with d s / d x = -s^3 x / width: what runs along x is taken out again.
        along = (to_scaled * scaled).mean(-1, keepdim=True)
        return to_scaled.addcmul_(scaled, along, value=-1).mul_(scale), to_weight, None
