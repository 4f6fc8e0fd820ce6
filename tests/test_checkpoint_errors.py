"""Every unsound folder is refused with the file and the values that are wrong, before memory is taken."""

import json
import shutil

import pytest
import torch
from folders import INDEX, edit_config, edit_tensors, files_of, index_of, nano_model, tokenizer_model, write_folder
from goldens import load as golden
from goldens import toy_a

from tinyds41 import memory
from tinyds41.checkpoint.read import load
from tinyds41.checkpoint.write import save
from tinyds41.model.transformer import Model
from tinyds41.tokenizer import Tokenizer

SHARD = "model-00001-of-00001.safetensors"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Sound folders by name; tests damage copies."""
    root = tmp_path_factory.mktemp("sound")
    save(nano_model(), root / "plain")
    save(nano_model(), root / "quantised", quantize=True)
    save(nano_model(), root / "sharded", max_shard_bytes=200_000)
    save(tokenizer_model(), root / "tokenizer")
    return root


@pytest.fixture
def copy(saved, tmp_path):
    return lambda name: shutil.copytree(saved / name, tmp_path / "model")


def refusal(folder, error=ValueError, **options) -> str:
    with pytest.raises(error) as caught:
        load(folder, **options)
    return str(caught.value)


def test_all_wrong_tensors_come_in_one_error(copy):
    folder = copy("quantised")

    def damage(tensors):
        del tensors["norm.weight"], tensors["layers.4.attn.indexer.wk.scale"]
        tensors["layers.0.attn.attn_sink"] = torch.zeros(3)
        tensors["layers.1.engram.embed.scale"] = tensors["layers.1.engram.embed.scale"][:-1]
        tensors["layers.5.attn.compressor.wkv.weight"] = torch.zeros(2)  # layer 5 reuses, it has no compressor
        tensors["layers.8.attn_norm.weight"] = torch.zeros(2)  # there are 8 layers
        tensors["embed.scale"] = torch.zeros(2)  # a scale of a weight that is not quantised
        tensors["head.weight"] = torch.zeros(64, 32, dtype=torch.int32)

    edit_tensors(folder, damage)
    assert refusal(folder).splitlines() == [
        f"{folder} does not hold the tensors that its config asks for:",
        "  missing (2): layers.4.attn.indexer.wk.scale beside the quantised layers.4.attn.indexer.wk.weight (F8_E4M3), "
        "norm.weight",
        "  unexpected (3): embed.scale, layers.5.attn.compressor.wkv.weight, layers.8.attn_norm.weight",
        "  misshaped (2): layers.0.attn.attn_sink is (3,), expected (2,), "
        "layers.1.engram.embed.scale is (155, 1), expected (156, 1)",
        "  unreadable (1): head.weight is I32, which is no weight format",
    ]


def test_a_long_list_of_tensors_is_cut(copy):
    folder = copy("plain")
    edit_tensors(folder, lambda tensors: [tensors.pop(name) for name in list(tensors) if ".experts." in name])
    assert "missing (96): layers.0.ffn.experts.0.w1.weight, " in refusal(folder)
    assert refusal(folder).endswith(" and 88 more")


@pytest.mark.parametrize("name", ["layers.3.attn.wq_a", "layers.7.ffn.experts.3.w2", "layers.1.engram.embed"])
def test_a_quantised_weight_without_its_scale_is_named(copy, name):
    folder = copy("quantised")
    edit_tensors(folder, lambda tensors: tensors.pop(f"{name}.scale"))
    assert f"missing (1): {name}.scale beside the quantised {name}.weight" in refusal(folder)


def test_the_scaleless_goldens_are_no_checkpoint(tmp_path):
    config, _ = toy_a(torch.float32)
    folder = write_folder(tmp_path / "model", config, golden("toyA_weights"))
    assert "embed.scale beside the quantised embed.weight (F8_E4M3)" in refusal(folder)


@pytest.mark.parametrize(("name", "tensor", "said"), [
    ("layers.0.attn.wkv.scale", torch.ones(1, 1), "layers.0.attn.wkv.scale is F32, expected F8_E8M0"),
    ("layers.0.attn.wq_b.scale", torch.ones(1, 1).to(torch.float8_e8m0fnu),
     "layers.0.attn.wq_b.scale is (1, 1), expected (2, 1)"),
    ("layers.0.ffn.experts.0.w1.weight", torch.zeros(32, 32, dtype=torch.int8),
     "layers.0.ffn.experts.0.w1.weight is (32, 32), expected (32, 16)"),
    ("layers.0.attn.wo_b.weight", torch.zeros(32, 16, dtype=torch.int8),
     "layers.0.attn.wo_b.weight is packed fp4 (I8), which (32, 16) cannot be"),
    ("norm.weight", torch.zeros(32).to(torch.float8_e4m3fn),
     "norm.weight is fp8 tiles (F8_E4M3), which (32,) cannot be"),
])  # fmt: skip
def test_a_quantised_tensor_of_the_wrong_kind_is_named(copy, name, tensor, said):
    folder = copy("quantised")
    edit_tensors(folder, lambda tensors: tensors.update({name: tensor}))
    assert said in refusal(folder)


def test_a_table_whose_rows_do_not_match_the_primes_is_refused(copy):
    folder = copy("plain")
    edit_tensors(folder, lambda tensors: tensors.update({"layers.1.engram.embed.weight": torch.zeros(157, 32)}))
    assert "layers.1.engram.embed.weight is (157, 32), expected (156, 32)" in refusal(folder)
    edit_config(folder, engram_num_embeddings=[157, 304])  # config and table agree, the primes do not
    said = refusal(folder)
    assert str(folder / "config.json") in said
    assert "engram_num_embeddings[0]=157" in said and "add up to 156" in said


def test_a_missing_shard_is_named(copy):
    folder = copy("sharded")
    shard = folder / index_of(folder)["layers.3.attn.wkv.weight"]
    shard.unlink()
    assert refusal(folder, FileNotFoundError) == f"shard {shard} is missing"


@pytest.mark.parametrize("kept", [0, 5, 100, -1])
def test_a_truncated_shard_is_named_with_its_bytes(copy, kept):
    folder = copy("sharded")
    shard = folder / index_of(folder)["norm.weight"]
    content = shard.read_bytes()[:kept]
    shard.write_bytes(content)
    said = refusal(folder)
    assert f"{shard} is truncated: {len(content):,} bytes" in said
    if kept < 0:
        assert f"expected {len(content) + 1:,}" in said


def test_a_shard_that_is_too_long_or_garbled_is_named(copy):
    folder = copy("plain")
    content = (folder / SHARD).read_bytes()
    (folder / SHARD).write_bytes(content + b"x")
    assert f"{folder / SHARD} is too long: {len(content) + 1:,} bytes, expected {len(content):,}" in refusal(folder)
    (folder / SHARD).write_bytes(content[:8] + b"[" + content[9:])
    assert f"{folder / SHARD} has no valid safetensors header" in refusal(folder)
    (folder / SHARD).write_bytes(content.replace(b'"shape":[32]', b'"shape":[33]', 1))
    assert f"{folder / SHARD} has no valid safetensors header" in refusal(folder)


@pytest.mark.parametrize(("text", "said"), [
    ("{", "is not a JSON file in UTF-8"),
    ("[]", "has no weight_map"),
    ('{"weight_map": {}}', "has no weight_map"),
    ('{"weight_map": {"norm.weight": "../other.safetensors"}}', "puts norm.weight into '../other.safetensors'"),
    ('{"weight_map": {"norm.weight": "pytorch_model.bin"}}', "puts norm.weight into 'pytorch_model.bin'"),
    ('{"weight_map": {"norm.weight": 3}}', "puts norm.weight into 3"),
])  # fmt: skip
def test_a_bad_index_is_named(copy, text, said):
    folder = copy("plain")
    (folder / INDEX).write_text(text)
    assert str(folder / INDEX) in refusal(folder)
    assert said in refusal(folder)


def test_an_index_that_does_not_fit_its_shards_is_refused(copy):
    folder = copy("plain")
    weight_map = index_of(folder)
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map | {"layers.0.attn.wz": SHARD}}))
    assert refusal(folder) == f"{folder / SHARD} does not fit {INDEX}: it lacks layers.0.attn.wz"
    del weight_map["norm.weight"]
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    assert refusal(folder) == f"{folder / SHARD} does not fit {INDEX}: only it has norm.weight"


def test_a_folder_without_a_model_is_refused(copy, tmp_path):
    assert refusal(tmp_path / "nowhere", FileNotFoundError) == f"no folder {tmp_path / 'nowhere'}"
    folder = copy("plain")
    (folder / INDEX).unlink()
    assert f"neither {INDEX} nor model.safetensors" in refusal(folder, FileNotFoundError)
    (folder / "config.json").unlink()
    assert refusal(folder, FileNotFoundError) == f"{folder} holds no config.json: it is not a model folder"


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickles_are_not_opened(copy, name):
    folder = copy("plain")
    for file in (INDEX, SHARD):
        (folder / file).unlink()
    torch.save({"norm.weight": torch.ones(32)}, folder / name)
    assert f"weights as {name}: a pickle can run any code" in refusal(folder)


def test_the_config_of_another_architecture_is_named(copy):
    folder = copy("plain")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 32, "vocab_size": 64}))
    said = refusal(folder)
    assert said.startswith(f"{folder / 'config.json'}: not a config of this architecture: missing ")


def test_a_tokenizer_of_another_model_is_refused(copy):
    folder = copy("tokenizer")
    expected = json.loads((folder / "config.json").read_text())["text_config"]["engram_compressed_vocab_size"]
    other = Tokenizer.train(["naïve Naïve zzz " * 9], 270)
    assert other.compressed_vocab_size != expected
    other.save(folder)
    said = refusal(folder)
    assert f"{folder / 'tokenizer.json'} compresses to {other.compressed_vocab_size} ids" in said
    assert f"engram_compressed_vocab_size is {expected}" in said


def test_a_tokenizer_with_more_ids_than_the_model_is_refused(copy):
    folder = copy("plain")
    Tokenizer.train(["a"], 261).save(folder)
    assert "tokenizer.json has 260 ids, vocab_size is 64" in refusal(folder)


def test_a_needed_tokenizer_that_is_not_there_is_named(copy):
    folder = copy("tokenizer")
    (folder / "tokenizer.json").unlink()
    assert refusal(folder, FileNotFoundError).startswith(f"{folder / 'tokenizer.json'} is missing")


def test_too_little_memory_is_refused_before_allocating(copy, monkeypatch):
    folder = copy("plain")
    needed = sum(parameter.numel() for parameter in nano_model().parameters()) * 8
    monkeypatch.setattr(memory, "available_bytes", lambda device: needed - 1)
    monkeypatch.setattr(Model, "to_empty", lambda *args, **kwargs: pytest.fail("memory was taken"))
    said = refusal(folder, MemoryError, dtype=torch.float64)
    assert f"{needed:,} bytes" in said and f"{needed - 1:,} bytes available" in said


def test_a_matrix_that_blocks_do_not_divide_is_named_and_nothing_is_written(tmp_path):
    said = r"layers\.0\.ffn\.experts\.0\.w2\.weight cannot be written as packed fp4.*32.*16"
    with pytest.raises(ValueError, match=said):
        save(nano_model(moe_intermediate_size=16), tmp_path / "model", quantize=True)
    assert not list(tmp_path.iterdir())


def test_a_model_without_weights_is_not_saved(tmp_path):
    with pytest.raises(ValueError, match="meta device"):
        save(Model(nano_model().config, device="meta"), tmp_path / "model")
    with pytest.raises(ValueError, match="max_shard_bytes=0"):
        save(nano_model(), tmp_path / "model", max_shard_bytes=0)
    assert not list(tmp_path.iterdir())


def test_a_failed_load_changes_no_file(copy):
    folder = copy("quantised")
    edit_tensors(folder, lambda tensors: tensors.pop("norm.weight"))
    before = files_of(folder)
    refusal(folder)
    assert files_of(folder) == before


@pytest.mark.parametrize("layers", [3, "012", [0.0, 1.0]])
def test_layers_that_are_no_numbers_are_refused(saved, layers):
    with pytest.raises(ValueError, match=r"are no layer numbers: range\(0, n\) names the first n"):
        load(saved / "plain", layers=layers)


@pytest.mark.parametrize("file", [INDEX, SHARD])
def test_json_nested_beyond_reading_is_refused_by_file(saved, tmp_path, file):
    shutil.copytree(saved / "plain", tmp_path / "model")
    deep = b"[" * 100_000
    (tmp_path / "model" / file).write_bytes(deep if file == INDEX else len(deep).to_bytes(8, "little") + deep)
    with pytest.raises(ValueError, match=file):
        load(tmp_path / "model")
