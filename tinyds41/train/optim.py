"""One optimiser per role of parameters, the learning rate's course, and the moving bias of the gates."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tinyds41.memory import require_bytes
from tinyds41.model.transformer import Model
from tinyds41.train.balanced_momentum import BalancedMomentum
from tinyds41.train.momentum import evaluated
from tinyds41.train.muon import Muon
from tinyds41.train.roles import ROLES, by_role, n_matrices, role

if TYPE_CHECKING:
    from tinyds41.train.train_config import TrainConfig

BETAS, EPSILON = (0.9, 0.95), 1e-20
BIAS_STEP = 0.001
# The schedule ends at a tenth of the base rate (spec 14).
FINAL_SHARE = 0.1
# No float16: second moments underflow to 0 there, and the second update is not finite.
TRAINABLE = (torch.bfloat16, torch.float32, torch.float64)


def require_trainable(model: Model, optimizer: str = "adamw") -> None:
    """Refuses before the first step what could not be trained.

    Needed are gradients and moments of every trained parameter, in its dtype; activations come on top.

    Raises: ValueError for a model without weights, and naming a dtype in which training cannot stay finite, and those
        in which it can; MemoryError naming the bytes needed and the bytes there.
    """
    if model.device.type == "meta":
        raise ValueError("the model is on the meta device: it has no weights to train")
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    for name, parameter in trained.items():
        if parameter.dtype not in TRAINABLE:
            raise ValueError(f"{name} is {parameter.dtype}, which does not train: {', '.join(map(str, TRAINABLE))} do")
    # A gradient that is there already takes no more.
    gradients = sum(p.nbytes for p in trained.values() if p.grad is None)
    moments = sum(p.nbytes * MOMENTS[optimizer_of(name, optimizer)] for name, p in trained.items())
    n_parameters = sum(p.numel() for p in trained.values())
    what = f"training {n_parameters:,} parameters (gradients and moments)"
    require_bytes(gradients + moments, model.device, what)


def optimizer_of(name: str, optimizer: str) -> str:
    """Which optimiser has a parameter: AdamW all of them, or the report's choice by role."""
    return "AdamW" if optimizer == "adamw" else ROLES[role(name)].optimizer


def adamw(model: Model, learning_rate: float) -> torch.optim.AdamW:
    """AdamW for all: one group per role, each with its `role` and `names`.

    Gate biases, which no gradient moves, are in none.

    Norms and matrices decay; scales, sinks, bases and tables do not. Source: spec 11.
    Differs: matrices and tables have Muon and balanced momentum in the report, see `ByRole`.
    """
    return _adamw([{**group, "lr_factor": 1.0} for group in _groups(model)], learning_rate)


class ByRole(torch.optim.Optimizer):
    """The report's optimisers as one: Muon, balanced momentum and AdamW, each for its roles (`roles.ROLES`).

    Groups and state are those of the three: who sets a group's `lr` or loads a state dict need not know of them. Each
    group has its `role`, its `names` and the `lr_factor` that the schedule multiplies the rate with.

    Raises: ValueError naming a parameter without a role.
    Source: spec 11. Lesson: 12.
    """

    def __init__(self, model: Model, learning_rate: float):
        groups = _groups(model)
        for group in groups:
            group["lr_factor"] = ROLES[group["role"]].lr_factor
            group["n_matrices"] = n_matrices(group["role"], model.config)
        self.parts: list[torch.optim.Optimizer] = []
        for name, make in MAKERS.items():
            own = [group for group in groups if ROLES[group["role"]].optimizer == name]
            self.parts += [make(own, learning_rate)] if own else []
        super().__init__([group for part in self.parts for group in part.param_groups], {})
        self._share()
        set_learning_rate(self, learning_rate)

    def _share(self) -> None:
        """The parts work on this optimiser's groups and state, which loading replaces."""
        first = 0
        for part in self.parts:
            last = first + len(part.param_groups)
            part.param_groups, part.state = self.param_groups[first:last], self.state
            first = last

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._share()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One update of every parameter that has a gradient."""
        loss = evaluated(closure)
        for part in self.parts:
            part.step()
        return loss


def _adamw(groups: list[dict[str, Any]], learning_rate: float) -> torch.optim.AdamW:
    return torch.optim.AdamW(groups, lr=learning_rate, betas=BETAS, eps=EPSILON, fused=True)


MAKERS = {"Muon": Muon, "balanced momentum": BalancedMomentum, "AdamW": _adamw}
MOMENTS = {"Muon": 1, "balanced momentum": 1, "AdamW": 2}


def _groups(model: Model) -> list[dict[str, Any]]:
    """One group per role that has trained parameters."""
    groups = []
    for kind, named in by_role(model).items():
        trained = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
        if trained:
            groups.append({"params": list(trained.values()), "names": list(trained), "role": kind,
                           "weight_decay": ROLES[kind].weight_decay})  # fmt: skip
    return groups


def optimizers(model: Model, config: TrainConfig) -> torch.optim.Optimizer:
    """What `config.optimizer` names: "report" for `ByRole`, "adamw" for AdamW alone."""
    return OPTIMIZERS[config.optimizer](model, config.learning_rate)


OPTIMIZERS: dict[str, Callable[[Model, float], torch.optim.Optimizer]] = {"adamw": adamw, "report": ByRole}


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """The schedule's rate times each group's own factor."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group["lr_factor"]


def learning_rate_at(step: int, *, base: float, warmup: int, steps: int) -> float:
    """Linear over `warmup` steps, then half a cosine to a tenth of `base` at the last step."""
    if step < warmup:
        return base * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - 1 - warmup)
    return base * (FINAL_SHARE + (1 - FINAL_SHARE) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))


@torch.no_grad()
def move_gate_biases(model: Model, load: Tensor, rate: float = BIAS_STEP, *, blocks: str = "layers") -> None:
    """bias_e += rate sign(mean load - load_e): the too busy are chosen less.

    blocks: "mtp" moves those of the draft blocks.
    Shapes: load [L,E]. Source: spec 8.
    """
    step_LE = rate * torch.sign(load.mean(-1, keepdim=True) - load)
    for layer, step_E in enumerate(step_LE):
        bias = model.get_parameter(f"{blocks}.{layer}.ffn.gate.bias")
        bias.add_(step_E.to(bias.dtype))
