"""Index scores and the choice they lead to: the k best entries, the pool, and the rows behind them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tinyds41 import few_index, few_tokens
from tinyds41.few_tokens import are_few
from tinyds41.formats import Rows
from tinyds41.mixing import at_least_fp32

# Elements of one temporary array of scores; small enough to stay in a CPU's cache while it is reduced.
SCORE_ELEMENTS = 1 << 20
# Values of gathered rows up to which layers share them (see `Selection.rows`).
SHARED = 1 << 22


@torch.no_grad()
def select_top(scores: Tensor, k: int) -> Tensor:
    """The k best by (score, lower index), ascending by index.

    -1 where fewer than k are above -inf.

    Shapes: scores [..., T] -> int64 [..., k].
    Source: spec 4.4. The only top-k of the project: bare `topk` breaks ties at random.
    """
    n_entries = scores.shape[-1]
    if 0 < n_entries <= few_tokens.FEW_SCORES and are_few(scores.shape[:-1].numel(), scores):
        return few_tokens.select_top(scores, k)
    if n_entries <= k:
        index = torch.arange(n_entries, device=scores.device).expand(scores.shape)
        return F.pad(_ascending(index, scores), (0, k - n_entries), value=-1)
    if scores.dtype in (torch.float32, torch.float64) and few_tokens.numpy_may_compute(scores):
        chosen = _chosen_by_partition(few_tokens.array(scores).reshape(-1, n_entries), k)
        if chosen is not None:
            return torch.from_numpy(chosen).view(*scores.shape[:-1], k)
    best = scores.topk(k + 1, dim=-1)
    index = best.indices[..., :k]
    # A tie matters only across the border between the k-th and the next value.
    tied = (best.values[..., k - 1] == best.values[..., k]) & (best.values[..., k] > -torch.inf)
    if tied.any():
        index = index.clone()
        index[tied] = _lowest_of_ties(scores[tied], best.values[tied][..., k - 1 : k], k)
    return _ascending(index, scores.gather(-1, index))


def _chosen_by_partition(scores_nT: np.ndarray, k: int) -> np.ndarray | None:
    """The same for k < T with NumPy, whose partition takes a sixth of the time of `topk`; None where a score is NaN.

    Shapes: -> [n,k].
    """
    n_rows, n_entries = scores_nT.shape
    best_nk = np.partition(scores_nT, -k, axis=-1)[:, -k:]
    if np.isnan(best_nk).any():
        return None
    border_n1 = best_nk[:, :1]
    keep_nT = scores_nT >= border_n1
    if np.count_nonzero(keep_nT) > n_rows * k:
        tied_n = np.count_nonzero(keep_nT, axis=-1) > k
        above_mT = scores_nT[tied_n] > border_n1[tied_n]
        equal_mT = keep_nT[tied_n] & ~above_mT
        room_m1 = k - np.count_nonzero(above_mT, axis=-1)[:, None]
        keep_nT[tied_n] = above_mT | (equal_mT & (equal_mT.cumsum(-1) <= room_m1))
    index_nk = np.flatnonzero(keep_nT).reshape(n_rows, k) - np.arange(n_rows)[:, None] * n_entries
    short_n = border_n1[:, 0] == -np.inf
    if short_n.any():  # those of -inf behind the others, as -1
        index_mk = index_nk[short_n]
        index_mk[np.take_along_axis(scores_nT[short_n], index_mk, -1) == -np.inf] = few_tokens.NONE
        index_mk.sort(-1)
        index_nk[short_n] = np.where(index_mk == few_tokens.NONE, -1, index_mk)
    return index_nk


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


def split(x: Tensor, chunk: int) -> tuple[Tensor, ...]:
    """x in chunks of queries; a single one is x itself, whose gradient is not copied. Shapes: [B,S,...].

    Not slices: the gradient of a slice is a whole array of zeros for each chunk.
    """
    return (x,) if x.shape[1] <= chunk else x.split(chunk, 1)


@dataclass
class Selection:
    """What one index source chose for each query, and the rows it chose from.

    Shapes: index [B,S,K] entry numbers, ascending, -1 = none; pool [B,S,P] block numbers, -1 = none.
    """

    index: Tensor
    entries: Rows
    pool: Tensor | None = None
    _taken: Tensor | None = field(default=None, repr=False)

    def rows(self, chunk: int, count: Callable[[int], None] | None = None) -> Iterator[Tensor]:
        """The chosen rows [B,S,K,C], `chunk` queries at a time; where there is no choice (-1) any row stands.

        Rows that are few, or that gradients keep alive anyway, are gathered once and shared by the Reuse layers that
        follow; many would come back from memory more slowly than they are gathered again.
        """
        if self._taken is None and (torch.is_grad_enabled() or self.index.numel() * self.entries.shape[2] <= SHARED):
            self._taken = self._take(self.index, count)
        if self._taken is None:
            yield from (self._take(part, count) for part in split(self.index, chunk))
        else:
            yield from split(self._taken, chunk)

    def _take(self, index: Tensor, count: Callable[[int], None] | None) -> Tensor:
        if count is not None:
            count(index.numel())
        # Whoever masks -1 anyway saves the blanking of these rows.
        return self.entries.take(index.clamp(min=0))

    def join(self, later: Selection) -> Selection:
        """The choices of these queries and of the ones behind them, which saw a longer store."""
        pool = None if self.pool is None or later.pool is None else _rows_below(self.pool, later.pool)
        return Selection(_rows_below(self.index, later.index), later.entries, pool)

    def last(self, n: int) -> Selection:
        """The same for the last n queries."""
        pool = None if self.pool is None else self.pool[:, -n:]
        taken = None if self._taken is None else self._taken[:, -n:]
        return Selection(self.index[:, -n:], self.entries, pool, taken)


def _rows_below(first_BSK: Tensor, later_BSK: Tensor) -> Tensor:
    """Both along the queries; the narrower one is filled up with -1, none."""
    width = max(first_BSK.shape[-1], later_BSK.shape[-1])
    return torch.cat([F.pad(x, (0, width - x.shape[-1]), value=-1) for x in (first_BSK, later_BSK)], 1)


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
    if q.shape[:2] == (1, 1) and are_few(1, q):
        return few_index.score_and_select(
            q, weight, keys, int(first), int(last), k, block_size=block_size, pool=pool, form_blocks=n_blocks,
            count=count)  # fmt: skip
    per_query = q.shape[0] * (q.shape[2] * n_entries if pool is None else pool.shape[2] * block_size * q.shape[3])
    chunk = max(1, SCORE_ELEMENTS // max(1, per_query))
    picks, pools = [], []
    # Packed keys are decoded once, not once per chunk of queries.
    keys_BTJ = None if pool is not None else keys.narrow(0, max(1, int(last.max()))).all()
    for start in range(0, q.shape[1], chunk):
        part = slice(start, start + chunk)
        if pool is not None:
            index_BSP = _pool_entries(pool[:, part], last[:, part], block_size)
            scores = _pooled_scores(q[:, part], weight[:, part], keys, index_BSP)
            column = select_top(scores, k)
            picks.append(torch.where(column < 0, -1, index_BSP.gather(-1, column.clamp(min=0))))
        else:
            assert keys_BTJ is not None
            scores = _visible_scores(q[:, part], weight[:, part], keys_BTJ, first[:, part], last[:, part])
            picks.append(select_top(scores, k))
        if count is not None:
            count(scores.numel())
        if form_blocks:
            pools.append(pool_blocks(scores, last[:, part], n_blocks, block_size))
    return torch.cat(picks, 1), torch.cat(pools, 1) if form_blocks else None


def _visible_scores(
    q_BSIJ: Tensor, weight_BSI: Tensor, keys_BTJ: Tensor, first_BS: Tensor, last_BS: Tensor
) -> Tensor:
    """Scores of all entries that any of these queries sees; -inf where a query does not see one."""
    seen, everyone = max(1, int(last_BS.max())), int(last_BS.min())
    scores_BST = index_scores(q_BSIJ, weight_BSI, keys_BTJ[:, :seen])
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
