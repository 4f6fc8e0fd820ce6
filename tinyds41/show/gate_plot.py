"""Engram's gates over a text: each token with a cell per stream below it, in lines as the text was written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.patches import Rectangle

from tinyds41.show.stream_observations import TokenGate
from tinyds41.show.style import Style, new_axes, require_data, require_numbers, styled

FONT = "DejaVu Sans Mono"  # comes with matplotlib; every character is equally wide
PER_LINE = 64  # characters in a line of the strip
LONGEST = 14  # characters of one token's text; the middle of a longer one is left out
MARKS = {" ": "·", "\n": "↵", "\t": "→"}


@styled
def plot_engram_gates(style: Style, gates: Sequence[TokenGate], *, model: str, ax: Axes | None = None) -> Axes:
    """Tokens in reading order, below each its gates: a cell per stream, or with several layers their means.

    The figure grows with the text: a slide has room for two or three lines of 64 characters.
    Blanks show as ·, line ends as ↵, what the font lacks as an escape.
    """
    require_data(gates, "gates")
    require_numbers((f"gate at token {gate.position}", value) for gate in gates for value in gate.gates)
    layers = sorted({gate.layer for gate in gates})
    by_token: dict[int, dict[int, TokenGate]] = {}
    for gate in gates:
        by_token.setdefault(gate.position, {})[gate.layer] = gate
    lines = list(_lines([(readable(next(iter(of.values())).text), _cells(of, layers)) for of in by_token.values()]))
    names = [f"layer {layer}" for layer in layers] if len(layers) > 1 else [
        f"stream {i}" for i in range(len(gates[0].gates))]  # fmt: skip
    pitch = 1.5 + 0.55 * len(names) + 0.7  # heights of a text line, its cells, and a gap
    ax = ax or new_axes(style, height=0.16 + 0.028 * pitch * len(lines))
    ax.set(xlim=(0, PER_LINE), ylim=(pitch * len(lines) - 0.5, -0.2))
    for number, line in enumerate(lines):
        _draw_line(ax, line, number * pitch, style)
    _name_rows(ax, names, [number * pitch for number in range(len(lines))], style)
    bar = ax.figure.colorbar(ScalarMappable(Normalize(0, 1), "cividis"), ax=ax, pad=0.02, aspect=30)
    bar.set_label("gate, 0 shut to 1 open")
    bar.outline.set_visible(False)
    ax.set(xticks=[], xlabel="text, token by token  (· blank, ↵ line end)")
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    where = f"layer {layers[0]}" if len(layers) == 1 else f"layers {', '.join(map(str, layers))}, mean over streams"
    ax.set_title(f"Engram gates of {model}, {where}")
    return ax


def readable(text: str) -> str:
    """A token's text on one line: marks for white space, escapes for what has no glyph.

    The middle of a long one is cut.
    """
    shown = [MARKS.get(character) or _with_glyph(character) for character in text]
    if sum(map(len, shown)) > LONGEST:
        head, tail = _fit(shown, LONGEST - 5), _fit(shown[::-1], 4)[::-1]
        shown = [*head, "…", *tail]
    return "".join(shown) or "∅"


def _fit(parts: Sequence[str], room: int) -> list[str]:
    """As many of the first parts as fit: an escape is kept whole."""
    kept: list[str] = []
    for part in parts:
        if sum(map(len, kept)) + len(part) > room:
            break
        kept.append(part)
    return kept


def _with_glyph(character: str) -> str:
    if character.isprintable() and ord(character) in _glyphs():
        return character
    return character.encode("unicode_escape").decode("ascii")


@cache
def _glyphs() -> frozenset[int]:
    return frozenset(get_font(findfont(FontProperties(family=FONT))).get_charmap())


def _cells(of: dict[int, TokenGate], layers: Sequence[int]) -> list[float]:
    if len(layers) == 1:
        return list(of[layers[0]].gates)
    return [sum(of[layer].gates) / len(of[layer].gates) for layer in layers]


def _lines(tokens: Sequence[tuple[str, list[float]]]) -> Iterator[list[tuple[int, str, list[float]]]]:
    """Tokens with the column where each begins; a line ends when it is full, or at a line end in the text.

    An empty line of the text takes no line of its own.
    """
    line: list[tuple[int, str, list[float]]] = []
    column, ended = 0, False
    for text, cells in tokens:
        full = column + len(text) + 1 > PER_LINE
        if line and (full or (ended and text != MARKS["\n"])):
            yield line
            line, column = [], 0
        line.append((column, text, cells))
        column, ended = column + len(text) + 1, text.endswith(MARKS["\n"])
    if line:
        yield line


def _draw_line(ax: Axes, line: Sequence[tuple[int, str, list[float]]], top: float, style: Style) -> None:
    colours = colormaps["cividis"]
    size = _font_size(style)
    for column, text, cells in line:
        width = len(text) + 1
        ax.annotate(text, (column + width / 2, top + 0.6), ha="center", va="center", family=FONT, fontsize=size,
                    parse_math=False)  # fmt: skip
        for row, value in enumerate(cells):
            ax.add_patch(Rectangle((column + 0.08, top + 1.2 + 0.55 * row), width - 0.16, 0.5, linewidth=0,
                                   facecolor=colours(value)))  # fmt: skip


def _font_size(style: Style) -> float:
    """Points at which PER_LINE characters of 0.602 em fill the part of the figure that the axes have."""
    return min(0.9 * style.font, 0.76 * 72 * style.width / PER_LINE / 0.602)


def _name_rows(ax: Axes, names: Sequence[str], tops: Sequence[float], style: Style) -> None:
    places = [top + 1.45 + 0.55 * row for top in tops for row in range(len(names))]
    ax.set_yticks(places, list(names) * len(tops), fontsize=_font_size(style))
