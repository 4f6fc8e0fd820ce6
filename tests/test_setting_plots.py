"""The curve of a knob shows every value where it belongs, and the one that the model was trained with."""

import matplotlib.pyplot as plt
import pytest
from matplotlib.colors import to_hex

from tinyds41.show.setting_plots import plot_loss_by_setting
from tinyds41.show.style import PALETTES, Style

LOSSES = {32: 5.0, 4: 5.5, 64: 5.1}


@pytest.fixture(autouse=True)
def closed_figures():
    yield
    plt.close("all")


def test_the_curve_holds_every_value_in_order_and_marks_the_trained_one():
    ax = plot_loss_by_setting(LOSSES, setting="sliding_window", trained=32, model="toy")
    curve, mark, baseline = ax.get_lines()
    assert (list(curve.get_xdata()), list(curve.get_ydata())) == ([4, 32, 64], [5.5, 5.0, 5.1])
    assert (list(mark.get_xdata()), list(mark.get_ydata())) == ([32], [5.0])
    assert set(baseline.get_ydata()) == {5.0} and baseline.get_linestyle() == "--"
    texts = {text.get_text() for text in ax.texts}
    assert texts == {"5.50", "5.00", "5.10", "trained with 32"}
    assert "nats" in ax.get_ylabel() and "sliding_window" in ax.get_xlabel() and "toy" in ax.get_title(loc="left")


def test_the_style_decides_the_background():
    dark = plot_loss_by_setting(LOSSES, setting="k", trained=4, model="toy", style=Style(theme="dark"))
    assert to_hex(dark.get_facecolor()) == PALETTES["dark"].paper


def test_a_curve_without_its_reference_is_refused():
    with pytest.raises(ValueError, match=r"trained=16 is not among the values \[4, 32, 64\]"):
        plot_loss_by_setting(LOSSES, setting="k", trained=16, model="toy")
    with pytest.raises(ValueError, match="nothing to plot: no losses"):
        plot_loss_by_setting({}, setting="k", trained=16, model="toy")
