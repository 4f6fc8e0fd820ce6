"""What every plot keeps, whatever it shows."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import matplotlib
import matplotlib.pyplot as plt
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex

from tinyds41.show.style import PALETTES, Style, new_axes

STYLES = [Style("page", "light"), Style("slide", "dark")]


def texts(ax: Axes) -> list[str]:
    return [text.get_text() for text in ax.texts]


def check_plot(draw: Callable[..., Axes], model: str) -> None:
    """A plot function with its data bound: labels, axes, style, settings, readable text; no show, no save.

    model: what the title has to name.
    """
    with pytest.MonkeyPatch.context() as patched, warnings.catch_warnings():
        warnings.simplefilter("error")
        for forbidden in ("show", "savefig"):
            patched.setattr(plt, forbidden, lambda *_, **__: pytest.fail("a plot function must not show or save"))
        for style in STYLES:
            settings = dict(matplotlib.rcParams)
            ax = draw(style=style)
            assert dict(matplotlib.rcParams) == settings
            assert isinstance(ax, Axes) and model in ax.get_title(loc="left") and ax.get_xlabel()
            assert ax.get_ylabel() or all(label.get_text() for label in ax.get_yticklabels())
            palette, face = PALETTES[style.theme], ax.figure.get_facecolor()
            assert to_hex(face) == palette.paper and face[3] == 1  # opaque
            assert to_hex(ax.title.get_color()) == to_hex(ax.xaxis.label.get_color()) == palette.ink
            check_texts_apart(ax)
        mine = new_axes(Style())
        n_figures = len(plt.get_fignums())
        assert draw(ax=mine) is mine and len(plt.get_fignums()) == n_figures


def check_texts_apart(ax: Axes) -> None:
    """No text leaves the figure or covers other text, colour bars included."""
    ax.figure.draw_without_rendering()
    renderer, paper = ax.figure.canvas.get_renderer(), ax.figure.bbox
    words = []
    for part in ax.figure.axes:
        words += [*part.texts, part._left_title, part.xaxis.label, part.yaxis.label]
        for axis, (low, high) in ((part.xaxis, sorted(part.get_xlim())), (part.yaxis, sorted(part.get_ylim()))):
            ticks = [tick for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
            words += [label for tick in ticks for label in (tick.label1, tick.label2) if label.get_visible()]
    boxes = [(word.get_text(), word.get_window_extent(renderer)) for word in words if word.get_text().strip("■ ")]
    for text, box in boxes:
        assert paper.x0 <= box.x0 and box.x1 <= paper.x1 and paper.y0 <= box.y0 and box.y1 <= paper.y1, text
    for i, (text, box) in enumerate(boxes):
        for other, its_box in boxes[i + 1 :]:
            overlap = box.padded(-1).overlaps(its_box.padded(-1))  # a pixel of bearing around the ink
            assert not overlap, f"{text!r} covers {other!r}"
