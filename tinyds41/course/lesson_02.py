"""The checks of lesson 02. What they expect is measured on a model, or computed by the library's own formulas."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from tinyds41.config import Config
from tinyds41.cost.kv_bytes import kv_bytes
from tinyds41.course.exercises import judge
from tinyds41.model.transformer import Model
from tinyds41.ops import attention_mass

BORDER = 30  # exercise 1
ROUNDING = 1e-10  # float64: other experts in the batch change the last bits of what they do not reach
CONTEXTS = (1, 5, 127, 128, 129, 4_096, 1_048_576)


def reach(config: Config, at: int = 3, length: int = 80) -> int:
    """The farthest distance at which another token changes the logits, measured on random weights.

    Rounding of the cache would blur small changes: it is off.
    """
    model = Model(config.replace(quantize_cache=False), seed=0, dtype=torch.float64)
    ids = torch.randint(4, config.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))
    changed = ids.clone()
    changed[0, at] = 4 + (ids[0, at] - 3) % (config.vocab_size - 4)
    with torch.no_grad():
        moved_S = (model(ids) - model(changed)).abs().amax(-1)[0]
    return int((moved_S > ROUNDING).nonzero().max()) - at


def check_border(answer: Config) -> None:
    """Exercise 1: windows alone, five layers or more, and a border at a distance of exactly 30 tokens."""

    def complaint(answer: Config) -> str | None:
        if any(answer.compress_ratios[: answer.num_hidden_layers]):
            return f"compress_ratios={answer.compress_ratios}: some layer sees more than its window"
        if answer.num_hidden_layers < 5:
            return f"{answer.num_hidden_layers} layers are fewer than five"
        found = reach(answer)
        return None if found == BORDER else f"a change moves outputs up to distance {found}"

    judge(answer, complaint)


def check_bytes(answer: Callable[[int], int]) -> None:
    """Exercise 2: bytes of all windows of flash after so many tokens."""

    def complaint(answer: Callable[[int], int]) -> str | None:
        windows = kv_bytes(Config.preset("flash")).of("window")
        for context in CONTEXTS:
            if answer(context) != sum(row.bytes_at(context) for row in windows):
                return f"after {context:,} tokens: {answer(context):,} bytes is wrong"
        return None

    judge(answer, complaint)


def check_sink(answer: Callable[[list[float], float], float]) -> None:
    """Exercise 3: the part of attention that the sink takes, from scores of any size; no scores, all of it."""

    def complaint(answer: Callable[[list[float], float], float]) -> str | None:
        for scores, sink in (([], 0.0), ([0.0], 0.0), ([1.0, 2.0, -1.0], 0.5), ([-3.0] * 9, 2.0), ([900.0], 899.0)):
            found, expected = answer(scores, sink), _sunk(scores, sink)
            if not isinstance(found, int | float) or not math.isclose(found, expected, abs_tol=1e-9):
                return f"scores {scores}, sink {sink}: {found} is wrong"
        return None

    judge(answer, complaint)


def _sunk(scores: list[float], sink: float) -> float:
    """What `attention_mass` leaves to the sink: the query is 1, so that scores are the rows themselves."""
    rows_BSWC = torch.tensor(scores, dtype=torch.float64).reshape(1, 1, -1, 1)
    none_BST = torch.zeros(1, 1, 0, dtype=torch.bool)
    near, _ = attention_mass(
        torch.ones(1, 1, 1, 1, dtype=torch.float64), rows_BSWC, torch.zeros(1, 1, len(scores), dtype=torch.bool),
        torch.zeros(1, 0, 1, dtype=torch.float64), none_BST, torch.tensor([sink], dtype=torch.float64),
    )  # fmt: skip
    return 1 - float(near.sum())
