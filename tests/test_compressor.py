"""The compressor: which tokens form an entry, how they are pooled, where it stands and who sees it."""

from __future__ import annotations

import math

import pytest
import torch
from goldens import load
from models import NANO, context, random_ids, scatter, scattered, traced

from tinyds41.formats import GLOBAL, INDEX
from tinyds41.model.block import Carry
from tinyds41.model.compressor import Compressor
from tinyds41.model.rope import inverse_frequencies

UNITS = load("units")
FLOATS = NANO.replace(quantize_cache=False)
# Ratio 2 in layer 2, ratio 1 in layer 4.
SOURCES = [(2, 2), (4, 1)]


def source_of_ratio(ratio: int):
    """Nano with layer 2 as a Full layer of that ratio."""
    return FLOATS.replace(compress_ratios=[0, 0, ratio, ratio, 1, 1, 1, 1])


def plain_latent(compressor: Compressor, tokens: torch.Tensor) -> torch.Tensor:
    """One group [m,D] -> [C]: a weighted mean per channel, written out."""
    c, z = compressor.project(tokens)
    pooled = []
    for channel in range(c.shape[1]):
        weight = [1.0] if z is None else [math.exp(x) for x in z[:, channel].tolist()]
        pooled.append(sum(w * x for w, x in zip(weight, c[:, channel].tolist(), strict=True)) / sum(weight))
    rms = math.sqrt(sum(x * x for x in pooled) / len(pooled))
    return torch.tensor(pooled, dtype=c.dtype) / rms * compressor.norm.weight


