"""Plots return labelled Axes and show, save and change nothing; what is saved comes with its data."""

import csv
import math
from fractions import Fraction

import matplotlib
import matplotlib.pyplot as plt
import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from plot_checks import check_texts_apart, texts

from tinyds41.config import Config
from tinyds41.cost.flops import ACCOUNTINGS, decode_cost
from tinyds41.cost.kv_bytes import kv_bytes
from tinyds41.cost.parameters import count_parameters
from tinyds41.model.transformer import Model
from tinyds41.show.cost_plots import kv_rows, plot_decode_work, plot_kv_bytes, plot_parameters, tokens
from tinyds41.show.observations import LOAD_NAMES, SELECTION_NAMES, ExpertLoad, Span, expert_loads, selection_spans
from tinyds41.show.plan_plot import plot_layer_plan
from tinyds41.show.run_plots import LossPoint, plot_curves, plot_expert_load, plot_loss, plot_selection
from tinyds41.show.save import save_figure
from tinyds41.show.style import PALETTES, Style, label_right, new_axes
from tinyds41.trace import Trace

NANO = Config.preset("nano")
QUERY = 12
LOSSES = [LossPoint(0, "train", 4.2), LossPoint(1, "train", 3.9), LossPoint(1, "held out", 4.0),
          LossPoint(1, "unigram", 4.05)]  # fmt: skip


@pytest.fixture(scope="module")
def run():
    """One forward of nano: its trace, kept whole."""
    trace = Trace(*SELECTION_NAMES, *LOAD_NAMES)
    with torch.no_grad():
        Model(NANO, seed=1)(torch.arange(3, 21)[None], trace=trace)
    return trace


@pytest.fixture(scope="module")
def figures(run):
    """Every plot function with data of nano, ready to be called with a style."""
    cost = decode_cost(NANO)
    curves = {name: cost.curve([8, 64, 256], name) for name in ACCOUNTINGS}
    spans, loads = selection_spans(run, NANO, QUERY), expert_loads(run, NANO)
    caches, parameters = {"nano": kv_bytes(NANO), "flash": kv_bytes(Config.preset("flash"))}, count_parameters(NANO)
    return {
        "plan": lambda **style: plot_layer_plan(NANO.plan(), model="nano", **style),
        "kv": lambda **style: plot_kv_bytes(caches, **style),
        "parameters": lambda **style: plot_parameters(parameters, model="nano", **style),
        "work": lambda **style: plot_decode_work(curves, model="nano", **style),
        "selection": lambda **style: plot_selection(spans, model="nano", **style),
        "load": lambda **style: plot_expert_load(loads, model="nano", **style),
        "loss": lambda **style: plot_loss(LOSSES, model="nano", vocab_size=64, **style),
        "curves": lambda **style: plot_curves(CURVES, xlabel="step", ylabel="busiest", model="nano", **style),
    }


NAMES = ("plan", "kv", "parameters", "work", "selection", "load", "loss", "curves")
CURVES = {"without": {0: 1.5, 10: 3.0}, "with": {0: 1.5, 10: 1.25}}


# ---------------------------------------------------------------------------------------------- every plot


@pytest.mark.parametrize("name", NAMES)
def test_a_plot_returns_labelled_axes_and_shows_and_saves_nothing(name, figures, monkeypatch):
    for forbidden in ("show", "savefig"):
        monkeypatch.setattr(plt, forbidden, lambda *_, **__: pytest.fail("a plot function must not show or save"))
    ax = figures[name]()
    assert isinstance(ax, Axes)
    assert "nano" in ax.get_title(loc="left") and ax.get_xlabel()
    assert ax.get_ylabel() or all(label.get_text() for label in ax.get_yticklabels())


@pytest.mark.parametrize("name", NAMES)
def test_a_plot_draws_into_the_axes_it_is_given(name, figures):
    mine = new_axes(Style())
    n_figures = len(plt.get_fignums())
    assert figures[name](ax=mine) is mine
    assert len(plt.get_fignums()) == n_figures


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("medium", "theme"), [("page", "light"), ("slide", "dark")])
def test_the_style_decides_background_and_text_and_leaves_settings_alone(name, medium, theme, figures):
    before = dict(matplotlib.rcParams)
    ax = figures[name](style=Style(medium, theme))
    assert dict(matplotlib.rcParams) == before
    palette, face = PALETTES[theme], ax.figure.get_facecolor()
    assert to_hex(face) == palette.paper and face[3] == 1  # opaque
    assert to_hex(ax.title.get_color()) == to_hex(ax.xaxis.label.get_color()) == palette.ink


