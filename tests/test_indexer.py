"""The indexer inside the model: whose keys it scores, what it may choose, and what it leaves alone."""

from __future__ import annotations

import math

import pytest
import torch
from models import NANO, context, random_ids, scattered, traced

from tinyds41.formats import INDEX
from tinyds41.model.rope import rotate

LENGTH = 23  # odd, more than the pool holds: 3 blocks of 2 entries
SOURCES = {2: 2, 4: 4, 6: 4}  # index source -> kv source


@pytest.fixture(scope="module")
def model():
    return scattered()


@pytest.fixture(scope="module")
def trace(model):
    return traced(model, random_ids(2, LENGTH))


def chosen(picks: list[int]) -> set[int]:
    return {pick for pick in picks if pick >= 0}


@pytest.mark.parametrize("layer", SOURCES)
def test_index_queries_come_from_the_query_latent_and_are_rounded_after_rotation(model, trace, layer):
    """Equal bit for bit: 3 heads of 32 channels, FP4 in blocks of 32."""
    block, name = model.layers[layer], f"layers.{layer}"
    positions = torch.arange(LENGTH).expand(2, -1)
    with torch.no_grad():
        latent = block.attn.q_norm(block.attn.wq_a(trace[f"{name}.attn.input"]))
        q = block.indexer.wq_b(latent).unflatten(-1, (3, 32))
        expected = INDEX.fake_quant(rotate(q, block.rope.rotation(positions, q.dtype).unsqueeze(2)))
        weights = block.indexer.weights_proj(trace[f"{name}.attn.input"])
    assert torch.equal(trace[f"{name}.indexer.queries"], expected)
    assert torch.equal(trace[f"{name}.indexer.weights"], weights)


