"""The overlap of two sets of chances: its parts add up to both of them."""

from functools import partial

import pytest
from plot_checks import check_plot

from tinyds41.show.draft_plots import plot_overlap

P, Q, NAMES = [0.5, 0.2, 0.3], [0.1, 0.6, 0.3], ["the", "a", "no"]


def test_common_and_own_parts_add_up_to_p_and_to_q():
    draw = partial(plot_overlap, P, Q, names=NAMES, model="made-up")
    check_plot(draw, "made-up")
    ax = draw()
    stands, falls, correction = ([bar.get_height() for bar in part] for part in ax.containers)
    assert stands == [0.1, 0.2, 0.3] == [bar.get_y() for bar in ax.containers[1]]
    assert [a + b for a, b in zip(stands, falls, strict=True)] == pytest.approx(Q)
    assert [a + b for a, b in zip(stands, correction, strict=True)] == pytest.approx(P)
    assert [bar.get_y() for bar in ax.containers[2]] == stands
    assert len({part[0].get_facecolor() for part in ax.containers}) == 3
    assert len({part[0].get_hatch() for part in ax.containers}) == 3
    assert [label.get_text() for label in ax.get_xticklabels()] == NAMES
    assert "0.60 of it stands" in ax.get_title(loc="left")


@pytest.mark.parametrize(("p", "q", "names", "message"), [
    ([], [], [], "nothing to plot: no tokens"),
    ([0.5, 0.5], [1.0], ["a", "b"], "2 and 1 chances for 2 tokens"),
    ([0.5, 0.5], [0.5, 0.5], ["a"], "2 and 2 chances for 1 tokens"),
    ([1.5, 0.5], [0.5, 0.5], ["a", "b"], r"p of a is 1\.5: between 0 and 1"),
    ([0.5, 0.5], [0.5, -0.5], ["a", "b"], r"q of b is -0\.5: between 0 and 1"),
    ([0.5, float("nan")], [0.5, 0.5], ["a", "b"], "p of b is nan: this plot shows finite numbers"),
])  # fmt: skip
def test_what_is_no_chance_is_refused(p, q, names, message):
    with pytest.raises(ValueError, match=message):
        plot_overlap(p, q, names=names, model="toy")