@pytest.mark.parametrize("name", NAMES)
def test_no_text_leaves_the_figure_or_covers_other_text(name, figures):
    check_texts_apart(figures[name]())


def test_themes_differ_in_lightness_of_neighbouring_colours():
    """Colours that share a figure stay apart in grey, which every kind of colour vision sees."""

    def grey(colour: str) -> float:
        red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
        return 0.299 * red + 0.587 * green + 0.114 * blue

    for palette in PALETTES.values():
        assert abs(grey(palette.ink) - grey(palette.paper)) > 180
        for chosen, area in ((palette.ink, palette.sky), (palette.ink, palette.green), (palette.orange, palette.sky)):
            assert abs(grey(chosen) - grey(area)) > 35, (chosen, area)


def test_an_unknown_style_names_the_known():
    with pytest.raises(ValueError, match=r"theme='sepia': one of light, dark"):
        Style(theme="sepia")
    with pytest.raises(ValueError, match=r"medium='poster': one of page, slide"):
        Style(medium="poster")


@pytest.mark.parametrize("draw", [lambda: plot_loss([], model="x"), lambda: plot_selection([], model="x"),
                                  lambda: plot_expert_load([], model="x"), lambda: plot_kv_bytes({}),
                                  lambda: plot_curves({"a": {}}, xlabel="x", ylabel="y", model="x"),
                                  lambda: plot_decode_work({"raw": []}, model="x")])  # fmt: skip
def test_a_plot_without_data_says_what_is_missing(draw):
    with pytest.raises(ValueError, match="nothing to plot: no "):
        draw()


# ---------------------------------------------------------------------------------------------- single plots


def test_the_plan_shows_sources_boundary_and_engram(figures):
    ax = figures["plan"]()
    assert [text for text in texts(ax) if text.isdigit()] == ["2", "4", "2", "4", "6"]
    assert [line.get_xdata()[0] for line in ax.lines if len(line.get_xdata()) == 1] == [1, 3]  # Engram layers
    assert 3.5 in [line.get_xdata()[0] for line in ax.lines]  # between encoder and decoder
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["SWA", "FULL", "REINDEX", "REUSE"]


def test_kv_bars_add_up_to_the_bytes_per_token(figures):
    ax = figures["kv"]()
    widths = [bar.get_width() for bar in ax.patches]
    assert sum(widths) == 52.5 + 890
    assert ax.get_title(loc="left") == "Cache bytes per token: nano 52.5, flash 890"
    assert any("720 B (layers 2, 8, 14, 20)" in text for text in texts(ax))
    assert "2,703,360 B per sequence" in ax.get_xlabel()


def test_parameter_bars_and_marks_are_stored_and_used_weights(figures):
    ax, parameters = figures["parameters"](), count_parameters(NANO)
    assert sum(bar.get_width() for bar in ax.patches) == parameters.total
    assert sum(ax.lines[0].get_xdata()) == parameters.active_decode
    assert ax.get_xscale() == "log"


def test_decode_work_is_labelled_with_accounting_and_growth(figures):
    ax, cost = figures["work"](), decode_cost(NANO)
    for name in ACCOUNTINGS:
        assert f"{name}\n{cost.growth(8, 256, name):.2f}×" in texts(ax)
        assert f"{name}: {ACCOUNTINGS[name].meaning}" in ax.get_xlabel()
    assert ax.get_xscale() == "log" and ax.get_ylim()[0] == 0


def test_the_selection_plot_counts_choices_out_of_the_reach(figures):
    labels = texts(figures["selection"]())
    # 13 tokens: 6 entries of ratio 2; the pool holds 3 blocks of 2, the newest with one entry so far.
    assert labels[:8] == ["window only", "window only", "3 of 6", "as layer 2",
                          "3 of 13", "as layer 4", "3 of 5", "as layer 6"]  # fmt: skip


