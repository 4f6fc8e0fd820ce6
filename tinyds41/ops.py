"""The hot functions in plain PyTorch, gathered in `Ops`; attention stands here, the others in their own files.

A faster backend mirrors these signatures; `reference.py` is the slow definition that all are tested against.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from tinyds41 import few_tokens
from tinyds41.experts import experts, experts_grouped, swiglu
from tinyds41.few_tokens import are_few
from tinyds41.formats import Rows
from tinyds41.graph import apply
from tinyds41.mixing import at_least_fp32, hyper_coefficients, hyper_step
from tinyds41.selection import Selection, index_scores, pool_blocks, score_and_select, select_top, split

__all__ = [
    "Ops", "Selection", "Window", "attend", "attention_mass", "experts", "experts_grouped", "hyper_coefficients",
    "hyper_step", "index_scores", "pool_blocks", "score_and_select", "select_top", "swiglu",
]  # fmt: skip

# Scores of one chunk of queries, window and selection together: 8 MiB in fp32. A CPU's last cache holds that while
# it is reduced; smaller chunks mean more calls.
ATTEND_ELEMENTS = 1 << 21
LN_2 = math.log(2)


@dataclass
class Window:
    """The rows around each query: the last S rows belong to the S queries, in order.

    Shapes: rows P+S rows of C; first and last [B,S] the first and last row each query may see. Without `last` that
        is its own row. Queries that see behind themselves, as those of a draft block, all lie within one window.
    """

    rows: Rows
    first: Tensor
    size: int  # W, an upper bound of what a query sees
    last: Tensor | None = None


def attend(
    q: Tensor, window: Window, selection: Selection | None, sink: Tensor, *,
    count: Callable[[int], None] | None = None,
) -> Tensor:  # fmt: skip
    """o_h = sum_i e^{s_i} v_i / (e^{sink_h} + sum_i e^{s_i}) over window and selected rows.

    Keys and values are the same rows, K = V.

    Shapes: q [B,S,H,C], sink [H] -> [B,S,H,C]; a query with nothing to see gives zeros.
    Raises: ValueError for more queries than the window has rows where `window.last` lets them see behind themselves.
    Source: spec 4.7, 10.2.
    """
    if window.last is not None and q.shape[1] > window.size:
        raise ValueError(f"{q.shape[1]} queries see behind themselves: they must lie within a window of {window.size}")
    n_chosen = 0 if selection is None else selection.index.shape[-1]
    selection = selection if n_chosen else None  # a store without entries has nothing to choose
    if window.last is not None and selection is None and are_few(q.shape[:2].numel(), q):
        return few_tokens.attend_block(q, window.rows.all(), window.first, window.last, sink)
    if q.shape[1] == 1 and window.last is None and are_few(len(q), q):
        chosen = None if selection is None else next(selection.rows(1, count))
        absent = None if selection is None else selection.index < 0
        return few_tokens.attend(q, window.rows.all(), window.first, chosen, absent, sink)
    per_query = q.shape[0] * q.shape[2] * (2 * window.size + n_chosen)
    # Whole windows per chunk, because the bands below are cut in windows.
    chunk = max(1, ATTEND_ELEMENTS // per_query // window.size) * window.size
    rows_BTC, n_queries = window.rows.all(), q.shape[1]
    past, outputs, start = rows_BTC.shape[1] - n_queries, [], 0
    parts_chosen = itertools.repeat(None) if selection is None else selection.rows(chunk, count)
    for q_BSHC, chosen_BSKC in zip(split(q, chunk), parts_chosen, strict=False):
        stop = start + q_BSHC.shape[1]
        begin = max(0, past + start - window.size + 1)
        first_BS = window.first[:, start:stop] - begin
        last_BS = None if window.last is None else window.last[:, start:stop] - begin
        band_BbwC, hidden_BSw = _bands(rows_BTC[:, begin : past + stop], first_BS, last_BS, window.size)
        absent_BSK = None if selection is None else selection.index[:, start:stop] < 0
        outputs.append(apply(_Attend, q_BSHC, band_BbwC, hidden_BSw, chosen_BSKC, absent_BSK, sink))
        start = stop
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)


def _bands(rows_BTC: Tensor, first_BS: Tensor, last_BS: Tensor | None, size: int) -> tuple[Tensor, Tensor]:
    """One band of window rows per block of queries, and which of its keys are hidden.

    Shapes: -> band [B,b,w,C] for b blocks of ceil(S/b) queries, hidden [B,S,w] (bool).
    """
    n_queries = first_BS.shape[1]
    block = min(size, n_queries)
    n_bands = -(-n_queries // block)
    past = rows_BTC.shape[1] - n_queries
    if n_bands == 1:
        band_BbwC, offset = rows_BTC.unsqueeze(1), torch.zeros(1, dtype=torch.long, device=rows_BTC.device)
    else:
        # Blocks of `size` rows: a query block sees its own and the one before it.
        rows_BTC = F.pad(rows_BTC, (0, 0, size - past, n_bands * size - n_queries))
        blocks_BbwC = rows_BTC.unflatten(1, (n_bands + 1, size))
        band_BbwC = torch.cat([blocks_BbwC[:, :-1], blocks_BbwC[:, 1:]], 2)
        offset = torch.arange(n_bands, device=rows_BTC.device) * size - size + past
    query = torch.arange(n_queries, device=rows_BTC.device)
    row_Sw = offset[query // block].unsqueeze(-1) + torch.arange(band_BbwC.shape[2], device=rows_BTC.device)
    last_BS = (past + query).unsqueeze(0) if last_BS is None else last_BS
    hidden_BSw = (row_Sw < first_BS.unsqueeze(-1)) | (row_Sw > last_BS.unsqueeze(-1))
    return band_BbwC, hidden_BSw


class _Attend(torch.autograd.Function):
    """The sums of `attend` for some queries, with a backward pass of matrix products.

    Window and selection stay side by side: nothing is copied into one array.

    The backward pass keeps the exponentials and the result. As in flash attention, with p = e / total and
    delta = sum_c do_c o_c the gradient of a score is p (do . v - delta).
    """

    @staticmethod
    def forward(ctx: Any, q_BSHC, band_BbwC, hidden_BSw, chosen_BSKC, absent_BSK, sink) -> Tensor:
        # s_i = q_h . v_i / sqrt(C), with the root taken from the few queries instead of the many scores
        # Powers of 2, because those of e take three times as long here, and six times at -inf.
        q_BSHC = q_BSHC * (q_BSHC.shape[-1] ** -0.5 / LN_2)
        q_BbXC = _in_bands(q_BSHC, band_BbwC)
        near_BSHw = _by_query(at_least_fp32(q_BbXC @ band_BbwC.mT), q_BSHC)
        # Added, not filled in: as wide as one head, while every head's scores pass in one go.
        near_BSHw += near_BSHw.new_zeros(hidden_BSw.shape).masked_fill_(hidden_BSw, -torch.inf).unsqueeze(2)
        # The largest exponent cancels.
        sink_H, far_BSHK = at_least_fp32(sink) / LN_2, None
        largest_BSH = torch.maximum(near_BSHw.amax(-1), sink_H)
        if chosen_BSKC is not None:
            far_BSHK = at_least_fp32(q_BSHC @ chosen_BSKC.mT).masked_fill_(absent_BSK.unsqueeze(2), -torch.inf)
            largest_BSH = torch.maximum(largest_BSH, far_BSHK.amax(-1))
        near_BSHw.sub_(largest_BSH.unsqueeze(-1)).exp2_()
        sunk_BSH = (sink_H - largest_BSH).exp2_()
        total_BSH = near_BSHw.sum(-1).add_(sunk_BSH)
        out_BbXC = _in_bands(near_BSHw.to(band_BbwC.dtype), band_BbwC) @ band_BbwC
        out_BSHC = at_least_fp32(_by_query(out_BbXC, q_BSHC))
        if chosen_BSKC is not None and far_BSHK is not None:
            far_BSHK.sub_(largest_BSH.unsqueeze(-1)).exp2_()
            total_BSH += far_BSHK.sum(-1)
            out_BSHC = out_BSHC + at_least_fp32(far_BSHK.to(chosen_BSKC.dtype) @ chosen_BSKC)
        out_BSHC = out_BSHC / total_BSH.unsqueeze(-1)
        ctx.save_for_backward(q_BSHC, band_BbwC, chosen_BSKC, sink, near_BSHw, far_BSHK, sunk_BSH, total_BSH, out_BSHC)
        return out_BSHC.to(q_BSHC.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        q_BSHC, band_BbwC, chosen_BSKC, sink, near_BSHw, far_BSHK, sunk_BSH, total_BSH, out_BSHC = ctx.saved_tensors
        dtype = q_BSHC.dtype
        # do / total: so the exponentials need no division
        given_BSHC = at_least_fp32(grads[0]) / total_BSH.unsqueeze(-1)
        delta_BSH = (given_BSHC * out_BSHC).sum(-1)
        given_BSHC = given_BSHC.to(dtype)
        given_BbXC, q_BbXC = _in_bands(given_BSHC, band_BbwC), _in_bands(q_BSHC, band_BbwC)
        scores_BSHw = at_least_fp32(_by_query(given_BbXC @ band_BbwC.mT, q_BSHC))
        scores_BSHw = scores_BSHw.sub_(delta_BSH.unsqueeze(-1)).mul_(near_BSHw)
        scores_BbXw, near_BbXw = (_in_bands(x.to(dtype), band_BbwC) for x in (scores_BSHw, near_BSHw))
        # Keys and values are the same rows.
        to_band_BbwC = _to_rows(near_BbXw, given_BbXC, scores_BbXw, q_BbXC)
        to_q_BSHC, to_chosen_BSKC = _by_query(scores_BbXw @ band_BbwC, q_BSHC), None
        if chosen_BSKC is not None:
            scores_BSHK = at_least_fp32(given_BSHC @ chosen_BSKC.mT).sub_(delta_BSH.unsqueeze(-1)).mul_(far_BSHK)
            scores_BSHK = scores_BSHK.to(dtype)
            to_chosen_BSKC = _to_rows(far_BSHK.to(dtype), given_BSHC, scores_BSHK, q_BSHC)
            to_q_BSHC = to_q_BSHC + scores_BSHK @ chosen_BSKC
        to_sink_H = -(sunk_BSH * delta_BSH).sum((0, 1)).to(sink.dtype)
        return to_q_BSHC * q_BSHC.shape[-1] ** -0.5, to_band_BbwC, None, to_chosen_BSKC, None, to_sink_H


def _to_rows(weights: Tensor, given: Tensor, scores: Tensor, q: Tensor) -> Tensor:
    """The gradient of rows that are values and keys; q is over ln 2. Shapes: [B,S,X,Y], [B,S,X,Z] -> [B,S,Y,Z]."""
    as_values = torch.bmm(weights.flatten(0, 1).mT, given.flatten(0, 1))
    return as_values.baddbmm_(scores.flatten(0, 1).mT, q.flatten(0, 1), alpha=LN_2).unflatten(0, weights.shape[:2])


def _in_bands(x_BSHX: Tensor, band_BbwC: Tensor) -> Tensor:
    """[B,S,H,X] to one matrix per band [B,b,(S/b)H,X]; zeros fill up the last band."""
    n_bands, n_queries = band_BbwC.shape[1], x_BSHX.shape[1]
    block = n_queries if n_bands == 1 else band_BbwC.shape[2] // 2
    spare = n_bands * block - n_queries
    x_BSHX = F.pad(x_BSHX, (0, 0, 0, 0, 0, spare)) if spare else x_BSHX
    return x_BSHX.unflatten(1, (n_bands, block)).flatten(2, 3)


def _by_query(x_BbXY: Tensor, q_BSHC: Tensor) -> Tensor:
    """The way back: [B,b,X,Y] -> [B,S,H,Y], without what filled up the last band."""
    n_batch, n_queries, n_heads = q_BSHC.shape[:3]
    return x_BbXY.reshape(n_batch, -1, n_heads, x_BbXY.shape[-1])[:, :n_queries]


def attention_mass(
    q: Tensor, near: Tensor, near_absent: Tensor, entries: Tensor, absent: Tensor, sink: Tensor
) -> tuple[Tensor, Tensor]:
    """The weights of `attend` with every entry on offer: the teacher of the indexer.

    Shapes: q [B,S,H,C], near [B,S,W,C] window rows of each query, entries [B,T,C], sink [H]; near_absent [B,S,W] and
        absent [B,S,T] are True where a query sees nothing -> [B,S,H,W], [B,S,H,T]; the sink takes the rest of 1.
    Source: spec 4.7, 12.
    """
    near_BSHW = at_least_fp32(q @ near.mT).masked_fill(near_absent.unsqueeze(2), -torch.inf)
    far_BSHT = at_least_fp32((q.flatten(1, 2) @ entries.mT).unflatten(1, q.shape[1:3]))
    far_BSHT = far_BSHT.masked_fill(absent.unsqueeze(2), -torch.inf)
    sink_BSH1 = at_least_fp32(sink)[:, None].expand(*q.shape[:3], 1)
    scores_BSHX = torch.cat([near_BSHW * q.shape[-1] ** -0.5, far_BSHT * q.shape[-1] ** -0.5, sink_BSH1], -1)
    near_BSHW, far_BSHT, _ = scores_BSHX.softmax(-1).split([near.shape[2], entries.shape[1], 1], -1)
    return near_BSHW, far_BSHT


@dataclass(frozen=True)
class Ops:
    """The functions a model runs on; a faster backend passes its own.

    The choice is an argument, never a global. For a handful of tokens on a CPU, without gradients, the plain functions
    compute with NumPy by themselves, to the same result up to rounding: `few_tokens.are_few` says when.
    """

    attend: Callable[..., Tensor] = attend
    score_and_select: Callable[..., tuple[Tensor, Tensor | None]] = score_and_select
    experts: Callable[..., Tensor] = experts
    hyper_coefficients: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]] = hyper_coefficients
    hyper_step: Callable[..., tuple[Any, ...]] = hyper_step

    @classmethod
    def plain(cls) -> Ops:
        return cls()

    @classmethod
    def grouped(cls) -> Ops:
        """Plain, but with grouped matrix products for the experts."""
        return cls(experts=experts_grouped)
