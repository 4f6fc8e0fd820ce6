"""Rotary positions: which frequencies each kind of layer has, and which channels turn how far."""

from __future__ import annotations

import cmath
import math

import pytest
import torch
from goldens import GOLDEN, load
from models import NANO, random_ids, scattered, traced

from tinyds41.config import Config
from tinyds41.model.rope import Rope, inverse_frequencies, rotate, yarn_ramp

UNITS = load("units")
FLASH = Config.preset("flash")
TOY_A = Config.from_json(GOLDEN / "toyA_config.json")


def turned_by_hand(x: torch.Tensor, position: int, frequencies: torch.Tensor) -> torch.Tensor:
    """One vector, pair by pair, with Python's complex numbers."""
    y = x.clone()
    still = x.shape[-1] - 2 * len(frequencies)
    for i, frequency in enumerate(frequencies.tolist()):
        even, odd = still + 2 * i, still + 2 * i + 1
        pair = complex(x[even], x[odd]) * cmath.exp(1j * position * frequency)
        y[even], y[odd] = pair.real, pair.imag
    return y


@pytest.mark.parametrize(("name", "config"), [("released", FLASH), ("toyA", TOY_A)])
def test_frequencies_are_yarn_in_compressed_layers_and_plain_in_others(name, config):
    """1e-14 in float64, relative; the plain ones are stored in float32."""
    yarn = inverse_frequencies(config, compressed=True)
    torch.testing.assert_close(yarn, UNITS[f"yarn.{name}.inv_freq_f64"], rtol=1e-14, atol=0)
    plain = inverse_frequencies(config, compressed=False)
    torch.testing.assert_close(plain.float(), UNITS[f"base.{name}.inv_freq"], rtol=1e-6, atol=0)
    assert list(yarn_ramp(config)) == UNITS[f"yarn.{name}.low_high"].tolist()


def test_a_ramp_without_length_is_widened_instead_of_dividing_by_zero():
    # 6.5 tokens turn more than once at no pair: both ends fall on 0.
    config = NANO.replace(rope_scaling={**(NANO.rope_scaling or {}), "original_max_position_embeddings": 6})
    low, high = yarn_ramp(config)
    assert (low, high) == (0, 0.001)
    assert inverse_frequencies(config, compressed=True).isfinite().all()


def test_without_scaling_compressed_layers_keep_their_own_base():
    config = NANO.replace(rope_scaling=None)
    frequencies = inverse_frequencies(config, compressed=True)
    assert frequencies.tolist() == pytest.approx([1.6e5 ** (-2 * i / 16) for i in range(8)], rel=1e-14)


