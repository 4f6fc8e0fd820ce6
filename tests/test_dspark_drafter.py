"""What the model's own drafter proposes: against the slow definition, for several rows, depths and temperatures."""

from __future__ import annotations

import pytest
import torch
from models import NANO, random_ids, scattered
from sessions import DRAFTING, fed_session
from torch import Tensor

from tinyds41 import reference, reference_dspark
from tinyds41.checkpoint.names import to_released
from tinyds41.infer.draft import Draft, Drafter, Sampling
from tinyds41.infer.dspark_drafter import DSparkDrafter
from tinyds41.infer.session import Session
from tinyds41.model.transformer import Model
from tinyds41.tokenizer import Tokenizer

GREEDY = Sampling(temperature=0)
TOLERANCE = 1e-11  # sums in another order, in float64, of logits that spread over 30


@pytest.fixture(scope="module")
def model() -> Model:
    return scattered(DRAFTING, draft=True)


def seeded(rows: int, seed: int = 0) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed + row) for row in range(rows)]


def propose(model: Model, ids: Tensor, depth: int = 5, sampling: Sampling = GREEDY, seed: int = 0) -> Draft:
    """The last id of each row is the anchor."""
    session = fed_session(model, ids[:, :-1])
    return DSparkDrafter(model).propose(session, ids[:, -1], depth, sampling, seeded(len(ids), seed))


def slow(model: Model, ids: Tensor) -> tuple[Tensor, Tensor]:
    """States and base logits behind the last id of one row [1,S]."""
    weights, record = to_released(model.state_dict()), {}
    reference.forward(model.config, weights, ids, record=record)
    features = reference_dspark.target_features(model.config, weights, record)
    return reference_dspark.draft(model.config, weights, features, ids[:, -1], ids.shape[1] - 1)


@pytest.mark.parametrize("length", [2, 4, 5, 6, 14])
def test_greedy_drafts_are_the_slow_definitions_chain(model, length):
    ids = random_ids(1, length)
    weights = to_released(model.state_dict())
    hidden, base = slow(model, ids)
    chain = reference_dspark.greedy_chain(model.config, weights, base, ids[:, -1])
    previous = torch.cat([ids[:, -1:], chain[:, :-1]], 1)
    confidence = reference_dspark.confidence(model.config, weights, hidden, previous).sigmoid()
    found = propose(model, ids)
    assert torch.equal(found.tokens, chain) and found.chances is None
    assert found.confidence is not None
    torch.testing.assert_close(found.confidence, confidence, rtol=0, atol=TOLERANCE)


def test_chances_are_those_of_the_biased_logits_and_tokens_are_drawn_from_them(model):
    """Temperature, top-k and top-p as everywhere; token k follows token k - 1 of the same draft."""
    ids, sampling = random_ids(1, 9), Sampling(temperature=3.0, top_k=20, top_p=0.9)
    weights, base = to_released(model.state_dict()), slow(model, ids)[1]
    drafts = [propose(model, ids, sampling=sampling, seed=seed) for seed in range(8)]
    for draft in drafts:
        assert draft.chances is not None and draft.chances.dtype == torch.float64
        previous = torch.cat([ids[:, -1:], draft.tokens[:, :-1]], 1)
        logits = base + reference_dspark.markov_bias(model.config, weights, previous)
        expected = torch.stack([sampling.chances(row) for row in logits[0]])
        torch.testing.assert_close(draft.chances[0], expected, rtol=0, atol=1e-9)
        assert (draft.chances[0].gather(1, draft.tokens[0, :, None]) > 0).all()
    assert len({tuple(draft.tokens[0].tolist()) for draft in drafts}) > 1


