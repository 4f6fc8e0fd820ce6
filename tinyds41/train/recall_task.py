"""Associative recall: pairs and questions in one stream, each question anywhere behind its pair."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tinyds41.train.corpus import Batch
from tinyds41.train.losses import IGNORED
from tinyds41.train.task_rows import N_SPECIAL, as_batch, check_counts, check_length


@dataclass(frozen=True, kw_only=True)
class AssociativeRecall:
    """Pairs of key and value, and questions about those told so far, slot by slot, with no filler between them.

    A slot is two tokens at an even position: a key and its value, or the mark of a question and a key. At the key of a
    question its value is wanted. A row tells `n_pairs` pairs, the first at once, the others anywhere; all other slots
    ask for any pair told before, so the same row asks near and far. A key has another value in every row.

    Shapes: ids are special 0..3, the mark, keys and values.
    """

    n_keys: int = 16
    n_values: int = 16
    n_pairs: int = 6

    def __post_init__(self) -> None:
        check_counts(self, "n_keys", "n_values", "n_pairs")
        if self.n_pairs > self.n_keys:
            raise ValueError(f"n_pairs={self.n_pairs} exceeds n_keys={self.n_keys}: a key is told once per row")

    @property
    def mark(self) -> int:
        return N_SPECIAL

    @property
    def first_key(self) -> int:
        return self.mark + 1

    @property
    def first_value(self) -> int:
        return self.first_key + self.n_keys

    @property
    def vocab_size(self) -> int:
        return self.first_value + self.n_values

    @property
    def shortest(self) -> int:
        """Tokens of a row with one question."""
        return 2 * (self.n_pairs + 1)

    def batch(self, step: int, batch_size: int, length: int, seed: int = 0) -> Batch:
        """Rows that depend on (seed, step) alone. Raises: ValueError for a length without room for a question."""
        check_length(length, self.shortest, f"{self.n_pairs} pairs and a question of 2 tokens each")
        generator = np.random.default_rng([seed, step])
        slots = np.arange(length // 2)
        ids = np.full((batch_size, length + 1), self.mark)
        wanted = np.full((batch_size, length), IGNORED)
        for row in range(batch_size):
            keys = self.first_key + generator.choice(self.n_keys, self.n_pairs, replace=False)
            values = self.first_value + generator.integers(0, self.n_values, self.n_pairs)
            told = np.sort(np.append(0, 1 + generator.choice(len(slots) - 1, self.n_pairs - 1, replace=False)))
            asked = np.setdiff1d(slots, told)
            which = generator.integers(0, np.searchsorted(told, asked))  # any of those told before
            ids[row, 2 * told], ids[row, 2 * told + 1] = keys, values
            ids[row, 2 * asked + 1], wanted[row, 2 * asked + 1] = keys[which], values[which]
        return as_batch(ids, wanted)
