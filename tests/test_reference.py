"""The slow definition against data of two public implementations, then against itself."""

from __future__ import annotations

import math

import pytest
import torch
from goldens import load, toy_a

from tinyds41 import reference
from tinyds41 import reference_formulas as formulas
from tinyds41.config import Config


@pytest.fixture(scope="module")
def golden() -> dict[str, torch.Tensor]:
    return load("toyA_golden")


@pytest.fixture(scope="module")
def units() -> dict[str, torch.Tensor]:
    return load("units")


@pytest.fixture(scope="module")
def unit_engram() -> dict[str, torch.Tensor]:
    return load("engram_unit")


def run_toy_a(golden, dtype: torch.dtype, *, quantize: bool) -> tuple[torch.Tensor, dict]:
    config, weights = toy_a(dtype, quantize_cache=quantize)
    record: dict = {}
    with torch.no_grad():
        logits = reference.forward(config, weights, golden["tokens"].long()[None], record=record)
    return logits[0], record


def all_streams(record: dict) -> torch.Tensor:
    return torch.stack([*(record[f"layers.{layer}.streams"][0] for layer in range(10)), record["streams"][0]])


# ---- Toy A: the whole model ----


@pytest.mark.parametrize("quantize", [False, True], ids=["floats", "quantised"])
def test_toy_a_logits_equal_in_float64(golden, quantize):
    """1e-9 as the goldens promise for float64; 5e-14 was measured on logits that spread over 2."""
    logits, _ = run_toy_a(golden, torch.float64, quantize=quantize)
    expected = golden["logits_f64" if quantize else "logits_noquant_f64"]
    torch.testing.assert_close(logits[golden["f64_positions"].long()], expected, rtol=0, atol=1e-9)


def test_toy_a_streams_equal_in_float64(golden):
    _, record = run_toy_a(golden, torch.float64, quantize=False)
    torch.testing.assert_close(all_streams(record)[:, -1], golden["streams_last_noquant_f64"], rtol=0, atol=1e-9)


def test_toy_a_selections_pools_and_experts_equal(golden):
    _, record = run_toy_a(golden, torch.float64, quantize=True)
    for source in (2, 5, 7, 9):
        assert torch.equal(record[f"layers.{source}.selection"][0], golden[f"topk.{source}"].long()), source
    assert torch.equal(record["layers.5.pool"][0], golden["candidate_blocks.5"].bool())
    for layer in range(10):
        assert torch.equal(record[f"layers.{layer}.experts"][0], golden["router_experts"][layer].long()), layer


def test_toy_a_caches_and_carries_equal(golden):
    """The two caches are exact codes. 2e-6 and 1e-3: float32 data, streams up to 225."""
    _, record = run_toy_a(golden, torch.float64, quantize=True)
    assert torch.equal(record["layers.2.entries"][0].float(), golden["first_compressed_kv"])
    assert torch.equal(record["layers.2.keys"][0].float(), golden["first_index_keys"])
    torch.testing.assert_close(record["mix"][0, -1].float(), golden["final_pre_mix_last"], rtol=0, atol=2e-6)
    weights = torch.stack([record[f"layers.{layer}.expert_weights"][0, -1] for layer in range(10)])
    torch.testing.assert_close(weights.float(), golden["router_weights_last"], rtol=0, atol=2e-6)
    streams = all_streams(record)
    torch.testing.assert_close(streams[:, -1].float(), golden["streams_last"], rtol=0, atol=1e-3)
    torch.testing.assert_close(streams.abs().mean((-1, -2)).float(), golden["streams_meanabs"], rtol=0, atol=1e-3)


def test_toy_a_in_float32_without_quantisers(golden):
    """2e-4: twice what the two peers differ by on random toys (1.1e-4)."""
    logits, _ = run_toy_a(golden, torch.float32, quantize=False)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, golden["logits_noquant"], rtol=0, atol=2e-4)


def test_toy_a_in_float32_with_quantisers(golden):
    """A value on a rounding midpoint may fall the other way and move a few positions: the median is the test."""
    logits, _ = run_toy_a(golden, torch.float32, quantize=True)
    assert (logits - golden["logits"]).abs().amax(-1).median() < 1e-4


# ---- Units ----


