"""Curves of right answers: all values where they belong, kinds told apart by colour and models by line."""

from functools import partial

import pytest
from plot_checks import check_plot

from tinyds41.show.accuracy_plot import Curve, plot_accuracy

CURVES = [
    Curve("names, table", {0: 0.06, 20: 0.4, 40: 0.97}),
    Curve("names, no table", {0: 0.06, 20: 0.1, 40: 0.3}, look=1),
    Curve("needles, table", {0: 0.9, 20: 0.98, 40: 1.0}, kind=1),
]


def test_curves_are_told_apart_by_kind_and_model():
    draw = partial(plot_accuracy, CURVES, setting="steps", model="the toy", baselines={"a guess": 0.0625})
    check_plot(draw, "the toy")
    ax = draw()
    lines = [line for line in ax.get_lines() if len(line.get_xdata()) == 3]
    assert [list(line.get_ydata()) for line in lines] == [list(curve.shares.values()) for curve in CURVES]
    assert lines[0].get_color() == lines[1].get_color() != lines[2].get_color()
    assert lines[0].get_linestyle() == lines[2].get_linestyle() != lines[1].get_linestyle()
    [guess] = [line for line in ax.get_lines() if len(line.get_xdata()) == 2]
    assert set(guess.get_ydata()) == {0.0625} and guess.get_linestyle() == "--"
    assert {text.get_text().strip() for text in ax.texts} == {
        "names, table 0.97", "names, no table 0.30", "needles, table 1.00", "a guess 0.06"}  # fmt: skip
    assert ax.get_xscale() == "linear" and ax.get_xlabel() == "steps"


def test_sizes_may_be_drawn_by_their_logarithm():
    ax = plot_accuracy([Curve("names", {4: 0.5, 64: 0.9})], setting="rows", model="toys", log=True)
    assert ax.get_xscale() == "log" and [label.get_text() for label in ax.get_xticklabels()] == ["4", "64"]
    assert ax.get_xlabel() == "rows (log scale)"


@pytest.mark.parametrize(("curves", "baselines", "message"), [
    ([], {}, "nothing to plot: no shares"),
    ([Curve("names", {1: 1.5})], {}, r"names: 1\.5 is no share"),
    (CURVES, {"guess": -0.1}, r"guess: -0\.1 is no share"),
])  # fmt: skip
def test_what_is_no_share_is_refused(curves, baselines, message):
    with pytest.raises(ValueError, match=message):
        plot_accuracy(curves, setting="steps", model="toy", baselines=baselines)
