"""What a drafter gives: the next tokens of running texts, and the chances it drew them from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tinyds41.infer.sample import chances, check_sampling
from tinyds41.infer.session import Session


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen from logits; temperature 0 takes the likeliest. See `sample`.

    Raises: ValueError naming the value that cannot be.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        check_sampling(self.temperature, self.top_k, self.top_p)

    def chances(self, logits: Tensor) -> Tensor:
        """Shapes: [...,V] -> float64 [...,V], which adds up to 1."""
        return chances(logits, self.temperature, self.top_k, self.top_p)


@dataclass(frozen=True)
class Draft:
    """The tokens that may come after the anchors, the last tokens of each text, which no session has read yet.

    Shapes: tokens [B,k] ids; chances [B,k,V] float64, what each token was drawn from, or None where each was certain;
        confidence [B,k] float64 in 0..1, the chance that a token is accepted once those before it are, or None.
    Source: spec 10.3, 10.7.
    """

    tokens: Tensor
    chances: Tensor | None = None
    confidence: Tensor | None = None


class Drafter(Protocol):
    """Whoever proposes tokens. It may read the session and must leave no trace in it.

    One that was made for a single model has it as `model`, and is refused by the sessions of others.
    """

    @property
    def depth(self) -> int:
        """The most tokens that `propose` may be asked for."""
        ...

    def propose(
        self, session: Session, anchors: Tensor, depth: int, sampling: Sampling, generators: list[torch.Generator]
    ) -> Draft:
        """`depth` tokens behind each row's anchor, row b drawn from generators[b]. Shapes: anchors [B] -> [B,depth].

        What a row is given follows from its own text and numbers, not from the rows beside it.
        """
        ...