def test_expert_load_is_relative_to_an_even_share():
    ax = plot_expert_load([ExpertLoad(0, 0, 30), ExpertLoad(0, 1, 10)], model="two experts")
    assert ax.images[0].get_array().tolist() == [[1.5, 0.5]]
    assert texts(ax) == ["1.5", "0.5"] and "busiest 1.5, idlest 0.5" in ax.get_title(loc="left")


def test_curves_are_in_order_and_named_with_their_last_value():
    """A curve whose steps come unordered; the first is the dashed orange one, the baseline stands apart from both."""
    ax = plot_curves({**CURVES, "with": {10: 1.25, 0: 1.5}}, xlabel="step", ylabel="busiest", model="nano",
                     baseline=(1, "even"))  # fmt: skip
    first, second, even = ax.lines
    assert second.get_xdata().tolist() == [0, 10] and second.get_ydata().tolist() == [1.5, 1.25]
    assert (first.get_color(), first.get_linestyle()) == (PALETTES["light"].orange, "--")
    assert set(even.get_ydata()) == {1} and set(texts(ax)) == {"without 3.00", "with 1.25", "even"}


def test_loss_has_the_uniform_guess_as_baseline(figures):
    ax = figures["loss"]()
    assert any(line.get_ydata()[0] == pytest.approx(math.log(64)) for line in ax.lines)
    assert {"train 4.05", "held out 4.00"} <= set(texts(ax))


def test_loss_has_counting_tokens_alone_as_a_second_baseline(figures):
    ax = figures["loss"]()
    [line] = [line for line in ax.lines if set(line.get_ydata()) == {4.05}]
    assert (line.get_linestyle(), line.get_color()) == ("--", PALETTES["light"].purple)
    assert "unigram 4.05" in texts(ax)


def test_the_training_curve_is_labelled_with_the_mean_of_its_last_20_steps():
    """The last batch alone is an outlier here."""
    losses = [5.0] * 10 + [3.0] * 19 + [4.0]
    ax = plot_loss([LossPoint(step, "train", loss) for step, loss in enumerate(losses, 1)], model="one")
    assert texts(ax) == ["train 3.05"] and ax.get_xlabel() == "step (train: mean of the last 20)"
    low, high = ax.get_ylim()
    assert ax.texts[0].xy[1] == pytest.approx((3.05 - low) / (high - low))


def test_close_labels_move_apart():
    ax = new_axes(Style())
    label_right(ax, [(0.50, "b", "red"), (0.49, "a", "red"), (0.9, "c", "red")], apart=0.1)
    assert [(text.get_text(), round(text.xy[1], 2)) for text in ax.texts] == [("a", 0.49), ("b", 0.59), ("c", 0.9)]


def test_contexts_on_an_axis():
    assert [tokens(n) for n in (500, 4096, 2**20, 3 * 2**20, 5000)] == ["500", "4K", "1M", "3M", "5,000"]


# ---------------------------------------------------------------------------------------------- observations


def test_spans_are_what_the_model_selected_and_could_see(run):
    spans = selection_spans(run, NANO, QUERY)
    for layer in NANO.plan():
        mine = [span for span in spans if span.layer == layer.layer]
        assert [(s.first, s.last) for s in mine if s.kind == "window"] == [(QUERY - 3, QUERY)]
        if layer.index_source is None:
            continue
        index = run[f"layers.{layer.index_source}.indexer.selection"][0, QUERY].tolist()
        expected = [(entry * layer.ratio, entry * layer.ratio + layer.ratio - 1) for entry in index]
        assert [(s.first, s.last) for s in mine if s.kind == "selected"] == expected
        visible = (QUERY + 1) // layer.ratio * layer.ratio
        assert [(s.first, s.last) for s in mine if s.kind == "visible"] == [(0, visible - 1)]
    pool = run["layers.4.indexer.pool"][0, QUERY].tolist()
    shown = [(s.layer, s.first, s.last) for s in spans if s.kind == "pool"]
    # The newest block of 2 holds only the query's own entry so far.
    assert shown == [(layer, 2 * b, min(2 * b + 1, QUERY)) for layer in (6, 7) for b in pool]


def test_spans_from_a_trace_of_a_few_queries_are_the_same(run):
    few = Trace(*SELECTION_NAMES, queries=[5, QUERY])
    with torch.no_grad():
        Model(NANO, seed=1)(torch.arange(3, 21)[None], trace=few)
    assert selection_spans(few, NANO, QUERY) == selection_spans(run, NANO, QUERY)
    with pytest.raises(ValueError, match=r"query=6 is not in the trace, which holds 2 queries, 5\.\.12"):
        selection_spans(few, NANO, 6)


