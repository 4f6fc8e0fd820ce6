"""What a drafter's chances have in common with the model's: what stands, what falls, what corrections bring."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes

from tinyds41.show.style import Style, name_kinds, new_axes, require_data, require_numbers, styled


@styled
def plot_overlap(
    style: Style, p: Sequence[float], q: Sequence[float], *, names: Sequence[str], model: str, ax: Axes | None = None
) -> Axes:
    """The chances p and q of each token as one bar: min(p, q) stands, q above it falls, p above it is the correction's.

    Of the bar's three parts the first two are q, the first and the third p. The title has the sum of min(p, q): the
    chance that a drafted token stands.

    names: of the tokens. p: the model's chances, q: the drafter's.
    Raises: ValueError for no tokens, another number of names or chances, a chance outside 0..1.
    Source: spec 10.7.
    """
    require_data(names, "tokens")
    if not len(p) == len(q) == len(names):
        raise ValueError(f"{len(p)} and {len(q)} chances for {len(names)} tokens")
    for which, chances in (("p", p), ("q", q)):
        require_numbers((f"{which} of {name}", value) for name, value in zip(names, chances, strict=True))
        for name, value in zip(names, chances, strict=True):
            if not 0 <= value <= 1:
                raise ValueError(f"{which} of {name} is {value}: between 0 and 1 is needed")
    ax, palette = ax or new_axes(style), style.palette
    places = list(range(len(names)))
    common = [min(pair) for pair in zip(p, q, strict=True)]
    parts = ((common, [0.0] * len(names), palette.blue, None),
             ([b - low for b, low in zip(q, common, strict=True)], common, palette.orange, "//"),
             ([a - low for a, low in zip(p, common, strict=True)], common, palette.green, ".."))  # fmt: skip
    for heights, bottoms, colour, hatch in parts:
        ax.bar(places, heights, bottom=bottoms, width=0.7, color=colour, hatch=hatch, edgecolor=palette.paper,
               linewidth=0)  # fmt: skip
    ax.set_xticks(places, list(names))
    ax.set(xlabel="token", ylabel="chance", xlim=(-0.6, len(names) - 0.4))
    ax.tick_params(axis="x", length=0)
    name_kinds(ax, [(palette.blue, "in both: stands"), (palette.orange, "q alone: falls"),
                    (palette.green, "p alone: correction")])  # fmt: skip
    ax.set_title(f"A draft of {model}: {sum(common):.2f} of it stands", pad=2.2 * style.font)
    return ax
