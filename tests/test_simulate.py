"""Replayed drafts: tokens and seconds as plain Python counts them, and where the scheduler is ahead."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from tinyds41.infer.schedule import choose_lengths
from tinyds41.infer.simulate import (
    Throughput,
    best_fixed,
    over_best_fixed,
    replay_order,
    simulate,
    throughput_table,
)
from tinyds41.infer.step_curve import StepCurve

COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
AFFINE = StepCurve(COUNTS, tuple(0.02 + 0.0002 * n for n in COUNTS))  # weights are read once, each token costs alike
ROOF = StepCurve(COUNTS, tuple(0.02 * max(1.0, n / 128) for n in COUNTS))  # up to 128 tokens memory is the limit
# `measure_curve(example("text"))`, one row, one thread, two shared cores: seconds as they came, with their bumps.
MEASURED = StepCurve(
    (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 64, 128, 256),
    (0.0264, 0.0327, 0.0334, 0.0354, 0.0387, 0.0428, 0.0451, 0.0464, 0.0468, 0.0528, 0.0514, 0.0571, 0.0703, 0.0949))


def recorded(n: int = 2000, k: int = 5, seed: int = 0, sharper: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Drafts of easy and hard passages, and how many of their tokens are accepted.

    sharper: by how much the drafter is surer than it should be.
    """
    rng = np.random.default_rng(seed)
    logits = rng.normal(1.2, 1.0, (n, 1)) + rng.normal(0, 1.6, (n, k)) - 0.15 * np.arange(k)
    chance = 1 / (1 + np.exp(-logits))
    accepted = (rng.random((n, k)) < chance).cumprod(1).sum(1)
    return 1 / (1 + np.exp(-sharper * logits)), accepted


def only(rows: list[Throughput], kind: str, setting: float | None = None) -> list[Throughput]:
    return [row for row in rows if row.kind == kind and setting in (None, row.setting)]


# --- Counting.


def slow(confidence, accepted, curve, order, choose, overhead=0.0) -> tuple[float, float, float]:
    """Tokens per second, tokens per step and verified tokens per step of a request, in plain Python."""
    tokens = verified = 0
    seconds = 0.0
    for step in order.tolist():
        lengths = [choose(confidence[draft].tolist()) for draft in step]
        for draft, length in zip(step, lengths, strict=True):
            tokens += 1
            for k in range(length):
                if k >= accepted[draft]:
                    break
                tokens += 1
        verified += sum(lengths)
        seconds += float(curve.seconds(len(step) + sum(lengths))) + overhead
    return tokens / seconds, tokens / order.size, verified / order.size


