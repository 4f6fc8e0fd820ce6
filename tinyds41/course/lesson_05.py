"""The checks of lesson 05. What they expect is computed by the library's own selection and cost model."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tinyds41.config import Config
from tinyds41.cost.rows import pool_shares, scored_entries
from tinyds41.course.exercises import judge
from tinyds41.ops import select_top

CONTEXTS = (1, 2, 4_095, 4_096, 16_384, 16_385, 100_001, 1_048_576)
BLOCKS, BLOCK_SIZE = 900, 16  # exercise 1


def check_binds(answer: int) -> None:
    """Exercise 1: the longest context at which a pool of 900 blocks of 16 still holds every entry of flash."""

    def complaint(answer: int) -> str | None:
        changed = Config.preset("flash", candidate_topk_blocks=BLOCKS, candidate_block_size=BLOCK_SIZE)
        if pool_shares(changed, answer)[0] < 1:
            return f"at a context of {answer:,} the pool leaves entries out"
        if pool_shares(changed, answer + 1)[0] == 1:
            return f"at {answer:,} it holds everything, but so it does at {answer + 1:,}"
        return None

    judge(answer, complaint)


def check_pool(answer: Callable[[list[float], int, int], list[int]]) -> None:
    """Exercise 2: a pool of n blocks, each as good as the sum of its scores; ties and the newest block included."""

    def complaint(answer: Callable[[list[float], int, int], list[int]]) -> str | None:
        generator = torch.Generator().manual_seed(5)
        for n_entries in (1, 5, 12, 31):
            for size, n_blocks in ((1, 2), (4, 1), (4, 3), (8, 2)):
                # Whole numbers, so that blocks tie.
                scores = torch.randint(0, 4, (n_entries,), generator=generator).float()
                sums = torch.stack([block.sum() for block in scores.split(size)])
                sums[-1] = torch.inf
                expected = [block for block in select_top(sums, n_blocks).tolist() if block >= 0]
                found = answer(scores.tolist(), size, n_blocks)
                if not isinstance(found, list) or found != expected:
                    return f"scores {scores.int().tolist()}, blocks of {size}, pool of {n_blocks}: {found} is wrong"
        return None

    judge(answer, complaint)


def check_scored(answer: Callable[[int], int]) -> None:
    """Exercise 3: how many index rows all layers of flash score for a token at a context."""

    def complaint(answer: Callable[[int], int]) -> str | None:
        flash = Config.preset("flash")
        for context in CONTEXTS:
            full, pool = scored_entries(flash, context)
            if answer(context) != sum(full.values()) + sum(pool.values()):
                return f"context {context:,}: {answer(context):,} rows is wrong"
        return None

    judge(answer, complaint)
