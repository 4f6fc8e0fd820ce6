"""The indexer's scores and choice for one query, as in decode, with NumPy: nothing as long as the context is held."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from tinyds41.few_tokens import array
from tinyds41.formats import Rows

STEP = 4096  # keys that are decoded and scored at a time: 1 MiB in fp32 at 64 channels
HELD = 1 << 15  # candidates that wait for a choice


def score_and_select(
    q: Tensor, weight: Tensor, keys: Rows, first: int, last: int, k: int, *, block_size: int,
    pool: Tensor | None, form_blocks: int, count: Callable[[int], None] | None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """`selection.score_and_select` of one query. Shapes: q [1,1,I,J], weight [1,1,I] -> [1,1,k], [1,1,form_blocks]."""
    query, by = array(q[0, 0]), array(weight[0, 0]) * (q.shape[2] * q.shape[3]) ** -0.5
    if pool is not None:
        entries = (array(pool[0, 0])[:, None] * block_size + np.arange(block_size)).ravel()
        scores = _scores(query, by, keys.take(torch.from_numpy(np.clip(entries, 0, last - 1))[None, None])[0, 0])
        # A block that is none has negative entries; the newest one may reach beyond what is visible.
        scores[(entries < 0) | (entries >= last)] = -np.inf
        if count is not None:
            count(scores.size)
        return _padded(entries[_best(scores, k)], k), None
    picks, blocks = _Candidates(k), _Candidates(form_blocks)
    step = STEP // block_size * block_size or block_size
    for start in range(0, last, step):
        length = min(step, last - start)
        scores = _scores(query, by, keys.narrow(start, length).all()[0])
        if start < first:
            scores[: first - start] = -np.inf
        if count is not None:
            count(scores.size)
        picks.add(scores, start)
        if form_blocks:
            filled = np.pad(scores, (0, -length % block_size), constant_values=-np.inf)
            best = filled.reshape(-1, block_size).max(-1)
            if start + length == last and best[-1] > -np.inf:
                best[-1] = np.inf  # the newest visible block is always among them
            blocks.add(best, start // block_size)
    return _padded(picks.best(), k), _padded(blocks.best(), form_blocks) if form_blocks else None


def _scores(query: np.ndarray, by: np.ndarray, keys: Tensor) -> np.ndarray:
    """sum_i w_i relu(q_i . k_j). Shapes: [I,J], [I], [T,J] -> [T]."""
    dots_IT = array(torch.from_numpy(query) @ keys.mT)
    return np.einsum("i,it->t", by, np.maximum(dots_IT, 0, out=dots_IT))


class _Candidates:
    """The k best so far by (score, lower index); waits for many before it chooses."""

    def __init__(self, k: int):
        self.k, self.waiting = k, 0
        self.scores: list[np.ndarray] = []
        self.index: list[np.ndarray] = []

    def add(self, scores: np.ndarray, start: int) -> None:
        self.scores.append(scores)
        self.index.append(np.arange(start, start + scores.size))
        self.waiting += scores.size
        if self.waiting > HELD:
            self._choose()

    def _choose(self) -> None:
        scores, index = np.concatenate(self.scores), np.concatenate(self.index)
        chosen = _best(scores, self.k)
        self.scores, self.index, self.waiting = [scores[chosen]], [index[chosen]], 0

    def best(self) -> np.ndarray:
        """Indices, ascending."""
        if not self.scores:
            return np.empty(0, dtype=np.int64)
        self._choose()
        return self.index[0]


def _best(scores: np.ndarray, k: int) -> np.ndarray:
    """Places of the k best above -inf, of equal ones the lower; ascending."""
    if scores.size <= k:
        return np.flatnonzero(scores > -np.inf)
    border = np.partition(scores, scores.size - k)[scores.size - k]
    if border == -np.inf:
        return np.flatnonzero(scores > -np.inf)
    above = np.flatnonzero(scores > border)
    chosen = np.concatenate([above, np.flatnonzero(scores == border)[: k - above.size]])
    chosen.sort()
    return chosen


def _padded(index: np.ndarray, k: int) -> Tensor:
    out = np.full((1, 1, k), -1, dtype=np.int64)
    out[0, 0, : index.size] = index
    return torch.from_numpy(out)
