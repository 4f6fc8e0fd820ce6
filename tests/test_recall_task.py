"""Associative recall: each answer was told before its question, near or far, and stands nowhere else."""

from __future__ import annotations

import pytest

from tinyds41.train.losses import IGNORED
from tinyds41.train.recall_task import AssociativeRecall

TASK = AssociativeRecall(n_keys=6, n_values=5, n_pairs=4)


def solve(row: list[int], place: int, window: int | None = None) -> int | None:
    """Looks back for the key beside a value, over the last tokens only if a window is given."""
    for at in range(place - 1, max(0, 0 if window is None else place - window + 1) - 1, -1):
        if row[at] == row[place] and row[at + 1] >= TASK.first_value:
            return row[at + 1]
    return None


def asked(batch) -> list[tuple[list[int], int, int]]:
    return [(row, place, value) for row, target in zip(batch.ids.tolist(), batch.wanted.tolist(), strict=True)
            for place, value in enumerate(target) if value != IGNORED]  # fmt: skip


def test_a_plain_reader_of_the_row_answers_everything():
    questions = asked(TASK.batch(3, 50, 40, seed=1))
    assert len(questions) == 50 * 16
    assert all(solve(row, place) == value for row, place, value in questions)
    assert all(row[place - 1] == TASK.mark and place % 2 for row, place, _ in questions)


def test_a_reader_of_the_last_tokens_does_not():
    """Ten tokens are five slots. Of what was told before, a key says nothing: over the rows its values are even."""
    questions = asked(TASK.batch(0, 200, 40))
    right = [solve(row, place, window=10) == value for row, place, value in questions]
    assert 0.2 < sum(right) / len(right) < 0.6
    far = {(tuple(row), row[place], value)
           for (row, place, value), near in zip(questions, right, strict=True) if not near}  # fmt: skip
    assert len({(key, value) for _, key, value in far}) == 6 * 5
    for key in range(TASK.first_key, TASK.first_value):
        values = [value for _, k, value in far if k == key]
        # Each value a fifth, give or take 5 deviations.
        assert max(values.count(value) for value in set(values)) / len(values) < 0.2 + 5 * (0.16 / len(values)) ** 0.5


def test_a_row_tells_each_pair_once():
    ids, _, wanted = TASK.batch(0, 30, 41)
    assert (ids[:, 0] != TASK.mark).all() and (ids[:, 40] == TASK.mark).all()
    for row, target in zip(ids.tolist(), wanted.tolist(), strict=True):
        told = [row[i] for i in range(0, 40, 2) if row[i] != TASK.mark]
        assert len(told) == len(set(told)) == 4
        assert all(row[i + 1] >= TASK.first_value for i in range(0, 40, 2) if row[i] != TASK.mark)
        assert sum(value != IGNORED for value in target) == 16


def test_every_told_pair_can_be_asked():
    """Also the pair told last before the question, and the first of all."""
    back = set()
    for row, place, _ in asked(TASK.batch(0, 100, 40)):
        told = [row[i] for i in range(0, place - 1, 2) if row[i] != TASK.mark]
        back.add((len(told), told.index(row[place])))
    assert back == {(n, i) for n in range(1, 5) for i in range(n)}


def test_sizes_and_lengths_that_make_no_task_are_refused():
    for sizes, message in (({"n_pairs": 0}, "n_pairs=0"), ({"n_keys": 2.5}, r"n_keys=2\.5"),
                           ({"n_pairs": 17}, "n_pairs=17 exceeds n_keys=16")):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            AssociativeRecall(**sizes)
    assert len(asked(TASK.batch(0, 1, 10))) == 1
    with pytest.raises(ValueError, match=r"length=9 is too short for 4 pairs and a question .* at least 10"):
        TASK.batch(0, 1, 9)
