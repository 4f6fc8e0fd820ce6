"""Replay in training is replay in serving, and reaches no further than it says."""

from __future__ import annotations

import pytest
import torch
from models import random_ids, reached, scattered
from sessions import SHORT, ratio, without_decoder, without_engram
from torch import Tensor

from tinyds41.infer.session import Session
from tinyds41.infer.tiered_store import TieredStore
from tinyds41.model.context import PADDING
from tinyds41.model.transformer import Model
from tinyds41.ops import index_scores
from tinyds41.train.indexer_loss import indexer_loss, teachers
from tinyds41.train.losses import IGNORED, cross_entropy, run
from tinyds41.train.replay import Hits, draw_hits, run_replayed

W = SHORT.sliding_window
LENGTH = 37
# Found and prompt of each row: nothing found, less than a window, whole and cut groups, suffixes around W, the end.
ROWS = [(0, 1), (0, W), (0, 20), (1, 1), (W - 1, W), (W, W), (W + 1, 2 * W + 1), (19, 19), (20, 21), (21, 21 + W - 1),
        (20, 20 + W), (19, 33), (30, 31), (LENGTH, LENGTH)]  # fmt: skip


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def model() -> Model:
    return scattered(SHORT)


def served(model: Model, ids: Tensor, found: int, prompt: int, folder) -> Tensor:
    """What a session says to one row from the prompt's last token on. Shapes: [1,S] -> [S-prompt+1,V]."""
    session = Session(model)
    if found:
        with TieredStore(folder, model, block_tokens=1) as store:
            writer = Session(model)
            writer.prefill(ids[:, :found])  # exactly
            writer.save(store)
            store.windows.clear()
            first = session.resume(ids[:, :prompt], store)
            assert session.resumed is not None and session.resumed.found == found
    else:
        first = session.prefill(ids[:, :prompt], mode="bounded")
    return torch.cat([first, *(session.decode(token) for token in ids[0, prompt:].tolist())])