def released(name: str, width: int = 64, original: int = 65536) -> Config:
    """A config with the frequencies of the goldens' `name`: only its rotary fields matter."""
    rotary = {"released": 64, "toyA": 16, "toyB": 32}[name]
    scaling = {"rope_type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1}
    return Config.preset("nano").replace(
        head_dim=width, index_head_dim=width, qk_rope_head_dim=rotary,
        rope_scaling={**scaling, "original_max_position_embeddings": original})  # fmt: skip


@pytest.mark.parametrize(("name", "original"), [("released", 65536), ("toyA", 64)])
def test_frequencies_equal_per_kind_of_layer(units, name, original):
    """1e-15 in float64, of values up to 1; the float32 copies round at 6e-8."""
    config = released(name, original=original)
    assert config.rope_scaling is not None
    compressed = formulas.inv_freq(config, 2)
    torch.testing.assert_close(compressed, units[f"yarn.{name}.inv_freq_f64"], rtol=1e-14, atol=0)
    torch.testing.assert_close(formulas.inv_freq(config, 0).float(), units[f"base.{name}.inv_freq"], rtol=1e-6, atol=0)
    ends = formulas.yarn_low_high(config.qk_rope_head_dim, config.compress_rope_theta, config.rope_scaling)
    assert list(ends) == units[f"yarn.{name}.low_high"].tolist()


def test_rotation_turns_adjacent_pairs_and_back(units):
    freq = formulas.inv_freq(toy_a(torch.float32)[0], 2)
    turned = formulas.rotate(units["rope.x"], units["rope.positions"], freq)
    back = formulas.rotate(units["rope.x"], units["rope.positions"], freq, inverse=True)
    torch.testing.assert_close(turned, units["rope.y"], rtol=0, atol=1e-6)
    torch.testing.assert_close(back, units["rope.y_inverse"], rtol=0, atol=1e-6)


def test_rotation_angles_are_exact_near_a_million():
    """Against integer arithmetic: the angle of position 1,048,575 at frequency 2^-20·(2^20 - 1), turned by hand."""
    freq = torch.tensor([1 - 2.0**-20], dtype=torch.float64)
    x = torch.tensor([[[1.0, 0.0]]], dtype=torch.float64)
    angle = (2**20 - 1) ** 2 / 2**20
    turned = formulas.rotate(x, torch.tensor([2**20 - 1]), freq)
    assert turned.flatten().tolist() == pytest.approx([math.cos(angle), math.sin(angle)], abs=1e-9)


@pytest.mark.parametrize("ratio", [1, 2, 4])
def test_compressor_equals_and_leaves_the_unfinished_group(units, ratio):
    """11 tokens: with ratio 2 one, with ratio 4 three of them wait."""
    part = {name.split(".", 1)[1]: x for name, x in units.items() if name.startswith(f"compressor{ratio}.")}
    z = part["x"] @ part["wgate.weight"].T if ratio > 1 else None
    latent = formulas.compress(part["x"] @ part["wkv.weight"].T, z, part["norm.weight"], ratio, 1e-20)
    torch.testing.assert_close(latent, part["y"], rtol=0, atol=1e-6)


def test_hyper_connections_equal(units):
    """Coefficients within float32 rounding; the updates of streams up to 145 are fed the golden coefficients."""
    streams, config = units["hc.streams"], toy_a(torch.float32)[0]
    pre, post, comb = formulas.hyper_coefficients(config, streams, units["hc.fn"], units["hc.base"], units["hc.scale"])
    for name, ours in (("pre", pre), ("post", post), ("comb", comb)):
        torch.testing.assert_close(ours, units[f"hc.{name}"], rtol=0, atol=1e-6)
    expanded = formulas.hyper_update(streams, units["hc.sublayer_out"], units["hc.post"], units["hc.comb"])
    torch.testing.assert_close(expanded, units["hc.expanded"], rtol=1e-6, atol=1e-5)
    collapsed = formulas.read_streams(streams, units["hc.pre"])
    torch.testing.assert_close(collapsed, units["hc.collapsed_by_pre"], rtol=1e-6, atol=1e-5)


def test_pool_keeps_the_best_blocks_and_the_newest(units):
    scores = units["pool.scores"]
    invisible = ~torch.ones(21, 21, dtype=torch.bool).tril()
    pool = formulas.pool_blocks(scores.masked_fill(invisible, -math.inf), 4, 3)
    inside = pool.repeat_interleave(4, -1)[..., :21] & ~invisible
    expected = units["pool.mask_topk3_block4"].bool()
    assert torch.equal(inside, expected & ~invisible)


# ---- Engram ----


def unit_engram_config(**changes) -> Config:
    return Config.preset("nano").replace(
        vocab_size=330, engram_vocab_size=23, engram_layer_ids=[1, 3], engram_num_embeddings=[204, 358],
        engram_compressed_vocab_size=260, **changes)  # fmt: skip


def hash_all(unit_engram, dead: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
    """[2,24,2,6] rows of both layers, document by document."""
    config, ids = unit_engram_config(), unit_engram["compressed_map"].long()[unit_engram["input_ids"]]
    rows = torch.zeros(2, 24, 2, 6, dtype=torch.int64)
    for table, primes in enumerate(formulas.engram_primes(config)):
        multipliers = formulas.engram_multipliers(config, config.engram_layer_ids[table])
        for row in range(2):
            for run in reference.document_runs(documents[row]):
                part = (slice(row, row + 1), run)
                rows[row, run, table] = formulas.engram_hash(ids[part], multipliers, primes, 2, dead[part])[0]
    return rows


def test_engram_primes_and_multipliers_equal(unit_engram):
    config = unit_engram_config()
    assert formulas.engram_primes(config) == unit_engram["primes"].tolist()
    for table, layer in enumerate(config.engram_layer_ids):
        assert torch.equal(formulas.engram_multipliers(config, layer), unit_engram["multipliers"][table])


def test_released_engram_primes_and_multipliers_equal(unit_engram):
    config = Config.preset("flash")
    primes = formulas.engram_primes(config)
    for table, layer in enumerate(config.engram_layer_ids):
        assert primes[table] == unit_engram[f"released.primes.{layer}"].tolist()
        assert sum(primes[table]) == config.engram_num_embeddings[table]
        assert torch.equal(formulas.engram_multipliers(config, layer), unit_engram[f"released.multipliers.{layer}"])


@pytest.mark.parametrize("preset", ["nano", "toy", "small"])
def test_preset_tables_have_the_rows_of_their_primes(preset):
    config = Config.preset(preset)
    assert [sum(primes) for primes in formulas.engram_primes(config)] == list(config.engram_num_embeddings)


def test_engram_rows_equal_plain_masked_and_packed(unit_engram):
    alive = torch.zeros(2, 24, dtype=torch.bool)
    whole, packed = torch.ones(2, 24), unit_engram["sequence_ids"]
    assert torch.equal(hash_all(unit_engram, alive, whole), unit_engram["hash"].long())
    masked = unit_engram["token_mask"] == 0
    assert torch.equal(hash_all(unit_engram, masked, whole), unit_engram["hash_masked"].long())
    assert torch.equal(hash_all(unit_engram, packed == 0, packed), unit_engram["hash_packed"].long())


def test_engram_rows_equal_python_integers_at_the_largest_ids():
    """Released settings: int32 ids must not wrap, nor the products, at any look-back."""
    config = Config.preset("flash")
    multipliers, primes = formulas.engram_multipliers(config, 1), formulas.engram_primes(config)[0]
    ids = torch.tensor([[99091, 99090, 0, 99091, 99089]], dtype=torch.int32)
    rows = formulas.engram_hash(ids, multipliers, primes, 2, torch.zeros(1, 5, dtype=torch.bool))
    for position in range(5):
        x, expected, offset = 0, [], 0
        for back in range(4):
            x ^= (int(ids[0, position - back]) if position >= back else 2) * int(multipliers[back])
            for prime in primes[(back - 1) * 8 : back * 8] if back else []:
                expected.append(x % prime + offset)
                offset += prime
        assert rows[0, position].tolist() == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_engram_gate_and_output_equal(unit_engram, dtype):
    """1e-6 on the gate as float32 data allows; the table is exact in FP8, so the quantiser changes nothing."""
    param = {name: unit_engram[f"engram.param.{name}"].to(dtype) for name in ("q_weight", "k_weight")}
    param |= {f"{name}.weight": unit_engram[f"engram.param.{name}.weight"].to(dtype) for name in ("embed", "wkv")}
    x, config = unit_engram["engram.x"].to(dtype), unit_engram_config()
    alive, masked = torch.zeros(2, 24, dtype=torch.bool), unit_engram["token_mask"] == 0
    for name, rows, dead in (("y", "hash", alive), ("y_masked", "hash_masked", masked)):
        rows = unit_engram[rows][:, :, 0].long()
        y = reference.engram(config, x, rows, dead, lambda name: param[name.removeprefix("engram.")])
        torch.testing.assert_close(y.float(), unit_engram[f"engram.{name}"], rtol=0, atol=1e-6)
    keys = (param["embed.weight"][unit_engram["hash"][:, :, 0].long()].flatten(-2) @ param["wkv.weight"].T)[..., :128]
    gate = formulas.engram_gate(config, x, keys.unflatten(-1, (4, 32)), param["q_weight"], param["k_weight"])
    torch.testing.assert_close(gate.float(), unit_engram["engram.gate"], rtol=0, atol=1e-6)
    assert gate[0, 0, 0].item() == pytest.approx(1 / (1 + math.exp(-1e-3)), abs=1e-7)  # a zero stream: 0.50025
