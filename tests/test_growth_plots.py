"""Plots of what grows with the context show the rows of the cost model and ratios to the first context."""

import pytest
from plot_checks import check_plot, texts

from tinyds41.config import Config
from tinyds41.cost.rows import attended_rows, scored_entries
from tinyds41.show.growth_plots import plot_growth, plot_rows_by_layer

FLASH = Config.preset("flash")
CONTEXTS = (2**12, 2**20)
SCORED = {n: scored_entries(FLASH, n)[0] | scored_entries(FLASH, n)[1] for n in CONTEXTS}
ATTENDED = attended_rows(FLASH, 2**20)


def test_rows_by_layer_are_bars_marks_and_dots():
    check_plot(lambda **style: plot_rows_by_layer(SCORED, ATTENDED, model="flash", **style), "flash")
    ax = plot_rows_by_layer(SCORED, ATTENDED, model="flash")
    assert {round(bar.get_x() + bar.get_width() / 2): bar.get_height() for bar in ax.patches} == SCORED[2**20]
    marks, dots = ax.get_lines()
    assert dict(zip(marks.get_xdata(), marks.get_ydata(), strict=True)) == SCORED[2**12]
    assert dict(zip(dots.get_xdata(), dots.get_ydata(), strict=True)) == ATTENDED
    shown = texts(ax)
    assert [shown.count(size) for size in ("512K", "1M", "16K")] == [3, 1, 4]
    assert {"scored at 1M", "scored at 4K", "attended to"} <= {text.strip() for text in shown}
    assert ax.get_yscale() == "log"


def test_a_layer_that_scores_nothing_yet_has_no_bar():
    ax = plot_rows_by_layer({1: {2: 0, 3: 1}}, {2: 1, 3: 2}, model="m")
    assert [bar.get_height() for bar in ax.patches] == [1]


WORK = {"raw": {4096: 20.0, 65_536: 24.0, 2**20: 32.0}, "time": {4096: 0.5, 2**20: 75.0}}


@pytest.mark.parametrize("log", [False, True])
def test_growth_is_relative_to_the_first_context(log):
    check_plot(lambda **style: plot_growth(WORK, title="of m41", log=log, **style), "m41")
    ax = plot_growth(WORK, title="of m41", log=log)
    baseline, raw, time = ax.get_lines()
    assert set(baseline.get_ydata()) == {1} and baseline.get_linestyle() == "--"
    assert list(raw.get_xdata()) == [4096, 65_536, 2**20] and list(raw.get_ydata()) == [1, 1.2, 1.6]
    assert list(time.get_ydata()) == [1, 150]
    assert {text.strip() for text in texts(ax)} == {"raw 1.60×", "time 150×"}
    assert ax.get_yscale() == ("log" if log else "linear") and "4K" in ax.get_ylabel()
    assert ("log" in ax.get_ylabel()) == log
    assert raw.get_linestyle() != time.get_linestyle() and raw.get_color() != time.get_color()
    low, high = ax.get_ylim()
    assert low < 1 and high > 150


@pytest.mark.parametrize(("values", "message"), [
    ({}, "nothing to plot: no values"),
    ({"a": {}}, "nothing to plot: no values"),
    ({"a": {1: 1.0}, "b": {2: 1.0}}, r"curves begin at different contexts: \['1', '2'\]"),
    ({"a": {1: 1.0}, "b": {}}, "curves begin at different contexts"),
    ({"a": {1: 1.0, 2: 0.0}}, r"a has the value 0\.0: growth needs positive ones"),
])  # fmt: skip
def test_values_that_have_no_growth_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        plot_growth(values, title="t")


def test_rows_of_nothing_are_refused():
    with pytest.raises(ValueError, match="nothing to plot: no contexts"):
        plot_rows_by_layer({}, ATTENDED, model="m")
    with pytest.raises(ValueError, match="nothing to plot: no layers"):
        plot_rows_by_layer(SCORED, {}, model="m")
