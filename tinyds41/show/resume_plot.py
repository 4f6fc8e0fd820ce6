"""A resumed prompt as a picture: what is read back, what runs again, what runs for the first time."""

from __future__ import annotations

from matplotlib.axes import Axes

from tinyds41.infer.replay import Resumed
from tinyds41.show.style import Style, new_axes, styled


@styled
def plot_resume(style: Style, resumed: Resumed, *, in_decoder: int, model: str, ax: Axes | None = None) -> Axes:
    """One bar per place along the prompt: rows from disk above, then the encoder's two runs, the decoder's below.

    in_decoder: on how many last tokens of the prompt the decoder ran.
    Raises: ValueError for a decoder that runs on more tokens than there are, or a replay of more than was found.
    Source: spec 6.
    """
    n_tokens = resumed.found + resumed.new
    if not 0 < in_decoder <= n_tokens:
        raise ValueError(f"in_decoder={in_decoder} of {n_tokens} tokens")
    if not 0 <= resumed.replayed <= resumed.found:
        raise ValueError(f"{resumed.replayed} tokens run again, of {resumed.found} found ones")
    ax = ax or new_axes(style, height=0.4)
    palette = style.palette
    bars = (
        ("read from the store", 0, resumed.found, palette.blue, 1.0),
        ("encoder, again", resumed.found - resumed.replayed, resumed.replayed, palette.orange, 0.5),
        ("encoder, new", resumed.found, resumed.new, palette.orange, 1.0),
        ("decoder", n_tokens - in_decoder, in_decoder, palette.purple, 1.0),
    )
    for row, (_, start, width, colour, opacity) in enumerate(bars):
        if width:
            ax.barh(row, width, left=start, height=0.6, color=colour, alpha=opacity)
        ax.annotate(f"{width:,}", (start + width, row), xytext=(3, 0), va="center", textcoords="offset points")
    ax.axvline(resumed.found, color=palette.muted, linestyle="--", linewidth=0.8)
    ax.set_yticks(range(len(bars)), [name for name, *_ in bars])
    ax.set(xlim=(0, n_tokens * 1.1), ylim=(len(bars) - 0.4, -0.6),
           xlabel="position in the prompt, tokens; dashed: end of what the store knows")  # fmt: skip
    ax.tick_params(axis="y", length=0)
    ax.set_title(f"A resumed prompt of {n_tokens:,} tokens, {model}; windows: {resumed.windows}")
    return ax
