"""How many drafted tokens a step verifies, over all its requests: as many as raise expected tokens per second."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tinyds41.infer.step_curve import StepCurve

Numbers = NDArray[np.float64]


def survival(confidence: ArrayLike) -> Numbers:
    """The chance that a block is accepted up to and with each position.

    A confidence is conditional, it counts once all tokens before it are accepted: a_k = c_1 * ... * c_k.

    Shapes: [...,k] -> float64 [...,k], never rising from left to right.
    Raises: ValueError for a confidence outside 0..1.
    Source: spec 10.6.
    """
    confidence = np.asarray(confidence, dtype=np.float64)
    possible = (confidence >= 0) & (confidence <= 1)
    if not possible.all():
        raise ValueError(f"confidence {confidence[~possible][0]}: between 0 and 1 is needed")
    return confidence.cumprod(-1)


def choose_lengths(confidence: ArrayLike, curve: StepCurve) -> NDArray[np.intp]:
    """How many drafted tokens of each request are verified in one step.

    (request, position) pairs are admitted in order of falling survival, of equal ones the lower request and position,
    as long as expected tokens per second rise: (R + sum of admitted survivals) * steps per second at (R + admitted)
    tokens. At the first one that does not raise them it ends, though later ones might.

    That end is what keeps it lossless. Whether position k is verified follows from confidences up to k of its request
    and from other requests. None of them knows token k, which therefore has the distribution that it is judged by. A
    best over all lengths would look at confidences behind k, which know it.

    A pair that cannot be accepted is never admitted: zeros end a request that may draft less than the others.

    Shapes: confidence [R,k], calibrated -> [R] integers in 0..k.
    Raises: ValueError for another shape, no request, a confidence outside 0..1.
    Source: spec 10.6.
    """
    survivals = _survivals(confidence)
    n_requests, depth = survivals.shape
    # By rows: of equal survivals a stable sort leaves the lower request first, and in it the lower position.
    order = np.argsort(-survivals.ravel(), kind="stable")
    admitted = survivals.ravel()[order]
    admitted = admitted[admitted > 0]
    kept = n_requests + np.append(0.0, admitted.cumsum())
    # (R + sum a) * steps_per_second(R + admitted), for each number of admitted pairs
    n_admitted = _until_it_falls(kept * curve.steps_per_second(n_requests + np.arange(len(kept))))
    # In a row survivals never rise: the admitted pairs of a request are its first positions.
    return np.bincount(order[:n_admitted] // max(depth, 1), minlength=n_requests)


def choose_common_length(confidence: ArrayLike, curve: StepCurve) -> int:
    """One length for all requests, for engines whose step reads equally many tokens of each.

    As `choose_lengths`, but a position is admitted for all requests at once: (R + sum of survivals up to L) * steps
    per second at R * (1 + L) tokens, as long as it rises.

    Shapes: confidence [R,k], calibrated; 0 from where a request may draft no more -> 0..k.
    Raises: as `choose_lengths`.
    Differs: our `extend` pads no rows, so tokens behind a shorter length would be read and thrown away.
    """
    survivals = _survivals(confidence)
    gained = survivals.sum(0)
    gained = gained[gained > 0]
    kept = len(survivals) + np.append(0.0, gained.cumsum())
    return _until_it_falls(kept * curve.steps_per_second(len(survivals) * np.arange(1, len(kept) + 1)))


def _survivals(confidence: ArrayLike) -> Numbers:
    survivals = survival(confidence)
    if survivals.ndim != 2 or not len(survivals):
        raise ValueError(f"confidence is {survivals.shape}: [R,k] of at least one request is needed")
    return survivals


def _until_it_falls(speed: Numbers) -> int:
    """The last place before the first that is not above the one before it."""
    falls = np.flatnonzero(np.diff(speed) <= 0)
    return int(falls[0]) if falls.size else len(speed) - 1
