"""The checks of lesson 12. What they expect is computed by the library's own optimisers, roles and model."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tinyds41.config import Config
from tinyds41.course.exercises import judge
from tinyds41.model.transformer import Model
from tinyds41.train.momentum import UPDATE_RMS
from tinyds41.train.muon import Muon
from tinyds41.train.optim import MOMENTS
from tinyds41.train.roles import ROLES, parameter_roles

BYTES = 4  # float32
REPEATS = 60  # exercise 3: how often the step is applied


def check_saved_bytes(answer: int) -> None:
    """Exercise 1: bytes of moments, in float32, that the tables of flash save against AdamW."""

    def complaint(answer: int) -> str | None:
        rows = parameter_roles(Model(Config.preset("flash"), device="meta"))
        saved = sum(BYTES * row.numbers * (MOMENTS["AdamW"] - MOMENTS[ROLES[row.role].optimizer])
                    for row in rows if row.alone == "table")  # fmt: skip
        return None if answer == saved else f"{answer:,} bytes is wrong"

    judge(answer, complaint)


def check_by_heads(answer: Callable[[Tensor, int], Tensor]) -> None:
    """Exercise 2: Muon's first update at a rate of 1, head by head, of weights that are 0."""

    def complaint(answer: Callable[[Tensor, int], Tensor]) -> str | None:
        generator = torch.Generator().manual_seed(12)
        for rows, columns, n_heads in ((6, 4, 1), (12, 5, 3), (12, 5, 2), (8, 16, 4)):
            gradient = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
            gradient[: rows // n_heads] *= 100  # a loud head
            expected, found = _update(gradient, n_heads), answer(gradient.clone(), n_heads)
            said = f"a gradient of {rows} x {columns}, {n_heads} heads: "
            if tuple(found.shape) != (rows, columns):
                return said + f"an update of shape {tuple(found.shape)} is wrong"
            if not torch.allclose(found.double(), expected, atol=1e-6):
                sizes = [round(float(head.square().mean().sqrt()), 4) for head in found.chunk(n_heads)]
                return said + f"an update whose heads have the root mean squares {sizes} is wrong"
        return None

    judge(answer, complaint)


def _update(gradient: Tensor, n_heads: int) -> Tensor:
    weight = torch.nn.Parameter(torch.zeros_like(gradient))
    weight.grad = gradient
    Muon([{"params": [weight], "n_matrices": n_heads}], lr=1.0).step()
    return -weight.detach()


def check_cubic(answer: tuple[float, float]) -> None:
    """Exercise 3: a and b with which s <- a s + b s^3 brings all singular values to 1, and holds them there."""

    def complaint(answer: tuple[float, float]) -> str | None:
        a, b = answer
        start = torch.linspace(0.01, 1, 100, dtype=torch.float64)
        values = start
        for _ in range(REPEATS):
            values = a * values + b * values**3
        far = ~((values - 1).abs() < 1e-3)
        if far.any():
            return f"after {REPEATS} steps {start[far][0]:.2f} has become {values[far][0]:.4g}"
        # A slope of 0 at 1: what is nearly 1 becomes so at once, not by and by.
        near = a * 0.9 + b * 0.9**3
        if abs(near - (1.5 * 0.9 - 0.5 * 0.9**3)) > 1e-6:
            return f"it comes to 1, but slowly: 0.9 becomes {near:.4g}"
        return None

    judge(answer, complaint)


def update_rms(update: Tensor, n_matrices: int) -> list[float]:
    """Root mean square of each head's, or each expert's, part of an update at a learning rate of 1.

    Shapes: update [rows, columns] or [n, rows, columns], as `Muon.direction` returns it.
    """
    parts = update if update.ndim == 3 else update.chunk(n_matrices)
    return [round(UPDATE_RMS * float(part.square().mean().sqrt()), 3) for part in parts]
