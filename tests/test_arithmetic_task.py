"""Arithmetic: an answer is a sum that stands nowhere, of a number told far back and one in the question."""

from __future__ import annotations

import pytest

from tinyds41.train.arithmetic_task import Arithmetic
from tinyds41.train.losses import IGNORED

TASK = Arithmetic(n_names=5, n_numbers=6, n_rules=3, n_questions=4, n_fillers=3)


def asked(batch) -> list[tuple[list[int], int, int]]:
    return [(row, place, value) for row, target in zip(batch.ids.tolist(), batch.wanted.tolist(), strict=True)
            for place, value in enumerate(target) if value != IGNORED]  # fmt: skip


def solve(row: list[int], place: int) -> int:
    """The first time a name stands, its shift stands behind: wanted at a name, and at the number behind it added."""
    if row[place] < TASK.first_shift:
        return row[row.index(row[place]) + 1]
    return row[place] + solve(row, place - 1) - TASK.first_shift


def test_a_plain_reader_of_the_row_answers_everything():
    questions = asked(TASK.batch(3, 50, 30, seed=1))
    assert len(questions) == 50 * 8
    assert all(solve(row, place) == value for row, place, value in questions)
    assert {place for _, place, _ in questions} == set(range(22, 30))


def test_rules_are_told_once_at_even_places():
    for row in TASK.batch(0, 50, 30).ids.tolist():
        names = [(place, token) for place, token in enumerate(row[:22]) if token < TASK.first_shift]
        assert len(names) == len({token for _, token in names}) == 3 and all(place % 2 == 0 for place, _ in names)
        assert all(TASK.first_shift <= row[place + 1] < TASK.first_number for place, _ in names)
        assert {row[place] for place in range(22, 30, 2)} <= {token for _, token in names}


def test_sums_are_numbers_of_their_own():
    """The largest, 5 + 5, is the last number; then come the fillers."""
    ids, _, wanted = TASK.batch(0, 200, 30)
    assert wanted.max() == TASK.first_number + 10 == TASK.first_filler - 1
    assert ids[:, 23:30:2].max() == TASK.first_number + 5 and ids.max() == TASK.vocab_size - 1


def test_the_end_of_a_row_says_nothing():
    """Questions and the eight tokens before them, without rules: each name and number has every answer, evenly."""
    counts: dict[tuple[int, ...], set[tuple[int, int]]] = {}
    for i, row in enumerate(TASK.batch(0, 2000, 60).ids.tolist()):
        if not any(token < TASK.first_shift for token in row[44:52]):
            for place in range(52, 60):  # a row that asks twice counts once
                said = (row[place],) if row[place] < TASK.first_shift else (row[place - 1], row[place])
                counts.setdefault(said, set()).add((i, solve(row, place)))
    assert len(counts) == 5 + 5 * 6
    for found in counts.values():
        values = [value for _, value in found]
        # A sixth each, give or take 5 deviations.
        assert max(values.count(v) for v in set(values)) / len(values) < 1 / 6 + 5 * (5 / 36 / len(values)) ** 0.5


def test_sizes_and_lengths_that_make_no_task_are_refused():
    for sizes, message in (({"n_numbers": 0}, "n_numbers=0"), ({"n_questions": -1}, "n_questions=-1"),
                           ({"n_rules": 17}, "n_rules=17 exceeds n_names=16")):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            Arithmetic(**sizes)
    assert len(asked(TASK.batch(0, 1, 14))) == 8
    with pytest.raises(ValueError, match=r"length=13 is too short for 3 rules and 4 questions .* at least 14"):
        TASK.batch(0, 1, 13)
