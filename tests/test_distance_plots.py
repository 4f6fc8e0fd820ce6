"""Curves against distance hold their values, and the borders stand behind the last distance that can be reached."""

from functools import partial

import pytest
from plot_checks import check_plot

from tinyds41.show.distance_plots import plot_by_distance

KNOWN = {"window 4": {2: 0.5, 0: 1.0, 1: 0.9}, "window 8": {0: 1.0, 1: 1.0, 2: 0.95}}
draw = partial(plot_by_distance, KNOWN, title="Answers of the toy", ylabel="share of right answers")


def curves(ax):
    return [line for line in ax.get_lines() if line.get_marker() != "None"]


def test_every_curve_is_there_in_order_of_distance_with_its_border_and_its_baseline():
    check_plot(partial(draw, borders={"window 4": 1}, baseline=("chance", 0.25)), "Answers of the toy")
    ax = draw(borders={"window 4": 1}, baseline=("chance", 0.25))
    first, second = curves(ax)
    assert (list(first.get_xdata()), list(first.get_ydata())) == ([0, 1, 2], [1.0, 0.9, 0.5])
    assert list(second.get_ydata()) == [1.0, 1.0, 0.95] and first.get_linestyle() != second.get_linestyle()
    border, baseline = (line for line in ax.get_lines() if line.get_marker() == "None")
    assert set(border.get_xdata()) == {1.5} and border.get_color() == first.get_color() != second.get_color()
    assert set(baseline.get_ydata()) == {0.25}
    assert {text.get_text().strip() for text in ax.texts} == {"window 4", "window 8", "1", "chance"}
    assert "distance" in ax.get_xlabel() and ax.get_ylabel() == "share of right answers"


def test_the_axis_can_be_named():
    assert draw(xlabel="tokens after the prompt").get_xlabel() == "tokens after the prompt"


def test_a_border_at_the_last_distance_has_room():
    ax = draw(borders={"window 8": 2})
    assert ax.get_xlim()[1] >= 2.5


def test_a_log_axis_leaves_out_what_is_not_positive():
    ax = plot_by_distance({"effect": {0: 1.0, 1: 1e-3, 2: 0.0}}, title="Outputs", ylabel="change", log=True)
    [curve] = curves(ax)
    assert list(curve.get_ydata()) == [1.0, 1e-3] and ax.get_yscale() == "log"


@pytest.mark.parametrize(("values", "options", "message"), [
    ({}, {}, "nothing to plot: no values"),
    ({"effect": {0: 0.0}}, {"log": True}, "nothing to plot: no positive values"),
    (KNOWN, {"borders": {"window 2": 4}}, r"borders of \['window 2'\], but the curves are \['window 4', 'window 8'\]"),
])  # fmt: skip
def test_what_cannot_be_drawn_is_refused(values, options, message):
    with pytest.raises(ValueError, match=message):
        plot_by_distance(values, title="t", ylabel="y", **options)
