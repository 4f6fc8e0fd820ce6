"""The interpolated Kneser-Ney trigram: what counting short runs of tokens reaches on the same text."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tinyds41.train.corpus import Corpus

ORDERS = (1, 2, 3)


class Trigram:
    """Shares of the next token after two others, from the counts of a text.

    A run of n tokens is discounted by D = n1 / (n1 + 2 n2), with n1 and n2 the runs seen once and twice (by 0.5 where
    none was seen once), and what that leaves goes to runs of n - 1 tokens. Those are counted by how many different
    tokens stand before them, not by how often they occur. Below single tokens all of the vocabulary share alike.

    Source: Kneser and Ney 1995; interpolated and with these discounts as in Chen and Goodman 1999, section 2.8.
    Raises: ValueError for an id outside the vocabulary, and for a text in which no document has three tokens.
    """

    def __init__(self, corpus: Corpus, vocab_size: int):
        self.vocab_size = vocab_size
        ids = _whole(corpus.ids)
        if ids.min(initial=0) < 0 or ids.max(initial=0) >= vocab_size:
            raise ValueError(f"ids {ids.min()} to {ids.max()} do not fit vocab_size={vocab_size}")
        borders = np.zeros_like(ids) if corpus.documents is None else _whole(corpus.documents)
        runs = self._runs(ids, borders, 3)
        if not len(runs):
            raise ValueError(f"none of the {len(ids)} tokens has two others of its document before it")
        self._orders: dict[int, _Counts] = {}
        for order in reversed(ORDERS):
            self._orders[order] = _Counts(*np.unique(runs, return_counts=True), vocab_size)
            runs = self._orders[order].keys % vocab_size ** (order - 1)  # each longer run counts once

    def _runs(self, ids: np.ndarray, borders: np.ndarray, order: int) -> np.ndarray:
        """Every run of `order` tokens inside one document, as one number."""
        end = len(ids) - order + 1
        if end < 1:
            return np.empty(0, np.int64)
        keys = np.zeros(end, np.int64)
        for i in range(order):
            keys = keys * self.vocab_size + ids[i : i + end]
        return keys[borders[:end] == borders[order - 1 :]]

    def log_shares(self, ids: Tensor, documents: Tensor | None = None) -> Tensor:
        """log share of each token but the first of a row, given those before it in the row, two at most.

        Shapes: ids, documents int64 [B,S+1] -> float64 [B,S]. A token after another document's is judged by what its
            own document has before it in the row.
        """
        ids_BS = ids.numpy()
        known_BS = np.zeros_like(ids_BS)  # tokens of its document before each, two at most
        borders = np.zeros_like(ids_BS) if documents is None else documents.numpy()
        for back in (1, 2):
            known_BS[:, back:] += borders[:, back:] == borders[:, :-back]
        before = np.pad(ids_BS, ((0, 0), (2, 0)))
        context_BS = np.where(known_BS > 1, before[:, :-2], 0) * self.vocab_size + np.where(
            known_BS > 0, before[:, 1:-1], 0)  # fmt: skip
        share_BS = np.full(ids_BS.shape, 1 / self.vocab_size)
        for order in ORDERS:
            context = context_BS % self.vocab_size ** (order - 1)
            longer = self._orders[order].shares(context, ids_BS, share_BS)
            share_BS = np.where(known_BS >= order - 1, longer, share_BS)
        return torch.from_numpy(np.log(share_BS[:, 1:]))


class _Counts:
    """The runs of one length: their counts, and what is known of the tokens before their last."""

    def __init__(self, keys: np.ndarray, counts: np.ndarray, vocab_size: int):
        self.keys, self.counts, self.vocab_size = keys, counts, vocab_size
        once, twice = int((counts == 1).sum()), int((counts == 2).sum())
        self.discount = once / (once + 2 * twice) if once else 0.5
        self.contexts, place = np.unique(keys // vocab_size, return_inverse=True)
        self.totals = np.bincount(place, weights=counts)
        self.kinds = np.bincount(place)  # different tokens after each context

    def shares(self, context: np.ndarray, ids: np.ndarray, shorter: np.ndarray) -> np.ndarray:
        """Of tokens after their contexts; `shorter` where the context was never seen."""
        count = _looked_up(self.keys, self.counts, context * self.vocab_size + ids)
        total = _looked_up(self.contexts, self.totals, context)
        kinds = _looked_up(self.contexts, self.kinds, context)
        seen = np.maximum(total, 1)
        own = (np.maximum(count - self.discount, 0) + self.discount * kinds * shorter) / seen
        return np.where(total > 0, own, shorter)


def _looked_up(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The value of each wanted key, 0 for keys that are not there; `keys` ascend."""
    place = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[place] == wanted, values[place], 0)


def _whole(row) -> np.ndarray:
    return row[:].numpy().astype(np.int64)
