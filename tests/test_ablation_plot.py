"""An ablation as a figure: all seeds are shown, and what the label says is their mean and spread."""

from functools import partial

import numpy as np
import pytest
from plot_checks import check_plot, texts

from tinyds41.show.ablation_plot import plot_ablation, plot_right_by_mass

VALUES = {"with": [4.0, 4.2, 4.4], "without": [4.9, 5.0, 5.1]}


def test_every_seed_is_a_point_and_means_are_lines():
    draw = partial(plot_ablation, VALUES, quantity="held-out loss, nats", title="Engram on text")
    check_plot(draw, "Engram on text")
    ax = draw()
    rings = [line for line in ax.get_lines() if line.get_marker() == "o"]
    assert [list(line.get_xdata()) for line in rings] == list(VALUES.values())
    assert [line.get_xdata()[0] for line in ax.get_lines() if line.get_marker() != "o"] == pytest.approx([4.2, 5.0])
    assert [text.get_text() for text in ax.texts] == ["4.2 ± 0.2", "5 ± 0.1"]
    assert [label.get_text() for label in ax.get_yticklabels()] == list(VALUES)
    bottom, top = ax.get_ylim()
    assert bottom > top  # the first variant stands on top


def test_one_seed_has_no_spread():
    ax = plot_ablation({"with": [4.0]}, quantity="loss", title="one seed")
    assert [text.get_text() for text in ax.texts] == ["4"]


@pytest.mark.parametrize(("values", "named"), [
    ({}, "no variants"), ({"with": []}, "values of with"), ({"with": [4.0, float("nan")]}, "with, seed 1"),
])  # fmt: skip
def test_what_cannot_be_drawn_is_named(values, named):
    with pytest.raises(ValueError, match=named):
        plot_ablation(values, quantity="loss", title="nothing")


POINTS = {"2 of 252": [(0.2, 0.5), (0.3, 0.6)], "8 of 252": [(0.5, 0.9), (0.6, 1.0)]}


def test_right_answers_stand_over_the_mass_that_was_kept():
    draw = partial(plot_right_by_mass, POINTS, quantity="mass in the choice, share", title="Ablation: top-k")
    check_plot(draw, "top-k")
    ax = draw()
    rings = [line.get_xydata().tolist() for line in ax.get_lines() if line.get_marker() == "o"]
    assert rings == [[list(pair) for pair in pairs] for pairs in POINTS.values()]
    (means,) = [line.get_xydata() for line in ax.get_lines() if line.get_marker() == "s"]
    assert means == pytest.approx(np.array([[0.25, 0.55], [0.55, 0.95]])) and texts(ax) == list(POINTS)


@pytest.mark.parametrize(("points", "named"), [
    ({}, "no variants"), ({"2": []}, "points of 2"), ({"2": [(0.1, float("nan"))]}, "2, seed 0"),
])  # fmt: skip
def test_points_that_cannot_be_drawn_are_named(points, named):
    with pytest.raises(ValueError, match=named):
        plot_right_by_mass(points, quantity="mass", title="nothing")
