"""The hot functions for a handful of tokens without gradients, as in decode, computed with NumPy.

There a call costs more than its arithmetic, and NumPy's calls cost a third of PyTorch's; its matrix-vector products
take two thirds of the time on cold weights (docs/LOG.md). What is tiny is computed in Python numbers, in float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import mul

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

# A private module, for want of a public one: dispatch modes live there alone, and torch's own documentation imports
# `TorchDispatchMode` from it.
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

FEW = 8  # tokens; from about here on the vector forms are faster
FEW_SCORES = 512  # of one choice
NONE = np.iinfo(np.int64).max  # sorts behind every index


def are_few(n_tokens: int, x: Tensor) -> bool:
    """Whether to compute this way; NumPy has no bfloat16."""
    return n_tokens <= FEW and x.dtype in (torch.float32, torch.float64) and numpy_may_compute(x)


def numpy_may_compute(x: Tensor) -> bool:
    """Whether nobody needs PyTorch to compute with x.

    Not where gradients are wanted, not on a GPU, where every number fetched would wait for the device, not under
    autocast, which mixes types, and not while a dispatch mode watches, such as torch's FLOP counter: it would not see
    the work.
    """
    return (x.is_cpu and not torch.is_grad_enabled() and not is_in_torch_dispatch_mode()
            and not torch.is_autocast_enabled("cpu"))  # fmt: skip


def array(x: Tensor) -> np.ndarray:
    """The same memory as an array."""
    return (x.detach() if x.requires_grad else x).numpy()


def product(matrix: np.ndarray, vector: np.ndarray) -> np.ndarray:
    """W x.

    Not by BLAS, which splits products of this size among threads that would wait for PyTorch's: with two of each a
    token took four times as long. The products below that use it are too small for that.
    """
    return np.einsum("ij,j->i", matrix, vector)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x W^T of one row. Shapes: [..., K], [N, K] -> [..., N]."""
    return torch.from_numpy(product(array(weight), array(x).reshape(-1)).reshape(*x.shape[:-1], len(weight)))


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """w * x / sqrt(mean(x^2) + eps). Shapes: [..., D], [D] -> [..., D]."""
    rows = array(x)
    if rows.size == rows.shape[-1]:
        row = rows.reshape(-1)
        by = _inverse_root(float(row @ row) / row.size + eps)
        return torch.from_numpy((rows * rows.dtype.type(by)) * array(weight))
    by = (np.square(rows).sum(-1, keepdims=True) / rows.shape[-1] + rows.dtype.type(eps)) ** -0.5
    return torch.from_numpy(rows * by * array(weight))


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """`rope.rotate`. Shapes: x [..., C], rotation complex [..., R/2] -> [..., C]."""
    out, turn = array(x).copy(), rotation.resolve_conj().numpy()
    pairs = out[..., -2 * turn.shape[-1] :].view(turn.dtype)
    np.multiply(pairs, turn, out=pairs)
    return torch.from_numpy(out)


def swiglu(x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, limit: float) -> Tensor:
    """`experts.swiglu` of rows. Shapes: [n,D], [F,D], [D,F], [F,D] -> [n,D].

    Several rows share each pass over a matrix, in PyTorch: from two on a quarter of the time of row after row.
    """
    if len(x) > 1:
        gate, up = F.linear(x, w1).clamp_(max=limit), F.linear(x, w3).clamp_(-limit, limit)
        return F.linear(F.silu(gate).mul_(up), w2)
    return torch.from_numpy(_swiglu(array(x)[0], array(w1), array(w2), array(w3), limit)[None])


def _swiglu(row: np.ndarray, w1: np.ndarray, w2: np.ndarray, w3: np.ndarray, limit: float) -> np.ndarray:
    gate, up = np.minimum(product(w1, row), limit), np.clip(product(w3, row), -limit, limit)
    # silu(a) = a / (1 + e^-a); where e^-a overflows the quotient is 0, as it should be
    with np.errstate(over="ignore"):
        return product(w2, gate / (1 + np.exp(-gate)) * up)


def experts(x: Tensor, index: Tensor, weight: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, limit: float) -> Tensor:
    """`experts.experts`, visit by visit. Shapes: x [n,D], index and weight [n,A] -> [n,D]."""
    first, second, third = array(w1), array(w2), array(w3)
    rows = []
    for row, chosen, by in zip(array(x), index.tolist(), weight.tolist(), strict=True):
        parts = [w * _swiglu(row, first[e], second[e], third[e], limit) for e, w in zip(chosen, by, strict=True)]
        rows.append(sum(parts[1:], parts[0]))
    return torch.from_numpy(np.stack(rows))


