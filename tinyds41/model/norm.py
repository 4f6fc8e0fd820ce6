"""RMSNorm, the only normalisation of the model."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tinyds41.mixing import at_least_fp32
from tinyds41.model.width import check_width


class RMSNorm(nn.Module):
    """y = w * x / sqrt(mean(x^2) + eps), in at least fp32, cast back. Shapes: [..., width]. Source: spec 2."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        check_width(x, self.weight.shape[0], "RMSNorm")
        wide = at_least_fp32(x)
        scaled = wide * (wide.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return (at_least_fp32(self.weight) * scaled).to(x.dtype)
