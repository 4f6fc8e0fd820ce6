"""Rotary positions: adjacent pairs of the last R channels turn by position times frequency."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tinyds41 import few_tokens
from tinyds41.config import Config
from tinyds41.few_tokens import are_few
from tinyds41.graph import apply


class Rope:
    """The frequencies of one kind of layer.

    Plain for window-only layers, YaRN for compressed ones.

    Units: angles in radians, built in float64: near position 1,048,575 fp32 angles are off by 0.06.
    Source: spec 2. The frequencies are no buffer, so that `model.to(bfloat16)` cannot round them.
    """

    def __init__(self, config: Config, *, compressed: bool):
        self.compressed = compressed
        self.frequencies = inverse_frequencies(config, compressed=compressed)

    def rotation(self, positions: Tensor, dtype: torch.dtype) -> Tensor:
        """e^{i p f}.

        Shapes: positions [...] (integers) -> complex [..., R/2], complex128 for float64.
        """
        same = positions.dim() > 1 and positions.stride(0) == 0  # one row for the whole batch: turned once
        angles = (positions[:1] if same else positions).unsqueeze(-1) * self.frequencies.to(positions.device)
        turn = torch.polar(torch.ones_like(angles), angles)
        return (turn if dtype == torch.float64 else turn.to(torch.complex64)).expand(*positions.shape, -1)


def inverse_frequencies(config: Config, *, compressed: bool) -> Tensor:
    """f_i, float64 [R/2]: theta^(-2i/R), for compressed layers blended by YaRN's ramp.

    Source: spec 2.
    """
    width = config.qk_rope_head_dim
    base = config.compress_rope_theta if compressed else config.rope_theta
    pair = torch.arange(width // 2, dtype=torch.float64, device="cpu")
    frequencies = base ** (-2 * pair / width)
    if not compressed or config.rope_scaling is None:
        return frequencies
    low, high = yarn_ramp(config)
    ramp = ((pair - low) / (high - low)).clamp(0, 1)
    # Only the frequencies change; the softmax temperature of YaRN is not used here.
    return frequencies / config.rope_scaling["factor"] * ramp + frequencies * (1 - ramp)


def yarn_ramp(config: Config) -> tuple[float, float]:
    """The pair numbers between which YaRN's blend runs from 'keep' to 'stretch'. Source: spec 2."""
    scaling, width = config.rope_scaling, config.qk_rope_head_dim
    assert scaling is not None
    original, base = scaling["original_max_position_embeddings"], config.compress_rope_theta

    def pair_turning(times: float) -> float:
        return width * math.log(original / (2 * math.pi * times)) / (2 * math.log(base))

    low = max(math.floor(pair_turning(scaling["beta_fast"])), 0)
    high = min(math.ceil(pair_turning(scaling["beta_slow"])), width - 1)
    return low, high + 0.001 if low == high else high


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Turns the adjacent pairs (2i, 2i+1) of the last R channels.

    Pass `rotation.conj()` to turn back.

    Shapes: x [..., C], rotation complex [..., R/2] that broadcasts over x's leading axes.
    Raises: ValueError when x has fewer than R channels.
    """
    n_rotary = 2 * rotation.shape[-1]
    if x.shape[-1] < n_rotary:
        raise ValueError(f"rotate: expected at least {n_rotary} channels, got {tuple(x.shape)}")
    if x.shape[-1] % 2 == 0 and rotation.dtype.to_real() == x.dtype and are_few(x.shape[:2].numel(), x):
        return few_tokens.rotate(x, rotation)
    return apply(_Rotate, x, rotation)


class _Rotate(torch.autograd.Function):
    """The gradient turns back: one copy each way, in which the last channels turn in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rotation: Tensor) -> Tensor:
        ctx.save_for_backward(rotation)
        return _turned(x, rotation)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _turned(grads[0], ctx.saved_tensors[0].conj()), None


def _turned(x: Tensor, rotation: Tensor) -> Tensor:
    out = x.clone(memory_format=torch.contiguous_format)
    moving = out[..., -2 * rotation.shape[-1] :]
    pairs = moving.to(torch.float64 if rotation.dtype == torch.complex128 else torch.float32)
    if x.shape[-1] % 2:  # pairs of an odd row lie across complex numbers
        pairs = pairs.clone(memory_format=torch.contiguous_format)
    torch.view_as_complex(pairs.unflatten(-1, (-1, 2))).mul_(rotation)
    if pairs is not moving:
        moving.copy_(pairs)
    return out
