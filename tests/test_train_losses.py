"""Losses against plain loops, and which weights each of them moves."""

import math

import pytest
import torch

from tinyds41.config import Config
from tinyds41.formats import Rows
from tinyds41.model.transformer import Model
from tinyds41.ops import Selection, Window, attend, attention_mass
from tinyds41.trace import Trace
from tinyds41.train.losses import (
    IGNORED,
    balance,
    balance_loss,
    cross_entropy,
    indexer_loss,
    recall,
    run,
    sample_queries,
    targets,
    teachers,
)  # fmt: skip

LENGTH = 29  # odd, more than the pool of 3 blocks of 2 entries holds


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def model():
    """nano in float64 with non-zero sinks and weights large enough that attention is far from even."""
    model = Model(Config.preset("nano"), dtype=torch.float64, seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("attn_sink"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
            elif parameter.ndim == 2 and ".attn." in name:
                parameter.mul_(8)
    return model


@pytest.fixture
def ids():
    return torch.randint(3, 64, (2, LENGTH), generator=torch.Generator().manual_seed(3))


@pytest.fixture
def documents():
    """Row 0: two documents and padding; row 1: documents of one token, which never see an entry of ratio 2."""
    return torch.stack([torch.tensor([5] * 13 + [6] * 13 + [-1] * 3), torch.arange(LENGTH)])


def test_targets_stay_inside_their_document_and_out_of_padding():
    ids = torch.tensor([[10, 11, 12, 13, 14, 15]])
    documents = torch.tensor([[0, 0, 1, 1, -1, -1]])
    assert targets(ids, documents).tolist() == [[11, IGNORED, 13, IGNORED, IGNORED]]
    assert targets(ids, None).tolist() == [[11, 12, 13, 14, 15]]


def test_cross_entropy_is_the_mean_over_the_kept_positions():
    logits = torch.randn(2, 3, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    wanted = torch.tensor([[1, IGNORED, 3], [IGNORED, 6, 0]])
    kept = [(b, s) for b in range(2) for s in range(3) if wanted[b, s] != IGNORED]
    plain = sum(-logits[b, s].log_softmax(0)[wanted[b, s]] for b, s in kept) / len(kept)
    # 1e-6: the loss itself is taken in fp32.
    assert cross_entropy(logits, wanted) == pytest.approx(float(plain), rel=1e-6)


def test_cross_entropy_without_any_target_is_zero_with_zero_gradient():
    logits = torch.randn(1, 4, 5, requires_grad=True)
    loss = cross_entropy(logits, torch.full((1, 4), IGNORED))
    loss.backward()
    assert loss == 0 and torch.equal(logits.grad, torch.zeros_like(logits))


def test_balance_loss_equals_its_definition_and_ignores_padding():
    generator = torch.Generator().manual_seed(4)
    scores = torch.rand(2, 5, 4, dtype=torch.float64, generator=generator)
    experts = torch.tensor([[[0, 1], [0, 2], [0, 3], [1, 2], [3, 3]], [[0, 1], [0, 1], [0, 1], [2, 3], [2, 3]]])
    alive = torch.tensor([[True] * 4 + [False], [True] * 5])
    plain = 0.0
    for row in range(2):
        tokens = [t for t in range(5) if alive[row, t]]
        for e in range(4):
            f = 4 / (2 * len(tokens)) * sum(int(e in experts[row, t]) for t in tokens)
            plain += f * sum(float(scores[row, t, e] / scores[row, t].sum()) for t in tokens) / len(tokens) / 2
    # 1e-6: the counts are fp32.
    assert float(balance_loss(scores, experts, alive)) == pytest.approx(plain, rel=1e-6)


def test_balance_loss_is_one_when_even_and_pushes_a_busy_expert_down():
    scores = torch.ones(1, 4, 4, requires_grad=True)
    even = torch.tensor([[[0, 1], [2, 3], [0, 1], [2, 3]]])
    alive = torch.ones(1, 4, dtype=torch.bool)
    assert float(balance_loss(scores, even, alive).detach()) == pytest.approx(1, abs=1e-6)
    busy = torch.tensor([[[0, 1], [0, 2], [0, 3], [0, 1]]])
    balance_loss(scores, busy, alive).backward()
    assert (scores.grad[..., 0] > 0).all() and (scores.grad[..., 3] < 0).all()


def test_balance_counts_every_layer_and_reaches_no_table_of_experts(model, ids):
    _, ctx = run(model, ids)
    loss, load = balance(model, ctx)
    loss.backward()
    assert load.sum(-1).tolist() == [2 * ids.numel()] * 8
    assert model.get_parameter("layers.7.ffn.gate.weight").grad.abs().sum() > 0
    assert model.get_parameter("layers.7.ffn.experts.w1").grad is None


def test_sampled_queries_depend_on_seed_and_step_alone():
    first = sample_queries(3, 100, 10, 7)
    assert torch.equal(first, sample_queries(3, 100, 10, 7)) and len(first.unique()) == 10
    assert not torch.equal(first, sample_queries(4, 100, 10, 7))
    assert not torch.equal(first, sample_queries(3, 100, 10, 8))
    assert sample_queries(0, 5, 64, 0).tolist() == [0, 1, 2, 3, 4]


def test_attention_mass_times_the_rows_is_what_attend_returns():
    generator = torch.Generator().manual_seed(5)
    n_entries, size, shape = 6, 4, (2, 11, 3, 32)
    q, rows = (torch.randn(s, dtype=torch.float64, generator=generator) for s in (shape, (2, 11, 32)))
    entries = torch.randn(2, n_entries, 32, dtype=torch.float64, generator=generator)
    sink = torch.randn(3, dtype=torch.float64, generator=generator)
    token = torch.arange(11)
    first = (token - size + 1).clamp(min=0).expand(2, -1)
    absent = (torch.arange(n_entries) >= (token // 2).unsqueeze(-1)).expand(2, -1, -1)
    index = torch.arange(n_entries).expand(2, 11, -1).masked_fill(absent, -1)
    expected = attend(q, Window(Rows(rows), first, size), Selection(index, Rows(entries)), sink)

    near_index = (token.unsqueeze(-1) + torch.arange(1 - size, 1)).expand(2, -1, -1)
    near = Rows(rows).take(near_index.clamp(min=-1))
    near_mass, far_mass = attention_mass(q, near, near_index < 0, entries, absent, sink)
    # Rounding of float64 sums of ten terms.
    torch.testing.assert_close(near_mass @ near + far_mass @ entries.unsqueeze(1), expected, rtol=0, atol=1e-13)


def test_the_teacher_sums_heads_and_following_layers_over_what_is_visible(model, ids):
    _, ctx = run(model, ids)
    queries = torch.tensor([0, 9, 28])
    found = teachers(model, ctx, queries)
    assert sorted(found) == [2, 4, 6]
    row, query, size = 1, 28, model.config.sliding_window
    mass = torch.zeros(LENGTH, dtype=torch.float64)
    for layer in (4, 5):  # 4 selects, 5 follows it; 6 selects anew
        q, sink = ctx.trace[f"layers.{layer}.attn.q"][row, query], model.layers[layer].attn.attn_sink
        window = ctx.trace[f"layers.{layer}.attn.window_kv"][row, query - size + 1 : query + 1]
        entries = ctx.entries(4).kv.all()[row]
        for head in range(2):
            near, far = (torch.exp(rows @ q[head] / math.sqrt(32)) for rows in (window, entries))
            mass += far / (near.sum() + far.sum() + sink[head].exp())
    # Rounding of float64 sums.
    torch.testing.assert_close(found[4].mass[row, 2], (mass / mass.sum()).detach(), rtol=0, atol=1e-13)
    assert found[4].sighted.all() and not found[2].sighted[:, 0].any()
    assert not found[4].mass.requires_grad


def test_the_teacher_never_looks_into_another_document(model, ids, documents):
    _, ctx = run(model, ids, documents)
    teacher = teachers(model, ctx, torch.tensor([12, 13, 20]))[4]
    # Query 13 opens the second document of row 0: its only entry is its own.
    assert teacher.visible[0].sum(-1).tolist() == [13, 1, 8]
    assert teacher.mass[0, 1].max() == 1
    assert not teacher.mass[~teacher.visible].any()


def test_indexer_loss_is_the_divergence_from_the_traced_scores(model, ids):
    trace = Trace("layers.[24].indexer.scores")
    model(ids, trace=trace)
    _, ctx = run(model, ids)
    queries = torch.tensor([5, 17, 28])
    teaching = {source: teacher for source, teacher in teachers(model, ctx, queries).items() if source != 6}
    plain = 0.0
    for source, teacher in teaching.items():
        for row in range(2):
            for i, query in enumerate(queries.tolist()):
                q = trace[f"layers.{source}.indexer.scores"][row, query].softmax(0)
                p = teacher.mass[row, i]
                plain += sum(float(a * (a / b).log()) for a, b in zip(p, q, strict=True) if a > 0) / 6 / 2
    # Rounding of float64 sums of some hundred terms.
    assert float(indexer_loss(model, ctx, queries, teaching).detach()) == pytest.approx(plain, abs=1e-12)


def test_distillation_reaches_indexer_weights_and_no_others(model, ids):
    """Trap I8."""
    _, ctx = run(model, ids)
    indexer_loss(model, ctx, torch.arange(LENGTH)).backward()
    moved = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.count_nonzero()}
    wanted = {f"layers.{n}.indexer.{leaf}.weight" for n in (2, 4, 6) for leaf in ("wq_b", "weights_proj")}
    wanted |= {f"layers.{n}.indexer.{leaf}.weight" for n in (2, 4) for leaf in ("wk", "k_norm")}
    assert moved == wanted


def test_the_next_token_loss_reaches_no_indexer_weight(model, ids):
    logits, _ = run(model, ids)
    cross_entropy(logits[:, :-1], ids[:, 1:]).backward()
    moved = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.count_nonzero()}
    assert moved and not any(".indexer." in name for name in moved)


def test_queries_without_entries_give_no_nan(model, ids, documents):
    """Row 1 has documents of one token; of ratio 2 there is no entry, of ratio 1 only the query's own."""
    _, ctx = run(model, ids, documents)
    loss = indexer_loss(model, ctx, torch.arange(LENGTH))
    loss.backward()
    assert torch.isfinite(loss)
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
    lonely = ids[1:]
    _, ctx = run(model, lonely, documents[1:])
    assert float(indexer_loss(model, ctx, torch.arange(LENGTH)).detach()) == pytest.approx(0, abs=1e-12)
    _, ctx = run(model, ids[:, :1])
    assert float(indexer_loss(model, ctx, torch.zeros(1, dtype=torch.long)).detach()) == pytest.approx(0, abs=1e-12)


def test_recall_is_the_mass_of_what_was_chosen(model, ids):
    _, ctx = run(model, ids)
    queries = torch.tensor([1, 10, 28])  # the first sees no more than it may choose and is not counted
    teaching = teachers(model, ctx, queries)
    found = recall(model, ctx, queries, teaching)
    kept, pooled = [], []
    for row in range(2):
        for i, query in ((1, 10), (2, 28)):
            mass = teaching[6].mass[row, i]
            chosen = [e for e in ctx.trace["layers.6.indexer.selection"][row, query].tolist() if e >= 0]
            kept.append(float(mass[chosen].sum()))
            blocks = [b for b in ctx.trace["layers.4.indexer.pool"][row, query].tolist() if b >= 0]
            pooled.append(float(mass[[e for b in blocks for e in (2 * b, 2 * b + 1) if e < LENGTH]].sum()))
    # Rounding of float64 sums.
    assert found[6].selection == pytest.approx(sum(kept) / 4, abs=1e-12)
    assert found[6].pool == pytest.approx(sum(pooled) / 4, abs=1e-12)
    assert found[2].pool is None and recall(model, ctx, queries[:1])[4].selection is None
    assert 0 < found[6].selection <= found[6].pool < 1
