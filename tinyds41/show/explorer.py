"""What all explorers share: controls above, and below them what one plain function makes of their values."""

from __future__ import annotations

import html
import io
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

DPI = 120


def require_widgets() -> ModuleType:
    """The module ipywidgets, asked for when an explorer is made and not before.

    Raises: ImportError naming what to install.
    """
    try:
        import ipywidgets
    except ImportError as error:
        raise ImportError(
            "an explorer needs ipywidgets: pip install 'tinyds41[notebooks]'; the *_view function beside it draws the "
            "same for fixed values without"
        ) from error
    return ipywidgets


def explorer(view: Callable[..., Axes | str], controls: Mapping[str, Any]) -> Any:
    """A box of the controls and of `view(**values)`, drawn again whenever a control gets another value.

    A figure shows as a picture, a text as it is, and a ValueError, which is what wrong values give, by its message.

    controls: widgets by the argument of `view` that each one sets.
    Raises: ImportError without ipywidgets; whatever else `view` raises for the first values.
    """
    widgets = require_widgets()
    # A box would stretch the picture to its own width.
    picture = widgets.Image(format="png", layout={"align_self": "flex-start", "max_width": "100%"})
    text = widgets.HTML()

    def show(_: Any = None) -> None:
        values = {name: control.value for name, control in controls.items()}
        try:
            shown = view(**values)
        except ValueError as error:
            shown = str(error)
        drawn = isinstance(shown, Axes)
        if isinstance(shown, Axes):
            picture.value = as_png(shown)
        else:
            text.value = f'<pre style="white-space: pre-wrap; line-height: 1.3">{html.escape(shown)}</pre>'
        # What has no place is hidden and not emptied: an empty picture would show as a broken one.
        picture.layout.display, text.layout.display = ("", "none") if drawn else ("none", "")

    for control in controls.values():
        control.observe(show, names="value")
    show()
    rows = widgets.Box(list(controls.values()), layout={"flex_flow": "row wrap"})
    return widgets.VBox([rows, picture, text])


def as_png(ax: Axes) -> bytes:
    """The figure of these axes as a picture; it is closed, so that a notebook does not show it once more."""
    figure = ax.get_figure(root=True)
    assert isinstance(figure, Figure)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI, facecolor=figure.get_facecolor(), bbox_inches="tight")
    plt.close(figure)
    return buffer.getvalue()
