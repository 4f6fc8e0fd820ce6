"""One look for every figure: page or slide, light or dark, told apart without colour vision."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence, Sized
from dataclasses import dataclass
from functools import wraps
from typing import Any, Concatenate, ParamSpec, cast

import matplotlib.pyplot as plt
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter

MEDIA = ("page", "slide")
THEMES = ("light", "dark")
Arguments = ParamSpec("Arguments")


@dataclass(frozen=True)
class Palette:
    """Colours by name.

    The five hues stay apart for the common kinds of colour blindness and in grey.

    Source: Okabe and Ito, Color Universal Design; lightened where the paper is dark.
    """

    ink: str
    paper: str
    muted: str  # baselines, secondary text
    faint: str  # areas behind data
    blue: str
    orange: str
    green: str
    purple: str
    sky: str


PALETTES = {
    "light": Palette(ink="#1a1a1a", paper="#ffffff", muted="#6b6b6b", faint="#e6e6e6", blue="#0072b2",
                     orange="#d55e00", green="#009e73", purple="#aa4f86", sky="#8cc8ee"),
    "dark": Palette(ink="#f0f0f0", paper="#16191d", muted="#a3a8ae", faint="#363c43", blue="#4aa8e0",
                    orange="#f28a3c", green="#35c79a", purple="#dd93bd", sky="#1f5f88"),
}  # fmt: skip


@dataclass(frozen=True)
class Style:
    """Where a figure will be seen. Raises: ValueError for an unknown medium or theme."""

    medium: str = "page"
    theme: str = "light"

    def __post_init__(self) -> None:
        for name, value, known in (("medium", self.medium, MEDIA), ("theme", self.theme, THEMES)):
            if value not in known:
                raise ValueError(f"{name}={value!r}: one of {', '.join(known)}")

    @property
    def palette(self) -> Palette:
        return PALETTES[self.theme]

    @property
    def font(self) -> float:
        """Points of the main text; the smallest text is 0.85 of it."""
        return 9.0 if self.medium == "page" else 15.0

    @property
    def width(self) -> float:
        """Inches: a text column, or a slide."""
        return 6.4 if self.medium == "page" else 11.0

    @property
    def tallest(self) -> float:
        """Greatest height of a figure with many rows, as a fraction of its width."""
        return 1.3 if self.medium == "page" else 0.62

    def rc(self) -> dict[str, Any]:
        """Matplotlib's settings for this style.

        Backgrounds are opaque, so that a figure reads on any page.
        """
        ink, paper, small = self.palette.ink, self.palette.paper, 0.9 * self.font
        return {
            "figure.facecolor": paper, "axes.facecolor": paper, "savefig.facecolor": paper,
            "savefig.transparent": False,
            "text.color": ink, "axes.labelcolor": ink, "axes.titlecolor": ink, "axes.edgecolor": self.palette.muted,
            "xtick.color": ink, "ytick.color": ink, "hatch.color": paper, "hatch.linewidth": 0.8,
            "font.family": "DejaVu Sans", "font.size": self.font, "axes.titlesize": 1.1 * self.font,
            "axes.labelsize": self.font, "xtick.labelsize": small, "ytick.labelsize": small, "legend.fontsize": small,
            "axes.titlelocation": "left", "axes.spines.top": False, "axes.spines.right": False,
            "legend.frameon": False, "lines.linewidth": self.font / 5,
            "figure.constrained_layout.w_pad": 0.07, "figure.constrained_layout.h_pad": 0.07,
        }  # fmt: skip


PAGE = Style()


def new_axes(style: Style, height: float = 0.45) -> Axes:
    """Axes of their own figure, as wide as the medium; `height` is a fraction of the width."""
    _, ax = plt.subplots(figsize=(style.width, height * style.width), layout="constrained")
    return ax


def require_data(data: Sized, what: str) -> None:
    """Raises: ValueError naming what is missing, where a plot would be empty."""
    if not len(data):
        raise ValueError(f"nothing to plot: no {what}")


def require_numbers(values: Iterable[tuple[str, float]], *, positive: bool = False) -> None:
    """Raises: ValueError naming the first value that no axis can show, or where a plot divides, one not above 0."""
    for name, value in values:
        if not math.isfinite(value) or (positive and value <= 0):
            wanted = "finite numbers more than 0" if positive else "finite numbers"
            raise ValueError(f"{name} is {value}: this plot shows {wanted}")


def require_places(setting: str, places: Iterable[float]) -> None:
    """Raises: ValueError naming the first place that a log axis does not have."""
    for place in places:
        if place <= 0:
            raise ValueError(f"{setting}={place} has no place on a log axis")


def label_right(ax: Axes, labels: Sequence[tuple[float, str, str]], *, apart: float = 0.09) -> None:
    """Names curves where they end, at the right of axes whose scale and limits are set.

    Close labels move apart, and down again where they would stand above the axes.

    labels: (y in data, text, colour); apart: least distance, in heights of the axes.
    """
    to_height = ax.transScale + ax.transLimits  # from data to a part of the axes, on any scale
    ordered = sorted(labels)
    places = [float(to_height.transform((max(ax.get_xlim()), y))[1]) for y, _, _ in ordered]
    for i in range(1, len(places)):
        places[i] = max(places[i], places[i - 1] + apart)
    for i in reversed(range(len(places))):
        places[i] = min(places[i], (places[i + 1] if i + 1 < len(places) else 1 + 2 * apart / 3) - apart)
    for place, (_, text, colour) in zip(places, ordered, strict=True):
        ax.annotate(text, (1.01, place), xycoords="axes fraction", color=colour, va="center", annotation_clip=False)


def name_kinds(ax: Axes, kinds: Sequence[tuple[str, str]]) -> None:
    """Names what areas mean as words behind a patch of their colour, above the axes: no legend box over the data.

    kinds: (colour, name), in order.
    """
    for place, (colour, name) in enumerate(kinds):
        above: dict[str, Any] = {"xy": (0.27 * place, 1), "xycoords": "axes fraction", "va": "bottom",
                                 "xytext": (0, 3), "textcoords": "offset points"}  # fmt: skip
        ax.annotate("■ ", color=colour, **above)
        ax.annotate(f"    {name}", fontsize="small", **above)


def on_cividis(value: float) -> str:
    """The colour of a number on that map, which is light above its middle. value: 0..1."""
    return "black" if value > 0.5 else "white"


def styled(draw: Callable[Concatenate[Style, Arguments], Axes]) -> Callable[..., Axes]:
    """Makes a plot function take `style=` (default: a light page) and draw under its settings.

    The settings end with the call: nothing global changes.
    """

    @wraps(draw)
    def drawn(*args: Any, style: Style = PAGE, **options: Any) -> Axes:
        # A notebook's first figure makes pyplot interactive. Inside the context that would be undone at its end, and
        # no later figure would show.
        plt.draw_if_interactive()
        with rc_context(cast(Any, style.rc())):
            ax = draw(style, *args, **options)
            _take_literally(ax)
            return ax

    return drawn


def _take_literally(ax: Axes) -> None:
    """A dollar in the name of a model is a dollar, no formula. The powers of ten on a log axis stay formulas."""
    legend = ax.get_legend()
    words = [child for child in ax.get_children() if isinstance(child, Text)]  # titles, and what was annotated
    words += [ax.xaxis.label, ax.yaxis.label]
    words += legend.get_texts() if legend else []
    for axis in (ax.xaxis, ax.yaxis):
        if isinstance(axis.get_major_formatter(), FuncFormatter):  # names, as `set_ticks` gives them
            words += axis.get_ticklabels()
    for word in words:
        word.set_parse_math(False)
