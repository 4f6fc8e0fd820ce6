"""One token id from logits, or the probabilities it is drawn from."""

from __future__ import annotations

import math
import operator

import torch
import torch.nn.functional as F
from torch import Tensor

from tinyds41.ops import select_top


def check_sampling(temperature: float, top_k: int | None, top_p: float | None) -> None:
    """Raises: ValueError naming the value that cannot be."""
    if not (math.isfinite(temperature) and temperature >= 0):
        raise ValueError(f"temperature={temperature}: 0 or a positive finite number is needed")
    if top_k is not None and operator.index(top_k) < 1:
        raise ValueError(f"top_k={top_k}: at least one token must be allowed")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p={top_p}: a probability above 0 and up to 1 is needed")


def sample(
    logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator, top_p: float | None = None
) -> int:
    """One id of logits [V], in float64; at temperature 0 the likeliest, of equal ones the lowest.

    top_k: only the k likeliest. top_p: of those only the likeliest that together have this probability, at least one.

    Raises: FloatingPointError for logits that are not finite.
    """
    probabilities = chances(logits, temperature, top_k, top_p)
    return int(probabilities.argmax() if temperature == 0 else probabilities.multinomial(1, generator=generator))


def chances(logits: Tensor, temperature: float, top_k: int | None, top_p: float | None) -> Tensor:
    """The probabilities that `sample` draws from; 1 for one id at temperature 0. Shapes: [...,V] -> float64 [...,V].

    Raises: FloatingPointError for logits that are not finite.
    """
    logits = logits.double()
    if not logits.isfinite().all():
        raise FloatingPointError("the model gives logits that are not finite: there is no token to choose")
    if temperature == 0:
        return torch.zeros_like(logits).scatter(-1, select_top(logits, 1), 1.0)
    if top_k is not None and top_k < logits.shape[-1]:
        kept = select_top(logits, top_k)
        logits = torch.full_like(logits, -torch.inf).scatter(-1, kept, logits.gather(-1, kept))
    probabilities = ((logits - logits.amax(-1, keepdim=True)) / temperature).softmax(-1)
    if top_p is not None:
        probabilities = probabilities * likeliest(probabilities, top_p)
        probabilities = probabilities / probabilities.sum(-1, keepdim=True)
    return probabilities


def likeliest(probabilities: Tensor, top_p: float) -> Tensor:
    """Which ids are among the likeliest that have at least probability top_p. Shapes: [...,V] -> bool [...,V]."""
    order = probabilities.sort(descending=True, stable=True)  # of equal ones the lowest id first
    # An id is needed while those before it have less; the first one always is.
    needed = F.pad(order.values.cumsum(-1)[..., :-1], (1, 0)) < top_p
    return torch.zeros_like(needed).scatter(-1, order.indices, needed)
