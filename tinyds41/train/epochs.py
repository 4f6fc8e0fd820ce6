"""A corpus in which each window comes once per epoch, in a shuffled order that is computed and never held."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tinyds41.train.corpus import Batch, Corpus

ROUNDS = 4  # of a Feistel network: with four, neighbours come out unrelated
ODD = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, odd: multiplying by it spreads low bits upwards
WORD = 2**64 - 1


@dataclass(frozen=True)
class Epochs:
    """Batches of neighbouring windows, which share no target; trained on like the corpus itself.

    A text of T tokens has (T - 1) // length windows. Each is drawn once per epoch; every epoch has another order, and
    a batch may end one and begin the next. Order and place depend on (seed, step) alone, and nothing grows with the
    text: the window at a place is computed, also of a file larger than memory.
    """

    corpus: Corpus

    def batch(self, step: int, batch_size: int, length: int, seed: int = 0) -> Batch:
        """Windows step * batch_size and following of the order. Raises: ValueError as `Corpus.require`."""
        n_windows = self.n_windows(length)
        drawn = (divmod(step * batch_size + row, n_windows) for row in range(batch_size))
        starts = [length * shuffled(place, n_windows, [seed, epoch]) for epoch, place in drawn]
        return self.corpus.windows(starts, length)

    def n_windows(self, length: int) -> int:
        """Windows of an epoch; `n_windows(length) / batch_size` steps are one."""
        self.corpus.require(length)
        return (len(self.corpus) - 1) // length


def shuffled(place: int, n: int, key: list[int]) -> int:
    """The number at a place of 0..n-1 shuffled by `key`; places 0..n-1 have each number once.

    A Feistel network permutes the next power of four; a number outside goes round again until one is inside.
    """
    half = (max(n - 1, 1).bit_length() + 1) // 2
    mask = 2**half - 1
    secrets = np.random.default_rng(key).integers(0, WORD, ROUNDS, dtype=np.uint64).tolist()
    while True:
        left, right = place >> half, place & mask
        for secret in secrets:
            left, right = right, left ^ (_mixed(right ^ secret) & mask)
        place = left << half | right
        if place < n:
            return place


def _mixed(number: int) -> int:
    number = number * ODD & WORD
    return (number ^ number >> 32) * ODD >> 32 & WORD
