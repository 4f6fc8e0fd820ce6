"""What tasks are built from: blank rows, words by number, checks that name what is wrong."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from tinyds41.train.losses import IGNORED
from tinyds41.train.task_rows import KeyedWords, as_batch, blank_rows, check_counts, check_length


def test_words_lie_side_by_side_behind_the_special_ones():
    words = KeyedWords()
    words.n_keys, words.n_values, words.n_fillers = 3, 5, 7
    assert (words.first_key, words.first_value, words.first_filler, words.vocab_size) == (4, 7, 12, 19)


def test_blank_rows_hold_every_filler_and_ask_nothing():
    generator, ids, wanted = blank_rows(SimpleNamespace(first_filler=12, n_fillers=7), 3, 20, 9, 1)
    assert set(ids.flatten().tolist()) == set(range(12, 19)) and ids.shape == (20, 10)
    assert wanted.shape == (20, 9) and (wanted == IGNORED).all()
    assert not np.array_equal(generator.integers(0, 7, (20, 10)), ids - 12)  # it goes on behind the fillers
    batch = as_batch(ids, wanted)
    assert batch.ids.tolist() == ids.tolist() and batch.documents is None and batch.wanted.tolist() == wanted.tolist()


@pytest.mark.parametrize("value", [0, -1, True, 1.0, "1", None])
def test_sizes_are_whole_numbers_of_at_least_one(value):
    check_counts(SimpleNamespace(a=1, b=99), "a", "b")
    with pytest.raises(ValueError, match=f"b={value!r}: a whole number of at least 1 is needed"):
        check_counts(SimpleNamespace(a=1, b=value), "a", "b")


def test_a_length_is_at_least_the_shortest():
    check_length(9, 9, "three words")
    with pytest.raises(ValueError, match="length=8 is too short for three words: at least 9 are needed"):
        check_length(8, 9, "three words")
