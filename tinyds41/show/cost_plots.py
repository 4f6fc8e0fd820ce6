"""Plots of what a model costs: cache bytes, parameters, work per token."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullLocator

from tinyds41.cost.flops import DecodeWork
from tinyds41.cost.kv_bytes import KVBytes
from tinyds41.cost.parameters import Parameters, short
from tinyds41.show.style import Style, label_right, new_axes, require_data, require_numbers, styled

GROWING = ("global KV", "index keys")
MOST_SEGMENTS = 12  # more layers in one bar are one segment: their edges and numbers would run into each other


def kv_rows(models: Mapping[str, KVBytes]) -> list[dict[str, Any]]:
    """The rows behind `plot_kv_bytes`, one per model, store and layer. Units: bytes."""
    return [{"model": model, **row} for model, cache in models.items() for row in cache.to_dict()["rows"]]


@styled
def plot_kv_bytes(style: Style, models: Mapping[str, KVBytes], *, ax: Axes | None = None) -> Axes:
    """Cache growth per token by store, a segment per layer that keeps rows; one segment where these are many.

    Windows do not grow: a note.
    """
    require_data(models, "models")
    ax = ax or new_axes(style, height=0.16 + 0.11 * len(models))
    colours = (style.palette.blue, style.palette.orange)
    longest = max(sum(row.bytes_per_token for row in cache.of(store)) for cache in models.values() for store in GROWING)
    labels = []
    for place, (model, cache) in enumerate(models.items()):
        for offset, (store, colour) in enumerate(zip(GROWING, colours, strict=True)):
            y = 2.6 * place + offset
            parts = [(row.layer, float(row.bytes_per_token)) for row in cache.of(store)]
            _draw_store(ax, y, parts, colour, style.palette.paper, float(longest) / 100)
            labels.append((y, f"{model}: {store}"))
    ax.set_yticks([y for y, _ in labels], [text for _, text in labels])
    ax.set_ylim(labels[-1][0] + 0.7, -0.7)
    windows = ", ".join(f"{model} {cache.window_bytes:,} B" for model, cache in models.items() if cache.window_bytes)
    note = f"windows do not grow: {windows} per sequence" if windows else "no windows"
    many = f", one for more than {MOST_SEGMENTS}" if any(map(_many, models.values())) else ""
    ax.set_xlim(0, float(longest) * 1.55 or 1)
    ax.set_xlabel(f"bytes per token of context, one segment per layer{many}\n" + _wrapped(f"({note})"))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda size, _: f"{size:,g}"))
    totals = ", ".join(f"{model} {_plain(cache.bytes_per_token)}" for model, cache in models.items())
    ax.set_title(f"Cache bytes per token: {totals}")
    return ax


def _wrapped(note: str) -> str:
    """A line, or where it is too long for a column one per item."""
    return note if len(note) <= 72 else note.replace(", ", ",\n")


def _many(cache: KVBytes) -> bool:
    return any(len(cache.of(store)) > MOST_SEGMENTS for store in GROWING)


def _draw_store(ax: Axes, y: float, parts: list[tuple[int, float]], colour: str, paper: str, least: float) -> None:
    """A bar of segments. least: the width below which a segment's edges would hide it."""
    total = sum(width for _, width in parts)
    many, left = len(parts) > MOST_SEGMENTS, 0.0
    edge = 1 if many or all(width > least for _, width in parts) else 0
    for width in [total] if many else [width for _, width in parts]:
        ax.barh(y, width, left=left, height=0.86, color=colour, edgecolor=paper, linewidth=edge)
        left += width
    layers = ", ".join(str(layer) for layer, _ in parts)
    where = f" (layer{'s' * (len(parts) > 1)} {layers})" if parts else ""
    where = f" ({len(parts)} layers, {parts[0][0]}..{parts[-1][0]})" if many else where
    ax.annotate(f" {_plain(total)} B{where}", (left, y), va="center")


def _plain(value: Any) -> str:
    return f"{float(value):,.4g}" if float(value) < 1000 else f"{float(value):,.0f}"


