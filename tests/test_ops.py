"""Selection, pool and attention against slow definitions with explicit masks."""

from __future__ import annotations

import math

import pytest
import torch
from goldens import load
from models import NANO, scattered
from torch import Tensor

from tinyds41 import ops, selection
from tinyds41.formats import GLOBAL, INDEX, WINDOW, Rows
from tinyds41.model.context import Sequence
from tinyds41.model.rope import rotate
from tinyds41.model.transformer import Model
from tinyds41.ops import Selection, Window, attend, index_scores, pool_blocks, score_and_select, select_top

UNITS = load("units")
INF = math.inf


def best(scores: list[float], k: int) -> list[int]:
    """The k best by (score, lower index), ascending, -1 behind them: one stable sort."""
    order = sorted((i for i, score in enumerate(scores) if score > -INF), key=lambda i: -scores[i])[:k]
    return sorted(order) + [-1] * (k - len(order))


# ---- select_top ----


@pytest.mark.parametrize(("scores", "k", "expected"), [
    ([3.0, 1.0, 2.0], 2, [0, 2]),
    ([1.0, 1.0, 1.0, 1.0], 2, [0, 1]),
    ([2.0, 1.0, 1.0, 3.0, 1.0], 3, [0, 1, 3]),
    ([-0.0, 0.0, -0.0, 0.0], 2, [0, 1]),
    ([0.0, -0.0, 1.0], 2, [0, 2]),
    ([-INF, 5.0, -INF], 2, [1, -1]),
    ([-INF, -INF, -INF], 2, [-1, -1]),
    ([-INF, -INF, 0.0, 0.0], 3, [2, 3, -1]),
    ([INF, 1.0, INF, 2.0], 3, [0, 2, 3]),
    ([1.0, -INF], 4, [0, -1, -1, -1]),
    ([1.0, 1.0], 2, [0, 1]),
    ([-1.0, -INF, -1.0, -2.0], 1, [0]),
])  # fmt: skip
def test_the_best_are_chosen_with_ties_to_the_lower_index(scores, k, expected):
    assert select_top(torch.tensor(scores), k).tolist() == expected == best(scores, k)


@pytest.mark.parametrize("k", [1, 3, 8, 64, 512])
@pytest.mark.parametrize("levels", [1, 2, 5, 1000])
def test_selection_equals_a_stable_sort_at_every_k(k, levels):
    """Rows of 200 with few distinct scores, half of them 0 or -0.0, and some invisible ones."""
    scores = torch.randint(0, levels, (3, 7, 200)).float() - levels // 2
    scores = torch.where(torch.rand(scores.shape) < 0.5, scores * 0, scores)
    scores = scores.masked_fill(torch.rand(scores.shape) < 0.2, -INF)
    found = select_top(scores, k)
    assert found.shape == (3, 7, k)
    for row, picks in zip(scores.flatten(0, 1).tolist(), found.flatten(0, 1).tolist(), strict=True):
        assert picks == best(row, k)


def test_constant_scores_give_the_first_entries():
    """Long rows: short ones may come out in order by accident."""
    assert select_top(torch.zeros(2, 3000), 5).tolist() == [[0, 1, 2, 3, 4]] * 2


# ---- index scores ----


def test_each_head_is_silenced_before_the_sum():
    """Head 1 weighs -1 and rejects entry 0: kept, its negative product would lift entry 0 over entry 1."""
    q = torch.tensor([[[[1.0, 0.0], [0.0, 1.0]]]])
    keys = torch.tensor([[[1.0, -5.0], [2.0, 0.0]]])
    scores = index_scores(q, torch.tensor([[[1.0, -1.0]]]), keys)
    # I^-1/2 J^-1/2 = 1/2
    torch.testing.assert_close(scores, torch.tensor([[[0.5, 1.0]]]))


def test_a_negative_head_flips_the_winner():
    """Head 0 prefers entry 1; head 1 likes it too, but its weight is negative."""
    q = torch.tensor([[[[1.0, 0.0], [0.0, 1.0]]]])
    keys = torch.tensor([[[1.0, 0.0], [2.0, 3.0]]])
    assert index_scores(q, torch.tensor([[[1.0, 0.0]]]), keys).argmax() == 1
    assert index_scores(q, torch.tensor([[[1.0, -1.0]]]), keys).argmax() == 0


