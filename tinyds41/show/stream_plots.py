"""Plots of the residual streams: hyper-connection coefficients, and Engram's gates over a text."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes

from tinyds41.show.stream_observations import StreamMix
from tinyds41.show.style import Style, new_axes, on_cividis, require_data, require_numbers, styled

PER_ROW = 4  # small maps side by side; more, and their numbers would not fit a column
MOST_ANNOTATED = 16  # maps with numbers; more are drawn smaller, without


@styled
def plot_stream_mixes(
    style: Style, mixes: Sequence[StreamMix], *, model: str, tokens: str, ax: Axes | None = None
) -> Axes:
    """A small map per sub-layer: from each stream (row) to each (column), and below what the output adds, what is read.

    tokens: whose they are, in words, as "the token at 12" or "mean over 300 tokens": it stands in the title.
    """
    require_data(mixes, "stream mixes")
    for mix in mixes:
        parts = {"pre": mix.pre, "post": mix.post, "comb": [value for source in mix.comb for value in source]}
        require_numbers((f"{part} of layer {mix.layer} {mix.sublayer}", value) for part, values in parts.items()
                        for value in values)  # fmt: skip
    n_streams, annotated = len(mixes[0].pre), len(mixes) <= MOST_ANNOTATED
    per_row = PER_ROW if annotated else 2 * PER_ROW
    wide, high = n_streams + 1.6, n_streams + 4.0  # cells, with the gaps around a map
    n_rows = -(-len(mixes) // per_row)
    cell = style.width / (per_row * wide + 1.5)
    ax = ax or new_axes(style, height=(n_rows * high * cell * 0.8 + 0.11 * style.width) / style.width)
    ax.set(xlim=(-1.1, min(per_row, len(mixes)) * wide - 1.0), ylim=(n_rows * high - 1.2, -1.7))
    for place, mix in enumerate(mixes):
        x, y = place % per_row * wide, place // per_row * high
        _draw_map(ax, mix, (x, y), annotated, style)
    names = [*map(str, range(n_streams)), "out", "read"]
    places = [high * line + _row(row, n_streams) for line in range(n_rows) for row in range(len(names))]
    ax.set_yticks(places, names * n_rows, fontsize=(0.9 if annotated else 0.6) * style.font)
    ax.tick_params(length=0, pad=0)
    ax.set(xticks=[], ylabel=f"source stream 0..{n_streams - 1}")
    ax.set_xlabel(f"target stream 0..{n_streams - 1}, from left to right; colour 0 to 1, for “out” 0 to 2\n"
                  "out: how much of the output a stream receives; read: its part in the next input")  # fmt: skip
    ax.spines[:].set_visible(False)
    ax.set_title(f"Stream mixing of {model}, {tokens}")
    return ax


def _row(row: int, n_streams: int) -> float:
    """The place of a row of a map: "out" and "read" stand a little apart from the streams."""
    return row + 0.25 * max(0, row - n_streams + 1)


def _draw_map(ax: Axes, mix: StreamMix, corner: tuple[float, float], annotated: bool, style: Style) -> None:
    colours, n_streams = colormaps["cividis"], len(mix.pre)
    rows = [*((source, 1.0) for source in mix.comb), (mix.post, 2.0), (mix.pre, 1.0)]
    for row, (values, top) in enumerate(rows):
        y = corner[1] + _row(row, n_streams)
        shares = np.clip(np.array(values) / top, 0, 1)
        ax.imshow(colours(shares)[None], extent=(corner[0] - 0.5, corner[0] + n_streams - 0.5, y + 0.5, y - 0.5),
                  aspect="auto", interpolation="nearest")  # fmt: skip
        if annotated:
            for column, (value, share) in enumerate(zip(values, shares, strict=True)):
                ax.annotate(f"{value:.2f}".replace("0.", ".", 1) if value < 0.995 else f"{value:.1f}",
                            (corner[0] + column, y), ha="center", va="center", fontsize=0.85 * style.font,
                            color=on_cividis(share))  # fmt: skip
    ax.annotate(f"{mix.layer} {mix.sublayer}", (corner[0] - 0.5, corner[1] - 0.7), ha="left", va="bottom",
                fontsize="small" if annotated else 0.7 * style.font)  # fmt: skip
