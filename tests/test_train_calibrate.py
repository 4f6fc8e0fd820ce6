"""Temperatures: survivals against shares accepted, in plain Python; a known distortion is found and undone."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from tinyds41.train.calibrate import (
    Bin,
    Blocks,
    bootstrap_interval,
    calibration_error,
    confidences,
    errors,
    fit_temperatures,
    noise_floor,
    pooled_reliability,
    reliability,
)


def drawn(n: int, temperatures, *, mean: float = 1.5, seed: int = 0, expected: bool = False) -> Blocks:
    """Blocks of a drafter whose logits are too large by known factors; its acceptance is what they say without."""
    rng = np.random.default_rng(seed)
    true = rng.normal(mean, 1.5, (n, len(temperatures)))
    chance = 1 / (1 + np.exp(-true))
    accepted = chance if expected else (rng.random(chance.shape) < chance).astype(float)
    return Blocks(true * np.array(temperatures), accepted)


def slow_error(predictions, outcomes, bins) -> float:
    """Bins of equal mass, in plain Python: sorted pairs, borders moved down to where a new prediction begins."""
    pairs = sorted(zip(predictions, outcomes, strict=True), key=lambda pair: pair[0])
    borders = {0, len(pairs)}
    for b in range(1, bins):
        place = b * len(pairs) // bins
        while place and pairs[place - 1][0] == pairs[place][0]:
            place -= 1
        borders.add(place)
    total, edges = 0.0, sorted(borders)
    for low, high in itertools.pairwise(edges):
        part = pairs[low:high]
        total += abs(sum(p for p, _ in part) - sum(o for _, o in part))
    return total / len(pairs)


# --- Confidences and the error.


def test_a_confidence_is_the_sigmoid_of_the_logit_over_its_temperature():
    found = confidences([[1.0, -2.0], [0.0, 800.0]], (2.0, 0.5))
    wanted = [[1 / (1 + math.exp(-0.5)), 1 / (1 + math.exp(4))], [0.5, 1.0]]
    np.testing.assert_allclose(found, wanted, rtol=1e-12)
    np.testing.assert_array_equal(confidences([[1.0, -2.0]], ()), confidences([[1.0, -2.0]], (1.0, 1.0)))
    assert np.isfinite(confidences([[-1e6, 1e6]], (1e-3, 1e-3))).all()


@pytest.mark.parametrize(("n", "bins"), [(1, 10), (7, 10), (97, 10), (200, 7), (50, 1)])
def test_the_error_is_that_of_bins_of_equal_mass(n, bins):
    rng = np.random.default_rng(n)
    predictions, outcomes = rng.random(n), rng.random(n)
    predictions = predictions.round(1) if n == 97 else predictions  # many equal ones
    found = reliability(predictions, outcomes, bins)
    assert calibration_error(found) == pytest.approx(slow_error(predictions, outcomes, min(bins, n)), abs=1e-12)
    assert sum(part.count for part in found) == n
    assert [part.prediction for part in found] == sorted(part.prediction for part in found)


def test_bins_are_means_and_counts():
    found = reliability([0.1, 0.2, 0.7, 0.9], [0, 1, 1, 1], 2)
    assert found == [Bin(pytest.approx(0.15), 0.5, 2), Bin(pytest.approx(0.8), 1.0, 2)]
    assert calibration_error(found) == pytest.approx((2 * 0.35 + 2 * 0.2) / 4)
    uneven = [Bin(0.5, 0.5, 9), Bin(0.9, 0.4, 1)]
    assert calibration_error(uneven) == pytest.approx(0.05)  # a bin counts by its mass


def test_equal_predictions_share_a_bin_so_their_order_says_nothing():
    outcomes = [0.0] * 50 + [1.0] * 50
    assert reliability([0.5] * 100, outcomes, 10) == [Bin(0.5, 0.5, 100)]
    rng = np.random.default_rng(0)
    predictions, order = rng.integers(0, 4, 100) / 4, rng.permutation(100)
    shuffled = reliability(predictions[order], np.array(outcomes)[order], 10)
    for found, part in zip(shuffled, reliability(predictions, outcomes, 10), strict=True):
        assert (found.prediction, found.outcome, found.count) == pytest.approx(
            (part.prediction, part.outcome, part.count))  # fmt: skip


def test_what_is_predicted_is_that_a_block_is_accepted_up_to_a_position():
    """Position 2 of a block that ended at 1 counts as not accepted, whatever stands there."""
    blocks = Blocks([[0.0, 0.0], [0.0, 0.0]], [[0.0, 1.0], [1.0, 1.0]])
    np.testing.assert_allclose(blocks.survived, [[0, 0], [1, 1]])
    found = errors(blocks, ())
    assert found.by_position == (0.0, pytest.approx(0.25))  # 0.5 of 0.5; 0.25 of 0.5
    assert found.overall == pytest.approx(slow_error([0.5, 0.25, 0.5, 0.25], [0, 0, 1, 1], 4))
    assert found.overall == calibration_error(pooled_reliability(blocks, ()))


def test_expected_acceptance_multiplies_as_outcomes_do():
    np.testing.assert_allclose(Blocks([[0, 0, 0]], [[0.5, 0.5, 0.2]]).survived, [[0.5, 0.25, 0.05]])


# --- Fitting.


def test_the_first_temperature_has_the_least_error_of_all():
    blocks = drawn(600, (2.0,))
    [tau] = fit_temperatures(blocks)
    mine = errors(blocks, (tau,)).overall
    tried = [errors(blocks, (2 ** (i / 25),)).overall for i in range(-100, 101)]
    assert mine <= min(tried) + 1e-4  # as fine as the search goes


def test_a_later_temperature_is_chosen_with_the_earlier_ones_in_place():
    """Against every value of a grid, of the product: not of its own confidence alone."""
    blocks = drawn(500, (2.5, 0.5, 1.0), seed=1)
    taus = fit_temperatures(blocks)
    for k in (1, 2):
        def error(tau, k=k):
            survival = confidences(blocks.logits[:, : k + 1], (*taus[:k], tau)).prod(1)
            return slow_error(survival.tolist(), blocks.survived[:, k].tolist(), 10)

        assert error(taus[k]) <= min(error(2 ** (i / 10)) for i in range(-40, 41)) + 2e-3


@pytest.mark.parametrize("expected", [True, False])
def test_known_temperatures_are_found(expected):
    known = (2.0, 0.5, 3.0, 1.0)
    found = fit_temperatures(drawn(20_000, known, expected=expected))
    # Outcomes are drawn: at position 4 a third of the blocks is left, and an error of 1 % of survival moves tau by 5 %.
    assert found == pytest.approx(known, rel=0.01 if expected else 0.12)


def test_where_all_temperatures_do_alike_it_stays_one():
    assert fit_temperatures(Blocks([[0.0, 0.0]] * 4, [[1, 1], [1, 1], [0, 0], [1, 0]])) == (1.0, 1.0)


def test_the_search_ends_at_its_limits():
    """Confident and always right, or always wrong: no temperature is enough."""
    low, high = (fit_temperatures(Blocks([[0.01]] * 3, [[outcome]] * 3))[0] for outcome in (1.0, 0.5))
    assert low == 2**-4 and high == 2**4


def test_another_domain_gains_from_temperatures_that_it_did_not_fit():
    """The issue's bound: at most 1.5 %, or half of what it was. Its blocks are harder, its distortion the same."""
    known = (2.5, 2.0, 3.0)
    taus = fit_temperatures(drawn(4000, known, mean=1.5))
    other = drawn(4000, known, mean=0.3, seed=5)
    before, after = errors(other, ()), errors(other, taus)
    assert before.overall > 0.03 and after.overall <= max(0.015, before.overall / 2)
    assert max(after.by_position) <= max(0.02, max(before.by_position) / 2)


