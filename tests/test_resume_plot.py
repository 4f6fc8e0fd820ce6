"""The picture of a resumed prompt shows its numbers, to scale."""

import pytest
from matplotlib.patches import Rectangle

from tinyds41.infer.replay import Resumed
from tinyds41.show.resume_plot import plot_resume


def test_bars_are_the_tokens_of_each_place():
    ax = plot_resume(Resumed(found=192, replayed=32, new=40, windows="replay"), in_decoder=32, model="toy")
    bars = [(bar.get_x(), bar.get_width()) for bar in ax.patches if isinstance(bar, Rectangle)]
    assert bars == [(0, 192), (160, 32), (192, 40), (200, 32)]
    assert ax.get_yticklabels()[0].get_text() == "read from the store"
    assert {"192", "32", "40"} <= {text.get_text() for text in ax.texts}
    assert "232 tokens" in ax.get_title(loc="left") and "replay" in ax.get_title(loc="left")


def test_a_prompt_of_which_nothing_was_found_has_no_bar_for_it():
    ax = plot_resume(Resumed(found=0, replayed=0, new=9, windows="none"), in_decoder=9, model="toy")
    assert len(ax.patches) == 2  # encoder and decoder on the new tokens


@pytest.mark.parametrize(("resumed", "in_decoder", "reason"), [
    (Resumed(4, 4, 0, "replay"), 5, "in_decoder=5 of 4 tokens"), (Resumed(4, 5, 1, "replay"), 1, "5 tokens run again"),
    (Resumed(4, 4, 0, "replay"), 0, "in_decoder=0 of 4"),
])  # fmt: skip
def test_what_cannot_be_is_refused(resumed, in_decoder, reason):
    with pytest.raises(ValueError, match=reason):
        plot_resume(resumed, in_decoder=in_decoder, model="toy")