def test_draws_follow_the_chances(model):
    """The first token of 2,000 drafts, chi-square of the likeliest ids: 5 classes, 1 % is at 13.3."""
    ids, sampling = random_ids(1, 6), Sampling(temperature=2.0, top_k=5)
    session, drafter, generators = fed_session(model, ids[:, :-1]), DSparkDrafter(model), seeded(1)
    counts, n = torch.zeros(DRAFTING.vocab_size, dtype=torch.float64), 500
    for _ in range(n):
        draft = drafter.propose(session, ids[:, -1], 1, sampling, generators)
        counts[draft.tokens[0, 0]] += 1
    assert draft.chances is not None
    expected = draft.chances[0, 0] * n
    seen = expected > 0
    assert counts[~seen].sum() == 0
    assert ((counts - expected)[seen] ** 2 / expected[seen]).sum() < 13.3


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=2.0, top_k=9)])
def test_a_shorter_draft_is_the_beginning_of_the_whole_one(model, sampling):
    """All noise slots are computed at every depth: the block is not causal."""
    ids = random_ids(2, 9)
    whole = propose(model, ids, 5, sampling)
    for depth in range(1, 5):
        part = propose(model, ids, depth, sampling)
        assert torch.equal(part.tokens, whole.tokens[:, :depth])
        assert part.confidence is not None and whole.confidence is not None
        torch.testing.assert_close(part.confidence, whole.confidence[:, :depth], rtol=0, atol=TOLERANCE)
        assert part.chances is None or torch.equal(part.chances, whole.chances[:, :depth])


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=2.0)])
def test_each_row_gets_the_draft_it_gets_alone(model, sampling):
    """Rows of different length; row b draws from its own generator."""
    texts = [random_ids(1, n, seed=n) for n in (3, 12, 6)]
    width = max(text.shape[1] for text in texts) - 1
    ids, mask = torch.zeros(3, width, dtype=torch.long), torch.zeros(3, width, dtype=torch.bool)
    for b, text in enumerate(texts):
        ids[b, width - text.shape[1] + 1 :], mask[b, width - text.shape[1] + 1 :] = text[0, :-1], True
    session = Session(model)
    session.prefill(ids, mask=mask)
    anchors = torch.stack([text[0, -1] for text in texts])
    together = DSparkDrafter(model).propose(session, anchors, 5, sampling, seeded(3))
    for b, text in enumerate(texts):
        single = propose(model, text, 5, sampling, seed=b)
        assert torch.equal(together.tokens[b], single.tokens[0])
        torch.testing.assert_close(together.confidence[b], single.confidence[0], rtol=0, atol=TOLERANCE)


def test_a_draft_leaves_no_trace_in_the_session(model):
    ids = random_ids(2, 9)
    session = fed_session(model, ids[:, :-1])
    before = session.fingerprint()
    for _ in range(2):
        DSparkDrafter(model).propose(session, ids[:, -1], 5, GREEDY, seeded(2))
    assert session.fingerprint() == before and session.lengths == [8, 8]


def test_after_tokens_are_taken_back_the_draft_is_that_of_the_shorter_text(model):
    ids = random_ids(1, 12)
    session = fed_session(model, ids[:, :9])
    session.extend(ids[:, 9:])
    session.truncate(7)
    found = DSparkDrafter(model).propose(session, ids[:, 7], 5, GREEDY, seeded(1))
    assert torch.equal(found.tokens, propose(model, ids[:, :8]).tokens)
    assert torch.equal(found.confidence, propose(model, ids[:, :8]).confidence)


def test_temperatures_divide_the_confidence_logits_position_by_position(model):
    ids, temperatures = random_ids(1, 9), (0.5, 1.0, 2.0, 4.0, 8.0)
    session, plain = fed_session(model, ids[:, :-1]), propose(model, ids)
    found = DSparkDrafter(model, temperatures).propose(session, ids[:, -1], 3, GREEDY, seeded(1))
    expected = (plain.confidence[:, :3].logit() / torch.tensor([temperatures[:3]], dtype=torch.float64)).sigmoid()
    torch.testing.assert_close(found.confidence, expected, rtol=0, atol=1e-9)


