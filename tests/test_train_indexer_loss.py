"""What an index source is taught, against plain loops, in each phase of training."""

import math

import pytest
import torch
from models import NANO, reached, uneven

from tinyds41.formats import Rows
from tinyds41.ops import Selection, Window, attend, attention_mass
from tinyds41.trace import Trace
from tinyds41.train.indexer_loss import indexer_loss, is_dense, recall, sample_queries, taught, teachers
from tinyds41.train.losses import run

LENGTH = 29  # odd, more than the pool of 3 blocks of 2 entries holds


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def model():
    return uneven()


@pytest.fixture
def ids():
    return torch.randint(3, 64, (2, LENGTH), generator=torch.Generator().manual_seed(3))


@pytest.fixture
def documents():
    """Row 0: two documents and padding; row 1: documents of one token, which never see an entry of ratio 2."""
    return torch.stack([torch.tensor([5] * 13 + [6] * 13 + [-1] * 3), torch.arange(LENGTH)])


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


def divergence(model, ids, queries, dense: bool) -> float:
    """KL over the entries that a phase leaves, by plain loops over traced scores and choices."""
    trace = Trace("layers.[246].indexer.scores", "layers.[24].indexer.selection")
    model(ids, trace=trace)
    _, ctx = run(model, ids)
    total = 0.0
    for source, teacher in teachers(model, ctx, queries).items():
        for row in range(2):
            for i, query in enumerate(queries.tolist()):
                scores = trace[f"layers.{source}.indexer.scores"][row, query]
                if dense:
                    entries = range(int(teacher.visible[row, i].sum()))
                elif source == 6:  # restricted: outside its pool the traced scores are -inf
                    entries = [e for e, score in enumerate(scores.tolist()) if score > -math.inf]
                else:
                    entries = [e for e in trace[f"layers.{source}.indexer.selection"][row, query].tolist() if e >= 0]
                p, q = teacher.mass[row, i, list(entries)], scores[list(entries)].softmax(0)
                p = p / p.sum()
                total += sum(float(a * (a / b).log()) for a, b in zip(p, q, strict=True) if a > 0)
    return total / len(queries) / 2 / 3


@pytest.mark.parametrize("dense", [True, False])
def test_indexer_loss_is_the_divergence_over_what_its_phase_leaves(model, ids, dense):
    """Early all that is visible, later the choice, of a restricted source its pool."""
    queries = torch.tensor([5, 16, 28])  # the newest block of 16 is half visible
    if dense:  # the traced scores of a restricted source know its pool alone
        model = uneven(NANO.replace(candidate_topk_blocks=LENGTH))
    _, ctx = run(model, ids)
    found = float(indexer_loss(model, ctx, queries, dense=dense).detach())
    # Rounding of float64 sums of some hundred terms.
    assert found == pytest.approx(divergence(model, ids, queries, dense), abs=1e-12) and found > 0.01


def test_what_is_taught_are_the_chosen_entries_and_of_a_restricted_source_its_pool(model, ids):
    _, ctx = run(model, ids)
    queries = torch.tensor([4, 28])
    for source, teacher in teachers(model, ctx, queries).items():
        assert taught(model, ctx, source, queries, teacher, dense=True) is teacher.visible
        later = taught(model, ctx, source, queries, teacher, dense=False)
        assert not (later & ~teacher.visible).any()
        for row in range(2):
            for i, query in enumerate(queries.tolist()):
                chosen = {e for e in ctx.trace[f"layers.{source}.indexer.selection"][row, query].tolist() if e >= 0}
                if source == 6:
                    blocks = [b for b in ctx.trace["layers.4.indexer.pool"][row, query].tolist() if b >= 0]
                    room = {e for b in blocks for e in (2 * b, 2 * b + 1) if e <= query}
                    assert chosen <= room and (query < 28 or len(room) > len(chosen) > 0)
                    chosen = room
                assert set(later[row, i].nonzero().flatten().tolist()) == chosen


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("dense", [True, False])
def test_distillation_reaches_indexer_weights_and_no_others(ids, dense, dtype):
    """Trap I8. So neither the teacher nor what the indexers read passes a gradient on."""
    model = uneven().to(dtype)
    _, ctx = run(model, ids)
    indexer_loss(model, ctx, torch.arange(LENGTH), dense=dense).backward()
    wanted = {f"layers.{n}.indexer.{leaf}.weight" for n in (2, 4, 6) for leaf in ("wq_b", "weights_proj")}
    wanted |= {f"layers.{n}.indexer.{leaf}.weight" for n in (2, 4) for leaf in ("wk", "k_norm")}
    assert reached(model) == wanted


@pytest.mark.parametrize("dense", [True, False])
def test_a_step_of_distillation_improves_what_its_phase_is_about(model, ids, dense):
    queries = torch.arange(8, LENGTH)
    _, ctx = run(model, ids)
    before = indexer_loss(model, ctx, queries, dense=dense)
    before.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= 1e-3 * parameter.grad
    assert indexer_loss(model, ctx, queries, dense=dense) < before


def test_the_phase_follows_from_step_and_steps_alone():
    assert [is_dense(step, 10, 0.2) for step in range(4)] == [True, True, False, False]
    assert all(is_dense(step, 7, 1.0) for step in range(7)) and not is_dense(0, 7, 0.0)
    assert not is_dense(55, 100, 0.55)  # 0.55 * 100 is a little more than 55


@pytest.mark.parametrize("dense", [True, False])
def test_queries_without_entries_give_no_nan(model, ids, documents, dense):
    """Row 1 has documents of one token; of ratio 2 there is no entry, of ratio 1 only the query's own."""
    _, ctx = run(model, ids, documents)
    loss = indexer_loss(model, ctx, torch.arange(LENGTH), dense=dense)
    loss.backward()
    assert torch.isfinite(loss)
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
    lonely = ids[1:]
    _, ctx = run(model, lonely, documents[1:])
    found = indexer_loss(model, ctx, torch.arange(LENGTH), dense=dense)
    assert float(found.detach()) == pytest.approx(0, abs=1e-12)
    _, ctx = run(model, ids[:, :1])
    found = indexer_loss(model, ctx, torch.zeros(1, dtype=torch.long), dense=dense)
    assert float(found.detach()) == pytest.approx(0, abs=1e-12)


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