def test_rotation_turns_adjacent_pairs_and_back():
    """1e-6: float32 data of values up to 3."""
    rotation = Rope(TOY_A, compressed=True).rotation(UNITS["rope.positions"].long(), torch.float32).unsqueeze(-2)
    torch.testing.assert_close(rotate(UNITS["rope.x"], rotation), UNITS["rope.y"], rtol=0, atol=1e-6)
    torch.testing.assert_close(rotate(UNITS["rope.x"], rotation.conj()), UNITS["rope.y_inverse"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("channel", range(6))
def test_a_one_hot_vector_turns_into_its_neighbour_alone(channel):
    """R = 4 of 6 channels: 0 and 1 stay; 2 turns into 3 and 4 into 5, never 2 into 4."""
    angles = torch.tensor([0.3, 1.1], dtype=torch.float64)
    x = torch.eye(6, dtype=torch.float64)[channel]
    y = rotate(x, torch.polar(torch.ones_like(angles), angles))
    torch.testing.assert_close(y, turned_by_hand(x, 1, angles), rtol=0, atol=1e-15)
    assert (y != 0).sum() == (1 if channel < 2 else 2)


@pytest.mark.parametrize("position", [0, 128, 65_535, 65_536, 1_048_575])
@pytest.mark.parametrize("compressed", [False, True])
def test_angles_are_exact_up_to_the_last_position(position, compressed):
    """1e-9: float64 angles up to a million radians; float32 angles would be off by up to 0.06."""
    rope = Rope(FLASH, compressed=compressed)
    rotation = rope.rotation(torch.tensor([position]), torch.float64)[0]
    name = "yarn.released.inv_freq_f64" if compressed else None
    frequencies = UNITS[name].tolist() if name else [1e4 ** (-2 * i / 64) for i in range(32)]
    for turn, frequency in zip(rotation.tolist(), frequencies, strict=True):
        whole, part = divmod(position * frequency, 2 * math.pi)
        assert abs(turn - cmath.exp(1j * part)) < 1e-9, whole


def test_angles_differ_from_the_released_float32_ones_by_rounding_alone():
    """0.06 rad near a million, as measured for float32 products; under 0.005 up to 65,536."""
    positions = UNITS["rope.released.positions"][0].long()
    rotation = Rope(FLASH, compressed=True).rotation(positions, torch.float64)
    released = UNITS["rope.released.angles"][0].double()
    apart = (rotation * torch.polar(torch.ones_like(released), -released)).angle().abs().amax(-1)
    assert apart.max() < 0.06
    assert apart[positions <= 65_536].max() < 0.005


def test_positions_that_repeat_for_the_batch_turn_as_if_written_out():
    """A row for all, expanded over the batch; rows of their own; one row."""
    rope, row = Rope(FLASH, compressed=False), torch.arange(5)
    for positions in (row.expand(3, 5), row + torch.tensor([[0], [7]]), row[None], row.expand(2, 3, 5)):
        rotation = rope.rotation(positions, torch.float64)
        assert rotation.shape == (*positions.shape, 32)
        angles = positions.unsqueeze(-1) * rope.frequencies
        assert torch.equal(rotation, torch.polar(torch.ones_like(angles), angles))


def test_rotation_is_built_in_float64_and_rounded_once():
    rope, positions = Rope(FLASH, compressed=False), torch.tensor([1_048_575])
    exact = rope.rotation(positions, torch.float64)
    assert exact.dtype == torch.complex128
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(rope.rotation(positions, dtype), exact.to(torch.complex64))


@pytest.mark.parametrize("layer", range(8))
def test_each_layer_rotates_with_the_frequencies_of_its_kind(layer):
    """Queries and window rows of every layer, index queries too where there are any; 1e-12 in float64."""
    model = scattered(NANO.replace(quantize_cache=False))
    trace = traced(model, random_ids(1, 11), f"layers.{layer}.*")
    block = model.layers[layer]
    frequencies = inverse_frequencies(NANO, compressed=layer >= 2)
    latent, x = trace[f"layers.{layer}.attn.query_latent"], trace[f"layers.{layer}.attn.input"]
    with torch.no_grad():
        kv = block.attn.kv_norm(block.attn.wkv(x))[0, 9]
        q = block.attn.wq_b(latent)[0, 9].view(2, 32)
        expected = torch.stack([turned_by_hand(row, 9, frequencies) for row in (kv, *q)])
        found = [trace[f"layers.{layer}.attn.window_kv"][0, 9], *trace[f"layers.{layer}.attn.q"][0, 9]]
        if block.indexer is not None:
            index_q = block.indexer.wq_b(latent)[0, 9].view(3, 32)
            expected = torch.cat([expected, torch.stack([turned_by_hand(row, 9, frequencies) for row in index_q])])
            found += [*trace[f"layers.{layer}.indexer.queries"][0, 9]]
    torch.testing.assert_close(torch.stack(found), expected, rtol=0, atol=1e-12)


def test_fewer_channels_than_turn_are_refused():
    with pytest.raises(ValueError, match=r"at least 4 channels.*\(1, 3\)"):
        rotate(torch.zeros(1, 3), torch.ones(2, dtype=torch.complex64))