def select_top(scores: Tensor, k: int) -> Tensor:
    """`selection.select_top` by sorting: a stable sort leaves the lower index first. Shapes: [..., T] -> [..., k]."""
    values = array(scores)
    best = np.argsort(-values, axis=-1, kind="stable")[..., :k]
    index = np.full((*values.shape[:-1], k), NONE)
    index[..., : best.shape[-1]] = np.where(np.take_along_axis(values, best, -1) > -math.inf, best, NONE)
    index.sort(-1)
    return torch.from_numpy(np.where(index == NONE, -1, index))


def attend(
    q: Tensor, rows: Tensor, first: Tensor, chosen: Tensor | None, absent: Tensor | None, sink: Tensor
) -> Tensor:
    """`ops.attend` of one query per batch row.

    Shapes: q [B,1,H,C], rows [B,w,C] up to the query's own, first [B,1], chosen [B,1,K,C], absent [B,1,K].
    """
    outputs, sinks = [], array(sink)[:, None]
    for b, (begin,) in enumerate(first.tolist()):
        seen = array(rows[b])[max(begin, 0) :]
        if chosen is not None and absent is not None:
            picked, missing = array(chosen[b, 0]), absent[b, 0].numpy()
            seen = np.concatenate([seen, picked[~missing] if missing.any() else picked])
        query = array(q[b, 0]) * q.shape[-1] ** -0.5
        scores_HT = query @ seen.T
        largest_H1 = np.maximum(scores_HT.max(-1, keepdims=True, initial=-math.inf), sinks)
        scores_HT = np.exp(scores_HT - largest_H1)
        total_H1 = scores_HT.sum(-1, keepdims=True) + np.exp(sinks - largest_H1)
        outputs.append((scores_HT @ seen) / total_H1)
    return torch.from_numpy(np.stack(outputs)[:, None])


def attend_block(q: Tensor, rows: Tensor, first: Tensor, last: Tensor, sink: Tensor) -> Tensor:
    """`ops.attend` of queries that may see behind themselves, without a selection.

    Shapes: q [B,S,H,C], rows [B,T,C], first and last [B,S] the rows each query sees.
    """
    n_batch, n_queries, n_heads, width = q.shape
    seen_BTC, row_T = array(rows), np.arange(rows.shape[1])
    hidden_BST = (row_T < first.numpy()[..., None]) | (row_T > last.numpy()[..., None])
    query_BXC = (array(q) * width**-0.5).reshape(n_batch, -1, width)
    scores_BSHT = (query_BXC @ seen_BTC.swapaxes(1, 2)).reshape(n_batch, n_queries, n_heads, -1)
    scores_BSHT[np.broadcast_to(hidden_BST[:, :, None], scores_BSHT.shape)] = -math.inf
    sinks_H1 = array(sink)[:, None]
    largest_BSH1 = np.maximum(scores_BSHT.max(-1, keepdims=True, initial=-math.inf), sinks_H1)
    scores_BSHT = np.exp(scores_BSHT - largest_BSH1)
    total_BSH1 = scores_BSHT.sum(-1, keepdims=True) + np.exp(sinks_H1 - largest_BSH1)
    out_BXC = scores_BSHT.reshape(n_batch, n_queries * n_heads, -1) @ seen_BTC
    return torch.from_numpy(out_BXC.reshape(q.shape) / total_BSH1)


