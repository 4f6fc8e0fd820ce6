"""Temperatures of a drafter's confidences: chosen so that a survival of 0.7 is a block accepted in 7 of 10 cases."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tinyds41.infer.schedule import survival

Numbers = NDArray[np.float64]
BINS = 10
LIMIT = 4.0  # temperatures are searched between 2^-4 and 2^4
STEP = 0.25  # of the grid, in powers of two
FINEST = 2.0**-10  # where the search ends: 0.07 % of a temperature


@dataclass(frozen=True)
class Blocks:
    """What a drafter said of its tokens and what became of them, recorded on some text.

    accepted: 0 or 1 as drawn; or the chance min(1, p[x]/q[x]) of the drawn token; or the expected acceptance
        1 - |p - q|_1 / 2 of the position. After a rejection nothing counts any more.

    Shapes: logits, accepted [n,k] float64, of n blocks and k positions; survived [n,k], up to and with each position.
    Raises: ValueError for other shapes, a logit that is not finite, an acceptance outside 0..1.
    Source: spec 10.4, 10.5.
    Differs: products of expected acceptances treat drawn tokens as accepted ones are distributed. The other two
        forms do not; they are noisier.
    """

    logits: Numbers
    accepted: Numbers
    survived: Numbers = field(init=False)

    def __post_init__(self) -> None:
        logits, accepted = (np.asarray(part, dtype=np.float64) for part in (self.logits, self.accepted))
        if logits.ndim != 2:
            raise ValueError(f"logits are {logits.shape}: [n,k] is needed")
        if not logits.size:
            raise ValueError(f"logits are {logits.shape}: at least one block and position is needed")
        if logits.shape != accepted.shape:
            raise ValueError(f"logits are {logits.shape}, accepted is {accepted.shape}: the same shape is needed")
        if not np.isfinite(logits).all():
            raise ValueError(f"logit {logits[~np.isfinite(logits)][0]}: a finite number is needed")
        possible = (accepted >= 0) & (accepted <= 1)
        if not possible.all():
            raise ValueError(f"accepted {accepted[~possible][0]}: between 0 and 1 is needed")
        for name, value in (("logits", logits), ("accepted", accepted), ("survived", accepted.cumprod(1))):
            object.__setattr__(self, name, value)

    def take(self, rows: ArrayLike) -> Blocks:
        """These blocks, in this order."""
        rows = np.asarray(rows, dtype=np.intp)
        return Blocks(self.logits[rows], self.accepted[rows])


@dataclass(frozen=True)
class Bin:
    """Predictions of about one size: their mean, and the mean of what happened."""

    prediction: float
    outcome: float
    count: int


@dataclass(frozen=True)
class Errors:
    """Expected calibration errors of survivals, 0..1: at each position, and of all (block, position) pairs together.

    Together is how a scheduler meets them: it compares survivals of all positions.
    """

    by_position: tuple[float, ...]
    overall: float


def confidences(logits: ArrayLike, temperatures: Sequence[float]) -> Numbers:
    """The chance that a token is accepted once those before it are. No temperatures: 1 everywhere.

    Shapes: logits [n,k] -> float64 [n,k].
    Raises: ValueError for another number of temperatures than positions, or one that is not positive.
    Source: spec 10.5.
    """
    logits = np.asarray(logits, dtype=np.float64)
    if temperatures and len(temperatures) != logits.shape[1]:
        raise ValueError(f"{len(temperatures)} temperatures for blocks of {logits.shape[1]} positions")
    for temperature in temperatures:
        if not 0 < temperature < math.inf:
            raise ValueError(f"temperature {temperature}: a positive number is needed")
    return _sigmoid(logits / np.array(temperatures or (1.0,), dtype=np.float64))


def reliability(predictions: ArrayLike, outcomes: ArrayLike, bins: int = BINS) -> list[Bin]:
    """Bins of equal mass, from low to high predictions; equal predictions share one, so there may be fewer.

    Equal mass, not equal width: survivals crowd near 0 and 1, where bins of equal width would leave a few pairs to
    the others, and the noise of those would decide a fit. And a new temperature moves no block to another bin of
    position 1, where the error therefore changes smoothly.

    Shapes: predictions, outcomes [n].
    Raises: ValueError for none, for another number of outcomes, for bins below 1.
    """
    predictions, outcomes = np.asarray(predictions, dtype=np.float64), np.asarray(outcomes, dtype=np.float64)
    if bins < 1:
        raise ValueError(f"bins={bins}: at least one is needed")
    if predictions.shape != outcomes.shape:
        raise ValueError(f"{predictions.size} predictions, {outcomes.size} outcomes")
    if not predictions.size:
        raise ValueError("no predictions")
    order = np.argsort(predictions, kind="stable")
    predictions, outcomes = predictions[order], outcomes[order]
    starts = _starts(predictions, min(bins, predictions.size))
    counts = np.diff(np.append(starts, predictions.size))
    means = (np.add.reduceat(values, starts) / counts for values in (predictions, outcomes))
    return [Bin(float(p), float(o), int(n)) for p, o, n in zip(*means, counts, strict=True)]


def calibration_error(bins: Sequence[Bin]) -> float:
    """How far outcomes are from predictions, over bins by their mass. Units: 0..1."""
    return sum(part.count * abs(part.prediction - part.outcome) for part in bins) / sum(part.count for part in bins)


def pooled_reliability(blocks: Blocks, temperatures: Sequence[float], bins: int = BINS) -> list[Bin]:
    """Reliability of the survivals of all positions together: what the diagram shows. Raises: as `reliability`."""
    return reliability(survival(confidences(blocks.logits, temperatures)).ravel(), blocks.survived.ravel(), bins)


def errors(blocks: Blocks, temperatures: Sequence[float], bins: int = BINS) -> Errors:
    """Calibration errors under these temperatures, () for none. Raises: as `confidences` and `reliability`."""
    predicted = survival(confidences(blocks.logits, temperatures))
    each = (calibration_error(reliability(predicted[:, k], blocks.survived[:, k], bins))
            for k in range(predicted.shape[1]))  # fmt: skip
    return Errors(tuple(each), calibration_error(pooled_reliability(blocks, temperatures, bins)))


def fit_temperatures(blocks: Blocks, bins: int = BINS) -> tuple[float, ...]:
    """One temperature per position, for `Config.dspark_temperatures`: sequential temperature scaling.

    From left to right each is the one under which the product of confidences up to its position has the least
    calibration error, with those before it in place. Of equal ones the one nearest to 1.

    Source: spec 10.5.
    """
    temperatures: list[float] = []
    before = np.ones(len(blocks.logits))
    for k in range(blocks.logits.shape[1]):
        logits, survived = blocks.logits[:, k], blocks.survived[:, k]

        def error(power: float, logits: Numbers = logits, survived: Numbers = survived, before: Numbers = before):
            # a_k = a_{k-1} * sigma(logit / tau)
            return calibration_error(reliability(before * _sigmoid(logits / 2.0**power), survived, bins))

        temperatures.append(2.0 ** _least(error))
        before = before * _sigmoid(logits / temperatures[-1])
    return tuple(temperatures)


def noise_floor(
    blocks: Blocks, temperatures: Sequence[float], bins: int = BINS, *, draws: int = 20, seed: int = 0
) -> Errors:
    """The mean errors that as many blocks would show whose confidences are exactly right, as outcomes of 0 and 1.

    Every bin's share is off by chance, and each miss counts as error: what is near this floor says nothing against
    the drafter. It sinks with the root of the blocks.

    Raises: ValueError for draws below 1, and as `errors`.
    """
    _check_draws(draws)
    rng, chance = np.random.default_rng(seed), confidences(blocks.logits, temperatures)
    drawn = (Blocks(blocks.logits, (rng.random(chance.shape) < chance).astype(np.float64)) for _ in range(draws))
    found = [errors(each, temperatures, bins) for each in drawn]
    by_position = np.mean([each.by_position for each in found], 0)
    return Errors(tuple(by_position.tolist()), float(np.mean([each.overall for each in found])))


def bootstrap_interval(
    blocks: Blocks, measure: Callable[[Blocks], float], *, passages: ArrayLike | None = None, draws: int = 500,
    level: float = 0.95, seed: int = 0,
) -> tuple[float, float]:  # fmt: skip
    """Between what values `measure` lies on blocks drawn anew from these, with repetition.

    Whole blocks are drawn: what happens at their positions hangs together. Drawing adds noise of its own, which a
    calibration error counts as error: the interval leans upwards, and near the floor it lies above the truth.

    passages: which text each block is from, as a number. Then whole passages are drawn, as blocks of one are alike and
        no independent draws; without it the interval is too narrow for them.
    level: the share of the draws inside.
    Shapes: passages [n].
    Raises: ValueError for draws below 1, a level outside 0..1, another number of passages than blocks.
    """
    _check_draws(draws)
    if not 0 < level < 1:
        raise ValueError(f"level={level}: between 0 and 1 is needed")
    groups = None if passages is None else _groups(len(blocks.logits), passages)
    rng, n = np.random.default_rng(seed), len(blocks.logits if groups is None else groups)
    measured = []
    for _ in range(draws):
        drawn = rng.integers(0, n, n)
        rows = drawn if groups is None else np.concatenate([groups[i] for i in drawn])
        measured.append(measure(blocks.take(rows)))
    low, high = np.quantile(measured, ((1 - level) / 2, (1 + level) / 2))
    return float(low), float(high)


def _groups(n: int, passages: ArrayLike) -> list[NDArray[np.intp]]:
    """The blocks of each passage, in order."""
    passages = np.asarray(passages)
    if passages.shape != (n,):
        raise ValueError(f"{passages.size} passages for {n} blocks: one for each is needed")
    _, place = np.unique(passages, return_inverse=True)
    order = np.argsort(place, kind="stable")
    return np.split(order, np.bincount(place).cumsum()[:-1])


def _check_draws(draws: int) -> None:
    if draws < 1:
        raise ValueError(f"draws={draws}: at least one is needed")


def _sigmoid(x: Numbers) -> Numbers:
    return 0.5 * (1 + np.tanh(0.5 * x))  # overflows nowhere


def _starts(ordered: Numbers, bins: int) -> NDArray[np.intp]:
    """Where bins of equal mass begin; a border among equal values moves down to the first of them."""
    wished = np.arange(bins) * ordered.size // bins
    return np.unique(np.searchsorted(ordered, ordered[wished], side="left"))


def _least(error: Callable[[float], float]) -> float:
    """The power of two with the least error: on a grid, then ever closer around the best."""
    n_steps = round(LIMIT / STEP)
    # By distance from 0, and only a smaller error replaces: of equal ones the nearest to tau = 1 stays.
    grid = sorted((i * STEP for i in range(-n_steps, n_steps + 1)), key=lambda power: (abs(power), power))
    best = min(grid, key=error)
    least, step = error(best), STEP / 2
    while step >= FINEST:
        for power in sorted((best - step, best + step), key=abs):
            if abs(power) <= LIMIT and (found := error(power)) < least:
                best, least = power, found
        step /= 2
    return best