@pytest.mark.parametrize(("layer", "source"), SOURCES.items())
def test_scores_are_those_against_the_keys_of_its_own_kv_source(trace, layer, source):
    """Head by head; 1e-12 in float64. Where a query may not choose stands -inf."""
    q, weight = (trace[f"layers.{layer}.indexer.{name}"] for name in ("queries", "weights"))
    keys, scores = trace[f"layers.{source}.indexer.keys"], trace[f"layers.{layer}.indexer.scores"]
    expected = sum(
        weight[..., i, None] * (q[:, :, i] @ keys.mT).clamp(min=0) for i in range(3)) / math.sqrt(3 * 32)
    allowed = scores > -math.inf
    assert torch.equal(trace[f"layers.{layer}.indexer.keys"], keys)
    torch.testing.assert_close(scores[allowed], expected[allowed], rtol=0, atol=1e-12)
    visible = torch.arange(keys.shape[1]) < (torch.arange(1, LENGTH + 1) // NANO.compress_ratios[layer])[:, None]
    assert not (allowed & ~visible).any()
    if layer != 6:
        assert torch.equal(allowed, visible.expand_as(allowed))


@pytest.mark.parametrize("layer", SOURCES)
def test_the_selection_is_the_best_of_the_allowed_scores(trace, layer):
    """By a stable sort: 3 of them, fewer while fewer are there."""
    scores, selection = (trace[f"layers.{layer}.indexer.{name}"].flatten(0, 1) for name in ("scores", "selection"))
    for row, picks in zip(scores.tolist(), selection.tolist(), strict=True):
        order = sorted((i for i, score in enumerate(row) if score > -math.inf), key=lambda i: -row[i])
        assert picks == sorted(order[:3]) + [-1] * (3 - len(order[:3]))


def test_the_reindex_layer_may_choose_inside_the_pool_alone(trace):
    """The pool restricts: some query would choose otherwise, and its source does choose outside."""
    pool, picks = trace["layers.4.indexer.pool"], trace["layers.6.indexer.selection"]
    allowed = trace["layers.6.indexer.scores"] > -math.inf
    outside = 0
    for b in range(2):
        for s in range(LENGTH):
            entries = {2 * block + i for block in chosen(pool[b, s].tolist()) for i in range(2)} & set(range(s + 1))
            assert set(allowed[b, s].nonzero().flatten().tolist()) == entries
            assert chosen(picks[b, s].tolist()) <= entries
            assert s // 2 in pool[b, s].tolist()
            outside += len(set(range(s + 1)) - entries)
    assert outside > 100


def test_the_source_of_the_pool_scores_everything_and_the_reindex_layer_the_pool(model):
    """Entries scored: every query against all 23, then against 3 blocks of 2."""
    ids, ctx = random_ids(1, LENGTH), context(NANO, LENGTH)
    with torch.no_grad():
        model.decode(model.encode(ids, ctx), ctx)
    # Gathered once per selection: the Reuse layers 3, 5 and 7 take the same rows.
    assert ctx.counters.rows_decoded == dict.fromkeys((2, 4, 6), LENGTH * 3)
    assert ctx.counters.entries_scored == {2: LENGTH * (LENGTH // 2), 4: LENGTH * LENGTH, 6: LENGTH * 3 * 2}


def test_a_reuse_layer_attends_with_the_newest_selection_of_its_source(model, trace):
    """Layer 3 that of 2, 5 that of 4, 7 that of 6: attention recomputed with explicit masks, 1e-11 in float64."""
    for layer, selected_by, source in ((3, 2, 2), (5, 4, 4), (7, 6, 4), (2, 2, 2), (4, 4, 4), (6, 6, 4)):
        q, window = (trace[f"layers.{layer}.attn.{name}"][0] for name in ("q", "window_kv"))
        entries = trace[f"layers.{source}.compressor.global_kv"][0]
        block = model.layers[layer]
        for s in (0, 3, 11, LENGTH - 1):
            picks = sorted(chosen(trace[f"layers.{selected_by}.indexer.selection"][0, s].tolist()))
            rows = torch.cat([window[max(0, s - 3) : s + 1], entries[picks]])
            with torch.no_grad():
                weight = (q[s] @ rows.T / math.sqrt(32)).exp()
                out = weight @ rows / (weight.sum(-1, keepdim=True) + block.attn.attn_sink.exp()[:, None])
                turn = block.rope.rotation(torch.tensor(s), torch.float64).conj()
            heads = trace[f"layers.{layer}.attn.heads"][0, s]
            torch.testing.assert_close(heads, rotate(out, turn), rtol=0, atol=1e-11)


def test_heads_leave_through_their_own_group(model, trace):
    """Group g: heads of its half through rows g of wo_a; then all through wo_b. 1e-12 in float64."""
    heads, attn = trace["layers.4.attn.heads"], model.layers[4].attn
    with torch.no_grad():
        parts = [heads[:, :, g].flatten(2) @ attn.wo_a.weight[8 * g : 8 * g + 8].T for g in range(2)]
        expected = torch.cat(parts, -1) @ attn.wo_b.weight.T
        torch.testing.assert_close(attn.project(heads), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("k", [1, 3, 8, 64, 512])
def test_sparse_attention_equals_dense_while_k_holds_everything_visible(k):
    """K is what the config says: logits equal those of K = 512 up to the first query that sees more. 1e-12."""
    changes = {"candidate_source_layer_id": None, "index_source_layer_ids": [2, 4]}
    dense, sparse = (scattered(NANO.replace(index_topk=n, **changes)) for n in (512, k))
    ids = random_ids(1, LENGTH)
    with torch.no_grad():
        differs = (dense(ids) - sparse(ids)).abs().amax(-1)[0] > 1e-12
    assert not differs[:k].any()
    assert differs[k:].any() == (k < LENGTH)


def test_the_model_learns_nothing_through_the_choice(model):
    """Logits leave no gradient on an indexer, and its inputs pass none back."""
    model.zero_grad()
    model(random_ids(1, 9)).square().mean().backward()
    touched = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert not any(".indexer." in name for name in touched)
    assert "layers.4.compressor.wkv.weight" in touched
    block, x = model.layers[4], torch.randn(1, 9, 32, dtype=torch.float64, requires_grad=True)
    latent = torch.randn(1, 9, 16, dtype=torch.float64, requires_grad=True)
    rotation = block.rope.rotation(torch.arange(9), torch.float64)
    q, weight = block.indexer.queries(x, latent, rotation)
    keys = block.indexer.keys(x, rotation)
    (q.sum() + weight.sum() + keys.sum()).backward()
    assert x.grad is None
    assert latent.grad is None
    for parameter in block.indexer.parameters():
        assert parameter.grad.abs().sum() > 0
    model.zero_grad()


def test_inputs_of_another_width_are_refused(model):
    indexer, rotation = model.layers[4].indexer, torch.ones(1, 1, 8, dtype=torch.complex64)
    with pytest.raises(ValueError, match=r"layers\.4\.indexer: expected \[\.\.\., 32\], got \(1, 1, 31\)"):
        indexer.queries(torch.zeros(1, 1, 31), torch.zeros(1, 1, 16), rotation)
    with pytest.raises(ValueError, match=r"query_latent: expected \[\.\.\., 16\], got \(1, 1, 32\)"):
        indexer.queries(torch.zeros(1, 1, 32), torch.zeros(1, 1, 32), rotation)
    with pytest.raises(ValueError, match=r"latent: expected \[\.\.\., 32\], got \(1, 1, 16\)"):
        indexer.keys(torch.zeros(1, 1, 16), rotation)