@pytest.mark.parametrize("ratio", [1, 2, 4])
def test_pooled_groups_equal_the_golden(ratio):
    """1e-6: float32 data of values up to 3. Of 11 tokens one (ratio 2) or three (ratio 4) wait."""
    part = {name.split(".", 1)[1]: tensor for name, tensor in UNITS.items() if name.startswith(f"compressor{ratio}.")}
    compressor = Compressor(NANO.replace(hidden_size=16), ratio)
    compressor.load_state_dict({name: part[name] for name in compressor.state_dict()})
    c, z = compressor.project(part["x"])
    n_groups = 11 // ratio
    rows = [None if x is None else x[:, : n_groups * ratio].unflatten(1, (n_groups, ratio)) for x in (c, z)]
    torch.testing.assert_close(compressor.latent(*rows), part["y"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("ratio", [1, 2, 3, 4])
def test_entries_equal_the_equations_at_every_length_around_a_group(ratio):
    """Lengths 1, m-1, m, m+1, 2m-1, 2m+1: an unfinished group gives no entry. 1e-12 in float64."""
    config = source_of_ratio(ratio)
    model = scattered(config)
    frequencies = inverse_frequencies(config, compressed=True)
    for length in sorted({1, ratio - 1, ratio, ratio + 1, 2 * ratio - 1, 2 * ratio + 1} - {0}):
        trace = traced(model, random_ids(1, length), "layers.2.*")
        latent, entries = (trace[f"layers.2.compressor.{name}"] for name in ("latent", "global_kv"))
        assert latent.shape == entries.shape == (1, length // ratio, 32)
        x = trace["layers.2.attn.input"][0]
        for j in range(length // ratio):
            with torch.no_grad():
                expected = plain_latent(model.layers[2].compressor, x[j * ratio : (j + 1) * ratio])
            torch.testing.assert_close(latent[0, j], expected, rtol=0, atol=1e-12)
            # An entry stands at the position of its first token.
            pairs = torch.view_as_complex(expected[16:].view(8, 2)) * torch.exp(1j * frequencies * j * ratio)
            turned = torch.cat([expected[:16], torch.view_as_real(pairs).flatten()])
            torch.testing.assert_close(entries[0, j], turned, rtol=0, atol=1e-12)


def test_entries_are_pooled_from_what_attention_reads_in_every_mode():
    """Also where V4's mode gives attention its own mix; 1e-12 in float64."""
    for mode in ("single_pass", "multi_pass", "residual"):
        model = scattered(FLOATS.replace(mhc_mode=mode))
        trace = traced(model, random_ids(1, 6), "layers.4.*")
        with torch.no_grad():
            c, _ = model.layers[4].compressor.project(trace["layers.4.attn.input"])
            expected = model.layers[4].compressor.latent(c.unsqueeze(2), None)
        torch.testing.assert_close(trace["layers.4.compressor.latent"], expected, rtol=0, atol=1e-12)


def test_an_unfinished_group_leaves_the_model_finite():
    """One token and ratio 2: no entry anywhere in layer 2, and attention goes on with its window."""
    trace = traced(scattered(), random_ids(2, 1))
    assert trace["layers.2.compressor.global_kv"].shape == (2, 0, 32)
    assert trace["layers.2.indexer.selection"].shape[-1] == 0
    assert trace["logits"].isfinite().all()


@pytest.mark.parametrize(("source", "ratio"), SOURCES)
def test_a_query_sees_the_groups_that_are_complete(source, ratio):
    """Entry j is first seen at position (j+1)m - 1; with room for all, the selection is what is visible."""
    trace = traced(scattered(NANO.replace(index_topk=64)), random_ids(1, 13), "*.selection")
    for position, picks in enumerate(trace[f"layers.{source}.indexer.selection"][0].tolist()):
        assert [pick for pick in picks if pick >= 0] == list(range((position + 1) // ratio)), position


@pytest.mark.parametrize(("source", "ratio"), SOURCES)
def test_index_keys_come_from_the_latent_before_its_rotation(source, ratio):
    """Key = rope(norm(W latent)) at the same position; 1e-12 in float64."""
    model = scattered(FLOATS)
    trace = traced(model, random_ids(1, 9), f"layers.{source}.*")
    latent, indexer = trace[f"layers.{source}.compressor.latent"][0], model.layers[source].indexer
    with torch.no_grad():
        rows = latent @ indexer.wk.weight.T
        rows = rows / rows.square().mean(-1, keepdim=True).sqrt() * indexer.k_norm.weight
    positions = torch.arange(rows.shape[0])[:, None] * ratio
    pairs = torch.view_as_complex(rows[:, 16:].unflatten(1, (8, 2)).contiguous())
    pairs = pairs * torch.exp(1j * positions * inverse_frequencies(NANO, compressed=True))
    expected = torch.cat([rows[:, :16], torch.view_as_real(pairs).flatten(1)], 1)
    torch.testing.assert_close(trace[f"layers.{source}.indexer.keys"][0], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("source", "ratio"), SOURCES)
def test_entries_and_keys_are_rounded_once_after_rotation(source, ratio):
    """The same inputs without quantisers, rounded here: equal bit for bit."""
    x = torch.randn(1, 8, 32, dtype=torch.float64)
    entries = []
    for config in (FLOATS, NANO):
        ctx = context(config, 8)
        with torch.no_grad():
            scattered(config).layers[source].prepare(Carry.start(x, 4), ctx)
        entries.append(ctx.entries(source))
    assert torch.equal(GLOBAL.fake_quant(entries[0].kv.all()), entries[1].kv.all())
    assert torch.equal(INDEX.fake_quant(entries[0].keys.all()), entries[1].keys.all())
    assert not torch.equal(entries[0].kv.all(), entries[1].kv.all())


def test_the_gate_is_softmaxed_in_float32():
    """Two bfloat16 gates one step apart: shares rounded to bfloat16 would give another mean."""
    compressor = Compressor(NANO, 2).bfloat16()
    scatter(compressor)
    c, z = torch.randn(1, 1, 2, 32).bfloat16(), torch.randn(1, 1, 2, 32).bfloat16()
    share = z.float().softmax(2)
    expected = compressor.norm((share * c.float()).sum(2).bfloat16())
    assert torch.equal(compressor.latent(c, z), expected)


def test_ratio_one_has_no_gate():
    assert Compressor(NANO, 1).wgate is None
    assert Compressor(NANO, 2).wgate is not None


def test_inputs_of_another_width_are_refused():
    with pytest.raises(ValueError, match=r"expected \[\.\.\., 32\], got \(1, 2, 16\)"):
        Compressor(NANO, 2).project(torch.zeros(1, 2, 16))