def coefficients(
    streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, n_iters: int, eps: float, norm_eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`mixing.hyper_coefficients`. Shapes: [B,S,N,D], [(2+N)N,N*D] -> pre and post [B,S,N], comb [B,S,N,N]."""
    n_batch, n_tokens, n_streams, width = streams.shape
    scales = [s for s in scale.tolist() for _ in range(n_streams)]
    scales += scales[-1:] * (n_streams**2 - n_streams)
    offsets, matrix, rows = base.tolist(), array(fn), []
    for x in array(streams).reshape(-1, n_streams * width):
        by = _inverse_root(float(x @ x) / x.size + norm_eps)
        z = [t * by * s + b for t, s, b in zip(product(matrix, x).tolist(), scales, offsets, strict=True)]
        pre = [_sigmoid(x) + eps for x in z[:n_streams]]
        post = [2 * _sigmoid(x) for x in z[n_streams : 2 * n_streams]]
        comb = [_softmax(z[start : start + n_streams], eps) for start in range(2 * n_streams, len(z), n_streams)]
        rows.append([*pre, *post, *sinkhorn(comb, n_iters, eps)])
    packed = np.array(rows, dtype=matrix.dtype).reshape(n_batch, n_tokens, -1)
    pre, post, comb = np.split(packed, (n_streams, 2 * n_streams), -1)
    comb = comb.reshape(n_batch, n_tokens, n_streams, n_streams)
    return torch.from_numpy(pre), torch.from_numpy(post), torch.from_numpy(comb)


def _inverse_root(x: float) -> float:
    """x^-1/2, infinite at 0 as in PyTorch."""
    return x**-0.5 if x else math.inf


def _sigmoid(x: float) -> float:
    # e^-x overflows below -709; down there the value is below 1e-304
    return 0.0 if x < -700 else 1 / (1 + math.exp(-x))


def _softmax(row: Sequence[float], eps: float) -> list[float]:
    largest = max(row)
    powers = [math.exp(x - largest) for x in row]
    total = sum(powers)
    return [p / total + eps for p in powers]


def sinkhorn(matrix: list[list[float]], n_iters: int, eps: float) -> list[float]:
    """Columns, then (rows, columns) n_iters - 1 times, each by (sum + eps), row after row. Source: spec 7.

    The matrix stays as it is: only a factor per row and one per column change, x_ij = r_i a_ij c_j.
    """
    if len(matrix) == 4:
        row, column = _four_streams(matrix, n_iters, eps)
    else:
        columns = list(zip(*matrix, strict=True))
        row, column = [1.0] * len(matrix), [1.0] * len(matrix)
        for step in range(n_iters):
            if step:
                row = [r / (r * sum(map(mul, line, column)) + eps) for r, line in zip(row, matrix, strict=True)]
            column = [c / (c * sum(map(mul, line, row)) + eps) for c, line in zip(column, columns, strict=True)]
    return [r * a * c for r, line in zip(row, matrix, strict=True) for a, c in zip(line, column, strict=True)]


def _four_streams(matrix: list[list[float]], n_iters: int, eps: float) -> tuple[list[float], list[float]]:
    """The loop above written out for the released number of streams: a fifth of its time."""
    (a, b, c, d), (e, f, g, h), (i, j, k, l), (m, n, o, p) = matrix  # noqa: E741
    r0 = r1 = r2 = r3 = c0 = c1 = c2 = c3 = 1.0
    for step in range(n_iters):
        if step:
            r0 /= r0 * (a * c0 + b * c1 + c * c2 + d * c3) + eps
            r1 /= r1 * (e * c0 + f * c1 + g * c2 + h * c3) + eps
            r2 /= r2 * (i * c0 + j * c1 + k * c2 + l * c3) + eps
            r3 /= r3 * (m * c0 + n * c1 + o * c2 + p * c3) + eps
        c0 /= c0 * (a * r0 + e * r1 + i * r2 + m * r3) + eps
        c1 /= c1 * (b * r0 + f * r1 + j * r2 + n * r3) + eps
        c2 /= c2 * (c * r0 + g * r1 + k * r2 + o * r3) + eps
        c3 /= c3 * (d * r0 + h * r1 + l * r2 + p * r3) + eps
    return [r0, r1, r2, r3], [c0, c1, c2, c3]


def step(streams: Tensor, y: Tensor, post: Tensor, comb: Tensor, mix: Tensor) -> tuple[Tensor, Tensor]:
    """`mixing.hyper_step`. Shapes: [B,S,N,D], [B,S,D], [B,S,N], [B,S,N,N], [B,S,N] -> [B,S,N,D], [B,S,D]."""
    new = array(comb).swapaxes(-1, -2) @ array(streams)
    new += array(post)[..., None] * array(y)[..., None, :]
    return torch.from_numpy(new), torch.from_numpy((array(mix)[..., None, :] @ new)[..., 0, :])


def gate(logits: Tensor, bias: Tensor, n_active: int, scaling: float) -> tuple[Tensor, Tensor, Tensor]:
    """`moe.Gate` from x W_g / temperature. Shapes: [..., E], [E] -> scores [..., E], experts and weights [..., A]."""
    # softplus(x) = log(1 + e^x); from 20 on PyTorch takes x
    x = array(logits)
    scores = np.sqrt(np.where(x > 20, x, np.log1p(np.exp(np.minimum(x, 20)))))
    chosen = np.sort(np.argsort(-(scores + array(bias)), axis=-1, kind="stable")[..., :n_active], -1)
    weights = np.take_along_axis(scores, chosen, -1)
    weights = scaling * weights / (weights.sum(-1, keepdims=True) + 1e-20)
    return torch.from_numpy(scores), torch.from_numpy(chosen), torch.from_numpy(weights)
