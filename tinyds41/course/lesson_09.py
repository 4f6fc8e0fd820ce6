"""The checks of lesson 09. What they expect is computed by the library's own formats, selection and balance rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from tinyds41.checkpoint.layout import FP4
from tinyds41.config import Config
from tinyds41.cost.traffic import matrix_bytes
from tinyds41.course.exercises import judge


def check_expert_bytes(answer: int) -> None:
    """Exercise 1: bytes of routed experts that one generated token of flash reads, all layers, in FP4."""

    def complaint(answer: int) -> str | None:
        flash = Config.preset("flash")
        width, inner = flash.hidden_size, flash.moe_intermediate_size
        expert = 2 * matrix_bytes(FP4, inner, width) + matrix_bytes(FP4, width, inner)
        if answer != flash.num_hidden_layers * flash.num_experts_per_tok * expert:
            return f"{answer:,} bytes is wrong"
        return None

    judge(answer, complaint)


def check_dropped(answer: Callable[[list[list[int]], int], int]) -> None:
    """Exercise 2: visits that find their expert full, where an expert has room for so many in a batch."""

    def complaint(answer: Callable[[list[list[int]], int], int]) -> str | None:
        generator = torch.Generator().manual_seed(9)
        for n_tokens, n_experts, n_active in ((1, 4, 2), (6, 4, 2), (9, 3, 1), (12, 5, 3)):
            chosen = [torch.randperm(n_experts, generator=generator)[:n_active].tolist() for _ in range(n_tokens)]
            counts = torch.bincount(torch.tensor(chosen).flatten(), minlength=n_experts)
            for room in (0, 1, 2, n_tokens):
                expected, found = int((counts - room).clamp(min=0).sum()), answer([list(row) for row in chosen], room)
                if found != expected:
                    return f"choices {chosen}, room for {room}: {found} is wrong"
        return None

    judge(answer, complaint)


def check_moved(answer: Callable[[list[float], list[int], float], Sequence[float]]) -> None:
    """Exercise 3: the biases of one gate after a step of the balance rule."""

    def complaint(answer: Callable[[list[float], list[int], float], Sequence[float]]) -> str | None:
        generator = torch.Generator().manual_seed(10)
        for n_experts in (1, 3, 4, 7):
            for rate in (0.001, 0.5):
                # Few loads, so that some are exactly the mean.
                loads = torch.randint(0, 4, (n_experts,), generator=generator).double()
                bias = torch.randn(n_experts, generator=generator).double()
                expected = bias + rate * torch.sign(loads.mean() - loads)
                found = answer(bias.tolist(), loads.int().tolist(), rate)
                if len(found) != n_experts or not torch.allclose(torch.tensor(found).double(), expected, atol=1e-7):
                    shown = [round(value, 3) for value in bias.tolist()]
                    return f"biases {shown}, loads {loads.int().tolist()}, rate {rate}: {list(found)} is wrong"
        return None

    judge(answer, complaint)
