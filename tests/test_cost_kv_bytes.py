"""Cache bytes are those of rows that were really encoded."""

from fractions import Fraction

import pytest
import torch

from tinyds41.config import Config, preset_names
from tinyds41.cost.kv_bytes import kv_bytes, unshared_bytes_per_token
from tinyds41.formats import GLOBAL, INDEX, WINDOW


def test_flash_costs_890_bytes_per_token_and_2_703_360_per_sequence():
    cache = kv_bytes(Config.preset("flash"))
    assert cache.bytes_per_token == 890
    assert cache.window_bytes == 2_703_360
    assert [row.row_bytes for row in cache.of("global KV")] == [288] * 4
    assert [row.row_bytes for row in cache.of("index keys")] == [68] * 4
    assert [row.row_bytes for row in cache.of("window")] == [528] * 40
    assert "890" in str(cache) and "2,703,360" in str(cache)


@pytest.mark.parametrize("name", preset_names())
def test_only_full_layers_keep_global_rows_and_every_layer_a_window(name):
    config = Config.preset(name)
    cache = kv_bytes(config)
    sources = [(layer.layer, layer.ratio) for layer in config.plan() if layer.mode == "FULL"]
    for store in ("global KV", "index keys"):
        assert [(row.layer, row.tokens_per_row) for row in cache.of(store)] == sources
    assert [row.layer for row in cache.of("window")] == list(range(config.num_hidden_layers))


@pytest.mark.parametrize("context", [1, 2, 3, 4, 5, 31, 255, 256])
def test_bytes_at_a_context_equal_a_cache_filled_token_by_token(context):
    """Oracle: encode the rows that `context` tokens leave behind, and count their bytes."""
    config = Config.preset("nano")
    held = 0
    for layer in config.plan():
        held += WINDOW.encode(torch.zeros(context, config.head_dim))[-config.sliding_window :].nbytes
        if layer.mode == "FULL":
            full_groups = sum(1 for token in range(context) if token % layer.ratio == layer.ratio - 1)
            held += GLOBAL.encode(torch.zeros(full_groups, config.head_dim)).nbytes
            held += INDEX.encode(torch.zeros(full_groups, config.index_head_dim)).nbytes
    assert kv_bytes(config).bytes_at(context) == held


def test_an_unquantised_cache_holds_floats_of_the_models_dtype():
    config = Config.preset("nano", quantize_cache=False)
    per_token = Fraction(3, 2) * (config.head_dim + config.index_head_dim)
    assert kv_bytes(config).bytes_per_token == 4 * per_token
    assert kv_bytes(config, torch.bfloat16).bytes_per_token == 2 * per_token


def test_without_sharing_flash_would_keep_11_6_times_as_much_global_kv():
    flash = Config.preset("flash")
    shared = sum(row.bytes_per_token for row in kv_bytes(flash).of("global KV"))
    assert unshared_bytes_per_token(flash) == 8352
    assert round(float(unshared_bytes_per_token(flash) / shared), 1) == 11.6


def test_half_an_odd_row_is_not_rounded():
    cache = kv_bytes(Config.preset("toy"))  # 17-byte index keys, one for two tokens
    assert cache.bytes_per_token == Fraction(105, 2)
    assert cache.to_dict()["bytes_per_token"] == 52.5
    assert kv_bytes(Config.preset("flash")).to_dict()["bytes_per_token"] == 890


@pytest.mark.parametrize("context", [0, -1, 257, 3.5, True])
def test_a_context_that_cannot_be_is_named(context):
    with pytest.raises(ValueError, match=f"context={context}"):
        kv_bytes(Config.preset("nano")).bytes_at(context)


def test_an_unknown_store_names_the_known():
    with pytest.raises(ValueError, match=r"'windows'.*global KV, index keys, window"):
        kv_bytes(Config.preset("nano")).of("windows")
