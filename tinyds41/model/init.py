"""Initial weights: the report's where it gives them, else ours (spec 14)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from tinyds41.config import Config

if TYPE_CHECKING:
    from tinyds41.model.transformer import Model

DRAFT_SEED = 1 << 20  # added to a model's seed: a drafter that comes later has the same weights, the backbone others
MIXING_STD = 0.02  # of fn, which at any width must leave a layer close to a plain residual


@torch.no_grad()
def initialise(model: Model, seed: int) -> None:
    """Matrices N(0, initializer_range), norms 1, the rest 0; near a plain residual, with a silent Engram.

    Drawn in fp32 on the CPU by a generator of its own, so that a seed gives the same model on every device.
    """
    backbone = ((name, weight) for name, weight in model.named_parameters() if not name.startswith("mtp."))
    _draw(backbone, model.config, torch.Generator().manual_seed(seed))


@torch.no_grad()
def initialise_draft(model: Model, seed: int) -> None:
    """The same for the draft blocks of a model, if it has any."""
    if model.mtp is not None:
        _draw(model.mtp.named_parameters(), model.config, torch.Generator().manual_seed(seed + DRAFT_SEED))


def _draw(weights: Iterator[tuple[str, nn.Parameter]], config: Config, generator: torch.Generator) -> None:
    for name, parameter in weights:
        leaf = name.rsplit(".", 1)[-1]
        if name.endswith(("hc_attn.base", "hc_ffn.base")):
            parameter.copy_(_plain_residual(parameter))
        elif leaf in ("scale", "q_weight", "k_weight") or "norm" in name:
            parameter.fill_(1)
        elif leaf in ("attn_sink", "bias", "bias_vl"):
            parameter.zero_()
        else:
            std = MIXING_STD if name.endswith(".fn") else config.initializer_range
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
            if name.endswith("engram.wkv.weight"):
                n_streams = config.hc_mult
                # The value rows start at 0: even 1e-6 of their usual size flips near ties of experts and cache codes,
                # and those move the logits of some tokens by a quarter, not by the 1 % that spec 14 allows.
                parameter[n_streams * parameter.shape[0] // (n_streams + 1) :].zero_()


def _plain_residual(base: Tensor) -> Tensor:
    """pre even (1/N each), post 1, comb near the identity.

    Returned are the bases of sigmoid, 2 sigmoid and row softmax.
    """
    n = math.isqrt(base.numel() + 1) - 1  # (2 + n) n = numel
    even = math.log(1 / n / (1 - 1 / n)) if n > 1 else 4.0
    comb = 4.0 * torch.eye(n).flatten()
    return torch.cat([torch.full((n,), even), torch.zeros(n), comb])
