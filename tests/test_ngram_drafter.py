"""The drafter that copies: the longest ending, the latest place, always as many tokens as asked for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tinyds41.infer.draft import Sampling
from tinyds41.infer.ngram_drafter import NGramDrafter


def proposed(text: list[int], depth: int, longest: int = 4) -> list[int]:
    session = SimpleNamespace(cache=SimpleNamespace(texts=[text[:-1]]))
    draft = NGramDrafter(depth, longest).propose(session, torch.tensor(text[-1:]), depth, Sampling(), [])  # type: ignore[arg-type]
    assert draft.chances is None and draft.tokens.shape == (1, depth)
    return draft.tokens[0].tolist()


@pytest.mark.parametrize(("text", "depth", "expected"), [
    ([1, 2, 3, 9, 1, 2], 2, [3, 9]),
    ([5, 2, 7, 1, 2, 8, 5, 2, 4, 1, 2], 1, [8]),  # the longer ending wins over the later place
    ([3, 4, 3, 5, 3], 1, [5]),  # of equal endings the latest
    ([1, 2, 1, 2], 4, [1, 2, 1, 2]),  # goes on with its own beginning
    ([1, 2, 3], 3, [3, 3, 3]),  # never seen: the last token
    ([7], 2, [7, 7]),
])  # fmt: skip
def test_the_continuation_of_the_longest_latest_ending(text, depth, expected):
    assert proposed(text, depth) == expected


def test_the_longest_ending_has_a_limit():
    text = [1, 2, 3, 9, 2, 3, 8, 1, 2, 3]
    assert proposed(text, 1, longest=3) == [9]
    assert proposed(text, 1, longest=2) == [8]


@pytest.mark.parametrize("numbers", [{"depth": 0}, {"longest": 0}])
def test_a_depth_below_one_is_refused(numbers):
    with pytest.raises(ValueError, match="at least 1"):
        NGramDrafter(**numbers)
