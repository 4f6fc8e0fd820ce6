"""Copying: a string of letters, fillers, and the string once more."""

from __future__ import annotations

from dataclasses import dataclass

from tinyds41.train.corpus import Batch
from tinyds41.train.task_rows import N_SPECIAL, as_batch, blank_rows, check_counts, check_length


@dataclass(frozen=True, kw_only=True)
class Copying:
    """A string stands somewhere among fillers; behind the mark, at the row's end, it is to be written again.

    At the mark the first letter is wanted, at each letter of the copy the next one. A letter stands once in a string,
    so what followed it is one letter; which one, only the row tells.

    Shapes: ids are special 0..3, the mark, letters and fillers.
    """

    n_letters: int = 16
    n_copied: int = 8
    n_fillers: int = 16

    def __post_init__(self) -> None:
        check_counts(self, "n_letters", "n_copied", "n_fillers")
        if self.n_copied > self.n_letters:
            raise ValueError(f"n_copied={self.n_copied} exceeds n_letters={self.n_letters}: a letter stands once")

    @property
    def mark(self) -> int:
        return N_SPECIAL

    @property
    def first_letter(self) -> int:
        return self.mark + 1

    @property
    def first_filler(self) -> int:
        return self.first_letter + self.n_letters

    @property
    def vocab_size(self) -> int:
        return self.first_filler + self.n_fillers

    @property
    def shortest(self) -> int:
        """Tokens of a row without fillers. The last letter of the copy is a target only."""
        return 2 * self.n_copied

    def batch(self, step: int, batch_size: int, length: int, seed: int = 0) -> Batch:
        """Rows that depend on (seed, step) alone. Raises: ValueError for a length that cannot hold both strings."""
        check_length(length, self.shortest, f"{self.n_copied} letters, a mark and a copy")
        generator, ids, wanted = blank_rows(self, step, batch_size, length, seed)
        mark = length - self.n_copied
        ids[:, mark] = self.mark
        for row in range(batch_size):
            string = self.first_letter + generator.choice(self.n_letters, self.n_copied, replace=False)
            start = generator.integers(0, mark - self.n_copied + 1)
            ids[row, start : start + self.n_copied] = ids[row, mark + 1 :] = wanted[row, mark:] = string
        return as_batch(ids, wanted)
