"""Every window once per epoch, in an order that depends on seed and epoch alone."""

from __future__ import annotations

import itertools

import pytest
import torch

from tinyds41.train.corpus import Corpus
from tinyds41.train.epochs import Epochs, shuffled


def corpus(tokens: int) -> Corpus:
    return Corpus(torch.arange(tokens, dtype=torch.int32), torch.arange(tokens, dtype=torch.int32) // 7)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 16, 17, 100, 257, 1000])
def test_places_have_each_number_once(n):
    for key in ([0, 0], [0, 1], [3, 0]):
        assert sorted(shuffled(place, n, key) for place in range(n)) == list(range(n))


def test_the_order_is_shuffled():
    """Of 1,000 places few keep their number or their neighbour; the mean distance of neighbours is near n / 3."""
    order = [shuffled(place, 1000, [1, 2]) for place in range(1000)]
    steps = [abs(a - b) for a, b in itertools.pairwise(order)]
    assert sum(place == number for place, number in enumerate(order)) < 10
    assert steps.count(1) < 10 and 300 < sum(steps) / len(steps) < 367  # 5 deviations of a true shuffle: 333 +- 40
    other = [shuffled(place, 1000, [1, 3]) for place in range(1000)]
    assert sum(a == b for a, b in zip(order, other, strict=True)) < 10


def test_places_of_a_huge_text_are_computed():
    assert len({shuffled(place, 10**15, [0, 0]) for place in range(100)}) == 100


def test_each_window_comes_once_per_epoch():
    """101 tokens are 11 windows of 9 and their target; batches of 4 run over the border of epochs."""
    epochs = Epochs(corpus(101))
    assert epochs.n_windows(9) == 11
    starts = [row for step in range(11) for row in epochs.batch(step, 4, 9, seed=5).ids[:, 0].tolist()]
    for epoch in range(4):
        assert sorted(starts[11 * epoch : 11 * epoch + 11]) == list(range(0, 99, 9))
    assert starts[:11] != starts[11:22]
    ids, documents, wanted = epochs.batch(0, 4, 9)
    assert torch.equal(ids, ids[:, :1] + torch.arange(10)) and torch.equal(documents, ids // 7) and wanted is None


def test_batches_depend_on_seed_and_step_alone():
    whole = [Epochs(corpus(500)).batch(step, 4, 8, seed=1).ids for step in range(5)]
    assert torch.equal(Epochs(corpus(500)).batch(3, 4, 8, seed=1).ids, whole[3])
    assert not torch.equal(Epochs(corpus(500)).batch(3, 4, 8, seed=2).ids, whole[3])


def test_a_text_too_short_is_refused():
    with pytest.raises(ValueError, match="a text of 9 tokens is too short for a sequence of length 9"):
        Epochs(corpus(9)).batch(0, 2, 9)
