"""Bytes read per generated token: weights as files hold them, cache rows as the formats encode them."""

import pytest
import torch

from tinyds41.checkpoint.inspect import inspect
from tinyds41.checkpoint.write import save
from tinyds41.config import Config
from tinyds41.cost.generations import GENERATIONS, generation
from tinyds41.cost.parameters import count_parameters
from tinyds41.cost.traffic import DecodeTraffic, generation_bytes
from tinyds41.formats import ENGRAM, GLOBAL, INDEX, WINDOW
from tinyds41.model.transformer import Model

FLASH, M1 = Config.preset("flash"), 2**20


def test_flash_reads_the_published_engram_bytes():
    assert DecodeTraffic(FLASH).at(M1).engram_rows == 48 * 264 == 12_672


def test_flash_cache_reads_equal_a_count_by_hand():
    read = DecodeTraffic(FLASH).at(M1)
    assert read.window_rows == 40 * 128 * 528 == 2_703_360
    assert read.global_rows == 38 * 512 * 288
    assert read.index_keys == ((3 * 0.5 + 1) * M1 + 4 * 16_384) * 68
    assert read.cache == read.window_rows + read.global_rows + read.index_keys
    assert DecodeTraffic(FLASH, shared=True).at(M1).global_rows == 8 * 512 * 288


@pytest.mark.parametrize("released", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weights_are_the_bytes_of_the_files(tmp_path, released, dtype):
    """Toy with every expert active reads each stored weight once."""
    config = Config.preset("toy", num_experts_per_tok=8)
    save(Model(config, dtype=dtype), tmp_path / "model", quantize=released)
    stored = inspect(tmp_path / "model")
    # Look-ups read single rows; the router's second bias is for images.
    idle = sum(group.n_bytes for group in stored.groups
               if group.component in ("token embedding", "Engram rows") or "bias_vl" in group.name)  # fmt: skip
    embedding_row = config.hidden_size * dtype.itemsize
    read = DecodeTraffic(config, dtype=dtype, released=released).at(9)
    assert read.weights == stored.n_bytes - idle + embedding_row


def test_weights_without_a_format_have_the_models_dtype():
    config = Config.preset("toy")
    read = DecodeTraffic(config, released=False).at(9)
    assert read.weights == 2 * (count_parameters(config).active_decode + config.hidden_size)


def test_idle_experts_are_not_read():
    """One more active expert is three packed matrices with their scales, in every layer."""
    nano = Config.preset("nano")
    one, two = (DecodeTraffic(nano.replace(num_experts_per_tok=n)).at(9).weights for n in (1, 2))
    assert one is not None and two is not None
    width, inner = nano.hidden_size, nano.moe_intermediate_size
    # No block of 32 divides rows of 16 values: w2 stays in bf16.
    assert two - one == nano.num_hidden_layers * (2 * inner * (width // 2 + width // 32) + 2 * width * inner)


@pytest.mark.parametrize("context", [1, 3, 6, 13, 255])
@pytest.mark.parametrize("shared", [False, True])
def test_cache_reads_equal_rows_that_are_gathered_and_encoded(context, shared):
    """Oracle: a plain walk over the layers of nano, which encodes what each one reads."""
    nano = Config.preset("nano")
    near = chosen = keys = 0
    for layer in nano.plan():
        near += WINDOW.encode(torch.zeros(context, nano.head_dim))[-nano.sliding_window :].nbytes
        if not layer.ratio:
            continue
        entries = context // layer.ratio
        if layer.selects or not shared:
            chosen += GLOBAL.encode(torch.zeros(entries, nano.head_dim))[: nano.index_topk].nbytes
        if layer.selects:
            blocks = len(range(0, entries, nano.candidate_block_size))
            rows = nano.candidate_block_size * min(nano.candidate_topk_blocks, blocks) if layer.pooled else entries
            keys += INDEX.encode(torch.zeros(rows, nano.index_head_dim)).nbytes
    read = DecodeTraffic(nano, shared=shared).at(context)
    assert (read.window_rows, read.global_rows, read.index_keys) == (near, chosen, keys)
    columns = 3 * nano.engram_n_heads * len(nano.engram_layer_ids)
    assert read.engram_rows == columns * ENGRAM.encode(torch.zeros(1, nano.engram_head_dim)).nbytes


def test_plain_floats_are_read_where_nothing_is_quantised():
    plain = Config.preset("nano", quantize_cache=False)
    read = DecodeTraffic(plain, dtype=torch.float32, released=False).at(1)
    assert read.window_rows == 8 * plain.head_dim * 4
    assert read.engram_rows == 2 * 3 * plain.engram_n_heads * plain.engram_head_dim * 4


def test_without_engram_no_rows_are_read():
    config = Config.preset("nano", engram_layer_ids=(), engram_num_embeddings=())
    assert DecodeTraffic(config).at(3).engram_rows == 0


# By hand: layers x rows x bytes. V1 to V3 read everything they keep.
@pytest.mark.parametrize(("name", "cache"), [
    ("V1", 389_120 * 65_536), ("V2", 69_120 * 65_536), ("V3", 70_272 * 65_536),
    ("V3.2", 61 * (2048 * 656 + 65_536 * 132)),
    ("V4-Flash", (43 * 128 + 21 * 512 + 20 * 512) * 584 + 21 * 16_384 * 68),
    ("V4-Pro", (61 * 128 + 30 * 1024 + 31 * 512) * 584 + 30 * 16_384 * 68),
    ("V4.1-Flash", 40 * 128 * 528 + 38 * 512 * 288 + ((1.5 + 1) * 65_536 + 4 * 16_384) * 68),
])  # fmt: skip
def test_generations_read_what_their_attention_sees(name, cache):
    assert generation_bytes(generation(name), 65_536).cache == cache


def test_only_the_newest_generations_weights_are_known():
    for name, model in GENERATIONS.items():
        read = generation_bytes(model, 4096)
        assert (read.weights is None) == (read.total is None) == (name != "V4.1-Flash")
        assert read.to_dict()["cache"] == read.cache


@pytest.mark.parametrize("context", [0, M1 + 1])
def test_a_context_that_cannot_be_is_named(context):
    for count in (DecodeTraffic(FLASH).at, lambda n: generation_bytes(generation("V3"), n)):
        with pytest.raises(ValueError, match=f"context={context}"):
            count(context)
