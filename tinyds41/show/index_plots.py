"""Plots of the sparse choice: candidate blocks of a query, agreement of layers, where attention's mass goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from tinyds41.show.index_observations import AttentionShare, Candidate, Overlap
from tinyds41.show.style import Style, name_kinds, new_axes, on_cividis, require_data, require_numbers, styled


@styled
def plot_candidates(
    style: Style, candidates: Sequence[Candidate], *, model: str, marked: Mapping[int, str] | None = None,
    ax: Axes | None = None,
) -> Axes:  # fmt: skip
    """Each block as high as its best entry, along the context: in the pool or not, the newest, the chosen entries.

    candidates: of one query and layer, as from `index_observations.candidates`. marked: a text by token position.
    Raises: ValueError for candidates of which none has a score.
    """
    require_data(candidates, "candidates")
    scores = [(f"score of entry {one.entry}", one.score) for one in candidates if one.score is not None]
    if not scores:
        raise ValueError("no candidate has a score")
    require_numbers(scores)
    ax = ax or new_axes(style)
    palette = style.palette
    blocks: dict[int, list[Candidate]] = {}
    for candidate in candidates:
        blocks.setdefault(candidate.block, []).append(candidate)
    best = {block: _best(entries) for block, entries in blocks.items()}
    shown = [score for score in best.values() if score is not None]
    shown += [one.score for one in candidates if one.selected and one.score is not None]
    low, high = min(shown), max(shown)
    room = 0.06 * (high - low or 1)
    ax.set(ylim=(low - 2 * room, high + 2 * room), xlim=(0, candidates[-1].last + 1))
    looks = {"outside": (palette.faint, None), "pool": (palette.sky, None), "newest": (palette.orange, "////")}
    for block, entries in blocks.items():
        height = best[block]
        if height is not None:
            kind = "newest" if entries[0].newest else "pool" if entries[0].in_pool else "outside"
            colour, hatch = looks[kind]
            ax.bar(entries[0].first, height - low + 2 * room, bottom=low - 2 * room, align="edge", color=colour,
                   width=entries[-1].last + 1 - entries[0].first, hatch=hatch, linewidth=0)  # fmt: skip
    chosen = [(one.first + one.last + 1, one.score) for one in candidates if one.selected and one.score is not None]
    ax.plot([place / 2 for place, _ in chosen], [score for _, score in chosen], linestyle="", marker="D", zorder=3,
            markersize=style.font / 2.4, color=palette.ink, markeredgecolor=palette.paper, clip_on=False)  # fmt: skip
    boxed = {"facecolor": palette.paper, "edgecolor": "none", "pad": 1}  # readable where a bar passes behind
    for place, text in (marked or {}).items():
        ax.axvline(place + 0.5, color=palette.purple, linestyle="--", linewidth=0.8, zorder=2)
        ax.annotate(text, (place + 0.5, 0.9), xycoords=("data", "axes fraction"), xytext=(7, 0), va="center",
                    textcoords="offset points", color=palette.purple, bbox=boxed)  # fmt: skip
    name_kinds(ax, _kinds(blocks, len(chosen), looks, palette.ink))
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set(xlabel="position in the context, tokens", ylabel="index score (a block: its best entry)")
    layer, query = candidates[0].layer, candidates[0].query
    ax.set_title(f"Candidates in layer {layer} of {model} for the query at {query:,}", pad=2.2 * style.font)
    return ax


def _best(entries: Sequence[Candidate]) -> float | None:
    return max((entry.score for entry in entries if entry.score is not None), default=None)


def _kinds(blocks: dict[int, list[Candidate]], n_chosen: int, looks: dict, ink: str) -> list[tuple[str, str]]:
    """(colour, name) of what is drawn. The newest block stands in the pool too, so both are counted there."""
    n_pool = sum(entries[0].in_pool for entries in blocks.values())
    n_outside = len(blocks) - n_pool
    scored = any(entries[0].score is not None for entries in blocks.values() if not entries[0].in_pool)
    kinds = [(ink, f"{n_chosen} chosen entries"), (looks["pool"][0], f"{n_pool} blocks in the pool"),
             (looks["newest"][0], "the newest of them")]  # fmt: skip
    return kinds + (
        [(looks["outside"][0], f"{n_outside} outside" + ("" if scored else ", not scored"))] if n_outside else []
    )


@styled
def plot_selection_overlap(
    style: Style, overlaps: Sequence[Overlap], *, model: str, queries: str, ax: Axes | None = None
) -> Axes:
    """Index source against index source: the share of chosen tokens that both chose, annotated.

    queries: which they were, in words, as "query 300" or "24 queries": it stands in the title.
    """
    require_data(overlaps, "overlaps")
    require_numbers((f"overlap of layers {one.layer} and {one.other}", one.shared) for one in overlaps
                    if one.shared is not None)  # fmt: skip
    layers = sorted({one.layer for one in overlaps})
    ax = ax or new_axes(style, height=min(0.9, style.tallest, 0.25 + 0.07 * len(layers)))
    shared = np.full((len(layers), len(layers)), np.nan)
    for one in overlaps:
        shared[layers.index(one.layer), layers.index(one.other)] = np.nan if one.shared is None else one.shared
    image = ax.imshow(shared, cmap="cividis", vmin=0, vmax=1, aspect="auto")
    for (row, column), value in np.ndenumerate(shared):
        text, colour = ("–", style.palette.ink) if np.isnan(value) else (f"{value:.2f}", on_cividis(value))
        ax.annotate(text, (column, row), ha="center", va="center", color=colour)
    bar = ax.figure.colorbar(image, ax=ax, pad=0.02)
    bar.set_label("chosen by both / by either")
    bar.outline.set_visible(False)
    ax.set_xticks(range(len(layers)), [str(layer) for layer in layers])
    ax.set_yticks(range(len(layers)), [str(layer) for layer in layers])
    ax.set(xlabel="index source, layer", ylabel="index source, layer")
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    ax.set_title(f"Tokens that index sources of {model} choose in common, {queries}")
    return ax


@styled
def plot_attention_shares(
    style: Style, shares: Sequence[AttentionShare], *, model: str, queries: str, ax: Axes | None = None
) -> Axes:
    """A bar per layer, stacked from window, selected entries and sink.

    queries: which they were, in words: it stands in the title.
    """
    require_data(shares, "attention shares")
    require_numbers((f"{part} in layer {share.layer}", getattr(share, part)) for share in shares
                    for part in ("window", "selected", "sink"))  # fmt: skip
    height = min(style.tallest, 0.2 + 0.042 * len(shares))
    ax = ax or new_axes(style, height=height)
    small = min(0.85 * style.font, 0.6 * 72 * height * style.width / len(shares))  # what a row has room for
    palette, places = style.palette, range(len(shares))
    looks = {"window": (palette.green, None), "selected": (palette.ink, None), "sink": (palette.faint, "////")}
    left = np.zeros(len(shares))
    for part, (colour, hatch) in looks.items():
        sizes = np.array([getattr(share, part) for share in shares])
        ax.barh(places, sizes, left=left, height=0.72, color=colour, hatch=hatch, linewidth=0)
        left += sizes
    for place, share in zip(places, shares, strict=True):
        parts = (share.window, share.selected, share.sink)
        ax.annotate("  ".join(f"{part:4.0%}".rjust(4, "\u2007") for part in parts), (1.01, place), va="center",
                    xycoords=("axes fraction", "data"), fontsize=small, annotation_clip=False)  # fmt: skip
    name_kinds(ax, [(looks["window"][0], "window"), (looks["selected"][0], "selected entries"),
                    (looks["sink"][0], "sink")])  # fmt: skip
    ax.set_yticks(places, [f"{share.layer} {share.mode}" for share in shares], fontsize=small)
    ax.tick_params(axis="y", length=0)
    ax.set(xlim=(0, 1), ylim=(len(shares) - 0.4, -0.6), xlabel="share of attention, mean over heads and queries")
    ax.set_title(f"Where attention of {model} goes, {queries}", pad=2.2 * style.font)
    return ax
