"""Balanced momentum: rows of a table move alike, however seldom their ids occur, and so do its columns."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from tinyds41.train.momentum import Momentum

NORMALISATIONS = 11  # odd: rows come first and last
SMALL_ROW = 1e-3
EPSILON = 1e-20


def balanced(table: Tensor) -> Tensor:
    """Rows and columns brought to unit length by turns, as Sinkhorn does; rows of at most 1e-3 the mean length are 0.

    Rows end with length 1, columns near √(rows left / columns).

    Shapes: [rows, columns] -> the same, in the dtype given. Source: spec 11.
    """
    length_R = torch.linalg.vector_norm(table, dim=1)
    large_R = length_R > SMALL_ROW * length_R.mean()
    # Zero rows change no column: only the others are computed with, most of an n-gram table has no gradient.
    U = table[large_R]
    for k in range(1, NORMALISATIONS + 1):
        U /= torch.linalg.vector_norm(U, dim=k % 2, keepdim=True).clamp(min=EPSILON)
    result = torch.zeros_like(table)
    result[large_R] = U
    return result


class BalancedMomentum(Momentum):
    """Balanced momentum for token embedding, output head and Engram tables. Weights do not decay.

    A row that was never read has no gradient and keeps its bits. One that was read once moves on at full length until
    its look-ahead is 1e-3 of the mean: some 75 to 85 steps where most rows are read in each.

    Shapes: parameters [rows, columns], one row per id.
    Raises: ValueError naming another shape.
    Source: spec 11. Lesson: 12.
    """

    def __init__(self, params: ParamsT, lr: float):
        super().__init__(params, lr, weight_decay=0.0)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.ndim != 2:
                    raise ValueError(f"balanced momentum needs tables [rows, columns], got {tuple(parameter.shape)}")

    def direction(self, gradient: Tensor, group: dict[str, Any]) -> Tensor:
        return balanced(gradient).mul_(math.sqrt(gradient.shape[1]))
