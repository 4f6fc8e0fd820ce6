"""The drafter against the goldens, the slow definition, and its traps S5 and S6."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import pytest
import torch
from goldens import load
from models import NANO, dspark_model, random_ids, reached, scattered
from torch import Tensor

from tinyds41 import reference, reference_dspark
from tinyds41.checkpoint.names import to_released
from tinyds41.model.context import Sequence
from tinyds41.model.draft_context import DraftContext
from tinyds41.model.dspark import DSpark
from tinyds41.model.transformer import Model

GOLDEN = load("dspark_golden")
TOLERANCE = 1e-12  # sums in another order, in float64


@dataclass
class Run:
    """The goldens' five blocks through a model: rows are anchors."""

    model: Model
    projected: Tensor
    hidden: Tensor  # [5,5,D]
    base: Tensor  # [5,5,V]
    streams: list[Tensor]  # that leave each block


@cache
def run(dtype: torch.dtype, quantize: bool, grad: bool = False) -> Run:
    """With gradients PyTorch computes, without them NumPy does where few tokens are concerned."""
    model = dspark_model(dtype, quantize_cache=quantize)
    layers = model.config.dspark_target_layer_ids
    features = dict(zip(layers, GOLDEN["target_hidden_states"].to(dtype).split(32, -1), strict=True))
    anchors = GOLDEN["anchors"][0].long()
    with torch.set_grad_enabled(grad):
        draft = model.drafter
        projected = draft.project(features)
        text = Sequence(model.config, GOLDEN["context_ids"].long())
        rows = draft.target_rows(projected, text)
        ctx = DraftContext.at(model.config, rows, text.positions, (torch.zeros_like(anchors), anchors))
        streams: list[Tensor] = []
        for block in draft:
            block.register_forward_hook(lambda module, given, carry: streams.append(carry.streams))
        hidden, base = model.draft(by_anchor("noise_ids").long()[:, 0], ctx)
        return Run(model, projected, hidden, base, streams)


def by_anchor(name: str) -> Tensor:
    return GOLDEN[name][0].unflatten(0, (5, 5))


# ---- goldens ----


@pytest.mark.parametrize("quantize", [False, True], ids=["floats", "quantised"])
@pytest.mark.parametrize("grad", [False, True])
def test_float64_states_are_equal(quantize, grad):
    """1e-9 is what the goldens promise. The dropped block, which sees no text, is the last one."""
    expected = by_anchor("normalized_f64" if quantize else "normalized_noquant_f64")
    found = run(torch.float64, quantize, grad)
    normed = found.model.drafter.last.norm(found.hidden)
    torch.testing.assert_close(normed.detach(), expected, rtol=0, atol=1e-9)


def test_float32_states_without_quantisers():
    """1e-3: over ten times the difference of two float32 implementations."""
    found = run(torch.float32, False)
    normed = found.model.drafter.last.norm(found.hidden)
    torch.testing.assert_close(normed.detach(), by_anchor("normalized_noquant"), rtol=0, atol=1e-3)


def test_float32_states_with_quantisers_in_the_median():
    """A value on a rounding midpoint may fall the other way and move a block: the median is the test."""
    found = run(torch.float32, True)
    difference = (found.model.drafter.last.norm(found.hidden) - by_anchor("normalized")).abs().amax(-1)
    assert difference.median() < 1e-3


