"""Dialogues: facts told in one turn and asked for in a later one, with the text saved and resumed in between."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tinyds41.train.corpus import Batch
from tinyds41.train.task_rows import N_SPECIAL, KeyedWords, as_batch, blank_rows, check_counts, check_length


@dataclass(frozen=True, kw_only=True)
class Dialogue(KeyedWords):
    """Turns that each tell new facts among fillers and then ask for facts of earlier turns.

    All is slots of two tokens: the mark of a turn twice, which begins it; a key and its value; the mark of a question
    and a key, at which the value is wanted; two fillers. A turn ends with its questions, so the answer to the last is
    what comes next; the first turn asks nothing. Turns end where `ends` says, alike in all rows: there a session can
    be saved, dropped and resumed. A key has another value in every row.

    Shapes: ids are special 0..3, two marks, keys, values and fillers.
    """

    n_keys: int = 16
    n_values: int = 16
    n_turns: int = 4
    n_told: int = 2
    n_asked: int = 2
    n_fillers: int = 16

    def __post_init__(self) -> None:
        check_counts(self, "n_keys", "n_values", "n_turns", "n_told", "n_asked", "n_fillers")
        if self.n_turns < 2:
            raise ValueError(f"n_turns={self.n_turns}: at least 2 are needed, one to tell and one to ask")
        if self.n_turns * self.n_told > self.n_keys:
            raise ValueError(f"n_turns={self.n_turns} of n_told={self.n_told} facts exceed n_keys={self.n_keys}: "
                             "a key is told once per row")  # fmt: skip

    @property
    def turn_mark(self) -> int:
        return N_SPECIAL

    @property
    def question_mark(self) -> int:
        return self.turn_mark + 1

    @property
    def first_key(self) -> int:
        return self.question_mark + 1

    @property
    def shortest(self) -> int:
        """Tokens of a row without a filler."""
        return 2 * self.n_turns * (1 + self.n_told + self.n_asked)

    def ends(self, length: int) -> tuple[int, ...]:
        """Where each turn of a row ends: `ids[:, :end]` is the text up to there.

        All turns have the same even number of tokens; what is left of `length` comes behind the last, as fillers.
        Raises: ValueError for a length that cannot hold all turns.
        """
        what = f"{self.n_turns} turns of {self.n_told} facts and {self.n_asked} questions"
        check_length(length, self.shortest, what)
        turn = length // (2 * self.n_turns) * 2
        return tuple(turn * (i + 1) for i in range(self.n_turns))

    def batch(self, step: int, batch_size: int, length: int, seed: int = 0) -> Batch:
        """Rows that depend on (seed, step) alone. Raises: as `ends`."""
        ends = np.array(self.ends(length))
        generator, ids, wanted = blank_rows(self, step, batch_size, length, seed)
        free = ends[0] // 2 - 1 - self.n_asked  # slots of a turn for facts and fillers
        for row in range(batch_size):
            keys = self.first_key + generator.choice(self.n_keys, self.n_turns * self.n_told, replace=False)
            values = self.first_value + generator.integers(0, self.n_values, len(keys))
            for turn, start in enumerate(ends - ends[0]):
                ids[row, start : start + 2] = self.turn_mark
                told = start + 2 + 2 * generator.choice(free, self.n_told, replace=False)
                mine = slice(turn * self.n_told, (turn + 1) * self.n_told)
                ids[row, told], ids[row, told + 1] = keys[mine], values[mine]
                if turn:
                    asked = start + ends[0] - 2 * np.arange(self.n_asked, 0, -1)
                    which = generator.integers(0, turn * self.n_told, self.n_asked)
                    ids[row, asked], ids[row, asked + 1] = self.question_mark, keys[which]
                    wanted[row, asked + 1] = values[which]
        return as_batch(ids, wanted)

    def turns_back(self, ids: Tensor) -> Tensor:
        """Turns from a fact to its question; 0 where nothing is asked. Shapes: [B,S] to int64 [B,S]."""
        turn = (ids == self.turn_mark).long().cumsum(-1) // 2
        asked = torch.zeros_like(ids, dtype=torch.bool)
        asked[:, 1:] = ids[:, :-1] == self.question_mark
        told_at = (ids.unsqueeze(1) == ids.unsqueeze(-1)).int().argmax(-1)  # of equal ids the first
        return torch.where(asked, turn - turn.gather(1, told_at), 0)
