"""The checks of lesson 10. What they expect is computed by the library's own hash, gate and traffic."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tinyds41.config import Config
from tinyds41.cost.traffic import DecodeTraffic
from tinyds41.course.exercises import judge
from tinyds41.model.engram import hash_rows, multipliers, table_primes
from tinyds41.model.engram_gate import gated_read

CHANGES = {"engram_max_ngram_size": 5, "engram_head_dim": 128}  # exercise 1
GATES = (0.05, 0.3, 0.6, 0.9, 0.99)  # exercise 3; at 0.5 the definition holds t away from 0


def check_bytes(answer: int) -> None:
    """Exercise 1: the bytes of rows that a token reads in flash with n-grams up to 5 tokens, 128 numbers a row."""

    def complaint(answer: int) -> str | None:
        changed = Config.preset("flash", **CHANGES)
        changed = changed.replace(engram_num_embeddings=tuple(map(sum, table_primes(changed))))
        if answer != DecodeTraffic(changed).at(1).engram_rows:
            return f"{answer:,} bytes is wrong"
        return None

    judge(answer, complaint)


def check_shared(answer: Callable[[list[int], list[int], int], int]) -> None:
    """Exercise 2: how many different pairs of neighbours in a text have a row that another pair has too."""

    def complaint(answer: Callable[[list[int], list[int], int], int]) -> str | None:
        generator = torch.Generator().manual_seed(10)
        first, second = multipliers(1, 6, 2).tolist()
        for length, prime in ((2, 5), (9, 3), (30, 11), (30, 101), (60, 23)):
            ids = torch.randint(0, 6, (length,), generator=generator)
            pairs = torch.stack([ids[1:], ids[:-1]], -1).unique(dim=0)
            rows = hash_rows(pairs, torch.tensor([first, second]), torch.tensor([prime]), 1).flatten()
            expected = int((rows.bincount()[rows] > 1).sum())
            found = answer(ids.tolist(), [first, second], prime)
            if found != expected:
                return f"ids {ids.tolist()}, {prime} rows: {found} is wrong"
        return None

    judge(answer, complaint)


def check_opening(answer: Callable[[float], float]) -> None:
    """Exercise 3: the t that opens a gate to g."""

    def complaint(answer: Callable[[float], float]) -> str | None:
        # One stream of one channel, normalised to 1, with a key of 1: t is the weight.
        one, read = torch.ones(1, 1, 1, dtype=torch.float64), torch.tensor([[1.0, 0.0]], dtype=torch.float64)
        for wanted in GATES:
            weight = torch.tensor([[float(answer(wanted))]], dtype=torch.float64)
            _, gate = gated_read(one, read, weight, torch.ones(1, dtype=torch.bool), 1e-20)
            if abs(gate.item() - wanted) > 1e-6:  # float64, and eps of 1e-20: an exact answer is exact to 1e-12
                return f"for a gate of {wanted} your t is {weight.item():.4f}, which opens it to {gate.item():.4f}"
        return None

    judge(answer, complaint)
