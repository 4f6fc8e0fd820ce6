"""How many drafted tokens a step verifies, over all its requests: as many as raise expected tokens per second."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

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
