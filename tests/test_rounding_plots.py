"""The plots of rounding show every value where it is, and refuse what is none of the levels."""

from functools import partial

import pytest
from plot_checks import check_plot, texts

from tinyds41.show.rounding_plots import plot_block, plot_error_by_block

VALUES, STORED, GRID = [0.3, -1.9, 1.2], [0.5, -2.0, 1.0], [-2.0, -1.0, 0.0, 0.5, 1.0]
ERRORS = {"as they are": {2: 0.06, 16: 0.1, 64: 0.12}, "with an outlier": {2: 0.06, 16: 0.2, 64: 0.9}}
BYTES = {2: 512, 16: 288, 64: 264}


def test_a_block_shows_values_and_what_is_stored():
    draw = partial(plot_block, VALUES, STORED, GRID, model="toy")
    check_plot(draw, "toy")
    ax = draw()
    *lines, values, stored = ax.get_lines()
    assert list(values.get_ydata()) == VALUES and list(stored.get_ydata()) == STORED
    assert [line.get_ydata()[0] for line in lines[: len(GRID)]] == GRID
    moves = [tuple(line.get_ydata()) for line in lines[len(GRID) :]]
    assert moves == list(zip(VALUES, STORED, strict=True))
    assert "block of 3" in ax.get_title(loc="left")


@pytest.mark.parametrize(("values", "stored", "message"), [
    ([], [], "nothing to plot: no values"),
    (VALUES, STORED[:2], "3 values, but 2 stored ones"),
    (VALUES, [0.5, -2.0, 1.1], "1.1 is none of the 5 levels"),
])  # fmt: skip
def test_a_block_that_does_not_fit_is_refused(values, stored, message):
    with pytest.raises(ValueError, match=message):
        plot_block(values, stored, GRID, model="toy")


def test_errors_stand_over_their_block_size_and_its_bytes():
    draw = partial(plot_error_by_block, ERRORS, BYTES, released=16, model="toy rows")
    check_plot(draw, "toy rows")
    ax = draw()
    released, *curves = ax.get_lines()
    assert set(released.get_xdata()) == {16} and released.get_linestyle() == "--"
    for curve, wanted in zip(curves, ERRORS.values(), strict=True):
        assert dict(zip(curve.get_xdata(), curve.get_ydata(), strict=True)) == wanted
    assert [label.get_text() for label in ax.get_xticklabels()] == ["2\n512 B", "16\n288 B", "64\n264 B"]
    assert {"  as they are 0.12", "  with an outlier 0.90", "released: 16"} == set(texts(ax))
    assert ax.get_xscale() == ax.get_yscale() == "log"


@pytest.mark.parametrize(("errors", "message"), [
    ({}, "nothing to plot: no errors"),
    ({"a": {2: 0.0}}, "a: an error of 0.0 at block 2 has no place"),
    ({"a": {4: 0.1}}, r"a: no bytes for block 4, only for \[2, 16, 64\]"),
])  # fmt: skip
def test_errors_that_do_not_fit_are_refused(errors, message):
    with pytest.raises(ValueError, match=message):
        plot_error_by_block(errors, BYTES, released=16, model="toy")
