"""The measurements and checks of lesson 11. What the checks expect is computed by the library's own rules."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from math import prod

import torch
from torch import Tensor

from tinyds41.config import Config
from tinyds41.cost.parameters import Share, shares
from tinyds41.cost.traffic import matrix_bytes, stored_format
from tinyds41.course.exercises import judge
from tinyds41.infer.draft import Sampling
from tinyds41.infer.dspark_drafter import DSparkDrafter
from tinyds41.infer.schedule import survival
from tinyds41.infer.session import Session
from tinyds41.infer.speculate import accept
from tinyds41.model.transformer import Model

DTYPE = torch.bfloat16  # of weights that released files keep as they are


def chi_square(counts: Tensor, chances: Tensor) -> float:
    """How far counts are from chances: the sum of (counted - expected)^2 / expected. Shapes: [V], [V]."""
    expected = chances.double() * counts.sum()
    return float(((counts - expected).square() / expected).sum())


def cost_ratios(model: Model, *, context: int = 128, rounds: int = 9) -> dict[int, float]:
    """By drafted tokens, how long a step with its draft takes, over a plain step of one token.

    Processor time, the least of some rounds, behind random rows. Depth 0 drafts nothing: 1.
    Raises: ValueError for a model without a drafter.
    """
    drafter, session = DSparkDrafter(model), Session(model)
    session.start().fill(context)
    anchor, generator = torch.zeros(1, dtype=torch.long), torch.Generator()

    def step(depth: int) -> float:
        begin = time.process_time()
        if depth:
            drafter.propose(session, anchor, depth, Sampling(1.0), [generator])
        session.extend(anchor.expand(1, depth + 1))
        seconds = time.process_time() - begin
        session.truncate(context)
        return seconds

    depths = range(drafter.depth + 1)
    least = [min(times) for times in zip(*([step(depth) for depth in depths] for _ in range(rounds)), strict=True)]
    return {depth: least[depth] / least[0] for depth in depths}


class WeightBytes:
    """Bytes of weights that steps and drafts of a config's model read, each weight once, as released files have them.

    Tokens are taken to choose their experts evenly and not alike: of E experts n tokens meet E (1 - (1 - A/E)^n).

    Raises: ValueError for a config without draft blocks.
    """

    def __init__(self, config: Config):
        self.config = config
        self._shares = shares(Model(config, device="meta", draft=True))

    def step(self, n_tokens: int) -> float:
        """Of a run of the backbone over so many tokens."""
        met = _met(self.config.n_routed_experts, self.config.num_experts_per_tok, n_tokens)
        return sum(_bytes(share, met) for share in self._shares if share.decode)

    def draft(self, requests: int = 1) -> float:
        """Of the drafts of so many requests: the draft blocks with all their slots, and the output head."""
        config = self.config
        n_slots = requests * (config.dspark_block_size or 0)
        met = _met(config.dspark_n_routed_experts or 0, config.dspark_num_experts_per_tok or 0, n_slots)
        total = 0.0
        for share in self._shares:
            if share.name.endswith("markov_head.embed.weight"):  # a row for each token
                total += n_slots * share.shape[1] * DTYPE.itemsize
            elif share.component in ("draft blocks", "output head"):
                total += _bytes(share, met)
        return total


def _met(n_experts: int, n_active: int, n_tokens: int) -> float:
    return n_experts * (1 - (1 - n_active / n_experts) ** n_tokens)


def _bytes(share: Share, experts: float) -> float:
    """Bytes of one parameter; of a stack of experts so many of them are read."""
    form = stored_format(share)
    matrix = share.shape[-2:]
    whole = share.stored * DTYPE.itemsize if form is None else share.stored // prod(matrix) * matrix_bytes(
        form, *matrix)  # fmt: skip
    return whole * experts / share.shape[0] if len(share.shape) == 3 else whole


def check_tokens(answer: Callable[[Sequence[float]], float]) -> None:
    """Exercise 1: expected tokens of a step from confidences, each given that all tokens before it stand."""

    def complaint(answer: Callable[[Sequence[float]], float]) -> str | None:
        for confidence in ([0.5], [1.0, 1.0], [0.9, 0.0, 1.0], [0.7, 0.6, 0.5, 0.4, 0.3], []):
            expected, found = 1 + float(survival(confidence).sum()), answer(list(confidence))
            if abs(found - expected) > 1e-9:
                return f"for the confidences {confidence}, {found:.4g} tokens is wrong"
        return None

    judge(answer, complaint)


def check_correction(answer: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Exercise 2: the chances of the token that replaces one that fell."""

    def complaint(answer: Callable[[Tensor, Tensor], Tensor]) -> str | None:
        generator = torch.Generator().manual_seed(11)
        for size in (2, 5, 9):
            p, q = (torch.rand(size, generator=generator, dtype=torch.float64) for _ in range(2))
            p, q = p / p.sum(), q / q.sum()
            # A token that cannot stand: u = 1 is as great as no drawn number.
            drafted = (p - q).argmin().reshape(1)
            rest = accept(p.expand(2, -1), q[None], drafted, torch.ones(1, dtype=torch.float64))[1]
            found = torch.as_tensor(answer(p.clone(), q.clone()), dtype=torch.float64)
            if found.shape != p.shape:
                return f"chances of shape {tuple(found.shape)} for {size} tokens are wrong"
            if (found < 0).any() or abs(float(found.sum()) - 1) > 1e-9:
                return f"{[round(x, 3) for x in found.tolist()]} are no chances: from 0 on, adding up to 1"
            if not torch.allclose(found, rest / rest.sum(), atol=1e-9):
                written = torch.minimum(p, q) + (p - q).clamp(min=0).sum() * found
                off = float((written - p).abs().max())
                return f"with this correction a token is written with a chance that is off by {off:.3f}"
        return None

    judge(answer, complaint)


def check_depth(answer: Callable[[float, float, Sequence[float]], int]) -> None:
    """Exercise 3: the depth of most tokens per second, from acceptance, cost of a draft and of each step."""

    def complaint(answer: Callable[[float, float, Sequence[float]], int]) -> str | None:
        flat, steep = [1 + 0.05 * n for n in range(6)], [1 + 0.9 * n for n in range(6)]
        for acceptance, draft, steps in ((0.9, 0.1, flat), (0.6, 0.1, flat), (0.6, 0.3, flat), (0.3, 0.5, flat),
                                         (0.9, 0.1, steep), (0.8, 0.9, flat)):  # fmt: skip
            speeds = [(1 + sum(acceptance**k for k in range(1, n + 1))) / (cost + draft * (n > 0))
                      for n, cost in enumerate(steps)]  # fmt: skip
            found = answer(acceptance, draft, list(steps))
            if found != speeds.index(max(speeds)):
                shown = [round(cost, 2) for cost in steps]
                return f"with acceptance {acceptance}, a draft of {draft} and steps of {shown}, depth {found} is wrong"
        return None

    judge(answer, complaint)
