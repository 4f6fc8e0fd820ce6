"""What `load` reads, leaves out and decodes on the way."""

import logging

import pytest
import torch
from folders import assert_same_bits, edit_tensors, index_of, nano_model, released

from tinyds41.checkpoint import headers, read
from tinyds41.checkpoint.read import load
from tinyds41.checkpoint.write import save
from tinyds41.model import transformer
from tinyds41.trace import Trace


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A saved nano model, not to be changed."""
    return save(nano_model(), tmp_path_factory.mktemp("sound") / "model")


@pytest.fixture
def opened(monkeypatch):
    """The shards that are opened, by name."""
    names = set()
    read_header, open_shard = headers.read_header, read._open
    monkeypatch.setattr(headers, "read_header", lambda file: names.add(file.name) or read_header(file))
    monkeypatch.setattr(read, "_open", lambda file: names.add(file.name) or open_shard(file))
    return names


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_the_dtype_is_that_of_the_files_unless_it_is_given(tmp_path, dtype):
    folder = save(nano_model(dtype), tmp_path / "model")
    assert {parameter.dtype for parameter in load(folder).parameters()} == {dtype}
    assert {parameter.dtype for parameter in load(folder, dtype=torch.float32).parameters()} == {torch.float32}


def test_mixed_files_load_in_the_widest_of_their_dtypes(tmp_path):
    folder = save(nano_model(torch.bfloat16), tmp_path / "model")
    edit_tensors(folder, lambda tensors: tensors.update({"norm.weight": tensors["norm.weight"].float() + 1e-5}))
    loaded = load(folder)
    assert loaded.norm.weight.dtype == torch.float32
    assert (loaded.norm.weight != loaded.norm.weight.bfloat16()).any()


@pytest.mark.parametrize(("stored", "expected"), [
    (torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)])  # fmt: skip
def test_quantised_files_load_in_at_least_float32(tmp_path, stored, expected):
    assert load(save(nano_model(stored), tmp_path / "model", quantize=True)).device.type == "cpu"
    assert {parameter.dtype for parameter in load(tmp_path / "model").parameters()} == {expected}


@pytest.mark.parametrize("quantize", [False, True])
def test_a_tensor_read_in_pieces_is_the_same(tmp_path, monkeypatch, quantize):
    """Pieces of 32 rows: tables of 156 rows end in a piece of 28, tile scales advance with the pieces."""
    folder = save(nano_model(), tmp_path / "model", quantize=quantize)
    whole = load(folder).state_dict()
    monkeypatch.setattr(read, "_CHUNK_VALUES", 1)
    taken = []
    rows = read._rows
    monkeypatch.setattr(read, "_rows", lambda *args: (taken.append(piece) or piece for piece in rows(*args)))
    assert_same_bits(load(folder).state_dict(), whole)
    assert max(rows.shape[0] for _, rows in taken) == 32
    assert any(start == 128 and rows.shape[0] == 28 for start, rows in taken)


def test_nothing_but_the_first_layers_is_read(tmp_path, opened):
    model = nano_model()
    folder = save(model, tmp_path / "model", max_shard_bytes=1)
    loaded = load(folder, layers=range(0, 3))
    kept = {name: tensor for name, tensor in released(model).items()
            if not name.startswith("layers.") or int(name.split(".")[1]) < 3}  # fmt: skip
    assert_same_bits(released(loaded), kept)
    assert opened == {index_of(folder)[name] for name in kept}
    assert loaded.config.engram_layer_ids == (1,)
    assert loaded.config.num_nextn_predict_layers == 0  # draft blocks read the last layers


@pytest.mark.parametrize("n_layers", range(1, 9))
def test_the_first_layers_compute_what_they_compute_in_the_whole_model(tmp_path, n_layers):
    """Streams that enter layer n are those that leave layer n-1 when it is the last one."""
    model = nano_model(torch.float64)
    ids = torch.arange(24)[None] % model.config.vocab_size
    loaded = load(save(model, tmp_path / "model"), layers=range(n_layers))
    assert len(loaded.layers) == n_layers
    mine, whole = Trace("layers.*.streams"), Trace("layers.*.streams")
    loaded(ids, trace=mine)
    model(ids, trace=whole)
    for layer in range(n_layers):
        assert torch.equal(mine[f"layers.{layer}.streams"], whole[f"layers.{layer}.streams"])
        assert loaded.plan[layer].mode == model.plan[layer].mode
        assert loaded.plan[layer].pooled == model.plan[layer].pooled


def test_all_layers_named_are_the_whole_model(sound):
    assert load(sound, layers=range(8)).config == load(sound).config


@pytest.mark.parametrize(("layers", "said"), [
    (range(3, 5), "layer 3 reads the global KV of its source layer 2"),
    ([0, 1, 2, 4, 7], "layer 7 reads the selection of its source layer 6"),
    (range(1, 2), "a layer continues the streams of the one before"),
    (range(0, 4, 2), "a layer continues the streams of the one before"),
    (range(0, 9), "names layer 8: layers are 0..7"),
    (range(0), "names no layer: layers are 0..7"),
])  # fmt: skip
def test_layers_that_are_no_model_are_refused(sound, layers, said):
    with pytest.raises(ValueError, match=said):
        load(sound, layers=layers)


def test_draft_blocks_and_vision_are_skipped_with_one_notice(tmp_path, caplog):
    model = nano_model()
    folder = save(model, tmp_path / "model")
    assert not caplog.records
    extra = ["mtp.0.norm.weight", "mtp.2.ffn.gate.bias", "vision.x.weight", "aligner.y", "image_newline"]
    edit_tensors(folder, lambda tensors: tensors.update({name: torch.ones(3) for name in extra}))
    with caplog.at_level(logging.WARNING):
        loaded = load(folder)
    assert_same_bits(loaded.state_dict(), model.state_dict())
    [record] = caplog.records
    assert record.getMessage() == "model: skipped 2 of mtp.*, 1 of vision.*, 1 of aligner.*, 1 of image_*"


def test_a_shard_of_skipped_tensors_is_not_opened(tmp_path, opened):
    folder = save(nano_model(), tmp_path / "model")
    path = folder / "model.safetensors.index.json"
    path.write_text(path.read_text().replace('"weight_map": {', '"weight_map": {"vision.x": "far.safetensors",'))
    load(folder)
    assert opened == {"model-00001-of-00001.safetensors"}


def test_the_image_bias_may_be_absent_and_is_then_zero(tmp_path, monkeypatch):
    """Zero by `load` itself, and no other parameter keeps its initial value."""
    monkeypatch.setattr(transformer, "initialise", lambda model, seed: [p.data.fill_(7) for p in model.parameters()])
    model = nano_model()
    folder = save(model, tmp_path / "model")
    edit_tensors(folder, lambda tensors: [tensors.pop(f"layers.{n}.ffn.gate.bias_vl") for n in range(8)])
    loaded = load(folder)
    assert all(not layer.ffn.gate.bias_vl.any() for layer in loaded.layers)
    for name, tensor in released(model).items():
        assert name.endswith("bias_vl") or torch.equal(released(loaded)[name], tensor), name


def test_a_single_file_needs_no_index(tmp_path):
    model = nano_model()
    folder = save(model, tmp_path / "model")
    (folder / "model-00001-of-00001.safetensors").rename(folder / "model.safetensors")
    (folder / "model.safetensors.index.json").unlink()
    assert_same_bits(load(folder).state_dict(), model.state_dict())


def test_loading_leaves_parameters_trainable_as_a_new_model_has_them(sound):
    loaded = load(sound)
    flags = {name: parameter.requires_grad for name, parameter in nano_model().named_parameters()}
    assert {name: parameter.requires_grad for name, parameter in loaded.named_parameters()} == flags
    assert not all(flags.values())
