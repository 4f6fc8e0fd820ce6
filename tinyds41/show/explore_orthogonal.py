"""The Newton-Schulz explorer: singular values of one matrix after more or fewer steps of the iteration."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from matplotlib.axes import Axes
from torch import Tensor

from tinyds41.show.explorer import explorer, require_widgets
from tinyds41.show.optimizer_plots import plot_ranked
from tinyds41.show.style import PAGE, Style
from tinyds41.train.muon import COEFFICIENTS

RAISING, SETTLING = COEFFICIENTS[0], COEFFICIENTS[-1]
MOST = {"raising": COEFFICIENTS.count(RAISING), "settling": COEFFICIENTS.count(SETTLING)}


def orthogonal_view(
    matrix: Tensor, *, raising: int = MOST["raising"], settling: int = MOST["settling"], name: str = "the matrix",
    style: Style = PAGE, ax: Axes | None = None,
) -> Axes:  # fmt: skip
    """Singular values of a matrix, divided by its norm, before and after Newton-Schulz: what the explorer shows.

    Shapes: matrix [rows, columns]. raising, settling: steps with the first and with the last coefficients of spec 11.
    Raises: ValueError for another shape, a matrix of zeros, a number of steps below 0, or more steps than Muon has.
    Source: spec 11. Lesson: 12.
    """
    if matrix.ndim != 2:
        raise ValueError(f"a matrix [rows, columns] is needed, got {tuple(matrix.shape)}")
    for control, n in (("raising", raising), ("settling", settling)):
        if not 0 <= n <= MOST[control]:
            raise ValueError(f"{control}={n} is outside 0..{MOST[control]}")
    values = torch.linalg.svdvals(matrix.detach().double())
    if not values.any():
        raise ValueError(f"a matrix of zeros {tuple(matrix.shape)} has no directions")
    # Below the rounding of float32 a singular value is noise, and 0 has no place on the log axis.
    before = (values / values.square().sum().sqrt()).clamp(min=1e-8)
    after = before
    # The products of the iteration change singular values alone: p(s) = a s + b s^3 + c s^5.
    for a, b, c in (RAISING,) * raising + (SETTLING,) * settling:
        after = a * after + b * after**3 + c * after**5
    ax = plot_ranked({"before": before.tolist(), f"after {raising} + {settling} steps": after.tolist()},
                     what="directions", ylabel="singular value", model=name, style=style, ax=ax)  # fmt: skip
    ax.set_xlabel(f"{ax.get_xlabel()} (after: {float(after.min()):.2g} to {float(after.max()):.2g})")
    return ax


def explore_orthogonal(matrix: Tensor, *, name: str = "the matrix", style: Style = PAGE) -> Any:
    """Sliders for the steps of both kinds above `orthogonal_view`.

    Raises: ImportError without ipywidgets; ValueError as `orthogonal_view`.
    Lesson: 12.
    """
    widgets = require_widgets()
    look = {"style": {"description_width": "initial"}, "continuous_update": False}
    controls = {control: widgets.IntSlider(most, 0, most, description=control, **look)
                for control, most in MOST.items()}  # fmt: skip
    return explorer(partial(orthogonal_view, matrix, name=name, style=style), controls)
