"""One moment with a look ahead, and an update of one size whatever the gradient's: what Muon and its kin share."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from tinyds41.mixing import at_least_fp32

MOMENTUM = 0.95
# Root mean square of an update at a learning rate of 1: that of AdamW, so that both can share one rate.
UPDATE_RMS = 0.18


def evaluated(closure: Callable[[], float] | None) -> float | None:
    """The loss of a closure, with gradients, as torch's optimisers call it; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


class Momentum(torch.optim.Optimizer):
    """m ← .95 m + .05 g; the direction is taken from .95 m + .05 g; weights first decay, then move by .18 of it.

    Who inherits says in `direction` what it makes of it. Groups have `lr` and `weight_decay`. The moment is stored in
    the weight's dtype, everything between is at least float32, and a weight is rounded once.

    Raises: ValueError for a negative or non-finite rate or decay.
    Source: spec 11. The mean instead of the sum of gradients is a factor that no direction sees.
    """

    def __init__(self, params: ParamsT, lr: float, weight_decay: float, **defaults: Any):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, **defaults})
        for group in self.param_groups:
            for name in ("lr", "weight_decay"):
                if not 0 <= group[name] < math.inf:
                    raise ValueError(f"{name}={group[name]}: a finite number of at least 0 is needed")

    @abstractmethod
    def direction(self, gradient: Tensor, group: dict[str, Any]) -> Tensor:
        """Where a weight moves, with a root mean square of about 1; same shape as the gradient."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One update of every parameter that has a gradient."""
        loss = evaluated(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
        return loss

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["momentum"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        mean = state["momentum"].lerp_(gradient, 1 - MOMENTUM)
        ahead = at_least_fp32(gradient).lerp(at_least_fp32(mean), MOMENTUM)
        kept = at_least_fp32(parameter) * (1 - group["lr"] * group["weight_decay"])
        parameter.copy_(kept.sub_(self.direction(ahead, group), alpha=group["lr"] * UPDATE_RMS))
