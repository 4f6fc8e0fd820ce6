"""Stream mixing and Engram gates are those of the trace, and the plots show them with their text."""

import pytest
import torch
from matplotlib.patches import Rectangle
from models import random_ids, scattered, traced
from plot_checks import check_plot, texts

from tinyds41.config import Config
from tinyds41.show.gate_plot import LONGEST, PER_LINE, plot_engram_gates, readable
from tinyds41.show.stream_observations import GATE_NAMES, MIX_NAMES, StreamMix, TokenGate, stream_mixes, token_gates
from tinyds41.show.stream_plots import plot_stream_mixes

NANO = Config.preset("nano")
WORDS = ["The", " cat", " sat", ".", "\n", "A", " naïve", " 中文", "🙂", "\t", "\x00", "$x_1$", "\n", "\n", "end",
         " a long token without an end", "é", "<bos>", " one", " two", " three"]  # fmt: skip


@pytest.fixture(scope="module")
def run():
    return traced(scattered(), random_ids(2, 21), *MIX_NAMES, *GATE_NAMES)


# ---------------------------------------------------------------------------------------------- stream mixing


def test_the_mixes_of_a_token_are_its_coefficients_in_every_sub_layer(run):
    found = stream_mixes(run, NANO, query=7, row=1)
    assert [(mix.layer, mix.sublayer) for mix in found] == [(i, s) for i in range(8) for s in ("attention", "experts")]
    for mix in found:
        path = f"layers.{mix.layer}." + {"attention": "hc_attn", "experts": "hc_ffn"}[mix.sublayer]
        assert list(mix.pre) == run[f"{path}.pre"][1, 7].tolist()
        assert list(mix.post) == run[f"{path}.post"][1, 7].tolist()
        assert [list(source) for source in mix.comb] == run[f"{path}.comb"][1, 7].tolist()


def test_a_mean_leaves_padding_out(run):
    alive = torch.ones(2, 21, dtype=torch.bool)
    alive[1, 10:] = False
    [attention, _] = stream_mixes(run, NANO, [3], alive=alive)
    comb = run["layers.3.hc_attn.comb"]
    tokens = [comb[0, i] for i in range(21)] + [comb[1, i] for i in range(10)]
    assert torch.allclose(torch.tensor(attention.comb, dtype=comb.dtype), sum(tokens) / 31, atol=1e-12)
    [everyone, _] = stream_mixes(run, NANO, [3])
    assert everyone != attention
    # The last Sinkhorn step makes every target's column add up to 1, but for hc_eps = 1e-6.
    assert [sum(target) for target in zip(*everyone.comb, strict=True)] == pytest.approx([1] * 4, abs=1e-5)


@pytest.mark.parametrize(("alive", "message"), [
    (torch.ones(2, 21, dtype=torch.int64), r"alive is torch\.int64 with 42 tokens"),
    (torch.zeros(2, 21, dtype=torch.bool), r"alive is torch\.bool with 0 tokens"),
])  # fmt: skip
def test_a_mask_that_is_none_is_refused(run, alive, message):
    with pytest.raises(ValueError, match=message):
        stream_mixes(run, NANO, [3], alive=alive)


def test_mixes_that_the_trace_lacks_are_refused(run):
    with pytest.raises(ValueError, match=r"query=21 is not in the trace, which holds 21 queries"):
        stream_mixes(run, NANO, query=21)
    with pytest.raises(ValueError, match=r"layer=8: layers are 0\.\.7"):
        stream_mixes(run, NANO, [8])


@pytest.mark.parametrize("layers", [[3], [0, 1, 4, 7], range(8)])
def test_the_mixing_plot_is_readable_for_one_and_many_layers(run, layers):
    found = stream_mixes(run, NANO, layers)
    check_plot(lambda **style: plot_stream_mixes(found, model="nano", tokens="mean over 42 tokens", **style), "nano")
    assert "mean over 42 tokens" in plot_stream_mixes(found, model="nano", tokens="mean over 42 tokens").get_title(
        loc="left")  # fmt: skip


def test_more_maps_than_have_room_for_numbers_have_none(run):
    many = [*stream_mixes(run, NANO), *stream_mixes(run, NANO)]
    check_plot(lambda **style: plot_stream_mixes(many, model="nano", tokens="mean", **style), "nano")
    assert len(texts(plot_stream_mixes(many, model="nano", tokens="mean"))) == len(many)


