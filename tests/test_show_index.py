"""Candidates, overlaps and attention mass are what the model computed, and the plots show them."""

import math

import pytest
import torch
from models import random_ids, scattered, traced
from plot_checks import check_plot, texts

from tinyds41.config import Config
from tinyds41.model.rope import rotate
from tinyds41.show.index_observations import (
    CANDIDATE_NAMES,
    MASS_NAMES,
    OVERLAP_NAMES,
    AttentionShare,
    Overlap,
    attention_shares,
    candidates,
    selection_overlaps,
)
from tinyds41.show.index_plots import plot_attention_shares, plot_candidates, plot_selection_overlap
from tinyds41.show.style import PALETTES
from tinyds41.trace import Trace

NANO = Config.preset("nano")
QUERY = 18  # its newest block of 2 is half full, its last group of 2 unfinished
QUERIES = [3, 11, QUERY]


@pytest.fixture(scope="module")
def model():
    return scattered()


@pytest.fixture(scope="module")
def run(model):
    """Two rows of 21 tokens, everything kept."""
    return traced(model, random_ids(2, 21))


def some(model, *names: str) -> Trace:
    """The same run, kept for a few queries and the given names only."""
    trace = Trace(*names, queries=QUERIES)
    with torch.no_grad():
        model(random_ids(2, 21), trace=trace)
    return trace


# ---------------------------------------------------------------------------------------------- candidates


