"""Drafters for the tests: they know the text and err where they are told to, or draw from chances of their own."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tinyds41.infer.draft import Draft, Sampling
from tinyds41.infer.session import Session

WRONG = {"all right": lambda depth: depth, "last wrong": lambda depth: depth - 1, "all wrong": lambda depth: 0}


class Scripted:
    """Knows how each text goes on; only the first `right(number of the text)` tokens of a draft are as there."""

    def __init__(self, texts: Sequence[Sequence[int]], depth: int, right: Callable[[int], int]):
        self.texts, self.depth, self.right = [list(text) for text in texts], depth, right
        self.asked: list[int] = []

    def propose(
        self, session: Session, anchors: Tensor, depth: int, sampling: Sampling, generators: list[torch.Generator]
    ) -> Draft:
        self.asked.append(depth)
        drafts = [self._row([*text, anchor], depth)
                  for text, anchor in zip(session.cache.texts, anchors.tolist(), strict=True)]  # fmt: skip
        return Draft(torch.tensor(drafts))

    def _row(self, read: list[int], depth: int) -> list[int]:
        number = next(i for i, text in enumerate(self.texts) if text[: len(read)] == read)
        known = self.texts[number][len(read) :][:depth]
        right = min(self.right(number), len(known))
        wrong = [4 if token != 4 else 5 for token in known[right:]]
        return [*known[:right], *wrong, *[4] * (depth - len(known))]


def mixed(depth: int, seed: int = 0) -> Callable[[int], int]:
    """By turns of texts: all right, last wrong, all wrong, random."""
    drawn = random.Random(seed)
    return lambda number: (depth, depth - 1, 0, drawn.randint(0, depth))[number % 4]


class Guessing:
    """Draws from the same chances at every place, each row from its own generator."""

    def __init__(self, chances: Tensor, depth: int):
        self.chances, self.depth = chances, depth

    def propose(
        self, session: Session, anchors: Tensor, depth: int, sampling: Sampling, generators: list[torch.Generator]
    ) -> Draft:
        tokens = [self.chances.multinomial(depth, replacement=True, generator=generator) for generator in generators]
        return Draft(torch.stack(tokens), self.chances.expand(len(anchors), depth, -1))


class Certain:
    """The same tokens for every row."""

    def __init__(self, tokens: list[int]):
        self.tokens, self.depth = torch.tensor(tokens), len(tokens)

    def propose(
        self, session: Session, anchors: Tensor, depth: int, sampling: Sampling, generators: list[torch.Generator]
    ) -> Draft:
        return Draft(self.tokens[:depth].expand(len(anchors), -1))


class Given:
    """This draft whatever is asked, also one that cannot be."""

    def __init__(self, draft: Draft, depth: int = 3):
        self.draft, self.depth = draft, depth

    def propose(self, *_: object) -> Draft:
        return self.draft
