"""A drafter without weights: what followed the last time the text's latest tokens stood there."""

from __future__ import annotations

import operator

import numpy as np
import torch
from torch import Tensor

from tinyds41.infer.draft import Draft, Sampling
from tinyds41.infer.session import Session


class NGramDrafter:
    """Proposes what came after the longest earlier occurrence of the text's end, for any model.

    Of equally long occurrences the latest counts; ends of more than `longest` tokens are not told apart. A draft that
    reaches the end of the text goes on with its own first tokens: of "abab" with "abab". Where the last token is new,
    the token that the text has most often is proposed at all places, of equally frequent ones the lowest. So drafts
    are always of the depth that was asked for.

    Raises: ValueError for a depth or length below 1.
    """

    def __init__(self, depth: int = 5, longest: int = 16):
        self.depth, self.longest = operator.index(depth), operator.index(longest)
        if self.depth < 1 or self.longest < 1:
            raise ValueError(f"depth={depth}, longest={longest}: at least one token is needed")

    def propose(
        self, session: Session, anchors: Tensor, depth: int, sampling: Sampling, generators: list[torch.Generator]
    ) -> Draft:
        """See `Drafter.propose`; nothing is drawn."""
        texts = [np.append(np.asarray(text, dtype=np.int64), anchor)
                 for text, anchor in zip(session.cache.texts, anchors.tolist(), strict=True)]  # fmt: skip
        return Draft(torch.from_numpy(np.stack([self._continued(text, depth) for text in texts])))

    def _continued(self, text: np.ndarray, depth: int) -> np.ndarray:
        begin = self._behind_latest(text)
        if begin is None:
            return np.full(depth, np.bincount(text).argmax())
        known = text[begin : begin + depth]
        return np.resize(known, depth)  # repeats what is there

    def _behind_latest(self, text: np.ndarray) -> int | None:
        """Where the text goes on behind the longest earlier occurrence of its end."""
        last = len(text) - 1
        ends = np.flatnonzero(text[:last] == text[last])  # where occurrences of the last token end
        if not len(ends):
            return None
        for n in range(1, self.longest):
            longer = ends[ends >= n]
            longer = longer[text[longer - n] == text[last - n]]
            if not len(longer):
                break
            ends = longer
        return int(ends[-1]) + 1
