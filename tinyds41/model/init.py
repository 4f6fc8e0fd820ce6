"""Initial weights (spec 14), where the report is silent ours."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

STD = 0.02
# Value rows of Engram's projection start this much smaller: without cache quantisers, whose codes flip at any change,
# the logits of step 0 then equal those of the model without Engram within 1 %.
ENGRAM_VALUE_SCALE = 0.01


@torch.no_grad()
def initialise(model: nn.Module, seed: int) -> None:
    """Matrices N(0, 0.02), norms 1, sinks and gate bias 0, hyper-connections close to a plain residual.

    Drawn in fp32 on the CPU by a generator of its own, so that a seed gives the same model on every device.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        leaf = name.rsplit(".", 1)[-1]
        if name.endswith(("hc_attn.base", "hc_ffn.base")):
            parameter.copy_(_plain_residual(parameter))
        elif leaf in ("scale", "q_weight", "k_weight") or "norm" in name:
            parameter.fill_(1)
        elif leaf in ("attn_sink", "bias", "bias_vl"):
            parameter.zero_()
        else:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * STD)
            if name.endswith("engram.wkv.weight"):
                n_streams = model.config.hc_mult
                parameter[n_streams * parameter.shape[0] // (n_streams + 1) :] *= ENGRAM_VALUE_SCALE


def _plain_residual(base: Tensor) -> Tensor:
    """pre even (1/N each), post 1, comb near the identity: bases of sigmoid, 2 sigmoid and row softmax."""
    n = math.isqrt(base.numel() + 1) - 1  # (2 + n) n = numel
    even = math.log(1 / n / (1 - 1 / n)) if n > 1 else 4.0
    comb = 4.0 * torch.eye(n).flatten()
    return torch.cat([torch.full((n,), even), torch.zeros(n), comb])
