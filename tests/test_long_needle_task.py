"""The long needle: facts out of reach of windows and newest entries, small choices, rows that grow by the step."""

from __future__ import annotations

import pytest
import torch

from tinyds41.model.transformer import Model
from tinyds41.trace import Trace
from tinyds41.train.long_needle_task import LongNeedle, coverage, long_needle_config
from tinyds41.train.losses import IGNORED
from tinyds41.train.tasks import TEST_STEP, answers, needle_config
from tinyds41.train.trainer import train

TASK = LongNeedle(n_keys=6, n_values=5, n_facts=3, n_fillers=4, gap=30, first_length=16, first_steps=10, double_every=4)


def test_a_plain_reader_answers_and_the_last_tokens_say_nothing():
    ids, _, wanted = TASK.batch(TEST_STEP, 50, 100)
    assert ids.shape == (50, 101)
    for row, target in zip(ids.tolist(), wanted.tolist(), strict=True):
        assert target[97:] == [row[row.index(key) + 1] for key in row[97:100]] and target[:97] == [IGNORED] * 97
        # Nothing but fillers between the last fact and the questions: 30 tokens of gap.
        assert min(row[67:97]) >= TASK.first_filler
    assert TASK.places(ids[:, :-1]).max() == 64  # and no further than the gap asks


def test_a_row_too_short_for_the_gap_has_what_fits():
    ids = TASK.batch(0, 5, 16).ids
    assert (ids[:, 0:6:2] < TASK.first_value).all() and (ids[:, 6:13] >= TASK.first_filler).all()


def test_rows_grow_by_the_step_alone():
    lengths = [TASK.length_at(step, 100) for step in range(30)]
    assert lengths == [16] * 10 + [32] * 4 + [64] * 4 + [100] * 12
    assert TASK.length_at(TEST_STEP, 100) == 100 and TASK.length_at(TEST_STEP, 1 << 20) == 1 << 20
    for step, rows in ((0, 12), (10, 6), (14, 2), (18, 2)):  # as many tokens each step, as near as whole rows allow
        assert TASK.batch(step, 2, 100).ids.shape == (rows, lengths[step] + 1)
    assert torch.equal(TASK.batch(12, 2, 100, seed=1).ids, TASK.batch(12, 2, 100, seed=1).ids)


def test_it_trains_while_rows_grow():
    """The indexer is taught at places that the row of the step has, and a resumed run has the same rows."""
    task = LongNeedle(n_facts=3, first_length=16, first_steps=1, double_every=1)
    model = Model(needle_config(task), seed=0)
    history = train(model, task, steps=3, batch_size=1, length=64, indexer_queries=64, record_every=1, progress=False)
    assert history.step == 3 and all(loss > 0 for loss in history.indexer_losses)


@pytest.mark.parametrize("length", [512, 1000, 1024])
def test_the_choice_and_the_pool_are_small(length):
    """At most 5 % and 30 %, and as large as that allows; measured by what a first question really chose among."""
    task = LongNeedle()
    config = long_needle_config(task, length)
    found = coverage(config, task, length)
    trace = Trace("layers.2.indexer.*", queries=[length - task.n_facts])
    with torch.no_grad():
        Model(config, seed=0)(task.batch(TEST_STEP, 1, length).ids[:, :-1], trace=trace)
    chosen, pool = trace["layers.2.indexer.selection"].flatten(), trace["layers.2.indexer.pool"].flatten()
    assert found.visible == (length - 8 + 1) // 2
    assert found.chosen == len(chosen[chosen >= 0]) and found.pooled == 4 * len(pool[pool >= 0])
    top, pooled = found.shares
    assert top <= 0.05 < (found.chosen + 1) / found.visible and pooled <= 0.30 < (found.pooled + 4) / found.visible


def test_a_coverage_is_never_more_than_all():
    assert coverage(needle_config(LongNeedle()), LongNeedle(), 32).shares == (1.0, 1.0)


def test_answers_can_be_asked_on_rows_of_full_length():
    model = Model(long_needle_config(LongNeedle(n_facts=2), 128), seed=0)
    assert answers(model, LongNeedle(n_facts=2), length=128, n_rows=2, step=TEST_STEP).ids.shape == (2, 128)


def test_what_makes_no_long_needle_is_refused():
    for sizes, message in (({"gap": 0}, "gap=0"), ({"double_every": 0.5}, r"double_every=0\.5"),
                           ({"n_keys": 2}, "n_facts=8 exceeds n_keys=2"),
                           ({"first_length": 23}, "first_length=23 is too short for n_facts=8: at least 24"),
                           ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            LongNeedle(**sizes)
    with pytest.raises(ValueError, match="length=15 is below first_length=16"):
        TASK.batch(0, 1, 15)
    with pytest.raises(ValueError, match="length=32 is too short: 12 entries give index_topk=0"):
        long_needle_config(LongNeedle(), 32)
    with pytest.raises(ValueError, match="gap=64: windows or the newest K entries reach back 102 tokens"):
        long_needle_config(LongNeedle(), 2048)
    with pytest.raises(ValueError, match=r"gap=20: .* reach back 28 tokens"):
        long_needle_config(LongNeedle(gap=20), 512, index_topk=4)