def test_a_domain_that_is_distorted_otherwise_is_told():
    taus = fit_temperatures(drawn(4000, (3.0, 3.0)))
    other = drawn(4000, (1.0, 1.0), seed=5)
    assert errors(other, taus).overall > errors(other, ()).overall + 0.05


# --- The interval.


def test_the_interval_is_that_of_resampled_blocks():
    blocks = drawn(60, (2.0, 2.0))
    rng, measured = np.random.default_rng(3), []
    for _ in range(50):
        rows = rng.integers(0, 60, 60)
        measured.append(errors(Blocks(blocks.logits[rows], blocks.accepted[rows]), (1.5, 1.5)).overall)
    low, high = bootstrap_interval(blocks, lambda part: errors(part, (1.5, 1.5)).overall, draws=50, level=0.8, seed=3)
    assert (low, high) == pytest.approx((np.quantile(measured, 0.1), np.quantile(measured, 0.9)), abs=1e-12)


def test_the_interval_follows_its_seed_and_narrows_with_blocks():
    def width(n, seed=0):
        low, high = bootstrap_interval(drawn(n, (3.0, 3.0)), lambda part: errors(part, ()).overall, draws=80, seed=seed)
        return high - low

    assert width(100) == width(100) != width(100, seed=1)
    assert width(1600) < width(100) / 2  # noise falls with the root of 16


def test_the_interval_of_a_known_error_covers_it():
    """Of 40 sets of blocks most intervals hold the error of very many."""
    truth = errors(drawn(200_000, (3.0,)), ()).overall
    covered = 0
    for seed in range(1, 41):
        low, high = bootstrap_interval(drawn(300, (3.0,), seed=seed), lambda part: errors(part, ()).overall, draws=100)
        covered += low <= truth <= high
    assert covered >= 32  # 0.95 wished; resampling adds noise of its own, which raises both ends


