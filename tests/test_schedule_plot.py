"""Throughput by load: all rows where they belong, the scheduler in front, fixed lengths behind it."""

import math
from functools import partial

import pytest
from matplotlib.colors import to_hex
from plot_checks import check_plot

from tinyds41.infer.simulate import Throughput
from tinyds41.show.schedule_plot import plot_schedule
from tinyds41.show.style import PALETTES

LOADS = (1, 4, 16, 64, 256)
SPEED = {("fixed", 0): (10, 38, 140, 400, 730), ("fixed", 1): (16, 61, 200, 480, 700),
         ("fixed", 2): (21, 77, 230, 470, 630), ("fixed", 3): (24, 85, 240, 450, 570),
         ("fixed", 4): (26, 90, 240, 410, 500), ("fixed", 5): (27, 92, 230, 380, 450),
         ("threshold", 0.5): (22, 83, 255, 540, 740), ("scheduler", math.nan): (27, 95, 266, 545, 790)}  # fmt: skip
ROWS = [Throughput(kind, setting, load, float(speed), 1.0, 1.0)
        for (kind, setting), speeds in SPEED.items() for load, speed in zip(LOADS, speeds, strict=True)]  # fmt: skip
draw = partial(plot_schedule, ROWS, model="the toy, plays")


def curves(ax):
    return [line for line in ax.get_lines() if len(line.get_xdata()) == len(LOADS)]


@pytest.mark.parametrize("relative", [False, True])
def test_words_and_looks_are_those_of_every_plot(relative):
    check_plot(partial(draw, relative=relative), "the toy, plays")


def test_every_row_is_there_and_every_curve_named():
    ax = draw()
    assert [tuple(line.get_ydata()) for line in curves(ax)] == list(SPEED.values())
    assert all(tuple(line.get_xdata()) == LOADS for line in curves(ax))
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    assert [label.get_text() for label in ax.get_xticklabels()] == ["1", "4", "16", "64", "256"]
    words = {text.get_text().strip() for text in ax.texts}
    assert words == {*(f"{n} drafted" for n in range(6)), "survival ≥ 0.5", "scheduler"}
    assert "tokens per second" in ax.get_ylabel() and "requests" in ax.get_xlabel()


def test_the_scheduler_stands_out_and_fixed_lengths_are_alike():
    *fixed, threshold, scheduler = curves(draw())
    palette = PALETTES["light"]
    assert {to_hex(line.get_color()) for line in fixed} == {palette.muted}
    assert to_hex(scheduler.get_color()) == palette.blue and to_hex(threshold.get_color()) == palette.orange
    assert scheduler.get_linewidth() > max(line.get_linewidth() for line in fixed)
    assert len({threshold.get_linestyle(), scheduler.get_linestyle(), fixed[0].get_linestyle()}) == 3


def test_relative_rows_are_shares_of_the_best_fixed_length_at_their_load():
    """A difference of 2 % is no more than the line's width on a log axis of throughput."""
    ax = draw(relative=True)
    *_, scheduler = curves(ax)
    assert list(scheduler.get_ydata()) == pytest.approx([1.0, 95 / 92, 266 / 240, 545 / 480, 790 / 730])
    assert ax.get_yscale() == "linear" and "best fixed length" in ax.get_ylabel()
    [level] = [line for line in ax.get_lines() if len(line.get_xdata()) == 2]
    assert set(level.get_ydata()) == {1.0} and level.get_linestyle() == "--"


def test_two_thresholds_are_told_apart():
    more = [*ROWS, *(Throughput("threshold", 0.8, load, 5.0 * load, 1.0, 1.0) for load in LOADS)]
    lines = curves(plot_schedule(more, model="toy"))
    assert lines[6].get_linestyle() != lines[8].get_linestyle() or lines[6].get_marker() != lines[8].get_marker()


@pytest.mark.parametrize(("rows", "options", "message"), [
    ([], {}, "nothing to plot: no rows"),
    ([Throughput("fixed", 0, 1, 0.0, 1.0, 0.0)], {}, "0 drafted at 1 requests is 0.0"),
    ([Throughput("fixed", 0, 1, math.nan, 1.0, 0.0)], {}, "0 drafted at 1 requests is nan"),
    ([Throughput("scheduler", math.nan, 4, 1.0, 1.0, 0.0)], {"relative": True}, "no fixed length at 4 requests"),
])  # fmt: skip
def test_what_cannot_be_shown_is_refused(rows, options, message):
    with pytest.raises(ValueError, match=message):
        plot_schedule(rows, model="toy", **options)