def random_index(batch: int, queries: int, entries: int, dtype=torch.float64, levels: int | None = None):
    """q [B,S,I,J], weight [B,S,I], keys [B,T,J]; with levels, small integers, so that exact ties abound."""
    shapes = [(batch, queries, 3, 32), (batch, queries, 3), (batch, entries, 32)]
    if levels is None:
        return [torch.randn(shape, dtype=dtype) for shape in shapes]
    return [torch.randint(-levels, levels + 1, shape).to(dtype) for shape in shapes]


def slow_scores(q: Tensor, weight: Tensor, keys: Tensor) -> Tensor:
    dots = torch.einsum("bsij,btj->bsit", q, keys).relu()
    return torch.einsum("bsi,bsit->bst", weight, dots) / math.sqrt(q.shape[2] * q.shape[3])


def test_index_scores_equal_the_sum_over_heads():
    """1e-12 in float64 of sums of 32 products."""
    q, weight, keys = random_index(2, 5, 7)
    torch.testing.assert_close(index_scores(q, weight, keys), slow_scores(q, weight, keys), rtol=0, atol=1e-12)


def ranges(batch: int, queries: int, entries: int) -> tuple[Tensor, Tensor]:
    """first and last [B,S]: from nothing visible to everything, with a start that moves through the blocks."""
    last = (torch.arange(queries) * (entries + 1) // queries).expand(batch, -1)
    first = last * 2 // 3
    first[:, ::5] = 0
    return first, last


def masked(scores: Tensor, first: Tensor, last: Tensor) -> Tensor:
    entry = torch.arange(scores.shape[-1])
    return scores.masked_fill((entry < first[..., None]) | (entry >= last[..., None]), -INF)


@pytest.mark.parametrize("k", [1, 3, 8, 64])
def test_selection_equals_sorting_all_visible_scores(k):
    q, weight, keys = random_index(2, 19, 30, levels=1)
    first, last = ranges(2, 19, 30)
    index, pool = score_and_select(q, weight, Rows(keys), first, last, k)
    scores = masked(index_scores(q, weight, keys), first, last)
    assert pool is None
    assert index.shape == (2, 19, min(k, 30))
    for row, picks in zip(scores.flatten(0, 1).tolist(), index.flatten(0, 1).tolist(), strict=True):
        assert picks == best(row, min(k, 30))


@pytest.mark.parametrize("entries", range(5))
def test_fewer_entries_than_k_give_fewer_picks_and_none_invisible(entries):
    q, weight, keys = random_index(1, 6, entries)
    last = torch.arange(6).clamp(max=entries)[None]
    index, _ = score_and_select(q, weight, Rows(keys), torch.zeros_like(last), last, 3)
    for picks, seen in zip(index[0].tolist(), last[0].tolist(), strict=True):
        chosen = [pick for pick in picks if pick != -1]
        assert len(chosen) == min(3, seen)
        assert all(0 <= pick < seen for pick in chosen)


def select_all(q, weight, keys, first, last, **options):
    """Picks, pool, and picks inside that pool."""
    rows = Rows(keys)
    index, pool = score_and_select(q, weight, rows, first, last, 5, block_size=4, form_blocks=3, **options)
    inside, _ = score_and_select(q, weight.flip(-1), rows, first, last, 5, block_size=4, pool=pool, **options)
    return index, pool, inside


@pytest.mark.parametrize("elements", [1, 100, 700, 5000])
@pytest.mark.parametrize("levels", [1, None])
def test_scoring_in_chunks_equals_one_shot(monkeypatch, elements, levels):
    """With exact ties and without; index sets are compared, in float64."""
    q, weight, keys = random_index(2, 19, 30, levels=levels)
    first, last = ranges(2, 19, 30)
    whole = select_all(q, weight, keys, first, last)
    monkeypatch.setattr(selection, "SCORE_ELEMENTS", elements)
    for one, other in zip(whole, select_all(q, weight, keys, first, last), strict=True):
        assert torch.equal(one, other)


def test_no_array_of_scores_exceeds_the_chunk(monkeypatch):
    monkeypatch.setattr(selection, "SCORE_ELEMENTS", 2000)
    sizes = []
    monkeypatch.setattr(selection, "index_scores", lambda q, w, k: sizes.append(q.shape) or index_scores(q, w, k))
    q, weight, keys = random_index(1, 64, 64)
    last = torch.arange(1, 65)[None]
    score_and_select(q, weight, Rows(keys), torch.zeros_like(last), last, 5)
    assert len(sizes) > 1
    assert all(batch * queries * heads * 64 <= 2000 for batch, queries, heads, _ in sizes)


def test_scores_counted_are_scores_computed():
    """Over everything seen for a source, over the pool's entries for those that follow."""
    q, weight, keys = random_index(1, 10, 40)
    last = torch.full((1, 10), 40)
    first, counted = torch.zeros_like(last), []
    _, pool = score_and_select(
        q, weight, Rows(keys), first, last, 5, block_size=4, form_blocks=3, count=counted.append)
    score_and_select(q, weight, Rows(keys), first, last, 5, block_size=4, pool=pool, count=counted.append)
    assert counted == [10 * 40, 10 * 3 * 4]


# ---- the pool ----


def slow_pool(scores: list[float], newest: int, n_blocks: int, size: int) -> list[int]:
    """The newest visible block first, then the others by (best score, lower block)."""
    if newest < 0:
        return [-1] * n_blocks
    blocks = [max(scores[i : i + size]) for i in range(0, len(scores), size)]
    blocks[newest // size] = INF
    return best(blocks, n_blocks)


def test_the_pool_of_the_golden_is_equal():
    """The golden marks whole blocks, whether all their entries are visible or not."""
    scores, mask = UNITS["pool.scores"], UNITS["pool.mask_topk3_block4"][0].bool()
    last = torch.arange(1, 22)[None]
    pool = pool_blocks(scores.masked_fill(torch.arange(21) >= last[..., None], -INF), last, 3, 4)
    for position in range(21):
        inside = [entry for entry in range(21) if entry // 4 in pool[0, position].tolist()]
        assert inside == mask[position].nonzero().flatten().tolist()


@pytest.mark.parametrize("levels", [2, 1000])
@pytest.mark.parametrize("entries", [1, 4, 13, 30])
def test_the_pool_equals_sorting_blocks(entries, levels):
    """Lengths that no block divides, fewer blocks than the pool holds, queries that see nothing, ties."""
    first, last = ranges(2, 19, entries)
    scores = masked(torch.randint(-levels, levels, (2, 19, entries)).float(), first, last)
    pool = pool_blocks(scores, last, 3, 4)
    for row, low, high, blocks in zip(
        scores.flatten(0, 1).tolist(), first.flatten().tolist(), last.flatten().tolist(), pool.flatten(0, 1).tolist(),
        strict=True,
    ):  # fmt: skip
        assert blocks == slow_pool(row, high - 1 if high > low else -1, 3, 4)


def test_the_newest_block_stays_though_it_scores_lowest():
    """Entries 0..8, blocks of 4: block 2 holds entry 8 alone, with the lowest score."""
    scores = torch.tensor([[[9.0, 9, 9, 9, 8, 8, 8, 8, -5.0, -INF, -INF, -INF]]])
    assert pool_blocks(scores, torch.tensor([[9]]), 1, 4).tolist() == [[[2]]]
    assert pool_blocks(scores, torch.tensor([[9]]), 2, 4).tolist() == [[[0, 2]]]


def test_the_newest_block_counts_among_the_pool():
    scores = torch.tensor([[[1.0, 2, 3, 4]]])
    assert pool_blocks(scores, torch.tensor([[4]]), 2, 1).tolist() == [[[2, 3]]]


def test_a_query_that_sees_nothing_has_an_empty_pool():
    """Neither at the start of a row nor at the start of a document whose entries lie behind others."""
    scores = torch.full((1, 2, 8), -INF)
    assert pool_blocks(scores, torch.tensor([[0, 4]]), 2, 4).tolist() == [[[-1, -1], [-1, -1]]]


@pytest.mark.parametrize("k", [1, 5, 64])
@pytest.mark.parametrize("levels", [1, None])
def test_choosing_inside_the_pool_equals_masking_all_scores(k, levels):
    """Entry numbers survive the compaction; fewer picks than k, never one outside."""
    q, weight, keys = random_index(2, 19, 30, levels=levels)
    first, last = ranges(2, 19, 30)
    first = first // 4 * 4  # a document begins at a block border, so that a block belongs to one document
    pool = score_and_select(q, weight, Rows(keys), first, last, k, block_size=4, form_blocks=3)[1]
    index, _ = score_and_select(q, weight.flip(-1), Rows(keys), first, last, k, block_size=4, pool=pool)
    scores = masked(index_scores(q, weight.flip(-1), keys), first, last)
    inside = (torch.arange(30)[:, None] // 4 == pool.unsqueeze(-2)).any(-1)
    scores = scores.masked_fill(~inside, -INF)
    for row, picks in zip(scores.flatten(0, 1).tolist(), index.flatten(0, 1).tolist(), strict=True):
        # 12 entries in the pool: with k = 64 no more than those and their padding come back.
        assert [p for p in picks if p >= 0] == [p for p in best(row, k) if p >= 0]


def test_a_source_chooses_from_all_its_scores_not_from_its_pool():
    """Best entry 0 and 4 in the lower blocks, one block kept: the newest. Both best ones are still chosen."""
    keys = torch.zeros(1, 12, 32)
    keys[0, [0, 4], 0] = torch.tensor([5.0, 4.0])
    q = torch.zeros(1, 1, 1, 32)
    q[..., 0] = 1
    first, last = torch.tensor([[0]]), torch.tensor([[12]])
    index, pool = score_and_select(
        q, torch.ones(1, 1, 1), Rows(keys), first, last, 2, block_size=4, form_blocks=1)
    assert (index.tolist(), pool.tolist()) == ([[[0, 4]]], [[[2]]])


# ---- attend ----


def slow_attend(q: Tensor, rows: Tensor, first: Tensor, size: int, chosen: Tensor | None, index, sink: Tensor):
    """Query by query and head by head; also the masses of window, selection and sink."""
    out, masses = torch.zeros_like(q), torch.zeros(*q.shape[:3], 3, dtype=q.dtype)
    past = rows.shape[1] - q.shape[1]
    for b, s, h in torch.cartesian_prod(*(torch.arange(n) for n in q.shape[:3])).tolist():
        own = past + s
        near = rows[b, max(int(first[b, s]), 0) : own + 1]
        far = rows[:0, 0] if chosen is None else chosen[b][index[b, s][index[b, s] >= 0]]
        assert near.shape[0] <= size
        values = torch.cat([near, far])
        weight = (values @ q[b, s, h] / math.sqrt(q.shape[-1])).exp()
        total = sink[h].exp() + weight.sum()
        out[b, s, h] = weight @ values / total
        masses[b, s, h] = torch.stack([weight[: len(near)].sum(), weight[len(near) :].sum(), sink[h].exp()]) / total
    return out, masses


def random_attention(queries: int, past: int, size: int, entries: int, k: int = 4, batch: int = 2, heads: int = 3):
    """Everything attend needs, with first limits that cut some windows short and picks that are missing."""
    q = torch.randn(batch, queries, heads, 32, dtype=torch.float64)
    rows = torch.randn(batch, past + queries, 32, dtype=torch.float64)
    own = past + torch.arange(queries)
    first = (own - size + 1).clamp(min=0).expand(batch, -1).clone()
    first[0, queries // 2 :] = torch.maximum(first[0, queries // 2 :], torch.tensor(past + queries // 2))
    kv = torch.randn(batch, entries, 32, dtype=torch.float64)
    index = torch.randint(-1, entries, (batch, queries, min(k, entries)))
    sink = torch.randn(heads, dtype=torch.float64)
    return q, rows, first, kv, index, sink


@pytest.mark.parametrize(("queries", "size"), [
    (1, 1), (3, 4), (4, 4), (5, 4), (7, 4), (8, 4), (9, 4), (13, 8), (6, 1), (11, 3)])  # fmt: skip
@pytest.mark.parametrize("with_selection", [False, True])
@pytest.mark.parametrize("past", [0, 1, "most"])
def test_attention_equals_explicit_masks(queries, size, past, with_selection):
    """At W-1, W, W+1, 2W-1, 2W, 2W+1 queries, with rows of earlier tokens or without. 1e-12 in float64."""
    past = size - 1 if past == "most" else min(past, size - 1)
    q, rows, first, kv, index, sink = random_attention(queries, past, size, 9)
    selection = Selection(index, Rows(kv)) if with_selection else None
    found = attend(q, Window(Rows(rows), first, size), selection, sink)
    expected, _ = slow_attend(q, rows, first, size, kv if with_selection else None, index, sink)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("elements", [1, 300, 1000])
def test_attention_in_chunks_equals_one_shot(monkeypatch, elements):
    """1e-14: the same sums over differently padded bands."""
    q, rows, first, kv, index, sink = random_attention(23, 2, 4, 9)
    whole = attend(q, Window(Rows(rows), first, 4), Selection(index, Rows(kv)), sink)
    monkeypatch.setattr(ops, "ATTEND_ELEMENTS", elements)
    chunked = attend(q, Window(Rows(rows), first, 4), Selection(index, Rows(kv)), sink)
    torch.testing.assert_close(chunked, whole, rtol=0, atol=1e-14)


@pytest.mark.parametrize("grad", [False, True])
def test_queries_may_see_behind_themselves(grad):
    """Rows first..last of each query, by explicit sums: before, at and behind its own row. By NumPy and by PyTorch."""
    q, rows, sink = random_attention(4, 3, 9, 0)[0], *(random_attention(4, 3, 9, 0)[i] for i in (1, 5))
    first, last = torch.tensor([[0, 2, 3, 6], [5, 0, 1, 1]]), torch.tensor([[6, 2, 5, 6], [6, 4, 6, 0]])
    with torch.set_grad_enabled(grad):
        found = attend(q, Window(Rows(rows), first, 9, last), None, sink)
    for b, s in torch.cartesian_prod(torch.arange(2), torch.arange(4)).tolist():
        seen = rows[b, first[b, s] : last[b, s] + 1]
        weight = (q[b, s] @ seen.mT / math.sqrt(32)).exp()
        expected = weight @ seen / (sink.exp() + weight.sum(-1)).unsqueeze(-1)
        torch.testing.assert_close(found[b, s], expected, rtol=0, atol=1e-12)
    assert (found[1, 3] == 0).all()  # its rows end before they begin


def test_queries_that_see_behind_themselves_beside_a_selection():
    """A selection of nothing is no selection; 9 rows reach back and forward in one band."""
    q, rows, _, kv, index, sink = random_attention(4, 3, 9, 5)
    first, last = torch.zeros(2, 4, dtype=torch.long), torch.full((2, 4), 6)
    alone = attend(q, Window(Rows(rows), first, 9, last), None, sink)
    nothing = attend(q, Window(Rows(rows), first, 9, last), Selection(torch.full_like(index, -1), Rows(kv)), sink)
    torch.testing.assert_close(alone, nothing, rtol=0, atol=1e-12)


def test_more_queries_than_the_window_cannot_see_behind_themselves():
    q, rows, first, _, _, sink = random_attention(5, 0, 4, 0)
    with pytest.raises(ValueError, match="5 queries see behind themselves: they must lie within a window of 4"):
        attend(q, Window(Rows(rows), first, 4, first + 2), None, sink)


def test_a_query_with_nothing_to_see_gives_zeros():
    """Its window begins behind itself and no entry is chosen; its neighbour is not touched by that."""
    q, rows, first, kv, index, sink = random_attention(5, 0, 4, 9)
    first[0, 2], index[0, 2] = 99, -1
    out = attend(q, Window(Rows(rows), first, 4), Selection(index, Rows(kv)), sink)
    assert torch.equal(out[0, 2], torch.zeros(3, 32))
    assert out.isfinite().all()
    assert (out[0, 1] != 0).all()


def test_masses_of_window_selection_and_sink_sum_to_one():
    """A channel that is 1 in window rows shows the mass of the window, another one that of the entries."""
    q, rows, first, kv, index, sink = random_attention(9, 0, 4, 9)
    q[..., 30:] = 0
    rows[..., 30], rows[..., 31] = 1, 0
    kv[..., 30], kv[..., 31] = 0, 1
    out = attend(q, Window(Rows(rows), first, 4), Selection(index, Rows(kv)), sink)
    _, masses = slow_attend(q, rows, first, 4, kv, index, sink)
    torch.testing.assert_close(out[..., 30:], masses[..., :2], rtol=0, atol=1e-12)
    torch.testing.assert_close(masses.sum(-1), torch.ones(2, 9, 3, dtype=torch.float64), rtol=0, atol=1e-12)
    assert (masses[..., 2] > 0).all()


def test_the_sink_only_enlarges_the_denominator():
    """One row of score 0 and a sink of log 3: a quarter of the row."""
    q, rows = torch.zeros(1, 1, 1, 4), torch.tensor([[[4.0, 8, 0, -4]]])
    out = attend(q, Window(Rows(rows), torch.zeros(1, 1, dtype=torch.long), 2), None, torch.tensor([math.log(3)]))
    torch.testing.assert_close(out[0, 0, 0], torch.tensor([1.0, 2, 0, -1]))


def test_the_scale_is_one_over_the_root_of_the_width():
    """C = 4, q.v = 2 log 3: a score of log 3 against a sink of 0 gives 3/4."""
    q = torch.tensor([[[[2 * math.log(3), 0, 0, 0]]]])
    rows = torch.tensor([[[1.0, 0, 0, 0]]])
    out = attend(q, Window(Rows(rows), torch.zeros(1, 1, dtype=torch.long), 2), None, torch.zeros(1))
    assert out[0, 0, 0, 0].item() == pytest.approx(0.75, abs=1e-6)


def test_a_token_seen_twice_counts_twice():
    """Once through the window, once through its entry: with two rows of score 0 and the sink, 2/3 remain."""
    q, rows = torch.zeros(1, 1, 1, 4), torch.ones(1, 1, 4)
    selection = Selection(torch.tensor([[[0, -1]]]), Rows(rows))
    out = attend(q, Window(Rows(rows), torch.zeros(1, 1, dtype=torch.long), 2), selection, torch.zeros(1))
    torch.testing.assert_close(out, torch.full((1, 1, 1, 4), 2 / 3))


def test_large_scores_do_not_overflow():
    q, rows = torch.full((1, 1, 1, 4), 1e4), torch.full((1, 1, 4), 1e4)
    out = attend(q, Window(Rows(rows), torch.zeros(1, 1, dtype=torch.long), 2), None, torch.zeros(1))
    assert torch.equal(out, torch.full((1, 1, 1, 4), 1e4))


def test_packed_rows_give_what_rounded_rows_give():
    """The bytes of a cache and the rounded floats of training: equal bit for bit."""
    q, rows, first, kv, index, sink = (x.float() if x.is_floating_point() else x for x in random_attention(9, 2, 4, 9))
    packed = attend(q, Window(Rows(WINDOW.encode(rows), WINDOW, 32), first, 4),
                    Selection(index, Rows(GLOBAL.encode(kv), GLOBAL, 32)), sink)  # fmt: skip
    rounded = attend(q, Window(Rows(WINDOW.fake_quant(rows)), first, 4),
                     Selection(index, Rows(GLOBAL.fake_quant(kv))), sink)  # fmt: skip
    assert torch.equal(packed, rounded)
    iq, weight, keys = random_index(2, 9, 9, torch.float32)
    start, last = ranges(2, 9, 9)
    both = [
        score_and_select(iq, weight, rows, start, last, 3)[0]
        for rows in (Rows(INDEX.encode(keys), INDEX, 32), Rows(INDEX.fake_quant(keys)))]
    assert torch.equal(*both)


def test_the_last_queries_of_a_selection_are_those_of_the_whole():
    kv, index = torch.randn(2, 9, 8), torch.randint(-1, 9, (2, 6, 4))
    pool = torch.randint(-1, 3, (2, 6, 2))
    for gathered in (False, True):
        selection = Selection(index, Rows(kv), pool)
        if gathered:
            list(selection.rows(6))  # few enough to be kept
        tail = selection.last(2)
        assert torch.equal(tail.index, index[:, -2:])
        assert torch.equal(tail.pool, pool[:, -2:])
        assert torch.equal(torch.cat(list(tail.rows(1)), 1), torch.cat(list(selection.rows(4)), 1)[:, -2:])


# ---- positions ----


def test_a_shift_of_all_positions_changes_no_attention():
    """Keys are the values: without turning the output back, absolute angles would remain. 1e-11 in float64."""
    config = NANO.replace(quantize_cache=False)
    model, far = scattered(config), scattered(config)
    assert torch.equal(attention_at(model, 0), attention_at(far, 0))
    for shift in (2, 1000):
        torch.testing.assert_close(attention_at(far, shift), attention_at(model, 0), rtol=0, atol=1e-11)


def attention_at(model: Model, shift: int) -> Tensor:
    """The output of layer 4's attention over window and entries, every position `shift` later."""
    ctx = Sequence(model.config, torch.zeros(1, 9, dtype=torch.long))
    block, x = model.layers[4], torch.randn(1, 9, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    rotation = block.rope.rotation(ctx.positions + shift, torch.float64)
    c, _ = block.compressor.project(x)
    kv = rotate(block.compressor.latent(c.unsqueeze(2), None), rotation)
    index = torch.tensor([[[max(0, p - 6), p] for p in range(9)]])
    with torch.no_grad():
        return block.attn(x, block.attn.query_latent(x), ctx, rotation, Selection(index, Rows(kv)))
