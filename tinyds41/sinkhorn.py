"""Sinkhorn normalisation of the stream-mixing matrices, with a backward pass that stores only sums."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tinyds41.graph import apply


def sinkhorn(logits: Tensor, n_iters: int, eps: float) -> Tensor:
    """Rows to a softmax plus eps, then columns, then (rows, columns) n_iters - 1 times.

    Each division is by (sum + eps).

    Shapes: logits [..., N, N] (source, target) -> the same. Source: spec 7, TR 2.4.1.
    """
    n_streams = logits.shape[-1]
    # Tokens last: every sum over N streams becomes N long vector additions.
    logits_NNn = logits.reshape(-1, n_streams, n_streams).permute(1, 2, 0)
    start_NNn = logits_NNn.softmax(1) + eps
    return apply(_Sinkhorn, start_NNn, n_iters, eps).permute(2, 0, 1).reshape(logits.shape)


class _Sinkhorn(torch.autograd.Function):
    """y = x / (sum + eps), alternating axes.

    The backward pass recomputes each x from its y and its sum.
    """

    @staticmethod
    def forward(ctx, matrix: Tensor, n_iters: int, eps: float) -> Tensor:
        axes = [0] + [1, 0] * (n_iters - 1)  # 0: columns (sum over sources), 1: rows (sum over targets)
        n_streams, sums = matrix.shape[0], []
        # One more row and column of eps: a sum over N + 1 is a sum plus eps.
        bordered = matrix.new_full((n_streams + 1, n_streams + 1, matrix.shape[2]), eps)
        with_eps = bordered[:, :n_streams], bordered[:n_streams]
        matrix = bordered[:n_streams, :n_streams].copy_(matrix)
        for axis in axes:
            total = with_eps[axis].sum(axis, keepdim=True)
            matrix.div_(total)
            sums.append(total)
        matrix = matrix.contiguous()
        ctx.axes = axes
        ctx.save_for_backward(matrix, *sums)
        return matrix

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        matrix, *sums = ctx.saved_tensors
        # y = x / t, t = sum x + eps  =>  dx = (dy - sum(dy * y)) / t, so u = dy * y becomes dx * x = u - y sum(u):
        # carried from step to step the product needs no division until the end.
        product, matrix = grad * matrix, matrix.clone()
        product = product.contiguous()
        for axis, total in zip(reversed(ctx.axes), reversed(sums), strict=True):
            product.addcmul_(matrix, product.sum(axis, keepdim=True), value=-1)
            matrix.mul_(total)
        # Without eps a softmax may be 0: the product is 0 as well, and nothing passes there.
        return product.div_(matrix.clamp_(min=torch.finfo(matrix.dtype).tiny)), None, None
