"""A drafter without weights: what followed when the text last ended like this."""

from __future__ import annotations

import torch
from torch import Tensor

from tinyds41.infer.draft import Draft, Sampling
from tinyds41.infer.session import Session


class NGramDrafter:
    """Copies what followed the latest earlier place that ends with the same tokens, the longest such ending first.

    A draft has always `depth` tokens: where the copy reaches the text's end it goes on with its own beginning, and
    where no ending was there before, the last token is repeated. Each token is certain, whatever the sampling.

    longest: tokens of the longest ending that is looked for.
    Raises: ValueError for a depth or an ending below 1.
    """

    def __init__(self, depth: int = 5, longest: int = 4):
        if depth < 1 or longest < 1:
            raise ValueError(f"depth={depth}, longest={longest}: at least 1 is needed")
        self.depth, self.longest = depth, longest

    def propose(
        self, session: Session, anchors: Tensor, depth: int, sampling: Sampling, generators: list[torch.Generator]
    ) -> Draft:
        """See `Drafter.propose`."""
        rows = [self._row([*text, anchor], depth)
                for text, anchor in zip(session.cache.texts, anchors.tolist(), strict=True)]  # fmt: skip
        return Draft(torch.tensor(rows, device=anchors.device))

    def _row(self, text: list[int], depth: int) -> list[int]:
        for n in range(min(self.longest, len(text) - 1), 0, -1):
            ending = text[-n:]
            for end in range(len(text) - 1, n - 1, -1):
                if text[end - n : end] == ending:
                    copy = text[end : end + depth]
                    return [copy[i % len(copy)] for i in range(depth)]
        return [text[-1]] * depth
