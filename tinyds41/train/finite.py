"""Where a run went wrong: the first intermediate, or the last parameter, that is not finite."""

from __future__ import annotations

import torch
from torch import Tensor

from tinyds41.model.transformer import Model
from tinyds41.trace import Trace


def require_finite(what: str, value: Tensor, step: int, began: str | None = None) -> None:
    """Raises: FloatingPointError naming what is not finite, the step, and where it began, if that is known."""
    if not torch.isfinite(value):
        where = "" if began is None else f", beginning in {began}"
        found = float(value.detach())
        raise FloatingPointError(f"the {what} is {found} at step {step}{where}: the update of this step was not made")


@torch.no_grad()
def first_not_finite(model: Model, ids: Tensor, documents: Tensor | None = None) -> str | None:
    """The first intermediate with a NaN or an infinity, such as "layers.3.attn.q"; None when there is none.

    The rows run again one by one with everything traced, so that this needs no more memory than a row. Minus infinity
    is a score of what must not be seen, and no fault.

    Shapes: ids [B,S], documents [B,S].
    """
    trace = Trace("*")
    for row in range(len(ids)):
        own = None if documents is None else documents[row : row + 1]
        model(ids[row : row + 1], documents=own, trace=trace)
        for name, value in trace.items():
            if value.is_floating_point() and bool((value.isnan() | value.isposinf()).any()):
                return name
    return None


def gradient_not_finite(model: Model) -> str | None:
    """The parameter nearest to the logits whose gradient is not finite: a gradient spreads from there to the front."""
    for name, parameter in reversed(list(model.named_parameters())):
        if parameter.grad is not None and not torch.isfinite(parameter.grad).all():
            return name
    return None


def require_finite_weights(model: Model, step: int) -> None:
    """Raises: FloatingPointError naming the first parameter that is not finite behind a step."""
    for name, parameter in model.named_parameters():
        if not torch.isfinite(parameter).all():
            raise FloatingPointError(f"{name} is not finite behind step {step}: nothing was saved")
