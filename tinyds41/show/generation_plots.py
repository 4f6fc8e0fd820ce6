"""Plots of generations side by side: what each keeps per token, and what one more token costs it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from tinyds41.cost.flops import ACCOUNTINGS, PRECISIONS, DecodeWork
from tinyds41.cost.generations import ConfigGeneration, Generation
from tinyds41.cost.parameters import short
from tinyds41.show.cost_plots import require_work, tokens
from tinyds41.show.style import Style, label_right, name_kinds, new_axes, require_data, require_numbers, styled

COMPONENTS = {"linear": "linear", "attention": "attention", "index_full": "index, all entries",
              "index_pool": "index, pool"}  # fmt: skip


@dataclass(frozen=True)
class GenerationBytes:
    """What the cache of one generation grows by. Units: bytes per token of context.

    assumed: what of it is not published, empty where all is.
    """

    model: str
    global_kv: float
    index_keys: float
    assumed: str = ""

    @property
    def bytes_per_token(self) -> float:
        return self.global_kv + self.index_keys


def generation_rows(generations: Iterable[Generation | ConfigGeneration]) -> list[GenerationBytes]:
    """The rows behind `plot_generation_bytes`, as from `cost.generations.GENERATIONS.values()`."""
    found = []
    for model in generations:
        cache = model.kv_bytes()
        main, keys = (
            float(sum(row.bytes_per_token for row in cache.of(store))) for store in ("global KV", "index keys")
        )
        found.append(GenerationBytes(model.name, main, keys, model.assumed))
    return found


@styled
def plot_generation_bytes(style: Style, rows: Sequence[GenerationBytes], *, ax: Axes | None = None) -> Axes:
    """Bytes per token of context by generation, log axis; how many times the last one's stands beside it.

    One bar each: on a log axis stacked parts would mislead. Hatched: something about it is assumed.
    """
    require_data(rows, "generations")
    require_numbers(((row.model, row.bytes_per_token) for row in rows), positive=True)
    ax = ax or new_axes(style, height=0.16 + 0.055 * len(rows))
    palette, newest = style.palette, rows[-1].bytes_per_token
    for place, row in enumerate(rows):
        last, size = row is rows[-1], row.bytes_per_token
        ax.barh(place, size, height=0.7, color=palette.blue if last else palette.sky, edgecolor=palette.ink,
                linewidth=0, hatch="////" if row.assumed else None)  # fmt: skip
        times = "" if last else f"  {_times(size / newest)}×"
        ax.annotate(f"  {_plain(size)} B{times}", (size, place), va="center", weight="bold" if last else None)
    ax.set_yticks(range(len(rows)), [row.model + (" *" if row.assumed else "") for row in rows])
    ax.tick_params(axis="y", length=0)
    sizes = [row.bytes_per_token for row in rows]
    ax.set(xscale="log", xlim=(min(sizes) / 4, max(sizes) * 12), ylim=(len(rows) - 0.4, -0.6))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda size, _: f"{size:,.0f}"))
    notes = "".join(f"\n* {row.model}: assumed, {row.assumed}" for row in rows if row.assumed)
    ax.set_xlabel(f"global KV and index keys, bytes per token of context (log scale){notes}")
    ax.set_title(f"Cache bytes per token, {rows[0].model} to {rows[-1].model}; × of {rows[-1].model}")
    return ax


def _plain(size: float) -> str:
    return f"{size:,.2f}".rstrip("0").rstrip(".")


def _times(ratio: float) -> str:
    return f"{ratio:,.0f}" if ratio >= 20 else f"{ratio:.2f}" if ratio < 10 else f"{ratio:.1f}"


@styled
def plot_work_by_generation(
    style: Style, curves: Mapping[str, Sequence[DecodeWork]], *, ax: Axes | None = None
) -> Axes:
    """Work per generated token against context, a line per model, labelled with its growth; both axes log.

    curves: by model, oldest first, all under one accounting.
    Raises: ValueError for curves of several accountings.
    """
    require_work(curves)
    rows = [row for curve in curves.values() for row in curve]
    accounting = _one({row.accounting for row in rows}, "accounting")
    ax = ax or new_axes(style, height=0.56)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    contexts, totals = [row.context for row in rows], [row.total for row in rows]
    ax.set(xlim=(min(contexts), max(contexts)), ylim=(min(totals) / 1.5, max(totals) * 1.5))
    labels = []
    looks = _looks(style)[-len(curves) :]
    for place, (model, curve) in enumerate(curves.items()):
        colour, line = looks[place % len(looks)]
        last = place == len(curves) - 1
        ax.plot([row.context for row in curve], [row.total for row in curve], color=colour, linestyle=line,
                linewidth=style.font / (4 if last else 6))  # fmt: skip
        labels.append((curve[-1].total, f"{model} {_times(curve[-1].total / curve[0].total)}×", colour))
    label_right(ax, labels, apart=0.075)
    ax.xaxis.set_major_formatter(FuncFormatter(lambda n, _: tokens(int(n))))
    # A power of ten alone says little where there are two of them at most.
    ax.yaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5) if max(totals) < 100 * min(totals) else (1,)))
    ax.yaxis.set_major_formatter(FuncFormatter(flops))
    ax.yaxis.set_minor_locator(NullLocator())
    ax.set(xlabel=f"context, tokens (log scale)\n{accounting}: {_meaning(accounting)}",
           ylabel="FLOPs per generated token (log scale)")  # fmt: skip
    ax.set_title(f"Decode work by generation, accounting “{accounting}”; × is growth along the line")
    return ax


def _looks(style: Style) -> list[tuple[str, str]]:
    """Colour and line of each curve; the last, newest, stands out."""
    palette = style.palette
    return [(palette.muted, ":"), (palette.muted, "--"), (palette.muted, "-"), (palette.purple, "-."),
            (palette.orange, "--"), (palette.green, ":"), (palette.blue, "-")]  # fmt: skip


def _one(values: set[str], what: str) -> str:
    if len(values) > 1:
        raise ValueError(f"one plot shows one {what}, got {', '.join(sorted(values))}")
    return next(iter(values))


def _meaning(accounting: str) -> str:
    # A generation may score its index at another precision, as V3.2 does at FP8: the general rule is named.
    if accounting == "weighted":
        counts = ", ".join(f"{precision} {count:g}" for precision, count in PRECISIONS.items())
        return f"a FLOP counts {counts}: attention in BF16, linear in FP8,\nindex scores in FP4 (V3.2: FP8)"
    return ACCOUNTINGS[accounting].meaning


def flops(count: float, _: object = None) -> str:
    """FLOPs on an axis: 1G, 320M."""
    for unit, size in (("P", 1e15), ("T", 1e12)):
        if count >= size:
            return f"{count / size:,.3g}{unit}"
    return short(count).replace("B", "G").replace(".00", "")


@styled
def plot_work_by_component(style: Style, rows: Sequence[DecodeWork], *, ax: Axes | None = None) -> Axes:
    """Work per generated token of one model, a stacked bar per context, a part per component.

    Raises: ValueError for rows of several models or accountings.
    """
    require_data(rows, "decode work")
    for row in rows:
        require_work({row.model: [row]})
    accounting = _one({row.accounting for row in rows}, "accounting")
    model = _one({row.model for row in rows}, "model")
    ax = ax or new_axes(style)
    palette, highest = style.palette, max(row.total for row in rows)
    looks = dict(zip(COMPONENTS, ((palette.sky, None), (palette.green, "...."), (palette.orange, "////"),
                                  (palette.purple, None)), strict=True))  # fmt: skip
    base = [0.0] * len(rows)
    for component, (colour, hatch) in looks.items():
        parts = [getattr(row, component) for row in rows]
        ax.bar(range(len(rows)), parts, bottom=base, width=0.68, color=colour, hatch=hatch, linewidth=0)
        base = [low + part for low, part in zip(base, parts, strict=True)]
    for place, row in enumerate(rows):
        ax.annotate(flops(row.total), (place, row.total), xytext=(0, 2), textcoords="offset points", ha="center",
                    va="bottom")  # fmt: skip
    ax.set_xticks(range(len(rows)), [tokens(row.context) for row in rows])
    ax.tick_params(axis="x", length=0)
    ax.set(ylim=(0, 1.12 * highest), xlim=(-0.5, len(rows) - 0.5))
    drawn = [component for component in looks if any(getattr(row, component) for row in rows)]
    name_kinds(ax, [(looks[component][0], COMPONENTS[component]) for component in drawn])
    _label_shares(ax, rows[-1], drawn, palette.ink)
    ax.yaxis.set_major_formatter(FuncFormatter(flops))
    ax.set(xlabel=f"context, tokens\n{accounting}: {rows[0].meaning}",
           ylabel="FLOPs per generated token")  # fmt: skip
    ax.set_title(f"Decode work of {model} by component, accounting “{accounting}”", pad=2.2 * style.font)
    return ax


def _label_shares(ax: Axes, row: DecodeWork, components: Sequence[str], ink: str) -> None:
    """Shares at the right, each as high as its part of the last bar."""
    labels, base = [], 0.0
    for component in components:
        part = getattr(row, component)
        labels.append((base + part / 2, f"{part / row.total:.1%}", ink))
        base += part
    label_right(ax, labels, apart=0.08)