@styled
def plot_parameters(style: Style, parameters: Parameters, *, model: str, ax: Axes | None = None) -> Axes:
    """Stored weights by component, and those that one generated token uses, on a log axis."""
    parts = sorted((part for part in parameters.components if part.stored), key=lambda part: part.stored)
    require_data(parts, "stored weights")
    ax = ax or new_axes(style, height=0.18 + 0.042 * len(parts))
    palette, places = style.palette, range(len(parts))
    ax.barh(places, [part.stored for part in parts], height=0.72, color=palette.sky)
    used = [(place, part.decode) for place, part in zip(places, parts, strict=True) if part.decode]
    ax.plot([n for _, n in used], [place for place, _ in used], linestyle="", marker="|", markersize=1.5 * style.font,
            markeredgewidth=2.2, color=palette.orange)  # fmt: skip
    for place, part in zip(places, parts, strict=True):
        share = part.stored / parameters.total
        text = f"  {short(part.stored)}" + (f" ({share:.1%})" if share >= 0.001 else "")
        ax.annotate(text, (part.stored, place), va="center")
    ax.set_yticks(places, [part.name for part in parts])
    low, high = min(min(part.stored, part.decode or part.stored) for part in parts), parts[-1].stored
    used_in_all = f"orange mark: used by a generated token, {short(parameters.active_decode)} in all"
    ax.set(xscale="log", xlim=(low / 3, high * (high / low) ** 0.3 * 3), xlabel=f"weights, log scale; {used_in_all}")
    ax.set_xticks([10**power for power in range(math.ceil(math.log10(low / 3)), math.floor(math.log10(high)) + 1)])
    ax.xaxis.set_major_formatter(FuncFormatter(lambda count, _: short(count).replace(".00", "")))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_title(f"Parameters of {model}: {short(parameters.total)}")
    return ax


@styled
def plot_decode_work(
    style: Style, curves: Mapping[str, Sequence[DecodeWork]], *, model: str, ax: Axes | None = None
) -> Axes:
    """Work per generated token against context, a line per accounting, labelled with its growth.

    curves: by accounting, as `{name: cost.curve(contexts, name) for name in ACCOUNTINGS}`.
    """
    require_work(curves)
    ax = ax or new_axes(style)
    looks = [(style.palette.blue, "-"), (style.palette.orange, "--"), (style.palette.green, ":")]
    labels = []
    for (accounting, rows), (colour, line) in zip(curves.items(), looks, strict=False):
        totals = [row.total for row in rows]
        ax.plot([row.context for row in rows], totals, color=colour, linestyle=line)
        labels.append((totals[-1], f"{accounting}\n{totals[-1] / totals[0]:.2f}×", colour))
        ax.axhline(totals[0], color=style.palette.muted, linestyle="--", linewidth=0.6)
    contexts = [row.context for rows in curves.values() for row in rows]
    ax.set_xscale("log", base=2)
    meanings = "".join(f"\n{name}: {rows[0].meaning}" for name, rows in curves.items())
    ax.set(ylim=(0, 1.1 * max(row.total for rows in curves.values() for row in rows)),
           xlim=(min(contexts), max(contexts)), xlabel=f"context, tokens (log scale){meanings}",
           ylabel="FLOPs per generated token")  # fmt: skip
    label_right(ax, labels, apart=0.17)
    ax.xaxis.set_major_formatter(FuncFormatter(lambda n, _: tokens(int(n))))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda count, _: short(count).replace("B", "G").replace(".00", "")))
    ax.set_title(f"Decode work of {model}, {tokens(min(contexts))} to {tokens(max(contexts))} tokens")
    return ax


def require_work(curves: Mapping[str, Sequence[DecodeWork]]) -> None:
    """Raises: ValueError for no curve, one without rows, or work from which no growth can be told."""
    require_data(curves, "decode work")
    for name, rows in curves.items():
        require_data(rows, f"decode work of {name}")
        require_numbers(((f"{name} at a context of {row.context:,}", row.total) for row in rows), positive=True)


def tokens(count: int) -> str:
    """A context for an axis: 4K, 1M, 500. K is 1,024."""
    for unit, size in (("M", 2**20), ("K", 2**10)):
        if count >= size and count % size == 0:
            return f"{count // size}{unit}"
    return f"{count:,}"
