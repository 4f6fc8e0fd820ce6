"""The n-gram drafter against a definition in plain Python."""

from __future__ import annotations

import random
from array import array
from types import SimpleNamespace

import pytest
import torch
from models import random_ids, scattered
from sessions import SHORT, fed_session

from tinyds41.infer.draft import Sampling
from tinyds41.infer.ngram_drafter import NGramDrafter


def proposed(texts: list[list[int]], depth: int, **options) -> list[list[int]]:
    """Drafts behind texts whose last token is the anchor."""
    session = SimpleNamespace(cache=SimpleNamespace(texts=[array("i", text[:-1]) for text in texts]))
    anchors = torch.tensor([text[-1] for text in texts])
    draft = NGramDrafter(9, **options).propose(session, anchors, depth, Sampling(), [])
    assert draft.chances is None and draft.tokens.shape == (len(texts), depth)
    return draft.tokens.tolist()


def defined(text: list[int], depth: int, longest: int) -> list[int]:
    """The longest end that stood there before, its latest place, and what came then, token by token."""
    for n in range(min(longest, len(text) - 1), 0, -1):
        for end in range(len(text) - 1, n - 1, -1):
            if text[end - n : end] == text[-n:]:
                grown = list(text)
                for _ in range(depth):
                    grown.append(grown[end])
                    end += 1
                return grown[len(text) :]
    return [min(set(text), key=lambda token: (-text.count(token), token))] * depth


@pytest.mark.parametrize("longest", [1, 2, 3, 16])
def test_drafts_are_those_of_the_definition(longest):
    """Texts of 1 to 40 tokens out of 2 to 6, so that ends are found once, often and never."""
    drawn = random.Random(longest)
    texts = [[drawn.randrange(4, 6 + n % 5) for _ in range(1 + n % 40)] for n in range(200)]
    for depth in (1, 3, 9):
        assert proposed(texts, depth, longest=longest) == [defined(text, depth, longest) for text in texts]


@pytest.mark.parametrize(("text", "draft"), [
    ([7], [7, 7, 7]), ([7, 8], [7, 7, 7]), ([8, 9, 9, 7], [9, 9, 9]),  # nothing to go by: the most frequent
    ([5, 6, 5, 6], [5, 6, 5]), ([9, 5, 6, 7, 9], [5, 6, 7]),
    ([1, 5, 8, 2, 5, 9, 1, 5], [8, 2, 5]),  # "1 5" is longer than the later "5"
    ([5, 8, 5, 9, 5], [9, 5, 9]),  # the later of two
])  # fmt: skip
def test_drafts_by_hand(text, draft):
    assert proposed([text], 3) == [draft]


def test_the_session_is_as_before():
    session = fed_session(scattered(SHORT), random_ids(2, 9))
    before = session.fingerprint()
    draft = NGramDrafter(4).propose(session, torch.tensor([5, 6]), 4, Sampling(), [])
    assert draft.tokens.shape == (2, 4) and session.fingerprint() == before


def test_a_long_text_of_one_token_takes_no_longer_than_its_ends():
    """16 comparisons of the whole text at most, not one per token."""
    assert proposed([[5] * 100_000], 5) == [[5] * 5]


@pytest.mark.parametrize("options", [{"depth": 0}, {"longest": 0}])
def test_drafts_and_ends_have_a_token(options):
    with pytest.raises(ValueError, match="at least one token is needed"):
        NGramDrafter(**options)
    with pytest.raises(TypeError):
        NGramDrafter(**dict.fromkeys(options, 1.5))
