"""The compressor of a Full layer: m tokens become one global entry."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tinyds41.config import Config
from tinyds41.mixing import at_least_fp32
from tinyds41.model.linear import Linear
from tinyds41.model.norm import RMSNorm
from tinyds41.model.width import check_width


class Compressor(nn.Module):
    """latent_j = RMSNorm(sum_t softmax_t(z_t) * c_t) over the m tokens of group j.

    Source: spec 4.2.
    """

    def __init__(self, config: Config, ratio: int):
        super().__init__()
        self.ratio = ratio
        self.wkv = Linear(config.hidden_size, config.head_dim)
        # One token needs no gate.
        self.wgate = Linear(config.hidden_size, config.head_dim) if ratio > 1 else None
        self.norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """The per-token rows c and z that wait until their group is full.

        Shapes: [B,S,D] -> [B,S,C].
        """
        check_width(x, self.wkv.in_features, "Compressor")
        return self.wkv(x), None if self.wgate is None else self.wgate(x)

    def latent(self, c: Tensor, z: Tensor | None) -> Tensor:
        """Pools full groups. Shapes: c, z [B,G,m,C] -> [B,G,C], before RoPE."""
        if z is None:
            return self.norm(c.squeeze(2))
        # Softmax per channel over the tokens of the group, in at least fp32.
        share_BGmC = torch.softmax(at_least_fp32(z), 2)
        return self.norm((share_BGmC * at_least_fp32(c)).sum(2).to(c.dtype))
