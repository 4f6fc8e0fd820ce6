"""Properties of the whole slow model that no stored number shows: causality, packing, modes, gradients."""

from __future__ import annotations

import pytest
import torch
from released import random_weights

from tinyds41 import reference, reference_formulas
from tinyds41.config import Config

NANO = Config.preset("nano")


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    return random_weights(NANO)


def tokens(length: int, *, rows: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randint(4, NANO.vocab_size, (rows, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("t", [6, 7, 12])
def test_a_later_token_changes_no_earlier_logit(weights, t):
    """Perturbed at both phases of a ratio-2 group: exact before t, different from t on."""
    ids = tokens(15)
    other = ids.clone()
    other[0, t] = (ids[0, t] - 4 + 30) % 60 + 4
    change = (reference.forward(NANO, weights, ids) - reference.forward(NANO, weights, other)).abs().amax(-1)[0]
    assert change[:t].max() < 1e-12
    assert change[t:].min() > 1e-6


def test_rows_of_a_batch_do_not_see_each_other(weights):
    ids = tokens(11, rows=2)
    both = reference.forward(NANO, weights, ids)
    for row in range(2):  # 1e-10: other row counts may sum in another order
        alone = reference.forward(NANO, weights, ids[row : row + 1])
        torch.testing.assert_close(both[row : row + 1], alone, rtol=0, atol=1e-10)


def test_packed_documents_equal_the_documents_alone(weights):
    """Odd lengths, so that groups of two and pool blocks would cross the seams; ids of documents may repeat."""
    ids = tokens(17)
    documents = torch.tensor([[4] * 5 + [7] * 1 + [4] * 8 + [-1] * 3])
    record: dict = {}
    packed = reference.forward(NANO, weights, ids, documents=documents, record=record)
    for start, end in ((0, 5), (5, 6), (6, 14)):
        torch.testing.assert_close(packed[:, start:end], reference.forward(NANO, weights, ids[:, start:end]))
    assert list(record) == [(0, 0), (0, 5), (0, 6), (0, 14)]
    assert record[0, 6]["layers.2.entries"].shape[1] == 4


def test_padding_and_pads_are_dead_for_engram(weights):
    """A negative document id and the pad token itself: no look-back, gate shut."""
    ids, pads = tokens(4), torch.full((1, 4), NANO.engram_pad_token_id)
    record: dict = {}
    reference.forward(NANO, weights, ids, documents=torch.full((1, 4), -1), record=record)
    as_pads: dict = {}
    reference.forward(NANO, weights, pads, record=as_pads)
    name = "layers.1.engram_rows"
    assert torch.equal(record[0, 0][name], as_pads[name])
    no_engram = NANO.replace(engram_layer_ids=[], engram_num_embeddings=[])
    expected = reference.forward(no_engram, weights, pads)
    torch.testing.assert_close(reference.forward(NANO, weights, pads), expected, rtol=0, atol=0)


def test_tokens_of_one_compressed_id_share_their_engram_rows(weights):
    token_map = torch.arange(NANO.vocab_size).clamp(max=40)
    records: list[dict] = [{}, {}]
    for record, last in zip(records, (50, 60), strict=True):
        reference.forward(NANO, weights, torch.tensor([[9, 10, last]]), token_map=token_map, record=record)
    assert torch.equal(records[0]["layers.3.engram_rows"], records[1]["layers.3.engram_rows"])


def test_picks_are_visible_and_inside_the_pool(weights):
    record: dict = {}
    reference.forward(NANO, weights, tokens(24, rows=2), record=record)
    for layer, ratio in ((2, 2), (4, 1), (6, 1)):
        picks = record[f"layers.{layer}.selection"]
        visible = ((torch.arange(24) + 1) // ratio)[:, None]
        assert (picks < visible).all()
        assert torch.equal((picks >= 0).sum(-1), visible[:, 0].clamp(max=3).expand(2, -1))
    pool, picks = record["layers.4.pool"], record["layers.6.selection"]
    assert (pool.gather(-1, picks.clamp(min=0) // 2) | (picks < 0)).all()
    unrestricted = reference_formulas.select_top(record["layers.4.index_scores"], 3)
    assert torch.equal(record["layers.4.selection"], unrestricted)


def test_query_chunks_change_no_result(weights, monkeypatch):
    """A chunk that does not divide the length; 1e-12 for another order of summation."""
    ids = tokens(13)
    whole = reference.forward(NANO, weights, ids)
    monkeypatch.setattr(reference_formulas, "QUERY_CHUNK", 5)
    torch.testing.assert_close(reference.forward(NANO, weights, ids), whole, rtol=0, atol=1e-12)


def test_single_pass_reads_with_the_previous_mix_and_multi_pass_with_its_own(weights):
    streams = torch.randn(1, 2, 4, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    mix = torch.tensor([0.0, 0.0, 1.0, 0.0], dtype=torch.float64).expand(1, 2, 4)
    w = lambda name: weights[f"layers.2.{name}"]
    fn, base, scale = (w(f"hc_ffn_{part}") for part in ("fn", "base", "scale"))
    pre, *_ = reference_formulas.hyper_coefficients(NANO, streams, fn, base, scale)
    for mode, reading in (("single_pass", mix), ("multi_pass", pre)):
        seen: list[torch.Tensor] = []
        _, after = reference.sub_layer(
            NANO.replace(mhc_mode=mode), streams, mix, w, "ffn", lambda x, seen=seen: seen.append(x) or x)  # fmt: skip
        u = reference_formulas.read_streams(streams, reading)
        torch.testing.assert_close(seen[0], reference_formulas.rms_norm(u, w("ffn_norm.weight"), 1e-20))
        assert torch.equal(after, pre)


def test_the_first_sub_layer_reads_stream_zero(monkeypatch):
    """The streams start equal: only an Engram module before layer 0, with a gate per stream, tells them apart."""
    config = NANO.replace(engram_layer_ids=[0], engram_num_embeddings=[156])
    weights, record, seen = random_weights(config), {}, []
    attention = reference.attention
    monkeypatch.setattr(reference, "attention", lambda *args, **more: seen.append(args[2]) or attention(*args, **more))
    ids = tokens(5)
    reference.forward(config, weights, ids, record=record)
    streams = record["layers.0.streams"]  # behind Engram
    assert not torch.equal(streams[:, :, 0], streams[:, :, 1])
    norm = weights["layers.0.attn_norm.weight"]
    torch.testing.assert_close(seen[0], reference.rms_norm(streams[:, :, 0], norm, 1e-20))


def test_residual_mode_is_a_plain_residual(weights):
    """x = x + F(norm(x)) by hand, without Engram, whose gates differ between streams."""
    config = NANO.replace(engram_layer_ids=[], engram_num_embeddings=[], mhc_mode="residual")
    ids, record = tokens(9), {}
    x = weights["embed.weight"][ids]
    for plan in config.plan():
        w = lambda name, plan=plan: weights[f"layers.{plan.layer}.{name}"]
        x = x + reference.attention(config, plan, reference.rms_norm(x, w("attn_norm.weight"), 1e-20), w, record)
        x = x + reference.mixture(config, plan, reference.rms_norm(x, w("ffn_norm.weight"), 1e-20), w, record)
    expected = reference.rms_norm(x, weights["norm.weight"], 1e-20) @ weights["head.weight"].T
    torch.testing.assert_close(reference.forward(config, weights, ids), expected, rtol=0, atol=1e-10)


def test_gradients_equal_finite_differences(weights):
    """All weights at once along a random direction, without quantisers; 1e-6 relative at a step of 1e-6."""
    config, ids = NANO.replace(quantize_cache=False, quantize_engram=False), tokens(11)
    loss = lambda w: reference.forward(config, w, ids).square().mean()
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in weights.items()}
    loss(leaves).backward()
    silent = {name for name, leaf in leaves.items() if leaf.grad is None}
    assert silent == {name for name in weights if ".indexer." in name or name.endswith("gate.bias")}
    generator = torch.Generator().manual_seed(1)
    step = {n: 1e-6 * torch.randn(w.shape, generator=generator, dtype=w.dtype) for n, w in weights.items()}
    slope = sum(float((leaf.grad * step[n]).sum()) for n, leaf in leaves.items() if leaf.grad is not None)
    up, down = (float(loss({n: w + sign * step[n] for n, w in weights.items()})) for sign in (1, -1))
    assert (up - down) / 2 == pytest.approx(slope, rel=1e-6)


def test_quantisers_let_gradients_pass(weights):
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in weights.items()}
    reference.forward(NANO, leaves, tokens(11)).square().mean().backward()
    for name in ("layers.2.attn.compressor.wkv.weight", "layers.0.attn.wkv.weight", "layers.1.engram.embed.weight"):
        grad = leaves[name].grad
        assert grad is not None and grad.abs().max() > 0, name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ids": torch.tensor([[1, 64]])}, r"token ids 1\.\.64 leave the vocabulary 0\.\.63"),
        ({"ids": torch.tensor([[-1, 5]])}, r"token ids -1\.\.5 leave"),
        ({"ids": torch.tensor([1, 2])}, r"expected ids \[B,S\] .*\(2,\)"),
        ({"documents": torch.tensor([[1, 2, 3]])}, r"shape of ids \(1, 2\), got \(1, 3\)"),
        ({"token_map": torch.arange(63)}, r"token_map of 64 ids, got \(63,\)"),
        ({"config": NANO.replace(engram_compressed_vocab_size=60)}, r"=60 differs from vocab_size=64: a token_map"),
        ({"weights": {"embed.weight": torch.zeros(1, dtype=torch.bfloat16)}}, "embed.weight is torch.bfloat16"),
    ],
)
def test_wrong_inputs_are_named(weights, change, message):
    arguments = {"config": NANO, "weights": weights, "ids": torch.tensor([[1, 2]]), **change}
    with pytest.raises(ValueError, match=message):
        reference.forward(**arguments)
