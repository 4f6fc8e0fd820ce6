"""Curves against tokens hold their values on log axes, and what does not depend on tokens is a dashed line."""

from functools import partial

import pytest
from matplotlib.colors import to_hex
from plot_checks import check_plot

from tinyds41.show.context_plots import plot_by_context
from tinyds41.show.style import PALETTES

READ = {"V1": {4096: 2e9, 1024: 5e8, 2048: 1e9}, "V4.1": {1024: 8e6, 2048: 9e6, 4096: 1e7}}
draw = partial(plot_by_context, READ, title="Cache reads of V1 and V4.1", ylabel="bytes", baselines={"weights": 1.3e10})


def test_every_curve_is_there_in_order_of_tokens_with_its_name_and_the_baseline():
    check_plot(draw, "V4.1")
    ax = draw()
    first, last, baseline = ax.get_lines()
    assert (list(first.get_xdata()), list(first.get_ydata())) == ([1024, 2048, 4096], [5e8, 1e9, 2e9])
    assert list(last.get_ydata()) == [8e6, 9e6, 1e7] and to_hex(last.get_color()) == PALETTES["light"].blue
    assert first.get_linestyle() != last.get_linestyle() and first.get_marker() != last.get_marker()
    assert set(baseline.get_ydata()) == {1.3e10} and baseline.get_linestyle() == "--"
    assert {text.get_text().strip() for text in ax.texts} == {"V1", "V4.1", "weights"}


def test_both_axes_are_log_and_hold_baselines_too():
    ax = draw(xlabel="tokens written")
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    assert ax.get_xlabel() == "tokens written (log scale)" and ax.get_ylabel() == "bytes (log scale)"
    assert ax.get_xlim() == (1024, 4096) and ax.get_ylim()[0] < 8e6 and ax.get_ylim()[1] > 1.3e10


@pytest.mark.parametrize(("values", "baselines", "message"), [
    ({}, {}, "nothing to plot: no values"),
    ({"V1": {1: 0.0}}, {}, "V1: a log axis shows positive numbers only"),
    ({"V1": {0: 1.0}}, {}, "V1: a log axis shows positive numbers only"),
    ({"V1": {1: 1.0}}, {"weights": 0.0}, "weights: a log axis shows positive numbers only"),
])  # fmt: skip
def test_what_a_log_axis_cannot_show_is_refused(values, baselines, message):
    with pytest.raises(ValueError, match=message):
        plot_by_context(values, title="t", ylabel="y", baselines=baselines)