def test_a_query_before_the_first_entry_has_only_its_window(run):
    spans = selection_spans(run, NANO, 0)
    assert [s for s in spans if s.layer == 2] == [Span(2, "FULL", "window", 2, 0, 0)]
    assert "no entry yet" in texts(plot_selection(spans, model="nano"))
    with pytest.raises(ValueError, match=r"query=18 is not in the trace, which holds 18 queries, 0\.\.17"):
        selection_spans(run, NANO, 18)


def test_expert_loads_count_every_visit_and_no_padding(run):
    loads = expert_loads(run, NANO)
    assert len(loads) == NANO.num_hidden_layers * NANO.n_routed_experts
    alive = torch.ones(1, 18, dtype=torch.bool)
    alive[0, 10:] = False
    for layer in range(NANO.num_hidden_layers):
        assert sum(load.tokens for load in loads if load.layer == layer) == 18 * NANO.num_experts_per_tok
        inside = sum(load.tokens for load in expert_loads(run, NANO, alive) if load.layer == layer)
        assert inside == 10 * NANO.num_experts_per_tok
    first = run["layers.0.ffn.experts"].flatten().tolist()
    assert [load.tokens for load in loads[: NANO.n_routed_experts]] == [first.count(e) for e in range(4)]


# ---------------------------------------------------------------------------------------------- saving


def test_saving_writes_svg_png_and_the_data(tmp_path, figures):
    rows = kv_rows({"nano": kv_bytes(NANO)})
    paths = save_figure(figures["kv"](), tmp_path / "new folder", "kv", rows)
    assert [path.name for path in paths] == ["kv.svg", "kv.png", "kv.csv"]
    assert b"<svg" in paths[0].read_bytes() and paths[1].read_bytes()[:4] == b"\x89PNG"
    with paths[2].open(newline="", encoding="utf-8") as file:
        table = list(csv.DictReader(file))
    assert table[0] == {"model": "nano", "store": "window", "layer": "0", "row_bytes": "33", "tokens_per_row": "1",
                        "max_rows": "4", "bytes_per_token": "0"}  # fmt: skip
    assert sum(float(row["bytes_per_token"]) for row in table) == 52.5


def test_the_same_figure_gives_the_same_bytes(tmp_path, figures):
    contents = []
    for name in ("a", "b"):
        paths = save_figure(figures["loss"](), tmp_path / name, "loss", LOSSES)
        contents.append([path.read_bytes() for path in paths])
    assert contents[0] == contents[1]
    assert contents[0][2].decode() == "step,kind,loss\n0,train,4.2\n1,train,3.9\n1,held out,4.0\n1,unigram,4.05\n"


def test_a_dark_figure_keeps_its_background_when_saved(tmp_path, figures):
    _, png, _ = save_figure(figures["loss"](style=Style(theme="dark")), tmp_path, "loss", LOSSES)
    corner = plt.imread(png)[0, 0]
    assert to_hex(corner[:3]) == PALETTES["dark"].paper


def test_cells_are_plain(tmp_path, figures):
    rows = [{"bytes": Fraction(105, 2), "whole": Fraction(4), "layers": (2, 4), "none": None}]
    path = save_figure(figures["loss"](), tmp_path, "x", rows)[2]
    assert path.read_text() == "bytes,whole,layers,none\n52.5,4,2 4,\n"


@pytest.mark.parametrize(("name", "rows", "message"), [
    ("sub/loss", LOSSES, r"name='sub/loss'"),
    ("", LOSSES, r"name=''"),
    ("loss", [], r"loss: a figure without rows"),
    ("loss", [{"a": 1}, {"b": 2}], r"row 1 has columns \['b'\], row 0 has \['a'\]"),
    ("loss", [3], r"a row is a dataclass or a mapping, got int"),
])  # fmt: skip
def test_what_cannot_be_saved_writes_nothing(tmp_path, figures, name, rows, message):
    with pytest.raises(ValueError, match=message):
        save_figure(figures["loss"](), tmp_path, name, rows)
    assert not list(tmp_path.iterdir())