def test_features_are_projected_then_normed():
    """1e-5: sums of 96 float32 products."""
    found = run(torch.float32, True).projected
    torch.testing.assert_close(found.detach(), GOLDEN["projected_target"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("block", [0, 1, 2])
def test_streams_of_every_block(block):
    """Those that leave it. 1e-3: the golden is a float32 run."""
    size = run(torch.float64, True).streams[block].abs().mean((-1, -2)).float()
    torch.testing.assert_close(size, by_anchor(f"streams_meanabs.stage{block}"), rtol=0, atol=1e-3)


def test_base_logits_and_the_markov_bias():
    """1e-3 as above; the golden's biases follow given tokens."""
    found = run(torch.float64, True)
    torch.testing.assert_close(found.base.detach().float(), by_anchor("base_logits"), rtol=0, atol=1e-3)
    bias = found.model.drafter.markov(by_anchor("previous_token_ids").long())
    torch.testing.assert_close(bias.detach().float(), by_anchor("transition_logits"), rtol=0, atol=1e-5)


def test_confidence_reads_the_state_before_the_norm():
    found = run(torch.float64, True)
    logits = found.model.drafter.confidence(found.hidden, by_anchor("previous_token_ids").long()).detach().float()
    torch.testing.assert_close(logits, by_anchor("confidence_raw"), rtol=0, atol=1e-3)
    assert (logits - by_anchor("confidence_nemo")).abs().max() > 0.1


def test_the_greedy_chain_is_biased_by_its_own_tokens():
    found = run(torch.float64, True)
    first = by_anchor("previous_token_ids").long()[:, 0]
    weights = to_released(found.model.state_dict())
    chain = reference_dspark.greedy_chain(found.model.config, weights, found.base, first)
    assert torch.equal(chain.int(), GOLDEN["greedy_chain"])


# ---- the slow definition ----


def anchored(model: Model, ids: Tensor, rows: list[int], tokens: list[int], documents: Tensor | None = None):
    """States and base logits of blocks behind these tokens of these rows, as training computes them."""
    ctx = Sequence(model.config, ids, documents)
    carry = model.decode(model.encode(ids, ctx), ctx)
    anchors = torch.tensor(rows), torch.tensor(tokens)
    draft_ctx = DraftContext.at(model.config, model.target_rows(carry, ctx), ctx.positions, anchors)
    return model.draft(ids[anchors], draft_ctx)


def slow(model: Model, ids: Tensor, row: int, token: int) -> tuple[Tensor, Tensor]:
    weights, record = to_released(model.state_dict()), {}
    reference.forward(model.config, weights, ids[row : row + 1], record=record)
    features = reference_dspark.target_features(model.config, weights, record)
    return reference_dspark.draft(model.config, weights, features, ids[row, token : token + 1], token)


@pytest.fixture(scope="module")
def model() -> Model:
    return scattered(draft=True)


@pytest.mark.parametrize("grad", [False, True])
def test_blocks_equal_the_slow_definition(model, grad):
    """Anchors at 0, below, at and above W = 4, several of one row, in two rows."""
    ids = random_ids(2, 13)
    rows, tokens = [0, 0, 0, 1, 1, 0, 1], [0, 1, 3, 4, 5, 12, 12]
    with torch.set_grad_enabled(grad):
        hidden, base = anchored(model, ids, rows, tokens)
    for found_hidden, found_base, row, token in zip(hidden, base, rows, tokens, strict=True):
        expected_hidden, expected_base = slow(model, ids, row, token)
        torch.testing.assert_close(found_hidden, expected_hidden[0], rtol=0, atol=TOLERANCE)
        torch.testing.assert_close(found_base, expected_base[0], rtol=0, atol=TOLERANCE * 10)


@pytest.mark.parametrize("token", [0, 1, 3, 4, 12])
def test_one_block_alone_equals_the_slow_definition(model, token):
    """As in a session: few enough tokens for NumPy."""
    ids = random_ids(1, 13)
    with torch.no_grad():
        found = anchored(model, ids, [0], [token])
    for x, expected in zip(found, slow(model, ids, 0, token), strict=True):
        torch.testing.assert_close(x, expected, rtol=0, atol=TOLERANCE * 10)


def test_heads_equal_the_slow_definition(model):
    hidden, previous = torch.randn(3, 5, 32, dtype=torch.float64), random_ids(3, 5)
    weights = to_released(model.state_dict())
    bias = reference_dspark.markov_bias(NANO, weights, previous)
    torch.testing.assert_close(model.drafter.markov(previous), bias, rtol=0, atol=TOLERANCE)
    logits = reference_dspark.confidence(NANO, weights, hidden, previous)
    torch.testing.assert_close(model.drafter.confidence(hidden, previous), logits, rtol=0, atol=TOLERANCE)


def test_packed_documents_equal_the_documents_alone(model):
    """T1: features of the document before are not there, positions begin anew."""
    ids, documents = random_ids(1, 12), torch.tensor([[0] * 5 + [1] * 7])
    packed = anchored(model, ids, [0, 0, 0], [5, 7, 11], documents)
    alone = anchored(model, ids[:, 5:], [0, 0, 0], [0, 2, 6])
    for found, expected in zip(packed, alone, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE * 10)


# ---- traps ----


def unread(rows: int = 1) -> DraftContext:
    """A context without any text."""
    none = torch.zeros(rows).long()
    return DraftContext(NANO, [torch.zeros(rows, 0, 32, dtype=torch.float64)] * 3, none, none)


def test_a_later_slot_changes_an_earlier_one(model):
    """S6: the block is not causal."""
    ids = model.drafter.block_ids(torch.tensor([7, 7]))
    ids[1, -1] = 9
    hidden = model.drafter(model.embed(ids), unread(2))
    assert ((hidden[0] - hidden[1]).abs().amax(-1) > 1e-6).all()


@pytest.mark.parametrize("layer", [1, 2, 5])
def test_features_are_the_mean_of_the_streams_before_attention_and_behind_engram(layer):
    """S5, by hooks: what enters attention's hyper-connection; layer 1 has Engram, layer 2 writes global entries."""
    model = scattered(NANO.replace(dspark_target_layer_ids=[layer]), draft=True)
    seen: list[Tensor] = []
    model.layers[layer].hc_attn.register_forward_hook(lambda module, given, out: seen.append(given[0]))
    ids = random_ids(2, 9)
    ctx = Sequence(model.config, ids)
    carry = model.decode(model.encode(ids, ctx), ctx)
    assert carry.features is not None and list(carry.features) == [layer]
    torch.testing.assert_close(carry.features[layer], seen[0].mean(2), rtol=0, atol=TOLERANCE)


def test_the_anchors_own_features_are_not_seen_but_those_of_the_token_before_it_are(model):
    """S5: features end at p - 1. What comes from p on may change without a trace."""
    ids = random_ids(1, 13)
    changed, before = ids.clone(), ids.clone()
    changed[0, 9:] = (changed[0, 9:] + 1) % 60 + 4
    changed[0, 8] = ids[0, 8]
    before[0, 7] = (before[0, 7] + 1) % 60 + 4
    first, second, third = (anchored(model, x, [0], [8])[0] for x in (ids, changed, before))
    assert torch.equal(first, second)
    assert (first - third).abs().max() > 1e-6


def test_exactly_w_target_rows_are_seen():
    """Rows that an anchor of position 9 may read: those of 5 to 8 with W = 4."""
    rows = [torch.randn(1, 12, 32, dtype=torch.float64) for _ in range(3)]
    positions = torch.arange(12).unsqueeze(0)
    config = NANO.replace(quantize_cache=False)
    for past, expected in ((9, range(5, 9)), (2, range(2)), (0, range(0))):
        ctx = DraftContext.at(config, rows, positions, (torch.tensor([0]), torch.tensor([past])))
        own = torch.randn(1, 5, 32, dtype=torch.float64)
        window = ctx.add_window(1, own)
        first, last = int(window.first[0, 0]), int(window.last[0, 0])
        assert (window.first == first).all() and (window.last == last).all() and window.first.shape == (1, 5)
        seen = window.rows.all()[0, first : last + 1]
        assert torch.equal(seen, torch.cat([rows[1][0, list(expected)], own[0]]))
        assert ctx.positions.tolist() == [list(range(past, past + 5))]


# ---- training ----


def test_gradients_reach_every_weight_of_the_drafter_and_none_of_detached_features(model):
    ids = random_ids(2, 12)
    ctx = Sequence(NANO, ids)
    with torch.no_grad():
        carry = model.decode(model.encode(ids, ctx), ctx)
    anchors = torch.tensor([0, 1, 1, 0, 1, 0]), torch.tensor([1, 3, 8, 6, 10, 11])
    draft_ctx = DraftContext.at(NANO, model.target_rows(carry, ctx), ctx.positions, anchors)
    hidden, base = model.draft(ids[anchors], draft_ctx)
    previous = random_ids(6, 5)
    (base + model.drafter.markov(previous)).logsumexp(-1).sum().backward(retain_graph=True)
    model.drafter.confidence(hidden, previous).sum().backward()
    wanted = {f"mtp.{name}" for name, weight in model.drafter.named_parameters() if weight.requires_grad}
    assert {name for name in reached(model) if name.startswith("mtp.")} == wanted
    assert {name for name in reached(model) if not name.startswith("mtp.")} == {"embed.weight", "head.weight"}
    model.zero_grad()


# ---- refusals ----


def test_a_config_without_draft_blocks_has_no_drafter():
    config = NANO.replace(num_nextn_predict_layers=0)
    with pytest.raises(ValueError, match="num_nextn_predict_layers=0: this config has no draft blocks"):
        Model(config, draft=True)
    with pytest.raises(ValueError, match="num_nextn_predict_layers=0"):
        Model(config).add_draft()


def test_a_model_without_a_drafter_says_so():
    with pytest.raises(ValueError, match=r"has no drafter: Model\(config, draft=True\)"):
        Model(NANO).draft(torch.tensor([1]), None)


def test_features_nobody_collected_are_missed(model):
    ids = random_ids(1, 5)
    ctx = Sequence(NANO, ids)
    with pytest.raises(ValueError, match="carry holds no features"):
        model.target_rows(model.encode(ids, ctx, features=False), ctx)
    carry = model.encode(ids, Sequence(NANO, ids))
    with pytest.raises(ValueError, match=r"features of the target layers \[5, 6, 7\] are missing"):
        model.target_rows(carry, ctx)


def test_target_rows_of_another_number_of_blocks_are_refused():
    rows = torch.zeros(1, 5, 32)
    with pytest.raises(ValueError, match="3 draft blocks, at most sliding_window=4"):
        DraftContext(NANO, [rows] * 3, torch.zeros(1).long(), torch.zeros(1).long())
    with pytest.raises(ValueError, match="expected those of 3 draft blocks"):
        DraftContext(NANO, [rows[:, :4]] * 2, torch.zeros(1).long(), torch.zeros(1).long())


@pytest.mark.parametrize(("changes", "said"), [
    ({"vocab_size": 65, "engram_compressed_vocab_size": 65}, r"vocab_size=64 \(the model's is 65\)"),
    ({"q_lora_rank": 8}, r"q_lora_rank=16 \(the model's is 8\)"),
    ({"dspark_target_layer_ids": [4, 6, 7]}, r"dspark_target_layer_ids=\(5, 6, 7\)"),
])  # fmt: skip
def test_a_drafter_of_another_model_is_refused(model, changes, said):
    with pytest.raises(ValueError, match=f"the drafter belongs to another model: .*{said}"):
        Model(NANO.replace(**changes), dtype=torch.float64).add_draft(model.drafter)
    with pytest.raises(ValueError, match=r"drafter is torch\.float64 on cpu, the model torch\.float32 on cpu"):
        Model(NANO).add_draft(model.drafter)


def test_a_drafter_sees_nothing_but_target_rows_and_its_own():
    ctx, x = unread(), torch.zeros(1)
    calls = (ctx.groups, 2, x, None), (ctx.entries, 2), (ctx.add_entries, 2, x, x), (ctx.look_back, x, 2)
    for method, *arguments in calls:
        with pytest.raises(NotImplementedError, match="a draft block sees target rows and its own slots"):
            method(*arguments)
    assert ctx.look_ahead(2) is None


# ---- with a model ----


def test_a_drafter_changes_no_weight_and_no_logit_of_the_backbone():
    plain, drafting = Model(NANO, seed=3), Model(NANO, seed=3, draft=True)
    own, ids = dict(drafting.named_parameters()), random_ids(2, 9)
    assert all(torch.equal(weight, own[name]) for name, weight in plain.named_parameters())
    assert {name.split(".")[0] for name in own.keys() - dict(plain.named_parameters())} == {"mtp"}
    assert torch.equal(plain(ids), drafting(ids))


def test_a_drafter_that_comes_later_has_the_same_weights():
    drafting, later = Model(NANO, seed=3, draft=True), Model(NANO, seed=3)
    added = later.add_draft(seed=3)
    assert isinstance(added, DSpark) and later.mtp is added
    for name, weight in drafting.named_parameters():
        assert torch.equal(weight, later.get_parameter(name)), name
    assert not torch.equal(added.last.markov_head.head.weight, later.add_draft(seed=4).last.markov_head.head.weight)


def test_features_travel_only_where_they_are_wanted(model):
    ids, plain = random_ids(1, 7), Model(NANO)

    def collected(model: Model, **options) -> list[int] | None:
        ctx = Sequence(NANO, ids)
        features = model.decode(model.encode(ids, ctx, **options), ctx).features
        return None if features is None else list(features)

    assert collected(plain) is None and collected(model, features=False) is None
    assert collected(plain, features=True) == collected(model) == [5, 6, 7]


def test_features_are_cut_and_joined_with_their_tokens():
    model, ids = scattered(NANO.replace(dspark_target_layer_ids=[1, 3]), draft=True), random_ids(1, 9)
    carry = model.encode(ids, Sequence(model.config, ids))
    assert carry.features is not None
    again = carry.last(9)
    first, rest = carry.last(9), carry.last(4)
    first = type(carry)(first.streams[:, :5], first.mix[:, :5], first.collapsed[:, :5], first.lookback[:, :5], {},
                        {layer: x[:, :5] for layer, x in carry.features.items()})  # fmt: skip
    joined = first.join(rest)
    for layer in (1, 3):
        assert torch.equal(joined.features[layer], again.features[layer])
        assert torch.equal(carry.last(2).features[layer], carry.features[layer][:, -2:])
