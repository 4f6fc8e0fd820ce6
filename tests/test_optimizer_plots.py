"""The plots of optimisers put values in order, show every rate, and refuse what a log axis does not have."""

from functools import partial

import pytest
from plot_checks import check_plot, texts

from tinyds41.show.optimizer_plots import plot_loss_by_rate, plot_ranked

VALUES = {"before": [0.01, 2.0, 0.3], "after": [1.0, 1.0, 1.0]}
LOSSES = {"AdamW": {0.02: 0.6, 0.005: 2.3, 0.04: 1.7}, "the report's": {0.005: 3.0, 0.04: 0.04}}


def test_values_stand_from_the_largest_to_the_smallest():
    draw = partial(plot_ranked, VALUES, what="directions", ylabel="singular value", model="toy")
    check_plot(draw, "toy")
    ax = draw()
    before, after = ax.get_lines()
    assert list(before.get_ydata()) == [2.0, 0.3, 0.01] and list(before.get_xdata()) == [1, 2, 3]
    assert list(after.get_ydata()) == [1.0, 1.0, 1.0] and texts(ax) == ["before", "after"]
    assert ax.get_yscale() == "log" and ax.get_xlabel() == "directions, largest first"
    low, high = ax.get_ylim()
    assert low < 0.01 and high > 2


def test_equal_values_and_a_single_one_still_have_an_axis():
    check_plot(partial(plot_ranked, {"one": [1.0]}, what="rows", ylabel="length", model="toy"), "toy")


@pytest.mark.parametrize(("values", "message"), [
    ({}, "nothing to plot: no values"),
    ({"a": []}, "nothing to plot: no values of a"),
    ({"a": [1.0, 0.0]}, "a value of a is 0.0: this plot shows finite numbers more than 0"),
    ({"a": [float("nan")]}, "a value of a is nan"),
])  # fmt: skip
def test_values_without_a_place_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        plot_ranked(values, what="rows", ylabel="length", model="toy")


def test_losses_stand_over_their_rates_and_the_best_is_named():
    draw = partial(plot_loss_by_rate, LOSSES, model="toy")
    check_plot(draw, "toy")
    ax = draw()
    for line, curve in zip(ax.get_lines(), LOSSES.values(), strict=True):
        assert dict(zip(line.get_xdata(), line.get_ydata(), strict=True)) == curve
        assert list(line.get_xdata()) == sorted(curve)
    assert [label.get_text() for label in ax.get_xticklabels()] == ["0.005", "0.02", "0.04"]
    assert {"  AdamW, best 0.60", "  the report's, best 0.04"} == set(texts(ax))
    assert ax.get_xscale() == "log" and ax.get_ylim()[0] == 0 and ax.get_xlim() == (0.005, 0.04)


def test_one_rate_still_has_an_axis():
    check_plot(partial(plot_loss_by_rate, {"a": {0.01: 1.0}}, model="toy"), "toy")


@pytest.mark.parametrize(("losses", "message"), [
    ({}, "nothing to plot: no losses"),
    ({"a": {}}, "nothing to plot: no losses of a"),
    ({"a": {0.0: 1.0}}, "a: learning rate=0.0 has no place on a log axis"),
    ({"a": {0.1: float("inf")}}, "a at 0.1 is inf"),
])  # fmt: skip
def test_losses_without_a_place_are_refused(losses, message):
    with pytest.raises(ValueError, match=message):
        plot_loss_by_rate(losses, model="toy")
