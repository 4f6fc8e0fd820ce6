"""Speculative decoding: which drafted tokens stand, so that the text is distributed as without a drafter."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tinyds41.infer.draft import Draft, Drafter
from tinyds41.infer.dspark_drafter import DSparkDrafter
from tinyds41.infer.session import Session

SUM_ERROR = 1e-6  # by which chances may miss 1


@dataclass
class Speculation:
    """What a drafter did for one or several answers.

    proposed, accepted: drafted tokens by position in the draft, the first one first. steps: runs of the model after
    the prefill, counted once per row; each gives the accepted tokens and one more.
    """

    steps: int = 0
    proposed: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def add(self, n_proposed: int, n_accepted: int) -> None:
        """One step of one row."""
        self.steps += 1
        for counts, n in ((self.proposed, n_proposed), (self.accepted, n_accepted)):
            counts.extend([0] * (n_proposed - len(counts)))
            for position in range(n):
                counts[position] += 1

    @property
    def accepted_length(self) -> float:
        """Tokens per step: the accepted ones and the one that the model adds."""
        return 1 + sum(self.accepted) / self.steps if self.steps else 0.0

    @property
    def acceptance(self) -> list[float]:
        """By position: how often its token stood, once those before it did."""
        reached = [self.proposed[0] if self.proposed else 0, *self.accepted]
        # Drafts may end before a position; without the shorter ones those that reached it are at most its proposals.
        reached = [min(a, b) for a, b in zip(reached, self.proposed, strict=False)]
        return [accepted / n if n else 0.0 for accepted, n in zip(self.accepted, reached, strict=True)]


def accept(
    target: Callable[[int], Tensor], tokens: list[int], chances: Tensor | None, generator: torch.Generator
) -> tuple[int, int]:
    """How many of the drafted tokens stand, and the token behind them.

    A token x, drawn from q, stands with min(1, p[x] / q[x]). Where one falls, the next is drawn from what p has more
    than q; where all stand, from p: so every token is distributed as p. A certain draft (chances None) has q[x] = 1,
    and a greedy target p[x] = 1: then what stands is what the target would choose, and nothing is drawn.

    Shapes: target(i) [V] float64, p behind i tokens; chances [k,V]. Source: spec 10.7.
    """
    for position, token in enumerate(tokens):
        p = target(position)
        drafted = 1.0 if chances is None else float(chances[position, token])
        wanted = float(p[token])
        if wanted >= drafted:
            continue
        if wanted > 0 and float(torch.rand((), generator=generator, dtype=torch.float64)) * drafted < wanted:
            continue
        rest = p.clone()
        if chances is None:
            rest[token] = 0
        else:
            rest = (p - chances[position]).clamp_(min=0)
        return position, draw(rest, generator)
    return len(tokens), draw(target(len(tokens)), generator)


def draw(weights: Tensor, generator: torch.Generator) -> int:
    """One id; what is certain leaves the generator as it was. Shapes: [V], not negative, need not add up to 1."""
    best = int(weights.argmax())
    if float(weights[best]) == 1.0:  # greedy
        return best
    return int(weights.multinomial(1, generator=generator))


def drafter_of(session: Session, speculate: bool | Drafter, draft_tokens: int | None) -> tuple[Drafter | None, int]:
    """Who drafts for a session, and how many tokens at a time; (None, 0) for nobody.

    Raises: ValueError for a model without a drafter, a number of tokens below 1, beyond what the drafter can or what
        the session can take back, or without a drafter.
    """
    if speculate is False:
        if draft_tokens is not None:
            raise ValueError(f"draft_tokens={draft_tokens} without speculate")
        return None, 0
    if speculate is True and session.model.mtp is None:
        raise ValueError("speculate=True: this model has no drafter; load(folder, draft=True) reads one where there "
                         "is one, and any Drafter can be passed")  # fmt: skip
    temperatures = session.model.config.dspark_temperatures
    drafter = DSparkDrafter(session.model, temperatures) if speculate is True else speculate
    if not hasattr(drafter, "propose"):
        raise ValueError(f"speculate={speculate!r}: True, False or a Drafter is needed")
    depth = drafter.depth if draft_tokens is None else operator.index(draft_tokens)
    if not 1 <= depth <= drafter.depth:
        raise ValueError(f"draft_tokens={depth}: this drafter proposes 1 to {drafter.depth}")
    if depth > session.rollback:
        raise ValueError(f"draft_tokens={depth}: the session can take back rollback={session.rollback} tokens only")
    return drafter, depth


def check_draft(draft: Draft, batch: int, depth: int, n_ids: int) -> None:
    """Raises: ValueError for a draft of another shape, ids that are none of the model's, impossible chances."""
    tokens, chances = draft.tokens, draft.chances
    if tuple(tokens.shape) != (batch, depth):
        raise ValueError(f"the draft has shape {tuple(tokens.shape)}, expected ({batch}, {depth})")
    low, high = (int(value) for value in tokens.aminmax())
    if low < 0 or high >= n_ids:
        raise ValueError(f"the drafter proposes id {low if low < 0 else high}: the model's ids are 0..{n_ids - 1}")
    if chances is None:
        return
    if chances.ndim != 3 or tuple(chances.shape[:2]) != (batch, depth) or chances.shape[2] < n_ids:
        raise ValueError(f"the draft's chances have shape {tuple(chances.shape)}, expected ({batch}, {depth}, {n_ids})")
    sums = chances[..., :n_ids].sum(-1)
    if not (bool((chances >= 0).all()) and bool(((sums - 1).abs() < SUM_ERROR).all())):
        raise ValueError(f"the draft's chances of the model's {n_ids} ids: none may be negative, and they add up to "
                         f"{float(sums.min()):.6g}..{float(sums.max()):.6g} instead of 1")  # fmt: skip
    if not bool((chances.gather(-1, tokens.to(chances.device).unsqueeze(-1)) > 0).all()):
        raise ValueError("the draft gives chance 0 to a token that it proposes")
