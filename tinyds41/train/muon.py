"""Muon: a matrix moves in all its directions alike, because its momentum is orthogonalised first."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from tinyds41.train.momentum import Momentum

WEIGHT_DECAY = 0.1
# Eight steps that raise small singular values 3.4 times each, then two that bring all of them close to 1.
COEFFICIENTS = ((3.4445, -4.7750, 2.0315),) * 8 + ((2.0, -1.5, 0.5),) * 2
EPSILON = 1e-20


def orthogonal(matrices: Tensor) -> Tensor:
    """Each matrix with singular values near 1 in place of its own: between 1 and 1.003 above 3e-5 of its norm.

    Newton-Schulz, in the dtype given. Zeros stay zeros.

    Shapes: [n, rows, columns] -> the same. Source: spec 11 (V4's hybrid coefficients). Lesson: 12.
    """
    tall = matrices.shape[-2] > matrices.shape[-1]
    X = matrices.mT if tall else matrices
    # No singular value exceeds the Frobenius norm.
    X = X / torch.linalg.matrix_norm(X, keepdim=True).clamp(min=EPSILON)
    for a, b, c in COEFFICIENTS:
        # X ← a X + b (X Xᵀ) X + c (X Xᵀ)² X
        gram = X @ X.mT
        X = torch.baddbmm(X, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), X, beta=a)
    return X.mT if tall else X


class Muon(Momentum):
    """Muon for matrices, and for matrices that are stored as one: each of them is orthogonalised alone.

    `n_matrices` of a group: how many of equal height lie one below the other in [rows, columns], such as the heads of
    a query projection. Stacks [n, rows, columns], such as experts, are n matrices.

    `torch.optim.Muon` of 2.11 to 2.13 does not fit here: it iterates in bfloat16, always (2 % from float32, and ten
    times as slow on a CPU), has one triple of coefficients for all its steps, no heads, no stacks, and an RMS of 0.2.
    What it shares, momentum, look-ahead, decay and the factor of the shape, a test compares.

    Shapes: parameters [rows, columns] or [n, rows, columns].
    Raises: ValueError naming a shape that is neither, or rows that are not n_matrices of equal height.
    Source: spec 11. Differs: √max(rows, columns) makes the RMS .18 where all singular values become 1; a gradient of
        lower rank moves less. An expert that no token visits goes on along its momentum, which is scaled up.
    """

    def __init__(self, params: ParamsT, lr: float, weight_decay: float = WEIGHT_DECAY, n_matrices: int = 1):
        super().__init__(params, lr, weight_decay, n_matrices=n_matrices)
        for group in self.param_groups:
            for parameter in group["params"]:
                _require_matrices(tuple(parameter.shape), group["n_matrices"])

    def direction(self, gradient: Tensor, group: dict[str, Any]) -> Tensor:
        matrices = gradient if gradient.ndim == 3 else gradient.unflatten(0, (group["n_matrices"], -1))
        return orthogonal(matrices).mul(math.sqrt(max(matrices.shape[1:]))).reshape(gradient.shape)


def _require_matrices(shape: tuple[int, ...], n_matrices: int) -> None:
    if len(shape) not in (2, 3):
        raise ValueError(f"Muon needs matrices [rows, columns] or [n, rows, columns], got {shape}")
    if n_matrices < 1:
        raise ValueError(f"n_matrices={n_matrices}: at least 1 is needed")
    if len(shape) == 3 and n_matrices != 1:
        raise ValueError(f"{shape} is a stack already: n_matrices={n_matrices} is for [rows, columns]")
    if shape[0] % n_matrices:
        raise ValueError(f"{shape[0]} rows are not {n_matrices} matrices of equal height")
