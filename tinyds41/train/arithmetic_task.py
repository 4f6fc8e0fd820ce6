"""Arithmetic patterns: a rule told once, applied to numbers at the end of the row."""

from __future__ import annotations

from dataclasses import dataclass

from tinyds41.train.corpus import Batch
from tinyds41.train.task_rows import N_SPECIAL, as_batch, blank_rows, check_counts, check_length


@dataclass(frozen=True, kw_only=True)
class Arithmetic:
    """Rules "add so much" among fillers, then questions: what does this rule make of this number?

    A rule is a name and a shift, side by side at an even position. A question is a name and a number: at its name the
    rule's shift is wanted, at its number the sum of both. So one answer needs fetching, the other
    adding to what was fetched; the sum stands nowhere, and a name has another shift in every row.

    Shifts are words of their own, or questions would look like rules. Both steps are asked, and sums are not taken
    modulo anything: without the one or the other tiny models learned no sum, see docs/LOG.md.

    n_numbers: shifts and numbers are 0 to n_numbers - 1.
    Shapes: ids are special 0..3, then names, shifts, numbers with their sums, and fillers.
    """

    n_names: int = 16
    n_numbers: int = 6
    n_rules: int = 2
    n_questions: int = 8
    n_fillers: int = 16

    def __post_init__(self) -> None:
        check_counts(self, "n_names", "n_numbers", "n_rules", "n_questions", "n_fillers")
        if self.n_rules > self.n_names:
            raise ValueError(f"n_rules={self.n_rules} exceeds n_names={self.n_names}: a name has one rule per row")

    @property
    def first_name(self) -> int:
        return N_SPECIAL

    @property
    def first_shift(self) -> int:
        return self.first_name + self.n_names

    @property
    def first_number(self) -> int:
        return self.first_shift + self.n_numbers

    @property
    def first_filler(self) -> int:
        return self.first_number + 2 * self.n_numbers - 1  # sums too

    @property
    def vocab_size(self) -> int:
        return self.first_filler + self.n_fillers

    @property
    def shortest(self) -> int:
        """Tokens of a row without fillers."""
        return 2 * (self.n_rules + self.n_questions)

    def batch(self, step: int, batch_size: int, length: int, seed: int = 0) -> Batch:
        """Rows that depend on (seed, step) alone. Raises: ValueError for a length that cannot hold everything."""
        what = f"{self.n_rules} rules and {self.n_questions} questions of 2 tokens each"
        check_length(length, self.shortest, what)
        generator, ids, wanted = blank_rows(self, step, batch_size, length, seed)
        body = length - 2 * self.n_questions
        for row in range(batch_size):
            names = self.first_name + generator.choice(self.n_names, self.n_rules, replace=False)
            added = generator.integers(0, self.n_numbers, self.n_rules)
            places = 2 * generator.choice(body // 2, self.n_rules, replace=False)
            ids[row, places], ids[row, places + 1] = names, self.first_shift + added
            which = generator.integers(0, self.n_rules, self.n_questions)
            numbers = generator.integers(0, self.n_numbers, self.n_questions)
            ids[row, body:length:2], ids[row, body + 1 : length : 2] = names[which], self.first_number + numbers
            wanted[row, body:length:2] = self.first_shift + added[which]
            wanted[row, body + 1 : length : 2] = self.first_number + numbers + added[which]
        return as_batch(ids, wanted)