CASES = {
    "short": (SHORT, ROWS), "no engram": (without_engram(), ROWS[7:9]), "ratio 3": (ratio(3), ROWS[6:10]),
    "no decoder": (without_decoder(), ROWS[6:9]), "no formats": (SHORT.replace(quantize_cache=False), ROWS[2::4]),
    "ratio 6": (ratio(6, quantize_cache=False), ROWS[8:12]),  # a group waits longer than a window
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_simulated_row_says_what_a_resumed_session_says(tmp_path, name):
    """The oracle: all rows in one batch against a store and a session of each."""
    config, rows = CASES[name]
    model, ids = scattered(config), random_ids(len(rows), LENGTH, SHORT)
    with torch.no_grad():
        logits, _ = run_replayed(model, ids, None, Hits(*torch.tensor(rows).T))
        plain, _ = run(model, ids)
    changed = 0
    for b, (found, prompt) in enumerate(rows):
        expected = served(model, ids[b : b + 1], found, prompt, tmp_path / f"{b}.sqlite")
        # Rounding of sums in another order, in float64.
        torch.testing.assert_close(logits[b, prompt - 1 :], expected, rtol=0, atol=1e-9)
        changed += not torch.allclose(plain[b, prompt - 1 :], expected, rtol=0, atol=1e-6)
    assert changed >= len(rows) / 2  # so a replay is not the plain run


def test_rows_that_are_cut_nowhere_are_those_of_a_plain_run(model):
    ids = random_ids(2, LENGTH, SHORT)
    with torch.no_grad():
        found, _ = run_replayed(model, ids, None, Hits(torch.tensor([0, 0]), torch.tensor([1, W])))
        assert torch.equal(found, run(model, ids)[0])


def test_tokens_before_a_segment_keep_their_windows(model):
    """No server says anything there, but balance and indexers learn from them as well."""
    ids = random_ids(1, LENGTH, SHORT)
    with torch.no_grad():
        for found, prompt in ((20, 22), (0, 30)):
            logits, _ = run_replayed(model, ids, None, Hits(torch.tensor([found]), torch.tensor([prompt])))
            plain, _ = run(model, ids)
            begin = found - W if found else prompt - W
            assert torch.equal(logits[:, :begin], plain[:, :begin])
            assert not torch.allclose(logits[:, begin], plain[:, begin], rtol=0, atol=1e-6)


def test_loss_lies_where_a_session_would_make_tokens():
    wanted = torch.arange(12).view(2, 6)
    found = Hits(torch.tensor([0, 3]), torch.tensor([1, 5])).served(wanted)
    assert found.tolist() == [[0, 1, 2, 3, 4, 5], [IGNORED] * 4 + [10, 11]]
    assert wanted[1, 0] == 6  # not changed in place


def test_hits_depend_on_seed_and_step_alone_and_come_as_often_as_wished():
    def draw(step, seed=7, share=1.0):
        return draw_hits(SHORT, step, (6, LENGTH), share, seed)

    first, again = draw(3), draw(3)
    assert torch.equal(first.found, again.found) and torch.equal(first.prompt, again.prompt)
    assert not torch.equal(first.prompt, draw(4).prompt) and not torch.equal(first.prompt, draw(3, seed=8).prompt)
    drawn = [draw(step) for step in range(200)]
    prompt, found = (torch.cat([getattr(hits, name) for hits in drawn]) for name in ("prompt", "found"))
    assert prompt.unique().tolist() == list(range(1, LENGTH + 1))
    assert (prompt - found).unique().tolist() == list(range(2 * W + 1)) and found.min() == 0
    assert 40 < sum(draw(step, share=0.3) is not None for step in range(200)) < 80
    assert all(draw(step, share=0.0) is None for step in range(200))


@pytest.mark.parametrize("config", [SHORT, ratio(6, quantize_cache=False)])
def test_a_packed_document_is_resumed_as_if_it_stood_alone(config):
    """Its groups, windows and stored entries are counted from its own start (trap T1)."""
    model, ids, begin = scattered(config), random_ids(1, LENGTH, SHORT), 7
    documents = torch.tensor([[0] * begin + [1] * (LENGTH - begin - 3) + [PADDING] * 3])
    with torch.no_grad():
        for found, prompt in ((4, 4), (5, 6), (11, 13), (12, 20), (0, 9)):
            hits = Hits(torch.tensor([begin + found if found else 0]), torch.tensor([begin + prompt]))
            packed, _ = run_replayed(model, ids, documents, hits)
            alone, _ = run_replayed(model, ids[:, begin:-3], None, Hits(torch.tensor([found]), torch.tensor([prompt])))
            # Rounding of sums in another order, in float64.
            torch.testing.assert_close(packed[:, begin + prompt - 1 : -3], alone[:, prompt - 1 :], rtol=0, atol=1e-12)


def test_another_document_changes_nothing_in_a_resumed_one(model):
    """Trap T1, by all four paths: window, entries, pool and Engram."""
    ids, begin = random_ids(1, LENGTH, SHORT), 9
    documents = (torch.arange(LENGTH) >= begin).long()[None]
    hits = Hits(torch.tensor([begin + 7]), torch.tensor([begin + 9]))
    other = ids.clone()
    other[:, :begin] = random_ids(1, begin, SHORT, seed=5)
    with torch.no_grad():
        one, two = (run_replayed(model, x, documents, hits)[0][:, begin:] for x in (ids, other))
    # Sums over tokens that other experts' tokens stand among: rounding in float64.
    torch.testing.assert_close(one, two, rtol=0, atol=1e-12)


def test_future_tokens_change_nothing_before_them(model):
    ids, hits = random_ids(1, LENGTH, SHORT), Hits(torch.tensor([20]), torch.tensor([22]))
    other = ids.clone()
    other[:, 25:] = random_ids(1, LENGTH - 25, SHORT, seed=5)
    with torch.no_grad():
        one, two = (run_replayed(model, x, None, hits)[0][:, :25] for x in (ids, other))
    torch.testing.assert_close(one, two, rtol=0, atol=1e-12)


def test_the_loss_of_a_replay_reaches_what_the_plain_loss_reaches():
    """Those who wrote the stored entries, too: here no entry is written behind the hit."""
    model, ids = scattered(SHORT), random_ids(2, 21, SHORT)
    hits = Hits(torch.tensor([20, 20]), torch.tensor([20, 20]))
    logits, _ = run_replayed(model, ids[:, :20], None, hits)
    cross_entropy(logits, hits.served(ids[:, 1:])).backward()
    wanted = {name for name, _ in model.named_parameters()
              if ".indexer." not in name and not name.endswith(("gate.bias", "gate.bias_vl"))}  # fmt: skip
    assert reached(model) == wanted


def test_entries_of_found_tokens_are_those_of_a_cold_reading_and_later_ones_are_not(model):
    ids, hits = random_ids(2, LENGTH, SHORT), Hits(torch.tensor([19, 30]), torch.tensor([21, 30]))
    with torch.no_grad():
        (_, ctx), (_, whole) = run_replayed(model, ids, None, hits), run(model, ids)
    for source, m in ((1, 2), (2, 1)):
        same_BG = (ctx.entries(source).kv.all() == whole.entries(source).kv.all()).all(-1)
        stored_BG = torch.arange(same_BG.shape[1]) * m + m - 1 < hits.found.unsqueeze(1)
        assert same_BG[stored_BG].all()
    assert not same_BG[~stored_BG].all()  # of layer 2: what windows of layer 1 lost comes through


@pytest.mark.parametrize("dense", [True, False])
def test_indexers_of_a_replay_learn_from_the_entries_they_scored(dense):
    """Stored keys and new ones, so the loss is that of the keys in the context; trap I8 holds."""
    model, ids = scattered(SHORT), random_ids(2, LENGTH, SHORT)
    hits = Hits(torch.tensor([19, 30]), torch.tensor([21, 30]))
    _, ctx = run_replayed(model, ids, None, hits)
    queries = torch.arange(LENGTH)
    indexer_loss(model, ctx, queries, dense=dense).backward()
    assert reached(model) and all(".indexer." in name for name in reached(model))
    expected = torch.stack([scored_divergence(model, ctx, queries, source) for source in (1, 2, 4)]).mean()
    if dense:
        torch.testing.assert_close(indexer_loss(model, ctx, queries), expected, rtol=0, atol=1e-12)


def scored_divergence(model: Model, ctx, queries: Tensor, source: int) -> Tensor:
    """The dense loss from the keys in the context."""
    block, teacher = model.layers[source], teachers(model, ctx, queries)[source]
    x, latent = (ctx.trace[f"layers.{source}.attn.{name}"] for name in ("input", "query_latent"))
    q, weight = block.indexer.queries(x, latent, ctx.rotation(block.rope, x.dtype))
    scores = index_scores(q, weight, ctx.entries(block.layer.kv_source).keys.all())
    log_share = scores.masked_fill(~teacher.visible, -torch.inf).log_softmax(-1).masked_fill(~teacher.visible, 0)
    kl = (torch.xlogy(teacher.mass, teacher.mass) - teacher.mass * log_share).sum(-1)
    return kl.sum() / teacher.sighted.sum()


@pytest.mark.parametrize(("found", "prompt", "message"), [
    ([3], [2], "row 0: 3 tokens found of a prompt of 2"), ([-1], [2], "row 0: -1 tokens found"),
    ([0, 0], [1, LENGTH + 1], "row 1: a prompt of 38 tokens in a row of 37"), ([0], [0], "row 0: a prompt of 0 tokens"),
])  # fmt: skip
def test_hits_that_cannot_be_are_refused(model, found, prompt, message):
    hits = Hits(torch.tensor(found), torch.tensor(prompt))
    with pytest.raises(ValueError, match=message):
        run_replayed(model, random_ids(len(found), LENGTH, SHORT), None, hits)
