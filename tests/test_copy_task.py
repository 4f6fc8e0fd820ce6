"""Copying: the copy is the string, which stands once, anywhere before the mark."""

from __future__ import annotations

import pytest

from tinyds41.train.copy_task import Copying
from tinyds41.train.losses import IGNORED

TASK = Copying(n_letters=7, n_copied=5, n_fillers=3)


def letters(row: list[int]) -> list[int]:
    return [token for token in row if TASK.first_letter <= token < TASK.first_filler]


def test_a_plain_reader_of_the_row_writes_the_copy():
    ids, _, wanted = TASK.batch(3, 50, 30, seed=1)
    for row, target in zip(ids.tolist(), wanted.tolist(), strict=True):
        mark = row.index(TASK.mark)
        string = letters(row[:mark])
        assert mark == 25 and len(string) == len(set(string)) == 5
        assert target == [IGNORED] * 25 + string == [IGNORED] * 25 + row[26:]
        start = row.index(string[0])
        assert row[start : start + 5] == string


def test_a_reader_of_the_last_tokens_does_not():
    """Rows whose string ends more than 8 tokens before the mark: what letters are left says nothing of their order."""
    ids, _, wanted = TASK.batch(0, 300, 30)
    first = {}
    for row, target in zip(ids.tolist(), wanted.tolist(), strict=True):
        if not letters(row[25 - 8 : 25]):
            first[target[25]] = first.get(target[25], 0) + 1
    assert len(first) == 7 and sum(first.values()) > 100
    # Each letter a seventh, give or take 5 deviations.
    n = sum(first.values())
    assert max(first.values()) / n < 1 / 7 + 5 * (6 / 49 / n) ** 0.5


def test_strings_stand_everywhere():
    starts = {row.index(letters(row)[0]) for row in TASK.batch(0, 400, 16).ids.tolist()}
    assert starts == set(range(16 - 5 - 5 + 1))


def test_sizes_and_lengths_that_make_no_task_are_refused():
    for sizes, message in (({"n_copied": 0}, "n_copied=0"), ({"n_letters": True}, "n_letters=True"),
                           ({"n_copied": 17}, "n_copied=17 exceeds n_letters=16")):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            Copying(**sizes)
    assert letters(TASK.batch(0, 1, 10).ids[0].tolist()[:5]) == TASK.batch(0, 1, 10).wanted[0, 5:].tolist()
    with pytest.raises(ValueError, match="length=9 is too short for 5 letters, a mark and a copy: at least 10"):
        TASK.batch(0, 1, 9)
