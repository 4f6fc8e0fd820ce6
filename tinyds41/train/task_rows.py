"""What made-up tasks are built from: rows of fillers to write on, words by number, and checks of their sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tinyds41.train.corpus import Batch
from tinyds41.train.losses import IGNORED

N_SPECIAL = 4  # ids that a tokenizer would need, never drawn here


class KeyedWords:
    """The words of a task that asks for what a row told: keys, values and fillers, in this order.

    A task has the fields n_keys, n_values and n_fillers: their order among its own is that in which records name them.
    """

    n_keys: int
    n_values: int
    n_fillers: int

    @property
    def first_key(self) -> int:
        return N_SPECIAL

    @property
    def first_value(self) -> int:
        return self.first_key + self.n_keys

    @property
    def first_filler(self) -> int:
        return self.first_value + self.n_values

    @property
    def vocab_size(self) -> int:
        return self.first_filler + self.n_fillers


def blank_rows(
    task: Any, step: int, batch_size: int, length: int, seed: int
) -> tuple[np.random.Generator, np.ndarray, np.ndarray]:  # fmt: skip
    """A generator that depends on (seed, step) alone, rows of the task's fillers, and nothing wanted.

    Shapes: ids [B,S+1], wanted [B,S], both int64.
    """
    generator = np.random.default_rng([seed, step])
    ids = task.first_filler + generator.integers(0, task.n_fillers, (batch_size, length + 1))
    return generator, ids, np.full((batch_size, length), IGNORED)


def as_batch(ids: np.ndarray, wanted: np.ndarray) -> Batch:
    """Rows that are written. Shapes: ids [B,S+1], wanted [B,S]."""
    return Batch(torch.from_numpy(ids), None, torch.from_numpy(wanted))


def check_counts(task: Any, *names: str) -> None:
    """Raises: ValueError naming a field that is no whole number of at least 1."""
    for name in names:
        value = getattr(task, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name}={value!r}: a whole number of at least 1 is needed")


def check_length(length: int, shortest: int, what: str) -> None:
    """Raises: ValueError naming a length that cannot hold `what`, and the shortest that does."""
    if length < shortest:
        raise ValueError(f"length={length} is too short for {what}: at least {shortest} are needed")
