"""Autograd's bookkeeping only where a gradient may be wanted."""

from __future__ import annotations

from typing import Any

import torch


class _NoGraph:
    """Stands for the context of a Function whose backward pass never comes: what it is given to keep is dropped."""

    def save_for_backward(self, *tensors: Any) -> None:
        pass


def apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """`function.apply(*args)`; without gradients its forward alone, which saves a small call half its time."""
    return function.apply(*args) if torch.is_grad_enabled() else function.forward(_NoGraph(), *args)