@pytest.mark.parametrize("row", [0, 1])
@pytest.mark.parametrize("layer", [4, 6])
def test_candidates_carry_score_block_and_fate_of_every_visible_entry(run, layer, row):
    found = candidates(run, NANO, QUERY, layer, row)
    scores = run[f"layers.{layer}.indexer.scores"][row, QUERY]
    assert [one.entry for one in found] == list(range(QUERY + 1))
    assert [(one.first, one.last, one.block) for one in found] == [(e, e, e // 2) for e in range(QUERY + 1)]
    assert [one.score for one in found] == [s if s > -math.inf else None for s in scores[: QUERY + 1].tolist()]
    pool = run["layers.4.indexer.pool"][row, QUERY].tolist()
    assert {one.block for one in found if one.in_pool} == set(pool)
    assert {one.entry for one in found if one.newest} == {QUERY}
    chosen = run[f"layers.{layer}.indexer.selection"][row, QUERY].tolist()
    assert [one.entry for one in found if one.selected] == chosen
    # The pool source scores everything, a later layer only the pool.
    assert all((one.score is None) == (layer == 6 and not one.in_pool) for one in found)


def test_the_newest_block_is_in_the_pool_whatever_its_score(run):
    """And the others are the best by their best entry."""
    for query in range(10, 21):
        best: dict[int, float] = {}
        for one in candidates(run, NANO, query):
            best[one.block] = max(best.get(one.block, -math.inf), one.score)
        newest = max(best)
        others = sorted((block for block in best if block != newest), key=lambda b: (-best[b], b))[:2]
        assert {one.block for one in candidates(run, NANO, query) if one.in_pool} == {newest, *others}
        assert {one.block for one in candidates(run, NANO, query) if one.newest} == {newest}


def test_an_entry_of_two_tokens_spans_both(model):
    """A pool over a source of ratio 2: entries, not tokens, are counted."""
    config = NANO.replace(compress_ratios=[0, 0, 2, 2, 2, 2, 2, 2, 0, 0, 0])
    found = candidates(traced(scattered(config), random_ids(1, 21)), config, QUERY)
    assert [(one.first, one.last) for one in found] == [(2 * e, 2 * e + 1) for e in range(9)]
    assert [one.entry for one in found if one.newest] == [8]


def test_candidates_from_a_trace_of_a_few_queries_are_the_same(run, model):
    assert candidates(some(model, *CANDIDATE_NAMES), NANO, QUERY) == candidates(run, NANO, QUERY)


def test_candidates_that_do_not_exist_are_refused(run):
    with pytest.raises(ValueError, match=r"layer=2 neither forms the candidate pool nor chooses inside it: .*\[4, 6\]"):
        candidates(run, NANO, QUERY, 2)
    with pytest.raises(ValueError, match=r"query=21 is not in the trace, which holds 21 queries, 0\.\.20"):
        candidates(run, NANO, 21)
    without = NANO.replace(candidate_source_layer_id=None)
    with pytest.raises(ValueError, match="no layer forms a candidate pool"):
        candidates(run, without, QUERY)


@pytest.mark.parametrize("layer", [4, 6])
def test_the_plot_has_a_bar_per_scored_block_and_a_mark_per_chosen_entry(run, layer):
    found = candidates(run, NANO, QUERY, layer)
    check_plot(lambda **style: plot_candidates(found, model="nano", **style), "nano")
    ax = plot_candidates(found, model="nano")
    tops = {round(bar.get_x()): bar.get_y() + bar.get_height() for bar in ax.patches}
    blocks = {one.first for one in found if one.entry % 2 == 0 and one.score is not None}
    assert set(tops) == blocks
    for first, top in tops.items():
        assert top == pytest.approx(max(one.score for one in found if one.block == first // 2))
    [marks] = ax.lines
    assert list(marks.get_ydata()) == [one.score for one in found if one.selected]
    assert any("3 blocks in the pool" in text for text in texts(ax))
    newest = [bar for bar in ax.patches if bar.get_hatch()]
    assert [bar.get_x() for bar in newest] == [QUERY] and f"query at {QUERY}" in ax.get_title(loc="left")
    assert any(("7 outside, not scored" if layer == 6 else "7 outside") in text for text in texts(ax))


def test_pool_and_other_blocks_differ_in_colour(run):
    found = candidates(run, NANO, QUERY)
    ax, palette = plot_candidates(found, model="nano"), PALETTES["light"]
    expected = {one.first: palette.orange if one.newest else palette.sky if one.in_pool else palette.faint
                for one in found if one.entry % 2 == 0}  # fmt: skip
    colours = {round(bar.get_x()): "#" + "".join(f"{round(255 * c):02x}" for c in bar.get_facecolor()[:3])
               for bar in ax.patches}  # fmt: skip
    assert colours == expected


# ---------------------------------------------------------------------------------------------- overlaps


def chosen_tokens(run, layer: int, row: int, query: int) -> set[int]:
    ratio = NANO.plan()[layer].ratio
    entries = [e for e in run[f"layers.{layer}.indexer.selection"][row, query].tolist() if e >= 0]
    return {entry * ratio + i for entry in entries for i in range(ratio)}


def test_overlaps_are_jaccard_indices_of_the_tokens_chosen(run):
    found = {(one.layer, one.other): one.shared for one in selection_overlaps(run, NANO, QUERIES)}
    assert set(found) == {(a, b) for a in (2, 4, 6) for b in (2, 4, 6)}
    for (layer, other), shared in found.items():
        each = []
        for row in (0, 1):
            for query in QUERIES:
                mine, its = (chosen_tokens(run, source, row, query) for source in (layer, other))
                each.append(len(mine & its) / len(mine | its))
        assert shared == pytest.approx(sum(each) / len(each), abs=1e-6)  # the mean is taken in float32
    assert 0 < found[2, 4] < 1 and found[2, 2] == 1


def test_a_query_without_entries_counts_for_no_overlap(run):
    """Query 0 sees no entry of ratio 2 but one of ratio 1."""
    alone = {(one.layer, one.other): one.shared for one in selection_overlaps(run, NANO, [0])}
    assert alone[2, 2] is None and alone[2, 4] == 0 and alone[4, 4] == 1
    with_it = {(one.layer, one.other): one.shared for one in selection_overlaps(run, NANO, [0, QUERY])}
    assert with_it[2, 2] == 1


def test_overlaps_from_a_trace_of_a_few_queries_are_the_same(run, model):
    assert selection_overlaps(some(model, *OVERLAP_NAMES), NANO, QUERIES) == selection_overlaps(run, NANO, QUERIES)
    with pytest.raises(ValueError, match="query=4 is not in the trace, which holds 3 queries"):
        selection_overlaps(some(model, *OVERLAP_NAMES), NANO, [3, 4])
    with pytest.raises(ValueError, match="queries is empty"):
        selection_overlaps(run, NANO, [])


def test_the_overlap_plot_writes_every_value_where_it_belongs():
    rows = [Overlap(2, 2, 1.0), Overlap(2, 8, 0.25), Overlap(8, 2, 0.25), Overlap(8, 8, None)]
    check_plot(lambda **style: plot_selection_overlap(rows, model="m41", queries="query 5", **style), "m41")
    ax = plot_selection_overlap(rows, model="m41", queries="query 5")
    assert {(text.xy, text.get_text()) for text in ax.texts} == {
        ((0, 0), "1.00"), ((1, 0), "0.25"), ((0, 1), "0.25"), ((1, 1), "–")}  # fmt: skip
    assert [label.get_text() for label in ax.get_xticklabels()] == ["2", "8"]
    assert "query 5" in ax.get_title(loc="left")


# ---------------------------------------------------------------------------------------------- attention mass


def weights(run, model, layer, row: int, query: int, head: int) -> tuple[list, list, float]:
    """Window, selected and sink weights by the formula, and the rows they belong to."""
    path = f"layers.{layer.layer}.attn"
    q = run[f"{path}.q"][row, query, head]
    near = run[f"{path}.window_kv"][row, int(run[f"{path}.window_first"][row, query]) : query + 1]
    far = near[:0]
    if layer.kv_source is not None:
        index = run[f"layers.{layer.index_source}.indexer.selection"][row, query]
        far = run[f"layers.{layer.kv_source}.compressor.global_kv"][row, index[index >= 0]]
    sink = model.layers[layer.layer].attn.attn_sink[head]
    powers = [[math.exp(float(q @ kv) / math.sqrt(len(q))) for kv in rows] for rows in (near, far)]
    total = sum(map(sum, powers)) + math.exp(float(sink.detach()))
    parts = [[power / total for power in part] for part in powers]
    out = sum((w * kv for part, rows in zip(parts, (near, far), strict=True) for w, kv in zip(part, rows, strict=True)),
              torch.zeros_like(q))  # fmt: skip
    return *parts, out


def test_shares_are_the_weights_that_attend_used(run, model):
    """The same weights over the same rows give the attention output of the run."""
    found = attention_shares(run, model, QUERIES)
    assert [share.layer for share in found] == list(range(8))
    for layer, share in zip(model.plan, found, strict=True):
        window, selected = [], []
        turn = model.layers[layer.layer].rope.rotation(torch.arange(21)[None], torch.float64)
        for row in (0, 1):
            for query in QUERIES:
                for head in (0, 1):
                    near, far, out = weights(run, model, layer, row, query, head)
                    back = rotate(out[None, None], turn[:, query : query + 1].conj())[0, 0]
                    kept = run[f"layers.{layer.layer}.attn.heads"][row, query, head]
                    # float64 throughout; e^x by Python and by torch differ in the last bits.
                    torch.testing.assert_close(back, kept, rtol=0, atol=1e-12)
                    window.append(sum(near))
                    selected.append(sum(far))
        assert share.window == pytest.approx(sum(window) / len(window), abs=1e-12)
        assert share.selected == pytest.approx(sum(selected) / len(selected), abs=1e-12)
        assert share.window + share.selected + share.sink == pytest.approx(1, abs=1e-12)
        assert (share.selected == 0) == (layer.mode == "SWA") and share.sink > 0


def test_shares_stay_inside_a_packed_document(model):
    """The second of two packed documents has the shares it has alone, up to where it stands."""
    ids = random_ids(1, 21)
    packed = traced(model, ids, documents=torch.tensor([[0] * 8 + [1] * 13]))
    alone = traced(model, ids[:, 8:])
    for query in (9, 20):  # the window of the first reaches back over the border
        pairs = zip(attention_shares(packed, model, [query]), attention_shares(alone, model, [query - 8]), strict=True)
        for mine, its in pairs:
            # float64, but the experts of both runs add up in another order.
            assert (mine.window, mine.selected) == pytest.approx((its.window, its.selected), abs=1e-9)


def test_shares_from_a_trace_of_a_few_queries_are_the_same(run, model):
    few, whole = attention_shares(some(model, *MASS_NAMES), model, QUERIES), attention_shares(run, model, QUERIES)
    for mine, its in zip(few, whole, strict=True):
        assert (mine.window, mine.selected) == pytest.approx((its.window, its.selected), abs=1e-12)
    with pytest.raises(ValueError, match="query=4 is not in the trace"):
        attention_shares(some(model, *MASS_NAMES), model, [4])


def test_the_share_plot_stacks_to_one_and_writes_the_numbers(run, model):
    found = attention_shares(run, model, QUERIES)
    check_plot(lambda **style: plot_attention_shares(found, model="nano", queries="3 queries", **style), "nano")
    ax = plot_attention_shares([AttentionShare(0, "SWA", 0.5, 0.0, 0.5), AttentionShare(1, "FULL", 0.25, 0.7, 0.05)],
                               model="m41", queries="query 7")  # fmt: skip
    ends = [max(bar.get_x() + bar.get_width() for bar in ax.patches if round(bar.get_y() + 0.36) == y) for y in (0, 1)]
    assert ends == pytest.approx([1, 1])
    shown = [text.replace("\u2007", " ").split() for text in texts(ax)]
    assert ["50%", "0%", "50%"] in shown and ["25%", "70%", "5%"] in shown
    assert "query 7" in ax.get_title(loc="left")


def test_the_shares_of_forty_layers_fit_page_and_slide():
    many = [AttentionShare(layer, "REINDEX", 0.3, 0.3, 0.4) for layer in range(40)]
    check_plot(lambda **style: plot_attention_shares(many, model="m41", queries="query 7", **style), "m41")


@pytest.mark.parametrize(("draw", "message"), [
    (lambda: plot_candidates([], model="x"), "nothing to plot: no candidates"),
    (lambda: plot_selection_overlap([], model="x", queries="y"), "nothing to plot: no overlaps"),
    (lambda: plot_attention_shares([], model="x", queries="y"), "nothing to plot: no attention shares"),
])  # fmt: skip
def test_a_plot_without_data_says_what_is_missing(draw, message):
    with pytest.raises(ValueError, match=message):
        draw()


def test_a_marked_token_is_named_at_its_place(run):
    found = candidates(run, NANO, QUERY)
    check_plot(lambda **style: plot_candidates(found, model="nano", marked={3: "the fact"}, **style), "nano")
    ax = plot_candidates(found, model="nano", marked={3: "the fact"})
    [line] = [line for line in ax.lines if line.get_linestyle() == "--"]
    assert list(line.get_xdata()) == [3.5, 3.5]
    assert [text.xy[0] for text in ax.texts if text.get_text() == "the fact"] == [3.5]
