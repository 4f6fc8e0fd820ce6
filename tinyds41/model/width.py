"""The check that every module of the model begins with."""

from __future__ import annotations

from torch import Tensor


def check_width(x: Tensor, width: int, what: str) -> None:
    """A wrong last axis is named here; deeper down it may broadcast, or fail far from its cause.

    Raises: ValueError with the expected width and the shape that came.
    """
    if x.shape[-1] != width:
        raise ValueError(f"{what}: expected [..., {width}], got {tuple(x.shape)}")
