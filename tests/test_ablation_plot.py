"""An ablation as a figure: all seeds are shown, and what the label says is their mean and spread."""

from functools import partial

import pytest
from plot_checks import check_plot

from tinyds41.show.ablation_plot import plot_ablation

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