@pytest.mark.parametrize("requests", [1, 3, 16])
def test_tokens_and_seconds_are_those_of_a_plain_count(requests):
    confidence, accepted = recorded(50, 3)
    rows = simulate(confidence, accepted, AFFINE, loads=(requests,), thresholds=(0.25, 0.5), blocks=96, seed=4)
    order = replay_order(50, requests, 96 // requests, 4)
    ways = [*(lambda c, n=n: n for n in range(4)),
            *(lambda c, t=t: sum(p >= t for p in itertools.accumulate(c, lambda a, b: a * b)) for t in (0.25, 0.5))]
    assert [(row.kind, row.setting) for row in rows[:-1]] == [
        ("fixed", 0), ("fixed", 1), ("fixed", 2), ("fixed", 3), ("threshold", 0.25), ("threshold", 0.5)]  # fmt: skip
    for row, choose in zip(rows, ways, strict=False):
        found = (row.tokens_per_second, row.tokens_per_step, row.verified)
        assert found == pytest.approx(slow(confidence, accepted, AFFINE, order, choose), rel=1e-12)


def test_the_scheduler_sees_all_requests_of_a_step_together():
    confidence, accepted = recorded(40, 3)
    *_, row = simulate(confidence, accepted, AFFINE, loads=(8,), blocks=40)
    tokens = seconds = 0.0
    for step in replay_order(40, 8, 5, 0):
        lengths = choose_lengths(confidence[step], AFFINE)
        tokens += 8 + np.minimum(lengths, accepted[step]).sum()
        seconds += AFFINE.seconds(8 + lengths.sum())
    assert row.kind == "scheduler" and math.isnan(row.setting)
    assert row.tokens_per_second == pytest.approx(tokens / seconds, rel=1e-12)


def test_without_drafts_a_step_gives_one_token_per_request():
    confidence, accepted = recorded(50)
    for row in only(simulate(confidence, accepted, MEASURED, loads=(1, 7), blocks=64), "fixed", 0):
        assert row.tokens_per_second == pytest.approx(row.requests / float(MEASURED.seconds(row.requests)), rel=1e-12)
        assert (row.tokens_per_step, row.verified) == (1, 0)


def test_a_threshold_of_zero_verifies_all_and_a_survival_at_the_threshold_counts():
    confidence, accepted = np.array([[0.5, 0.5], [1.0, 0.25]]), np.array([1, 2])
    rows = simulate(confidence, accepted, AFFINE, loads=(2,), thresholds=(0.0, 0.25, 1.0), blocks=2)
    assert [row.verified for row in only(rows, "threshold")] == [2.0, 2.0, 0.5]
    assert only(rows, "threshold")[0].tokens_per_second == only(rows, "fixed", 2)[0].tokens_per_second


def test_making_drafts_takes_time_wherever_drafts_are_made():
    """Length 0 makes none. The scheduler pays even where it verifies nothing, and reckons with it."""
    confidence, accepted = recorded(64)
    drafting = StepCurve((1, 16), (0.002, 0.005))
    free = simulate(confidence, accepted, AFFINE, loads=(16,), blocks=64)
    paid = simulate(confidence, accepted, AFFINE, loads=(16,), blocks=64, drafting=drafting)
    order = replay_order(64, 16, 4, 0)
    assert paid[0] == free[0]
    for n in (1, 5):
        wanted = slow(confidence, accepted, AFFINE, order, lambda c, n=n: n, overhead=0.005)
        assert paid[n].tokens_per_second == pytest.approx(wanted[0], rel=1e-12)
    lengths = [choose_lengths(confidence[step], AFFINE.slower(0.005)) for step in order]
    assert paid[-1].verified == np.mean(lengths) > free[-1].verified  # a dearer step wants more tokens
    gained = sum(float((1 + np.minimum(own, accepted[step])).sum()) for own, step in zip(lengths, order, strict=True))
    seconds = sum(float(AFFINE.seconds(16 + own.sum())) + 0.005 for own in lengths)
    assert paid[-1].tokens_per_second == pytest.approx(gained / seconds, rel=1e-12)


def test_every_draft_comes_once_before_one_comes_again():
    order = replay_order(10, 4, 6, 0)
    assert order.shape == (6, 4)
    flat = order.ravel().tolist()
    assert sorted(flat[:10]) == sorted(flat[10:20]) == list(range(10)) and len(set(flat[20:])) == 4
    assert flat[:10] != flat[10:20] and flat[:10] != sorted(flat[:10])
    assert (replay_order(10, 4, 6, 0) == order).all() and (replay_order(10, 4, 6, 1) != order).any()


def test_a_run_follows_its_seed_and_a_load_nothing_but_itself():
    confidence, accepted = recorded(300)
    rows = simulate(confidence, accepted, AFFINE, loads=(2, 8), blocks=128)
    assert repr(simulate(confidence, accepted, AFFINE, loads=(2, 8), blocks=128)) == repr(rows)  # nan is no equal
    assert repr(simulate(confidence, accepted, AFFINE, loads=(8,), blocks=128)) == repr(rows[len(rows) // 2 :])
    assert repr(simulate(confidence, accepted, AFFINE, loads=(2, 8), blocks=128, seed=1)) != repr(rows)


# --- What the scheduler gains.


@pytest.mark.parametrize("curve", [AFFINE, ROOF, MEASURED], ids=["affine", "roof", "measured"])
def test_the_scheduler_is_within_two_percent_of_the_best_fixed_length_and_ahead_somewhere(curve):
    ratios = over_best_fixed(simulate(*recorded(), curve))
    assert list(ratios) == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    assert min(ratios.values()) >= 0.98
    assert max(ratios.values()) >= 1.05


def test_no_threshold_does_as_well_at_all_loads():
    """A survival worth verifying at one load is a waste at another."""
    rows = simulate(*recorded(), AFFINE, thresholds=(0.1, 0.3, 0.5, 0.7, 0.9))
    ours = {row.requests: row.tokens_per_second for row in only(rows, "scheduler")}
    for least in (0.1, 0.3, 0.5, 0.7, 0.9):
        theirs = only(rows, "threshold", least)
        assert min(row.tokens_per_second / ours[row.requests] for row in theirs) < 0.95
        assert max(row.tokens_per_second / ours[row.requests] for row in theirs) < 1.01


def test_a_drafter_that_is_too_sure_costs_throughput():
    """What calibration is for: the same drafts, confidences three times as sharp."""
    right, wrong = (over_best_fixed(simulate(*recorded(sharper=sharper), AFFINE)) for sharper in (1.0, 3.0))
    assert all(wrong[load] < right[load] for load in right) and wrong[256] < right[256] - 0.03


def test_more_load_means_shorter_drafts():
    rows = only(simulate(*recorded(), ROOF), "scheduler")
    verified = [row.verified for row in rows]
    assert verified == sorted(verified, reverse=True)
    assert verified[0] == 5 and verified[-1] < 0.1  # while memory is the limit all is free; behind it nothing pays


# --- Reading the rows.

ROWS = [Throughput("fixed", 0, 1, 10.0, 1.0, 0.0), Throughput("fixed", 1, 1, 15.0, 1.7, 1.0),
        Throughput("threshold", 0.5, 1, 14.0, 1.6, 0.8), Throughput("scheduler", math.nan, 1, 16.5, 1.7, 0.9),
        Throughput("fixed", 0, 64, 1200.0, 1.0, 0.0), Throughput("fixed", 1, 64, 1200.0, 1.7, 1.0),
        Throughput("threshold", 0.5, 64, 600.0, 1.6, 0.8), Throughput("scheduler", math.nan, 64, 1188.0, 1.1, 0.1)]


def test_the_best_fixed_length_is_chosen_at_each_load_and_of_equal_ones_the_shortest():
    assert best_fixed(ROWS) == {1: ROWS[1], 64: ROWS[4]}
    assert over_best_fixed(ROWS) == {1: pytest.approx(1.1), 64: pytest.approx(0.99)}
    assert over_best_fixed(ROWS, "threshold") == {1: pytest.approx(14 / 15), 64: 0.5}


def test_the_table_has_a_line_per_load():
    assert throughput_table(ROWS).splitlines() == [
        "requests  0 drafted  1 drafted  survival ≥ 0.5  scheduler",
        "       1       10.0       15.0            14.0       16.5",
        "      64    1,200.0    1,200.0           600.0    1,188.0"]


# --- What is refused.


@pytest.mark.parametrize(("confidence", "accepted", "message"), [
    ([0.5, 0.5], [1, 1], r"confidence is \(2,\): \[n,k\]"),
    (np.zeros((0, 2)), [], r"confidence is \(0, 2\)"),
    ([[0.5, 0.5]], [[1, 1]], r"accepted is \(1, 2\): one length for each of 1 drafts"),
    ([[0.5, 0.5]], [1, 1], r"accepted is \(2,\)"),
    ([[0.5, 0.5]], [3], r"accepted 3: a whole number in 0\.\.2"),
    ([[0.5, 0.5]], [-1], "accepted -1"),
    ([[0.5, 0.5]], [0.5], r"accepted 0\.5"),
    ([[0.5, 0.5]], [math.nan], "accepted nan"),
    ([[0.5, 1.5]], [1], r"confidence 1\.5: between 0 and 1"),
])  # fmt: skip
def test_records_that_cannot_be_are_refused(confidence, accepted, message):
    with pytest.raises(ValueError, match=message):
        simulate(confidence, accepted, AFFINE)


@pytest.mark.parametrize(("options", "message"), [
    ({"loads": ()}, "no loads"), ({"loads": (1, 0)}, "requests=0"), ({"blocks": 0}, "blocks=0"),
    ({"thresholds": (0.5, 1.5)}, r"threshold 1\.5"), ({"thresholds": (math.nan,)}, "threshold nan"),
])  # fmt: skip
def test_settings_that_cannot_be_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        simulate([[0.5]], [1], AFFINE, **options)
