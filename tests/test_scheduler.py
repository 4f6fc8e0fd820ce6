"""Whether drafts are made at all: what they brought before decides, and now and then it is tried again."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from chi_square import chi_square_at_one_percent
from models import random_ids, scattered

from tinyds41.infer.draft import Sampling
from tinyds41.infer.generate import generate_ids
from tinyds41.infer.ngram_drafter import NGramDrafter
from tinyds41.infer.schedule import choose_common_length, choose_lengths
from tinyds41.infer.scheduler import FEWEST, Scheduler
from tinyds41.infer.speculate import Speculation
from tinyds41.infer.step_curve import StepCurve

FREE = StepCurve((1, 512), (1.0, 1.0))  # a step takes a second, whatever it reads
STEEP = StepCurve((1, 512), (1.0, 512.0))  # each token takes a second
DRAFTING = StepCurve((1, 512), (0.5, 0.5))
SURE, DOUBTFUL = np.full((4, 3), 0.9), np.full((4, 3), 0.05)


def begins(scheduler: Scheduler, steps: int, confidence: np.ndarray) -> list[bool]:
    """Whether each of so many steps drafts; where it does, the draft has these confidences."""
    found = []
    for _ in range(steps):
        found.append(scheduler.begin(len(confidence)))
        if found[-1]:
            scheduler.lengths(confidence)
    return found


# --- One length for all.


def common_by_trial(confidence: np.ndarray, curve: StepCurve) -> int:
    """The length grows while that is faster, counted in plain Python."""
    n, speeds = len(confidence), []
    for length in range(confidence.shape[1] + 1):
        kept = n + sum(float(np.prod(row[: k + 1])) for row in confidence for k in range(length))
        speeds.append(kept / float(curve.seconds(n * (1 + length))))
    for length in range(confidence.shape[1]):
        if speeds[length + 1] <= speeds[length]:
            return length
    return confidence.shape[1]


@pytest.mark.parametrize("seed", range(30))
def test_a_common_length_grows_while_all_requests_together_get_faster(seed):
    rng = np.random.default_rng(seed)
    confidence = rng.random((int(rng.integers(1, 6)), 5)) ** 0.3
    curve = StepCurve(tuple(range(1, 40)), tuple((8 + np.arange(39) + rng.random(39)).tolist()))
    assert choose_common_length(confidence, curve) == common_by_trial(confidence, curve)
    assert choose_common_length(confidence[:1], curve) == choose_lengths(confidence[:1], curve)[0]


def test_requests_that_may_draft_no_more_count_nothing_but_are_read():
    curve = StepCurve((1, 2, 4, 6), (1.0, 1.2, 1.5, 4.0))
    assert choose_common_length([[0.9, 0.9]], curve) == 2
    assert choose_common_length([[0.9, 0.9], [0.0, 0.0]], curve) == 1
    assert choose_common_length([[0.0, 0.0]], FREE) == 0
    with pytest.raises(ValueError, match=r"confidence is \(3,\)"):
        choose_common_length([0.5, 0.5, 0.5], curve)


# --- Whether to draft.


def test_drafts_that_cost_nothing_are_made_in_every_step():
    assert all(begins(Scheduler(STEEP), 50, DOUBTFUL))


def test_drafts_that_pay_are_made_in_every_step():
    assert all(begins(Scheduler(FREE, DRAFTING), 50, SURE))


def test_drafts_that_do_not_pay_are_tried_so_seldom_that_it_costs_one_percent():
    found = begins(Scheduler(STEEP, DRAFTING), 1000, DOUBTFUL)
    assert all(found[: FEWEST // 4]) and not found[FEWEST // 4]
    waits = np.diff(np.flatnonzero(found[FEWEST // 4 :]))
    assert set(waits.tolist()) == {14}  # nothing is admitted: a draft costs 0.5 / 4 of a step and brings nothing


def test_what_pays_again_is_made_again():
    scheduler = Scheduler(FREE, DRAFTING)
    assert not all(begins(scheduler, 40, DOUBTFUL))
    begins(scheduler, 1500, SURE)
    assert all(begins(scheduler, 20, SURE))


def test_loads_are_judged_apart_by_powers_of_two():
    scheduler = Scheduler(FREE, DRAFTING)
    begins(scheduler, 40, DOUBTFUL)
    waiting = [scheduler.begin(n) for n in (4, 5, 7)]
    assert waiting == [False] * 3 and scheduler.begin(3) and scheduler.begin(8)
    with pytest.raises(ValueError, match="0 requests"):
        scheduler.begin(0)


def test_lengths_are_those_of_the_rule_on_the_dearer_curve():
    confidence = np.random.default_rng(0).random((4, 3)) ** 0.3
    curve = StepCurve((1, 4, 8, 16), (1.0, 1.5, 3.0, 6.0))
    found = Scheduler(curve, DRAFTING)
    assert (found.lengths(confidence) == choose_lengths(confidence, curve.slower(0.5))).all()
    assert found.common_length(confidence) == choose_common_length(confidence, curve.slower(0.5))
    assert (choose_lengths(confidence, curve) != choose_lengths(confidence, curve.slower(0.5))).any()


# --- In decoding.


def test_a_schedule_changes_no_greedy_text():
    model, ids = scattered(draft=True, dtype=torch.float64), random_ids(3, 12)
    plain = generate_ids(model, ids, max_new_tokens=12, temperature=0)
    curve = StepCurve((1, 2, 3, 4, 6, 9, 12), (1.0, 1.05, 1.1, 1.2, 1.3, 1.6, 2.0))
    counts = Speculation()
    assert generate_ids(model, ids, max_new_tokens=12, temperature=0, speculate=True, speculation=counts,
                        schedule=Scheduler(curve)) == plain  # fmt: skip
    assert len(set(counts.proposed_at)) > 1  # steps verify to different lengths


def test_where_every_token_costs_as_much_nothing_is_verified():
    model, ids, counts = scattered(draft=True), random_ids(2, 12), Speculation()
    generate_ids(model, ids, max_new_tokens=6, temperature=0, speculate=True, speculation=counts,
                 schedule=Scheduler(STEEP))  # fmt: skip
    assert counts.proposed == 0 and counts.steps == 5


def test_where_tokens_are_free_all_of_a_draft_is_verified():
    model, ids = scattered(draft=True), random_ids(2, 12)
    options = {"max_new_tokens": 9, "temperature": 0, "speculate": True}
    plain, scheduled = Speculation(), Speculation()
    generate_ids(model, ids, speculation=plain, **options)
    generate_ids(model, ids, speculation=scheduled, schedule=Scheduler(FREE), **options)
    assert scheduled == plain and plain.proposed > 0


def test_500_scheduled_draws_follow_the_models_chances():
    """Lengths follow from confidences, thus from drafted tokens: the first two tokens of 500 texts show no trace."""
    model, sampling, ids = scattered(draft=True), Sampling(1.5, top_k=3), random_ids(1, 14)
    first = sampling.chances(model(ids)[0, -1].detach())
    cells, chances = {}, []
    for a in first.nonzero().flatten().tolist():
        second = sampling.chances(model(torch.cat([ids, torch.tensor([[a]])], 1))[0, -1].detach())
        for b in second.nonzero().flatten().tolist():
            cells[a, b] = len(chances)
            chances.append(float(first[a] * second[b]))
    counts, speculation = [0] * len(chances), Speculation()
    curve = StepCurve((10, 20, 30), (1.0, 1.3, 1.35))
    for seed in range(0, 500, 10):  # ten at a time, which have one length together
        rows = generate_ids(model, ids.expand(10, -1), max_new_tokens=4, temperature=1.5, top_k=3, speculate=True,
                            draft_tokens=2, seed=seed, schedule=Scheduler(curve), speculation=speculation)  # fmt: skip
        for row in rows:
            counts[cells[row[0], row[1]]] += 1
    first_place, *_, last_place = speculation.proposed_at
    assert first_place > last_place > 0  # lengths differ
    assert chi_square_at_one_percent(counts, chances)


def test_what_cannot_be_scheduled_is_refused():
    model, ids = scattered(draft=True), random_ids(1, 12)
    options = {"max_new_tokens": 4, "temperature": 0, "schedule": Scheduler(FREE)}
    with pytest.raises(ValueError, match="schedule without speculate"):
        generate_ids(model, ids, **options)
    with pytest.raises(ValueError, match="a schedule needs confidences: NGramDrafter gives none"):
        generate_ids(model, ids, speculate=NGramDrafter(2), **options)
