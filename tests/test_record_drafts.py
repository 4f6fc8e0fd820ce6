"""Drafts along a text: as generate would draw them, judged by the acceptance rule, the text untouched by them."""

from __future__ import annotations

import pytest
import torch
from models import random_ids, scattered

from tinyds41.infer.draft import Sampling
from tinyds41.infer.dspark_drafter import DSparkDrafter
from tinyds41.infer.record_drafts import record_drafts
from tinyds41.infer.session import Session


@pytest.fixture(scope="module")
def model():
    return scattered(draft=True)


def test_places_and_rows_of_the_drafts(model):
    found = record_drafts(model, random_ids(2, 30), start=8, every=6)
    assert found.positions.tolist() == [8, 8, 14, 14, 20, 20] and found.passages.tolist() == [0, 1] * 3
    assert found.tokens.shape == found.logits.shape == found.chances.shape == (6, 5)
    assert found.logits.dtype == found.chances.dtype == torch.float64


@pytest.mark.parametrize("sampling", [Sampling(1.0), Sampling(0.7, top_k=9), Sampling(0.0)])
def test_each_draft_is_that_of_its_text_alone(model, sampling):
    """A session that has read nothing but the text up to the anchor gives the same logits and chances."""
    rows = random_ids(1, 24)
    found = record_drafts(model, rows, start=7, every=5, sampling=sampling, seed=3)
    generator = torch.Generator().manual_seed(3)
    for i, place in enumerate(found.positions.tolist()):
        session = Session(model, rollback=5)
        session.prefill(rows[:, :place], mode="full")
        draft = DSparkDrafter(model).propose(session, rows[:, place], 5, sampling, [generator])
        assert torch.equal(draft.tokens[0], found.tokens[i])
        assert draft.confidence is not None
        assert torch.allclose(torch.sigmoid(found.logits[i]), draft.confidence[0], atol=1e-12)
        text = torch.cat([rows[:, : place + 1], draft.tokens], 1)
        p = sampling.chances(model(text)[0, place : place + 5])
        q = torch.ones(5) if draft.chances is None else draft.chances[0].gather(1, draft.tokens.T).squeeze(1)
        expected = (p.gather(1, draft.tokens.T).squeeze(1) / q).clamp(max=1)
        assert torch.allclose(expected, found.chances[i], atol=1e-9)
        torch.rand(5, generator=generator, dtype=torch.float64)  # what judged it


def test_what_stood_is_drawn_by_the_chances(model):
    found = record_drafts(model, random_ids(40, 40), start=8, every=3)
    expected = found.chances.cumprod(-1).sum(-1)
    spread = (found.accepted - expected).double()
    assert abs(float(spread.mean())) < 4 * float(spread.std()) / len(spread) ** 0.5
    impossible = found.chances[:, 0] == 0
    assert not found.accepted[impossible].any()


@pytest.mark.parametrize(("options", "message"), [
    ({"start": 0, "every": 1}, "start=0, every=1"), ({"start": 1, "every": 0}, "every=0"),
    ({"start": 15, "every": 1}, r"rows of 20 tokens: a draft of 5 behind the token start=15 needs 21"),
])  # fmt: skip
def test_numbers_out_of_range_are_refused(model, options, message):
    with pytest.raises(ValueError, match=message):
        record_drafts(model, random_ids(1, 20), **options)


def test_a_model_without_a_drafter_is_refused():
    with pytest.raises(ValueError, match="has no drafter"):
        record_drafts(scattered(), random_ids(1, 20), start=2, every=2)
