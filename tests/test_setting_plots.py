"""The curve of a knob shows every value where it belongs, and the one that the model was trained with."""

from functools import partial

import pytest
from matplotlib.colors import to_hex
from plot_checks import check_plot

from tinyds41.show.setting_plots import plot_loss_by_setting, plot_quality_by_setting
from tinyds41.show.style import PALETTES, Style

LOSSES = {32: 5.0, 4: 5.5, 64: 5.1}


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


# ---------------------------------------------------------------------------------------------- accuracy and recall

QUALITY = {"accuracy": {1: 0.3, 4: 0.6, 16: 0.83, 64: 0.84}, "pool recall": {1: 0.2, 4: 0.6, 16: 0.97, 64: 1.0}}


def test_two_quantities_share_one_axis_from_0_to_1():
    draw = partial(plot_quality_by_setting, QUALITY, setting="candidate_topk_blocks", trained=16, model="toy")
    check_plot(draw, "toy")
    ax = draw(ylabel="share of answers, of mass")
    curves = [line for line in ax.get_lines() if len(line.get_xdata()) == 4]
    assert [list(line.get_ydata()) for line in curves] == [list(curve.values()) for curve in QUALITY.values()]
    assert len({(line.get_color(), line.get_linestyle()) for line in curves}) == 2
    [trained] = [line for line in ax.get_lines() if len(line.get_xdata()) == 2]
    assert set(trained.get_xdata()) == {16} and trained.get_linestyle() == "--"
    assert {text.get_text().strip() for text in ax.texts} == {"accuracy 0.84", "pool recall 1.00", "trained with 16"}
    low, high = ax.get_ylim()
    assert low <= 0 and high >= 1 and ax.get_xscale() == "log" and ax.get_ylabel() == "share of answers, of mass"


@pytest.mark.parametrize(("values", "message"), [
    ({}, "nothing to plot: no values"),
    ({"recall": {1: 0.5}}, r"recall: trained=16 is not among the values \[1\]"),
    ({"recall": {16: 1.2}}, r"recall is 1\.2 at 16: this plot shows quantities between 0 and 1"),
    ({"recall": {16: 1.0}, "accuracy": {}}, "nothing to plot: no values of accuracy"),
])  # fmt: skip
def test_a_quantity_that_does_not_fit_is_refused(values, message):
    with pytest.raises(ValueError, match=message):
        plot_quality_by_setting(values, setting="k", trained=16, model="toy")