def test_ids_behind_the_tokenizers_are_never_drafted():
    """The model has 300 ids, its tokenizer fewer; one of the others is made the likeliest."""
    tokenizer = Tokenizer.train(["the cat The Cat THE CAT " * 20], 280)
    n_ids = tokenizer.vocab_size
    config = NANO.replace(vocab_size=300, engram_compressed_vocab_size=tokenizer.compressed_vocab_size)
    model = scattered(config, draft=True, tokenizer=tokenizer)
    with torch.no_grad():
        model.head.weight[n_ids:] = model.head.weight[5] * 50
        model.head.weight[n_ids] *= -1
    ids = random_ids(1, 6)
    session = fed_session(model, ids[:, :-1])
    for sampling in (GREEDY, Sampling(temperature=5.0)):
        draft = DSparkDrafter(model).propose(session, ids[:, -1], 5, sampling, seeded(1))
        assert (draft.tokens < n_ids).all()
        if draft.chances is not None:
            assert draft.chances.shape == (1, 5, 300) and (draft.chances[..., n_ids:] == 0).all()


def test_it_is_a_drafter_of_the_block_it_was_trained_with(model):
    drafter: Drafter = DSparkDrafter(model)
    assert drafter.depth == 5


# ---- refusals ----


@pytest.mark.parametrize("depth", [0, -1, 6])
def test_a_draft_beyond_the_trained_block_is_refused(model, depth):
    session = fed_session(model, random_ids(1, 5))
    with pytest.raises(ValueError, match=f"draft length {depth} beyond the trained block: dspark_block_size=5 allows"):
        DSparkDrafter(model).propose(session, torch.tensor([5]), depth, GREEDY, seeded(1))


def test_a_session_of_another_model_is_refused_with_the_reason(model):
    other = DRAFTING.replace(vocab_size=70, engram_compressed_vocab_size=70)
    session = fed_session(scattered(other, draft=True), random_ids(1, 5))
    with pytest.raises(ValueError, match=r"belongs to another model: vocab_size=64 \(the model's is 70\)"):
        DSparkDrafter(model).propose(session, torch.tensor([5]), 5, GREEDY, seeded(1))
    session = fed_session(scattered(DRAFTING, draft=True), random_ids(1, 5))
    with pytest.raises(ValueError, match=r"another model than the session: make it from session\.model"):
        DSparkDrafter(model).propose(session, torch.tensor([5]), 5, GREEDY, seeded(1))


@pytest.mark.parametrize(("anchors", "said"), [([5, 6], r"anchors have shape \(2,\), expected \(1,\)"),
                                               ([64], "anchor 64 is out of range: ids are 0..63"),
                                               ([-1], "anchor -1 is out of range")])  # fmt: skip
def test_anchors_that_are_no_ids_of_the_rows_are_refused(model, anchors, said):
    session = fed_session(model, random_ids(1, 5))
    with pytest.raises(ValueError, match=said):
        DSparkDrafter(model).propose(session, torch.tensor(anchors), 5, GREEDY, seeded(1))


def test_a_model_without_a_drafter_has_none():
    with pytest.raises(ValueError, match="the model has no drafter"):
        DSparkDrafter(Model(NANO))


@pytest.mark.parametrize("temperatures", [(1.0,), (1.0, 1.0, 0.0, 1.0, 1.0)])
def test_impossible_temperatures_are_refused(model, temperatures):
    with pytest.raises(ValueError, match="5 positive numbers are needed, or none"):
        DSparkDrafter(model, temperatures)


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=1.0)])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_an_error(sampling, value):
    model = scattered(DRAFTING, draft=True)
    session = fed_session(model, random_ids(1, 5))
    with torch.no_grad():
        model.drafter.last.norm.weight[0] = value
    with pytest.raises(FloatingPointError, match="logits that are not finite"):
        DSparkDrafter(model).propose(session, torch.tensor([5]), 5, sampling, seeded(1))