def test_rows_are_sources_then_output_then_reading_and_columns_targets():
    mix = StreamMix(5, "experts", pre=(0.75, 0.25), post=(1.5, 0.5), comb=((0.9, 0.1), (0.2, 0.8)))
    ax = plot_stream_mixes([mix], model="m41", tokens="the token at 3")
    numbers = [text for text in ax.texts if text.get_text() != "5 experts"]
    rows = sorted({text.xy[1] for text in numbers})
    table = [[text.get_text() for text in sorted(numbers, key=lambda t: t.xy[0]) if text.xy[1] == y] for y in rows]
    assert table == [[".90", ".10"], [".20", ".80"], ["1.5", ".50"], [".75", ".25"]]
    assert list(ax.get_yticks()) == rows
    assert [label.get_text() for label in ax.get_yticklabels()] == ["0", "1", "out", "read"]
    assert "target stream" in ax.get_xlabel() and "source stream" in ax.get_ylabel()


# ---------------------------------------------------------------------------------------------- gates


def test_gates_are_those_of_each_token_and_engram_layer(run):
    found = token_gates(run, NANO, WORDS, row=1)
    assert [(gate.layer, gate.position, gate.text) for gate in found] == [
        (layer, i, word) for layer in (1, 3) for i, word in enumerate(WORDS)]  # fmt: skip
    for gate in found:
        assert list(gate.gates) == run[f"layers.{gate.layer}.engram.gate"][1, gate.position].tolist()
    with pytest.raises(ValueError, match="20 texts for 21 tokens"):
        token_gates(run, NANO, WORDS[:-1])


def strip(ax) -> list[tuple[str, float, float]]:
    return [(text.get_text(), text.xy[0], text.xy[1]) for text in ax.texts]


@pytest.mark.parametrize("layers", [(1,), (1, 3)])
def test_the_gate_plot_is_readable_with_any_text(run, layers):
    """Long tokens, line ends, characters without a glyph, mathematics marks."""
    found = [gate for gate in token_gates(run, NANO, WORDS) if gate.layer in layers]
    check_plot(lambda **style: plot_engram_gates(found, model="nano", **style), "nano")


def test_each_token_has_a_cell_per_stream_of_one_layer_and_per_layer_of_several(run):
    found = token_gates(run, NANO, WORDS)
    one, two = plot_engram_gates([g for g in found if g.layer == 3], model="nano"), plot_engram_gates(found, model="n")
    assert len([p for p in one.patches if isinstance(p, Rectangle)]) == 4 * len(WORDS)
    assert len([p for p in two.patches if isinstance(p, Rectangle)]) == 2 * len(WORDS)
    assert {label.get_text() for label in one.get_yticklabels()} == {f"stream {i}" for i in range(4)}
    assert {label.get_text() for label in two.get_yticklabels()} == {"layer 1", "layer 3"}


def test_cells_of_several_layers_are_means_over_streams():
    from matplotlib import colormaps

    gates = [TokenGate(layer, 0, "a", (0.0, value)) for layer, value in ((1, 0.5), (3, 1.0))]
    cells = plot_engram_gates(gates, model="m41").patches
    assert [cell.get_facecolor() for cell in cells] == [colormaps["cividis"](0.25), colormaps["cividis"](0.5)]


def test_lines_break_where_the_text_does_and_where_they_are_full():
    def lines(*words: str) -> list[list[str]]:
        ax = plot_engram_gates([TokenGate(1, i, word, (0.5,)) for i, word in enumerate(words)], model="m41")
        tops = sorted({y for _, _, y in strip(ax)})
        return [[text for text, _, y in strip(ax) if y == top] for top in tops]

    assert lines("a", "\n", "b") == [["a", "↵"], ["b"]]
    assert lines("a", "\n", "\n", "b") == [["a", "↵", "↵"], ["b"]]
    full = lines(*["word "] * 30)
    assert [len(line) for line in full] == [PER_LINE // 6] * 3 and full[0][0] == "word·"


def test_texts_of_tokens_are_shown_on_one_line():
    assert [readable(text) for text in (" the", "\n", "\t", "é", "\x00", "", "$")] == [
        "·the", "↵", "→", "é", "\\x00", "∅", "$"]  # fmt: skip
    assert readable("中") == "\\u4e2d"  # no glyph in the font that comes with matplotlib
    long = readable("incomprehensibility")
    assert len(long) <= LONGEST and long == "incompreh…lity"
    assert readable("中文中文中文") == "\\u4e2d…"


@pytest.mark.parametrize(("draw", "message"), [
    (lambda: plot_stream_mixes([], model="x", tokens="y"), "nothing to plot: no stream mixes"),
    (lambda: plot_engram_gates([], model="x"), "nothing to plot: no gates"),
])  # fmt: skip
def test_a_plot_without_data_says_what_is_missing(draw, message):
    with pytest.raises(ValueError, match=message):
        draw()