def test_the_interval_of_passages_is_that_of_resampled_passages():
    """Passages of 1, 2, ... blocks, mixed up; each drawn one comes with all of its blocks."""
    blocks, passages = drawn(21, (2.0, 2.0)), np.random.default_rng(2).permutation(np.repeat(range(6), range(1, 7)))
    rng, measured = np.random.default_rng(3), []
    for _ in range(40):
        rows = [row for passage in rng.integers(0, 6, 6) for row in range(21) if passages[row] == passage]
        measured.append(errors(blocks.take(rows), ()).overall)
    found = bootstrap_interval(blocks, lambda part: errors(part, ()).overall, draws=40, seed=3, passages=passages)
    assert found == pytest.approx((np.quantile(measured, 0.025), np.quantile(measured, 0.975)), abs=1e-12)


def test_blocks_that_hang_together_make_the_interval_wider():
    """Each block ten times over, as neighbours in a text are alike: there is no more to know than of one."""
    alone = drawn(60, (3.0, 3.0))
    tenfold = alone.take(np.repeat(range(60), 10))

    def width(**options):
        low, high = bootstrap_interval(tenfold, lambda part: errors(part, ()).overall, draws=80, **options)
        return high - low

    assert width(passages=np.repeat(range(60), 10)) > 2 * width()  # the root of 10, less where bins share blocks


# --- The floor.


def test_the_floor_is_the_error_of_confidences_that_are_right():
    """Drawn by confidences under the temperatures, up to the first rejection; averaged over draws."""
    blocks, temperatures = drawn(40, (2.0, 2.0)), (2.0, 0.5)
    rng, chance, found = np.random.default_rng(5), confidences(blocks.logits, temperatures), []
    for _ in range(7):
        accepted = (rng.random(chance.shape) < chance).astype(float)
        found.append(errors(Blocks(blocks.logits, accepted), temperatures))
    floor = noise_floor(blocks, temperatures, draws=7, seed=5)
    assert floor.overall == pytest.approx(np.mean([each.overall for each in found]), abs=1e-12)
    assert floor.by_position == pytest.approx(np.mean([each.by_position for each in found], 0), abs=1e-12)


def test_the_floor_sinks_with_the_root_of_the_blocks_and_knows_no_outcomes():
    few, many = (noise_floor(drawn(n, (1.0,) * 3), ()) for n in (500, 8000))
    assert 0.2 < many.overall / few.overall < 0.3  # the root of 16 is 4
    blocks = drawn(500, (1.0,) * 3)
    assert noise_floor(Blocks(blocks.logits, np.zeros((500, 3))), ()) == few
    right, wrong = errors(blocks, ()).overall, errors(drawn(500, (3.0,) * 3), ()).overall
    assert right < 1.5 * few.overall and wrong > 3 * few.overall


# --- What is refused.


@pytest.mark.parametrize(("logits", "accepted", "message"), [
    ([1.0, 2.0], [1.0, 0.0], r"logits are \(2,\): \[n,k\] is needed"),
    (np.zeros((0, 3)), np.zeros((0, 3)), r"logits are \(0, 3\): at least one block and position"),
    ([[1.0, 2.0]], [[1.0]], r"logits are \(1, 2\), accepted is \(1, 1\)"),
    ([[1.0, math.nan]], [[1.0, 0.0]], "logit nan"),
    ([[1.0, 2.0]], [[1.0, 1.5]], r"accepted 1\.5: between 0 and 1"),
    ([[1.0, 2.0]], [[1.0, math.nan]], "accepted nan"),
])  # fmt: skip
def test_blocks_that_cannot_be_are_refused(logits, accepted, message):
    with pytest.raises(ValueError, match=message):
        Blocks(logits, accepted)


@pytest.mark.parametrize(("call", "message"), [
    (lambda blocks: errors(blocks, (1.0,)), "1 temperatures for blocks of 2"),
    (lambda blocks: errors(blocks, (1.0, 0.0)), r"temperature 0\.0: a positive number"),
    (lambda blocks: errors(blocks, (), 0), "bins=0"),
    (lambda blocks: reliability([0.5], [0.5, 1.0]), "1 predictions, 2 outcomes"),
    (lambda blocks: reliability([], []), "no predictions"),
    (lambda blocks: bootstrap_interval(blocks, len, draws=0), "draws=0"),
    (lambda blocks: bootstrap_interval(blocks, len, level=1.0), r"level=1\.0: between 0 and 1"),
    (lambda blocks: bootstrap_interval(blocks, len, passages=[1, 2]), "2 passages for 4 blocks"),
    (lambda blocks: noise_floor(blocks, (), draws=0), "draws=0"),
])  # fmt: skip
def test_settings_that_cannot_be_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(drawn(4, (1.0, 1.0)))
