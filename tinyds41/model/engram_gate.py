"""How far each stream opens to what Engram read, and the reading, in one pass over memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tinyds41.graph import apply
from tinyds41.mixing import pieces


def gated_read(streams: Tensor, read: Tensor, weight: Tensor, alive: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """X_i + g_i value, with a gate g_i per stream that opens where stream and key agree.

    g_i = sigmoid(sgn(t_i) sqrt(max(|t_i|, 1e-6))), t_i = sum_d rms(X_i)_d w_id rms(k_i)_d / sqrt(D).
    Positions that are not alive get g = 0.

    Shapes: streams [n,N,D], read [n,(N+1)D] = keys and value, weight [N,D], alive [n] -> [n,N,D], gate [n,N].
    Source: spec 9.3.
    """
    return apply(_GatedRead, streams, read, weight, alive, eps)


class _GatedRead(torch.autograd.Function):
    """Forward and backward in pieces that a cache holds.

    Autograd's own would pass through memory once per operation.
    """

    @staticmethod
    def forward(ctx: Any, streams: Tensor, read: Tensor, weight: Tensor, alive: Tensor, eps: float) -> tuple:
        n_streams, width = weight.shape
        new = torch.empty_like(streams, memory_format=torch.contiguous_format)
        # Per stream: t, and what normalises stream and key.
        t_nN, by_x, by_k = (new.new_empty(new.shape[:2]) for _ in range(3))
        gate = torch.empty_like(t_nN)
        for x, both, live, t, rx, rk, g, out in pieces(streams, read, alive, t_nN, by_x, by_k, gate, new):
            keys, value = _keys_and_value(both, n_streams)
            for rows, size in ((x, rx), (keys, rk)):
                size.copy_(torch.linalg.vector_norm(rows, dim=-1).square_().div_(width).add_(eps).rsqrt_())
            t.copy_((x * weight).mul_(keys).sum(-1)).mul_(rx).mul_(rk).mul_(width**-0.5)
            # The sign of 0 counts as +, and the root starts at 1e-6: a zero dot product opens the gate to 0.50025.
            sign = torch.where(t < 0, -1.0, 1.0).to(t.dtype)
            g.copy_(torch.sigmoid(sign * t.abs().clamp(min=1e-6).sqrt()).masked_fill_(~live.unsqueeze(-1), 0))
            torch.addcmul(x, g.unsqueeze(-1), value.unsqueeze(1), out=out)
        ctx.save_for_backward(streams, read, weight, t_nN, by_x, by_k, gate)
        return new, gate

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        streams, read, weight, t_nN, by_x, by_k, gate = ctx.saved_tensors
        n_streams, width = weight.shape
        to_x, to_read = torch.empty_like(streams, memory_format=torch.contiguous_format), torch.empty_like(read)
        to_weight = torch.zeros_like(weight)
        parts = pieces(streams, read, t_nN, by_x, by_k, gate, *grads, to_x, to_read)
        for x, both, t, rx, rk, g, to_new, to_gate, out, out_both in parts:
            (keys, value), (to_keys, to_value) = _keys_and_value(both, n_streams), _keys_and_value(out_both, n_streams)
            to_value.copy_(torch.bmm(g.unsqueeze(1), to_new).squeeze(1))  # into spread rows bmm writes one by one
            to_gate = to_gate + torch.bmm(value.unsqueeze(1), to_new.mT).squeeze(1)
            # d root / d t = 1 / (2 root); below 1e-6 the root is held. A dead gate is 0 and passes nothing.
            root = t.abs().sqrt()
            to_t = to_gate * g * (1 - g) * torch.where(root >= 1e-3, 0.5 / root, 0)
            across, along = to_t * rx * rk * width**-0.5, to_t * t / -width
            # t = c rx rk sum(x w k), and d rx / d x = -rx^3 x / D
            scaled_x, scaled_k = x * weight, keys * weight
            torch.addcmul(to_new, scaled_k, across.unsqueeze(-1), out=out)
            out.addcmul_(x, (along * rx.square()).unsqueeze(-1))
            torch.mul(scaled_x, across.unsqueeze(-1), out=to_keys)
            to_keys.addcmul_(keys, (along * rk.square()).unsqueeze(-1))
            to_weight += (scaled_k.copy_(x).mul_(keys).mul_(across.unsqueeze(-1))).sum(0)
        return to_x, to_read, to_weight, None, None


def _keys_and_value(read: Tensor, n_streams: int) -> tuple[Tensor, Tensor]:
    """[n,(N+1)D] -> views [n,N,D], [n,D]"""
    width = read.shape[-1] // (n_streams + 1)
    return read[:, : n_streams * width].unflatten(-1, (n_streams, width)), read[:, n_streams * width :]
