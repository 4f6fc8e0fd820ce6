"""The hot functions in plain PyTorch: the one place where attention and selection are computed fast.

A faster backend mirrors these signatures (`Ops`); `reference.py` is the slow definition that all are tested against.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tinyds41.formats import Rows
from tinyds41.mixing import at_least_fp32, hyper_coefficients, hyper_step

# Elements of one temporary array of scores; small enough to stay in a CPU's cache while it is reduced.
SCORE_ELEMENTS = 1 << 20
ATTEND_ELEMENTS = 1 << 20
# Values of gathered rows up to which layers share them (see `Selection.rows`).
SHARED = 1 << 22


# ---------------------------------------------------------------------------------------------- selection


def select_top(scores: Tensor, k: int) -> Tensor:
    """The k best by (score, lower index), ascending by index.

    -1 where fewer than k are above -inf.

    Shapes: scores [..., T] -> int64 [..., k].
    Source: spec 4.4. The only top-k of the project: bare `topk` breaks ties at random.
    """
    n_entries = scores.shape[-1]
    if n_entries <= k:
        index = torch.arange(n_entries, device=scores.device).expand(scores.shape)
        return F.pad(_ascending(index, scores), (0, k - n_entries), value=-1)
    best = scores.topk(k + 1, dim=-1)
    index = best.indices[..., :k]
    # A tie matters only across the border between the k-th and the next value.
    tied = (best.values[..., k - 1] == best.values[..., k]) & (best.values[..., k] > -torch.inf)
    if tied.any():
        index = index.clone()
        index[tied] = _lowest_of_ties(scores[tied], best.values[tied][..., k - 1 : k], k)
    return _ascending(index, scores.gather(-1, index))


def _lowest_of_ties(scores_nT: Tensor, border_n1: Tensor, k: int) -> Tensor:
    """Everything above the border, filled up with the lowest entries equal to it."""
    above_nT = scores_nT > border_n1
    equal_nT = scores_nT == border_n1
    room_n1 = k - above_nT.sum(-1, keepdim=True)
    keep_nT = above_nT | (equal_nT & (equal_nT.cumsum(-1) <= room_n1))
    return keep_nT.nonzero()[:, 1].view(-1, k)


def _ascending(index: Tensor, scores: Tensor) -> Tensor:
    """Sorts indices and moves those of -inf behind them as -1."""
    last = torch.iinfo(torch.int64).max
    index = index.masked_fill(scores == -torch.inf, last).sort(-1).values
    return index.masked_fill(index == last, -1)


def index_scores(q_BSIJ: Tensor, weight_BSI: Tensor, keys_BTJ: Tensor) -> Tensor:
    """score(p, j) = sum_i w_i I^-1/2 J^-1/2 relu(q_i . k_j).

    Shapes: -> [B,S,T]. Source: spec 4.4.
    """
    n_heads, width = q_BSIJ.shape[-2:]
    dots_BSIT = (q_BSIJ.flatten(1, 2) @ keys_BTJ.mT).unflatten(1, q_BSIJ.shape[1:3]).relu_()
    weight_BS1I = (at_least_fp32(weight_BSI) * (n_heads * width) ** -0.5).unsqueeze(2)
    return (weight_BS1I @ at_least_fp32(dots_BSIT)).squeeze(2)


@dataclass
class Selection:
    """What one index source chose for each query, and the rows it chose from.

    Shapes: index [B,S,K] entry numbers, ascending, -1 = none; pool [B,S,P] block numbers, -1 = none.
    """

    index: Tensor
    entries: Rows
    pool: Tensor | None = None
    _taken: Tensor | None = field(default=None, repr=False)

    def rows(self, chunk: int) -> Iterator[Tensor]:
        """The chosen rows [B,S,K,C], `chunk` queries at a time; where there is no choice (-1) any row stands.

        Rows that are few, or that gradients keep alive anyway, are gathered once and shared by the Reuse layers that
        follow; many would come back from memory more slowly than they are gathered again.
        """
        if self._taken is None and (torch.is_grad_enabled() or self.index.numel() * self.entries.shape[2] <= SHARED):
            self._taken = self._take(self.index)
        # split, not slices: the gradient of a slice is a whole array of zeros for each chunk.
        yield from map(self._take, self.index.split(chunk, 1)) if self._taken is None else self._taken.split(chunk, 1)

    def _take(self, index: Tensor) -> Tensor:
        # Whoever masks -1 anyway saves the blanking of these rows.
        return self.entries.take(index.clamp(min=0))

    def last(self, n: int) -> Selection:
        """The same for the last n queries."""
        pool = None if self.pool is None else self.pool[:, -n:]
        taken = None if self._taken is None else self._taken[:, -n:]
        return Selection(self.index[:, -n:], self.entries, pool, taken)


@torch.no_grad()
def score_and_select(
    q: Tensor, weight: Tensor, keys: Rows, first: Tensor, last: Tensor, k: int, *,
    block_size: int = 1, pool: Tensor | None = None, form_blocks: int = 0,
    count: Callable[[int], None] | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Scores the visible entries, or only those of the pool, and keeps the k best of each query.

    Shapes: q [B,S,I,J], weight [B,S,I], keys T rows of J, first and last [B,S]: entries first..last-1 are
        visible; pool [B,S,P] blocks of `block_size`. Returns index [B,S,min(k,T)] and, with `form_blocks`, the new
        pool [B,S,min(form_blocks, blocks)].
    Differs: queries go in chunks, so no [B,S,I,T] array exists for the whole sequence.
    Source: spec 4.4, 4.5.
    """
    n_entries = keys.shape[1]
    k = min(k, n_entries)
    n_blocks = min(form_blocks, -(-n_entries // block_size))
    if n_entries == 0:
        return first.new_empty(*first.shape, 0), first.new_empty(*first.shape, 0) if form_blocks else None
    per_query = q.shape[0] * (q.shape[2] * n_entries if pool is None else pool.shape[2] * block_size * q.shape[3])
    chunk = max(1, SCORE_ELEMENTS // max(1, per_query))
    picks, pools = [], []
    for start in range(0, q.shape[1], chunk):
        part = slice(start, start + chunk)
        if pool is not None:
            index_BSP = _pool_entries(pool[:, part], last[:, part], block_size)
            scores = _pooled_scores(q[:, part], weight[:, part], keys, index_BSP)
            column = select_top(scores, k)
            picks.append(torch.where(column < 0, -1, index_BSP.gather(-1, column.clamp(min=0))))
        else:
            scores = _visible_scores(q[:, part], weight[:, part], keys, first[:, part], last[:, part])
            picks.append(select_top(scores, k))
        if count is not None:
            count(scores.numel())
        if form_blocks:
            pools.append(pool_blocks(scores, last[:, part], n_blocks, block_size))
    return torch.cat(picks, 1), torch.cat(pools, 1) if form_blocks else None


def _visible_scores(q_BSIJ: Tensor, weight_BSI: Tensor, keys: Rows, first_BS: Tensor, last_BS: Tensor) -> Tensor:
    """Scores of all entries that any of these queries sees; -inf where a query does not see one."""
    seen, everyone = max(1, int(last_BS.max())), int(last_BS.min())
    scores_BST = index_scores(q_BSIJ, weight_BSI, keys.narrow(0, seen).all())
    column = torch.arange(seen, device=scores_BST.device)
    # Entries that every query has behind it need no mask: of a long context that is nearly all.
    scores_BST[..., everyone:].masked_fill_(column[everyone:] >= last_BS.unsqueeze(-1), -torch.inf)
    if bool(first_BS.any()):
        scores_BST.masked_fill_(column < first_BS.unsqueeze(-1), -torch.inf)
    return scores_BST


def _pool_entries(pool_BSP: Tensor, last_BS: Tensor, block_size: int) -> Tensor:
    """Blocks to the visible entries inside them, -1 for the others.

    Shapes: [B,S,P] -> [B,S,P*block_size].

    A pool holds blocks of the query's own document, so only the newest block can reach beyond what is visible.
    """
    offset = torch.arange(block_size, device=pool_BSP.device)
    entries_BSPX = pool_BSP.unsqueeze(-1) * block_size + offset
    absent_BSPX = (pool_BSP.unsqueeze(-1) < 0) | (entries_BSPX >= last_BS[..., None, None])
    return entries_BSPX.masked_fill_(absent_BSPX, -1).flatten(-2)


def _pooled_scores(q_BSIJ: Tensor, weight_BSI: Tensor, keys: Rows, index_BSP: Tensor) -> Tensor:
    """The same scores, computed for the listed entries alone; -inf where none is listed."""
    keys_BSPJ = keys.take(index_BSP.clamp(min=0))  # masked below
    scores_BSP = index_scores(
        q_BSIJ.flatten(0, 1).unsqueeze(1), weight_BSI.flatten(0, 1).unsqueeze(1), keys_BSPJ.flatten(0, 1))
    return scores_BSP.view(index_BSP.shape).masked_fill_(index_BSP < 0, -torch.inf)


def pool_blocks(scores_BST: Tensor, last_BS: Tensor, n_blocks: int, block_size: int) -> Tensor:
    """The best blocks by their best visible entry.

    The newest visible block is always among them.

    Shapes: scores [B,S,T] with -inf where invisible -> block numbers [B,S,n_blocks], -1 = none. Source: spec 4.5.
    """
    padding = -scores_BST.shape[-1] % block_size
    blocks_BSG = F.pad(scores_BST, (0, padding), value=-torch.inf).unflatten(-1, (-1, block_size)).amax(-1)
    newest_BS1 = ((last_BS - 1).clamp(min=0) // block_size).unsqueeze(-1)
    # A query that sees nothing has no newest block: its -inf must not become +inf.
    kept_BS1 = torch.where(blocks_BSG.gather(-1, newest_BS1) > -torch.inf, torch.inf, -torch.inf)
    return select_top(blocks_BSG.scatter(-1, newest_BS1, kept_BS1.to(blocks_BSG.dtype)), n_blocks)


# ---------------------------------------------------------------------------------------------- attention


@dataclass
class Window:
    """The rows around each query: the last S rows belong to the S queries, in order.

    Shapes: rows P+S rows of C; first [B,S] first row each query may see (it also sees all up to its own).
    """

    rows: Rows
    first: Tensor
    size: int  # W, an upper bound of what a query sees


def attend(q: Tensor, window: Window, selection: Selection | None, sink: Tensor) -> Tensor:
    """o_h = sum_i e^{s_i} v_i / (e^{sink_h} + sum_i e^{s_i}) over window and selected rows.

    Keys and values are the same rows, K = V.

    Shapes: q [B,S,H,C], sink [H] -> [B,S,H,C]; a query with nothing to see gives zeros. Source: spec 4.7.
    """
    n_chosen = 0 if selection is None else selection.index.shape[-1]
    selection = selection if n_chosen else None  # a store without entries has nothing to choose
    per_query = q.shape[0] * q.shape[2] * (2 * window.size + n_chosen)
    # Whole windows per chunk, because the bands below are cut in windows.
    chunk = max(1, ATTEND_ELEMENTS // per_query // window.size) * window.size
    rows_BTC, n_queries = window.rows.all(), q.shape[1]
    past, outputs, start = rows_BTC.shape[1] - n_queries, [], 0
    parts_chosen = itertools.repeat(None) if selection is None else selection.rows(chunk)
    for q_BSHC, chosen_BSKC in zip(q.split(chunk, 1), parts_chosen, strict=False):
        stop = start + q_BSHC.shape[1]
        begin = max(0, past + start - window.size + 1)
        first_BS = window.first[:, start:stop] - begin
        band_BbwC, hidden_BSw = _bands(rows_BTC[:, begin : past + stop], first_BS, window.size)
        absent_BSK = None if selection is None else selection.index[:, start:stop] < 0
        outputs.append(_attend_chunk(q_BSHC, band_BbwC, hidden_BSw, chosen_BSKC, absent_BSK, sink))
        start = stop
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)


def _bands(rows_BTC: Tensor, first_BS: Tensor, size: int) -> tuple[Tensor, Tensor]:
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
    hidden_BSw = (row_Sw < first_BS.unsqueeze(-1)) | (row_Sw > (past + query).unsqueeze(-1))
    return band_BbwC, hidden_BSw


def _attend_chunk(q_BSHC, band_BbwC, hidden_BSw, chosen_BSKC, absent_BSK, sink) -> Tensor:
    """The sums of `attend` for some queries, window and selection side by side.

    Nothing is copied into one array.
    """
    n_queries, width = q_BSHC.shape[1], q_BSHC.shape[-1]
    n_bands = band_BbwC.shape[1]
    block = n_queries if n_bands == 1 else band_BbwC.shape[2] // 2
    spare = n_bands * block - n_queries  # the last block may be partly empty
    # s_i = q_h . v_i / sqrt(C), with the root taken from the few queries instead of the many scores
    q_BSHC = q_BSHC * width**-0.5
    q_BSHC = F.pad(q_BSHC, (0, 0, 0, 0, 0, spare)) if spare else q_BSHC
    hidden_BSw = F.pad(hidden_BSw, (0, 0, 0, spare), value=True) if spare else hidden_BSw
    q_BbXC = q_BSHC.unflatten(1, (n_bands, block)).flatten(2, 3)
    near_BbXw = at_least_fp32(q_BbXC @ band_BbwC.mT)
    # masked_fill, not its in-place form: writing into a view makes autograd copy the whole array.
    near_BSHw = near_BbXw.view(*q_BSHC.shape[:3], -1).masked_fill(hidden_BSw.unsqueeze(2), -torch.inf)
    sink_H, q_BSHC = at_least_fp32(sink), q_BSHC[:, :n_queries] if spare else q_BSHC
    far_BSHK = None
    if chosen_BSKC is not None:
        far_BSHK = at_least_fp32(q_BSHC @ chosen_BSKC.mT).masked_fill_(absent_BSK.unsqueeze(2), -torch.inf)

    # o_h = sum_i e^{s_i} v_i / (e^{sink_h} + sum_i e^{s_i}); the largest exponent cancels and carries no gradient.
    with torch.no_grad():
        largest_BSH1 = torch.maximum(near_BSHw.amax(-1), sink_H).unsqueeze(-1)
        if far_BSHK is not None:
            largest_BSH1[:, :n_queries] = torch.maximum(largest_BSH1[:, :n_queries], far_BSHK.amax(-1, keepdim=True))
    near_BSHw = near_BSHw.sub_(largest_BSH1).exp_()
    out_BbXC = near_BSHw.view(near_BbXw.shape).to(band_BbwC.dtype) @ band_BbwC
    out_BSHC, total_BSH1 = at_least_fp32(out_BbXC.view(*near_BSHw.shape[:3], width)), near_BSHw.sum(-1, keepdim=True)
    if spare:
        out_BSHC, total_BSH1, largest_BSH1 = (x[:, :n_queries] for x in (out_BSHC, total_BSH1, largest_BSH1))
    total_BSH1 = total_BSH1 + (sink_H.unsqueeze(-1) - largest_BSH1).exp()
    if chosen_BSKC is not None and far_BSHK is not None:
        far_BSHK = far_BSHK.sub_(largest_BSH1).exp_()
        total_BSH1 = total_BSH1 + far_BSHK.sum(-1, keepdim=True)
        out_BSHC = out_BSHC + at_least_fp32(far_BSHK.to(chosen_BSKC.dtype) @ chosen_BSKC)
    return (out_BSHC / total_BSH1).to(q_BSHC.dtype)


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


# ---------------------------------------------------------------------------------------------- experts


def experts(x: Tensor, index: Tensor, weight: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, limit: float) -> Tensor:
    """sum_a weight_a expert_{index_a}(x).

    Tokens sorted by expert, one matrix product per expert and matrix.

    Shapes: x [n,D], index and weight [n,A], w1 and w3 [E,F,D], w2 [E,D,F] -> [n,D] in at least fp32. Source: spec 8.
    """
    n_active = index.shape[1]
    order = index.flatten().argsort(stable=True)
    token = order // n_active
    counts = torch.bincount(index.flatten(), minlength=w1.shape[0]).tolist()
    sorted_nD = x.index_select(0, token)
    outputs = [
        swiglu(part, w1[e], w2[e], w3[e], limit) for e, part in enumerate(sorted_nD.split(counts)) if part.shape[0]
    ]
    weighted_nD = at_least_fp32(torch.cat(outputs)) * weight.flatten()[order].unsqueeze(-1)
    # Back to token order, then a sum over the A experts of a token: no atomics, the same sum on every run.
    back = torch.empty_like(order).index_put_((order,), torch.arange(order.shape[0], device=order.device))
    return weighted_nD.index_select(0, back).unflatten(0, (-1, n_active)).sum(1)


def swiglu(x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, limit: float) -> Tensor:
    """w2( silu(min(w1 x, c)) * clamp(w3 x, -c, c) ), c = swiglu_limit. Source: spec 2."""
    gate = at_least_fp32(F.linear(x, w1)).clamp(max=limit)
    up = at_least_fp32(F.linear(x, w3)).clamp(-limit, limit)
    return F.linear((F.silu(gate) * up).to(x.dtype), w2)


@dataclass(frozen=True)
class Ops:
    """The functions a model runs on; a faster backend passes its own.

    The choice is an argument, never a global.
    """

    attend: Callable[..., Tensor] = attend
    score_and_select: Callable[..., tuple[Tensor, Tensor | None]] = score_and_select
    experts: Callable[..., Tensor] = experts
    hyper_coefficients: Callable[..., tuple[Tensor, Tensor, Tensor]] = hyper_coefficients
    hyper_step: Callable[..., tuple[Any, ...]] = hyper_step

    @classmethod
    def plain(cls) -> Ops:
        return cls()
