"""What a drafter does on held-out rows: acceptance by position, and the error of its confidences."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from models import random_ids, scattered

from tinyds41.infer.record_drafts import RecordedDrafts
from tinyds41.train.calibrate import errors
from tinyds41.train.corpus import Corpus
from tinyds41.train.draft_report import acceptance, blocks_of, calibrate, calibration, drafts_on, rows_of


def recorded(chances, logits=None, accepted=None) -> RecordedDrafts:
    chances = torch.tensor(chances, dtype=torch.float64)
    n = len(chances)
    whole = torch.arange(n)
    logits = torch.zeros_like(chances) if logits is None else torch.as_tensor(logits)
    return RecordedDrafts(tokens=torch.zeros(chances.shape, dtype=torch.long), logits=logits, chances=chances,
                          accepted=whole * 0 if accepted is None else torch.tensor(accepted), passages=whole,
                          positions=whole)  # fmt: skip


def test_acceptance_of_a_position_is_that_of_blocks_that_reach_it():
    found = acceptance(recorded([[1.0, 0.5], [0.5, 1.0]], accepted=[2, 1]))
    # Reached by all, survived by 0.75; two thirds of these go on.
    assert found["by_position"] == [0.75, 0.6667] and found["accepted_length"] == [1.75, 2.25]
    assert found["blocks"] == 2 and found["as_drawn"] == 2.5


def test_rows_are_a_text_in_order_or_some_spread_over_it():
    corpus = Corpus(torch.arange(103, dtype=torch.int32))
    rows = rows_of(corpus, 10)
    assert rows.shape == (10, 10) and rows.flatten().tolist() == list(range(100))
    assert rows_of(corpus, 10, most=4)[:, 0].tolist() == [0, 20, 50, 70]
    assert torch.equal(rows_of(corpus, 10, most=99), rows)
    with pytest.raises(ValueError, match="a text of 103 tokens has no row of 104"):
        rows_of(corpus, 104)


def test_rows_are_recorded_some_at_a_time_and_keep_their_numbers():
    model, rows = scattered(draft=True), random_ids(3, 48)
    found = drafts_on(model, rows, batch=2)
    assert sorted(set(found.passages.tolist())) == [0, 1, 2]
    assert found.logits.shape == found.chances.shape == (len(found.passages), 5)
    assert torch.equal(drafts_on(model, rows, batch=2).chances, found.chances)


def miscalibrated(n: int = 4_000):
    """Confidences of logits that are twice too large."""
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 2, (n, 2))
    chances = (rng.random((n, 2)) < 1 / (1 + np.exp(-logits / 2))).astype(float)
    return recorded(chances.tolist(), logits)


def test_temperatures_go_into_the_config():
    model = scattered(draft=True)
    found = recorded([[0.5] * 5] * 4, np.ones((4, 5)))
    temperatures = calibrate(model, found)
    assert model.config.dspark_temperatures == temperatures and len(temperatures) == 5


def test_the_error_is_told_before_and_after():
    drafts = miscalibrated()
    found = calibration(drafts, (2.0, 2.0), draws=40)
    assert found["before"]["error"] > 3 * found["after"]["error"]
    assert found["after"]["error"] == pytest.approx(errors(blocks_of(drafts), (2.0, 2.0)).overall, abs=1e-5)
    low, high = found["before"]["interval"]
    assert low < found["before"]["error"] < high and found["passages"] == found["blocks"] == 4_000
