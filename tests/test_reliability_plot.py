"""The reliability diagram: every bin where its means are, against the diagonal on which they should be."""

from functools import partial

import pytest
from plot_checks import check_plot

from tinyds41.show.reliability_plot import plot_reliability
from tinyds41.train.calibrate import Bin

BINS = {
    "as trained": [Bin(0.3, 0.1, 50), Bin(0.6, 0.35, 50), Bin(0.9, 0.7, 50)],
    "with temperatures": [Bin(0.12, 0.1, 40), Bin(0.33, 0.35, 50), Bin(0.72, 0.7, 60)],
}


def test_bins_stand_at_their_means_beside_the_diagonal():
    draw = partial(plot_reliability, BINS, model="the toy, plays")
    check_plot(draw, "the toy, plays")
    ax = draw()
    diagonal, *curves = ax.get_lines()
    assert list(diagonal.get_xdata()) == list(diagonal.get_ydata()) == [0, 1] and diagonal.get_linestyle() == "--"
    for curve, bins in zip(curves, BINS.values(), strict=True):
        assert list(curve.get_xdata()) == [part.prediction for part in bins]
        assert list(curve.get_ydata()) == [part.outcome for part in bins]
    assert curves[0].get_color() != curves[1].get_color() and curves[0].get_linestyle() != curves[1].get_linestyle()
    assert ax.get_aspect() == 1


def test_curves_are_named_with_their_error():
    """Errors of the bins that are shown: 0.2, 0.25, 0.2 of equal mass; 0.02 * 40, 0.02 * 50, 0.02 * 60 of 150."""
    words = [text.get_text() for text in plot_reliability(BINS, model="toy").texts]
    assert any("as trained" in word and "21.7 %" in word for word in words)
    assert any("with temperatures" in word and "2.0 %" in word for word in words)


@pytest.mark.parametrize(("bins", "message"), [
    ({}, "nothing to plot: no bins"),
    ({"a": []}, "no bins of a"),
    ({"a": [Bin(0.5, 1.5, 3)]}, r"a: outcome 1\.5: .* between 0 and 1"),
    ({"a": [Bin(float("nan"), 0.5, 3)]}, "a: prediction nan"),
    ({"a": [Bin(0.5, 0.5, 0)]}, "a: a bin of 0"),
])  # fmt: skip
def test_what_is_no_reliability_is_refused(bins, message):
    with pytest.raises(ValueError, match=message):
        plot_reliability(bins, model="toy")
