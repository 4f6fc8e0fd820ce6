"""Answers are counted where something is asked, on rows of a step that training never reaches."""

from __future__ import annotations

import pytest
import torch
from models import clear_choice

from tinyds41.model.transformer import Model
from tinyds41.train.losses import IGNORED
from tinyds41.train.recall_task import AssociativeRecall
from tinyds41.train.task_score import Score, score
from tinyds41.train.tasks import TEST_STEP, needle_config

TASK = AssociativeRecall(n_keys=5, n_values=4, n_pairs=3)


def test_answers_are_judged_by_the_likeliest_token():
    model = Model(needle_config(TASK), seed=0)
    said = TASK.first_value + 2
    model.logits = lambda carry: torch.eye(TASK.vocab_size)[said].expand(*carry.collapsed.shape[:2], -1)
    found = score(model, TASK, length=24, n_rows=7, seed=3, batch_size=4)
    ids, _, wanted = TASK.batch(TEST_STEP, 7, 24, 3)
    assert torch.equal(found.ids, ids[:, :-1]) and torch.equal(found.wanted, wanted)
    assert found.said.shape == (7, 24) and torch.equal(found.asked, wanted != IGNORED)
    assert found.accuracy == pytest.approx((wanted == said).sum().item() / (7 * 9), abs=1e-6)


def test_what_is_not_asked_does_not_count():
    wanted = torch.tensor([[IGNORED, 5, 6], [7, IGNORED, 8]])
    found = Score(torch.zeros(2, 3), wanted, torch.tensor([[1, 5, 0], [7, 1, 8]]))
    assert found.accuracy == 0.75
    assert found.by(torch.tensor([[9, 1, 2], [2, 9, 1]])) == {1: 1.0, 2: 0.5}


def test_a_model_is_asked_the_rows_and_no_targets():
    """Rows in batches are answered as rows alone: in float64 no sum's order decides."""
    model = Model(needle_config(TASK), seed=0, dtype=torch.float64)
    found = score(model, TASK, length=24, n_rows=5, batch_size=2)
    with torch.no_grad():
        assert torch.equal(found.said[4:], clear_choice(model(found.ids[4:])))


def test_a_near_tie_is_no_comparison():
    """Trap T3: in `clear_choice`, on which the test above and those of greedy texts rely."""
    assert clear_choice(torch.tensor([[0.0, 1.0], [2.0, 1.0]])).tolist() == [1, 0]
    with pytest.raises(AssertionError, match=r"leads by 0\.0e\+00, noise is 1\.0e-09"):
        clear_choice(torch.tensor([[0.0, 1.0], [2.0, 2.0]]))


def test_no_rows_are_refused():
    with pytest.raises(ValueError, match="n_rows=0: at least one row"):
        score(Model(needle_config(TASK), seed=0), TASK, length=24, n_rows=0)
