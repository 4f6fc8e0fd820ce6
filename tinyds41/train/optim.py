"""AdamW by the role of each parameter, the learning rate's course, and the moving bias of the gates."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tinyds41.memory import require_bytes
from tinyds41.model.transformer import Model

BETAS, EPSILON, WEIGHT_DECAY = (0.9, 0.95), 1e-20, 0.1
BIAS_STEP = 0.001
# The schedule ends at a tenth of the base rate (spec 14).
FINAL_SHARE = 0.1
# No float16: second moments underflow to 0 there, and the second update is not finite.
TRAINABLE = (torch.bfloat16, torch.float32, torch.float64)
DECAYED = {"matrix": True, "norm": True, "table": False, "scale": False}


def role(name: str) -> str:
    """What a parameter is to its optimiser.

    One of "matrix", "norm", "table" (rows looked up by id) or "scale".

    Source: spec 11.
    """
    leaf = name.rsplit(".", 1)[-1]
    if leaf in ("base", "scale", "attn_sink", "q_weight", "k_weight", "bias", "bias_vl"):
        return "scale"
    if "norm" in name:
        return "norm"
    return "table" if name == "head.weight" or name.endswith("embed.weight") else "matrix"


def require_trainable(model: Model) -> None:
    """Refuses before the first step what could not be trained.

    Needed are gradients and two moments of every trained parameter, in its dtype; activations come on top.

    Raises: ValueError naming a dtype in which training cannot stay finite, and those in which it can; MemoryError
        naming the bytes needed and the bytes there.
    """
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    for name, parameter in trained.items():
        if parameter.dtype not in TRAINABLE:
            raise ValueError(f"{name} is {parameter.dtype}, which does not train: {', '.join(map(str, TRAINABLE))} do")
    # A gradient that is there already takes no more.
    needed = sum(p.nbytes * (2 if p.grad is not None else 3) for p in trained.values())
    n_parameters = sum(p.numel() for p in trained.values())
    require_bytes(needed, model.device, f"training {n_parameters:,} parameters (gradients and moments)")


def adamw(model: Model, learning_rate: float) -> torch.optim.AdamW:
    """One group per role, each with its `role` and `names`.

    Gate biases, which no gradient moves, are in none.

    Norms and matrices decay; scales, sinks, bases and tables do not. Source: spec 11.
    Differs: matrices and tables have Muon and balanced momentum in the report.
    """
    groups = []
    for kind, decayed in DECAYED.items():
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad and role(name) == kind]
        if named:
            names, parameters = zip(*named, strict=True)
            groups.append({"params": list(parameters), "names": list(names), "role": kind,
                           "weight_decay": WEIGHT_DECAY if decayed else 0.0})  # fmt: skip
    return torch.optim.AdamW(groups, lr=learning_rate, betas=BETAS, eps=EPSILON, fused=True)


def learning_rate_at(step: int, *, base: float, warmup: int, steps: int) -> float:
    """Linear over `warmup` steps, then half a cosine to a tenth of `base` at the last step."""
    if step < warmup:
        return base * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - 1 - warmup)
    return base * (FINAL_SHARE + (1 - FINAL_SHARE) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))


@torch.no_grad()
def move_gate_biases(model: Model, load: Tensor, rate: float = BIAS_STEP) -> None:
    """bias_e += rate sign(mean load - load_e): the too busy are chosen less.

    Shapes: load [L,E]. Source: spec 8.
    """
    step_LE = rate * torch.sign(load.mean(-1, keepdim=True) - load)
    for layer, step_E in enumerate(step_LE):
        bias = model.get_parameter(f"layers.{layer}.ffn.gate.bias")
        bias.add_(step_E.to(bias.dtype))
