"""Single-pass hyper-connections: N residual streams, mixed by the coefficients of the sub-layer before."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tinyds41.config import Config
from tinyds41.mixing import collapse
from tinyds41.model.width import check_width
from tinyds41.ops import Ops


class HyperConnection(nn.Module):
    """Produces pre, post and comb of one sub-layer from the streams that enter it.

    mhc_mode: "single_pass" (V4.1: the sub-layer's input was mixed with the previous pre), "multi_pass" (V4: with
    its own), "residual" (no mixing: every stream adds the output, which makes all of them one plain residual).
    Source: spec 7, TR 2.4.1. Lesson: 08.
    """

    def __init__(self, config: Config, ops: Ops):
        super().__init__()
        self.config, self.ops = config, ops
        n_rows = (2 + config.hc_mult) * config.hc_mult
        self.fn = nn.Parameter(torch.empty(n_rows, config.hc_mult * config.hidden_size))
        self.scale = nn.Parameter(torch.ones(3))
        self.base = nn.Parameter(torch.zeros(n_rows))

    def forward(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The coefficients, and the streams to go on with (see `hyper_coefficients`).

        Shapes: streams [B,S,N,D] -> pre [B,S,N], post [B,S,N], comb [B,S,N,N] (source, target), [B,S,N,D].
        """
        config = self.config
        check_width(streams, config.hidden_size, "HyperConnection")
        if config.mhc_mode == "residual":
            one = streams.new_ones(*streams.shape[:3], dtype=torch.promote_types(streams.dtype, torch.float32))
            first = one * torch.eye(config.hc_mult, device=one.device, dtype=one.dtype)[0]
            return first, one, torch.diag_embed(one), streams
        return self.ops.hyper_coefficients(
            streams, self.fn, self.scale, self.base,
            n_iters=config.hc_sinkhorn_iters, eps=config.hc_eps, norm_eps=config.rms_norm_eps,
        )  # fmt: skip

    def input(self, streams: Tensor, collapsed: Tensor, pre: Tensor) -> Tensor:
        """What the sub-layer reads: the mix of the sub-layer before, or in V4's mode its own."""
        return collapse(streams, pre) if self.config.mhc_mode == "multi_pass" else collapsed
