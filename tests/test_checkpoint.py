"""What is saved comes back bit for bit; released formats decode on load; only what is asked for is read."""

import json
import stat

import pytest
import torch
from folders import assert_same_bits, files_of, nano_model, released, tokenizer_model, write_folder
from goldens import load as golden
from goldens import toy_a
from safetensors.torch import load_file

from tinyds41 import weight_formats
from tinyds41.checkpoint.read import load
from tinyds41.checkpoint.write import save
from tinyds41.config import Config
from tinyds41.formats import ENGRAM, INDEX
from tinyds41.model.transformer import Model

DTYPES = [torch.float64, torch.float32, torch.bfloat16]
STAYS_PLAIN = ("embed.weight", "head.weight", "norm.weight", "ffn.gate.weight", "hc_attn_fn", "hc_ffn_fn", "q_weight",
               "k_weight")  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_saved_model_comes_back_bit_for_bit(tmp_path, dtype):
    model = nano_model(dtype)
    loaded = load(save(model, tmp_path / "model"))
    assert loaded.config == model.config
    assert_same_bits(loaded.state_dict(), model.state_dict())
    ids = torch.arange(12)[None]
    assert torch.equal(loaded(ids), model(ids))


def test_the_files_are_those_of_the_released_layout(tmp_path):
    model = nano_model()
    folder = save(model, tmp_path / "model")
    shard = "model-00001-of-00001.safetensors"
    assert set(files_of(folder)) == {"config.json", "model.safetensors.index.json", shard}
    tensors = load_file(folder / shard)
    assert_same_bits(tensors, released(model))
    assert tensors["layers.2.ffn.experts.1.w2.weight"].equal(model.layers[2].ffn.experts.w2[1])
    assert tensors["layers.2.attn.compressor.wgate.weight"].equal(model.layers[2].compressor.wgate.weight)
    assert tensors["layers.4.attn.indexer.wk.weight"].equal(model.layers[4].indexer.wk.weight)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == dict.fromkeys(tensors, shard)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())


@pytest.mark.parametrize("nested", [True, False])
def test_the_config_keeps_its_form_and_the_fields_we_do_not_use(tmp_path, nested):
    text = {**nano_model().config.to_dict()["text_config"], "unknown_field": [1, {"a": 2}]}
    text["quantize_cache"] = False
    content = {"model_type": "m", "text_config": text} if nested else text
    folder = save(Model(Config.from_dict(content)), tmp_path / "model")
    assert json.loads((folder / "config.json").read_text()) == content
    assert load(folder).config == Config.from_dict(content)


@pytest.mark.parametrize("limit", [1, 20_000, 10**9])
def test_shards_hold_at_most_the_bytes_asked_for(tmp_path, limit):
    model = nano_model()
    folder = save(model, tmp_path / "model", max_shard_bytes=limit)
    shards = sorted(path.name for path in folder.glob("*.safetensors"))
    assert shards == [f"model-{n:05d}-of-{len(shards):05d}.safetensors" for n in range(1, len(shards) + 1)]
    held = [load_file(folder / shard) for shard in shards]
    for tensors in held:
        assert len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors.values()) <= limit
    assert len(shards) == {1: len(released(model)), 20_000: len(shards), 10**9: 1}[limit]
    assert len(shards) > 2 or limit == 10**9
    assert_same_bits(load(folder).state_dict(), model.state_dict())


