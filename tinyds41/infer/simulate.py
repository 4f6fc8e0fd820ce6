"""Recorded drafts replayed at many loads: fixed lengths, a threshold and the scheduler side by side."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tinyds41.infer.schedule import survival
from tinyds41.infer.scheduler import Scheduler
from tinyds41.infer.step_curve import StepCurve
from tinyds41.tables import aligned

LOADS = tuple(2**i for i in range(9))  # requests that decode together: 1 to 256
BLOCKS = 8192  # drafts replayed at each load, at least
Counts = NDArray[np.intp]
Choose = Callable[[NDArray[np.float64]], Counts | None]  # confidence [R,k] -> lengths [R], None without drafts


@dataclass(frozen=True)
class Throughput:
    """What one way of choosing lengths reached at one load.

    kind: "fixed", "threshold" or "scheduler". setting: the length, or the least survival; nan for the scheduler.
    verified: drafted tokens that a request verifies per step; tokens_per_step: tokens that it gains, 1 without drafts.

    Units: tokens_per_second of all requests together.
    """

    kind: str
    setting: float
    requests: int
    tokens_per_second: float
    tokens_per_step: float
    verified: float

    @property
    def name(self) -> str:
        """The way of choosing, in words."""
        if self.kind == "fixed":
            return f"{self.setting:g} drafted"
        return self.kind if self.kind == "scheduler" else f"survival ≥ {self.setting:g}"


def simulate(
    confidence: ArrayLike, accepted: ArrayLike, curve: StepCurve, *, loads: Sequence[int] = LOADS,
    thresholds: Sequence[float] = (0.5,), drafting: StepCurve | None = None, blocks: int = BLOCKS, seed: int = 0,
) -> list[Throughput]:  # fmt: skip
    """Replays drafts at each number of concurrent requests, under each way of choosing how many tokens are verified.

    A step draws the next draft of each request, chooses lengths from their confidences alone, and takes the seconds
    that the curve has for all its tokens. A request gains what was accepted of its length, and one token more. All
    ways see the same drafts in the same order.

    accepted: how many tokens of each draft are accepted where all are verified. drafting: seconds that making the
    drafts takes by the number of requests, in steps that make them; None: nothing. Fixed length 0 makes none, and the
    scheduler none in most steps at loads where they do not pay.

    Shapes: confidence [n,k], calibrated; accepted [n] integers in 0..k.
    Returns: for each load k + 1 fixed lengths, the thresholds, the scheduler.
    Raises: ValueError for other shapes, values that cannot be, a load or `blocks` below 1, no load.
    Source: spec 10.6.
    """
    confidence, accepted = _checked(confidence, accepted)
    _check_settings(loads, thresholds, blocks)
    rows = []
    for requests in loads:
        order = replay_order(len(confidence), requests, math.ceil(blocks / requests), seed)
        extra = 0.0 if drafting is None else float(drafting.seconds(requests))
        for kind, setting, choose in _ways(confidence.shape[1], thresholds, Scheduler(curve, drafting)):
            rows.append(_replay(kind, setting, choose, confidence[order], accepted[order], curve, extra))
    return rows


def replay_order(n: int, requests: int, steps: int, seed: int) -> Counts:
    """Which draft each request has in each step: all n in a drawn order, then all of them in another, and so on.

    Shapes: -> [steps,requests] integers in 0..n-1, no one of which comes twice before all have come.
    """
    rng = np.random.default_rng([seed, requests])
    rounds = math.ceil(steps * requests / n)
    return np.concatenate([rng.permutation(n) for _ in range(rounds)])[: steps * requests].reshape(steps, requests)


def best_fixed(rows: Sequence[Throughput]) -> dict[int, Throughput]:
    """At each load the fixed length of most tokens per second; of equal ones the shortest."""
    best: dict[int, Throughput] = {}
    for row in rows:
        if row.kind == "fixed":
            best.setdefault(row.requests, row)
            if row.tokens_per_second > best[row.requests].tokens_per_second:
                best[row.requests] = row
    return best


def over_best_fixed(rows: Sequence[Throughput], kind: str = "scheduler") -> dict[int, float]:
    """Tokens per second of each row of that kind over those of the best fixed length, by load; 1 is as many."""
    best = best_fixed(rows)
    return {row.requests: row.tokens_per_second / best[row.requests].tokens_per_second for row in rows
            if row.kind == kind}  # fmt: skip


def throughput_table(rows: Sequence[Throughput]) -> str:
    """Tokens per second as aligned text: a line per load, a column per way of choosing."""
    names = list(dict.fromkeys(row.name for row in rows))
    found = {(row.requests, row.name): f"{row.tokens_per_second:,.1f}" for row in rows}
    loads = list(dict.fromkeys(row.requests for row in rows))
    return "\n".join(aligned(
        ("requests", *names), ([f"{load:,}", *(found[load, name] for name in names)] for load in loads), left=()))


def _ways(depth: int, thresholds: Sequence[float], scheduler: Scheduler) -> list[tuple[str, float, Choose]]:
    def fixed(length: int) -> Choose:
        return lambda confidence: np.full(len(confidence), length) if length else None

    def at_least(least: float) -> Choose:
        return lambda confidence: (survival(confidence) >= least).sum(1)

    def scheduled(confidence: NDArray[np.float64]) -> Counts | None:
        return scheduler.lengths(confidence) if scheduler.begin(len(confidence)) else None

    ways: list[tuple[str, float, Choose]] = [("fixed", n, fixed(n)) for n in range(depth + 1)]
    ways += [("threshold", least, at_least(least)) for least in thresholds]
    return [*ways, ("scheduler", math.nan, scheduled)]


def _replay(
    kind: str, setting: float, choose: Choose, confidence: NDArray[np.float64], accepted: Counts, curve: StepCurve,
    drafting: float,
) -> Throughput:  # fmt: skip
    """Shapes: confidence [steps,R,k], accepted [steps,R]."""
    chosen = [choose(step) for step in confidence]
    lengths = np.stack([np.zeros_like(accepted[0]) if own is None else own for own in chosen])
    # What was not verified is not accepted; the model's own token comes on top, behind the last accepted one.
    gained = np.minimum(lengths, accepted) + 1
    requests = lengths.shape[1]
    seconds = curve.seconds(requests + lengths.sum(1)).sum() + drafting * sum(own is not None for own in chosen)
    return Throughput(kind, setting, requests, float(gained.sum() / seconds), float(gained.mean()),
                      float(lengths.mean()))  # fmt: skip


def _checked(confidence: ArrayLike, accepted: ArrayLike) -> tuple[NDArray[np.float64], Counts]:
    confidence, lengths = np.asarray(confidence, dtype=np.float64), np.asarray(accepted)
    if confidence.ndim != 2 or not len(confidence):
        raise ValueError(f"confidence is {confidence.shape}: [n,k] of at least one draft is needed")
    if lengths.shape != confidence.shape[:1]:
        raise ValueError(f"accepted is {lengths.shape}: one length for each of {len(confidence)} drafts is needed")
    survival(confidence)  # refuses what is no chance
    depth = confidence.shape[1]
    possible = (lengths >= 0) & (lengths <= depth) & (lengths == np.floor(lengths))
    if not possible.all():
        raise ValueError(f"accepted {lengths[~possible][0]}: a whole number in 0..{depth} is needed")
    return confidence, lengths.astype(np.intp)


def _check_settings(loads: Sequence[int], thresholds: Sequence[float], blocks: int) -> None:
    if not len(loads):
        raise ValueError("no loads: at least one number of requests is needed")
    for name, value in (("blocks", blocks), *(("requests", load) for load in loads)):
        if value < 1:
            raise ValueError(f"{name}={value}: at least one is needed")
    for least in thresholds:
        if not 0 <= least <= 1:
            raise ValueError(f"threshold {least}: a survival between 0 and 1 is needed")