def test_shards_are_as_readable_as_the_config(tmp_path):
    """safetensors alone would make them readable for their owner only."""
    folder = save(nano_model(), tmp_path / "model")
    modes = {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    assert len(modes) == 1


def test_the_tokenizer_comes_along(tmp_path):
    model = tokenizer_model()
    loaded = load(save(model, tmp_path / "model"))
    assert loaded.tokenizer is not None and loaded.tokenizer.encode("the Cat") == model.tokenizer.encode("the Cat")
    ids = torch.arange(40)[None]
    assert torch.equal(loaded(ids), model(ids))


def test_a_model_without_its_tokenizer_loads_with_a_token_map(tmp_path):
    model = tokenizer_model()
    token_map = model.layers[1].engram.token_map
    model.tokenizer = None
    ids = torch.arange(40)[None]
    assert torch.equal(load(save(model, tmp_path / "model"), token_map=token_map)(ids), model(ids))


def fake_quantised(name, weight):
    """The oracle: what a released weight is worth; experts and Engram rows by the cache codec of the same format."""
    if ".ffn.experts." in name:
        return INDEX.fake_quant(weight)
    if name.endswith("engram.embed.weight"):
        return ENGRAM.fake_quant(weight)
    if weight.dim() < 2 or name.endswith(STAYS_PLAIN):
        return weight
    return weight_formats.decode_tiles(*weight_formats.encode_tiles(weight), weight.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_quantised_model_comes_back_as_its_fake_quantised_weights(tmp_path, dtype):
    model = nano_model(dtype)
    folder = save(model, tmp_path / "model", quantize=True)
    expected = {name: fake_quantised(name, weight) for name, weight in released(model).items()}
    assert_same_bits(released(load(folder, dtype=dtype)), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_saving_a_quantised_model_again_gives_the_same_bytes(tmp_path, dtype):
    """Blocks whose largest value rounds down to half of the range would change their scale the second time."""
    first = save(nano_model(dtype), tmp_path / "first", quantize=True)
    second = save(load(first, dtype=dtype), tmp_path / "second", quantize=True)
    assert files_of(first) == files_of(second)


def test_quantised_files_have_the_released_dtypes(tmp_path):
    model = nano_model(torch.bfloat16)
    tensors = load_file(save(model, tmp_path / "model", quantize=True) / "model-00001-of-00001.safetensors")
    scales = set(tensors) - set(released(model))
    assert {tensors[name].dtype for name in scales} == {torch.float8_e8m0fnu}
    assert {name.removesuffix(".scale") + ".weight" for name in scales} <= set(tensors)
    for name, weight in released(model).items():
        routed, plain = ".ffn.experts." in name, weight.dim() < 2 or name.endswith(STAYS_PLAIN)
        expected = torch.int8 if routed else torch.float8_e4m3fn if not plain else torch.bfloat16
        assert tensors[name].dtype == (torch.float8_e4m3fn if "engram.embed" in name else expected), name
    assert tensors["layers.1.engram.embed.scale"].shape == (156, 1)
    assert tensors["layers.1.engram.wkv.scale"].shape == (5, 6)
    assert tensors["layers.0.ffn.experts.0.w1.weight"].shape == (32, 16)


def golden_parts(name):
    parts = golden("units")
    return (parts[f"dequant.{name}.weight"], parts[f"dequant.{name}.scale_u8"].view(torch.float8_e8m0fnu),
            parts[f"dequant.{name}.out"])  # fmt: skip


@pytest.mark.parametrize(("format", "name", "changes"), [
    ("fp8", "layers.3.attn.wq_a", {"q_lora_rank": 40, "hidden_size": 70}),
    ("fp4", "layers.3.ffn.experts.2.w1", {"moe_intermediate_size": 3, "hidden_size": 64}),
    ("rowwise", "layers.1.engram.embed", {
        "engram_head_dim": 64, "engram_vocab_size": 5, "engram_max_ngram_size": 2, "engram_n_heads": 1,
        "engram_layer_ids": (1,), "engram_num_embeddings": (5,)}),
])  # fmt: skip
def test_golden_bytes_in_a_released_folder_load_as_the_golden_values(tmp_path, format, name, changes):
    model = nano_model(**changes)
    codes, scale, expected = golden_parts(format)
    tensors = {**released(model), f"{name}.weight": codes, f"{name}.scale": scale}
    loaded = released(load(write_folder(tmp_path / "model", model.config, tensors)))
    decoded = loaded[f"{name}.weight"]
    # By value: the golden FP4 decoder drops the sign of zero, ours keeps it, so that a second save repeats the byte.
    assert torch.equal(decoded, expected)
    assert_same_bits(loaded, {**released(model), f"{name}.weight": decoded})


def test_toy_a_from_a_released_folder_gives_the_golden_logits(tmp_path):
    config, weights = toy_a(torch.float32)
    model = load(write_folder(tmp_path / "model", config, weights), dtype=torch.float64)
    stored = golden("toyA_golden")
    logits = model(stored["tokens"].long()[None])[0, stored["f64_positions"].long()]
    # Both sides compute in float64; 1e-9 is far above its rounding and far below any fault.
    torch.testing.assert_close(logits, stored["logits_f64"], rtol=0, atol=1e-9)
