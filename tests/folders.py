"""Model folders for the tests: small models with values that show a fault, and ways to damage what was saved."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tinyds41.checkpoint.names import to_released
from tinyds41.config import Config
from tinyds41.model.transformer import Model
from tinyds41.tokenizer import Tokenizer

INDEX = "model.safetensors.index.json"


def nano_model(
    dtype: torch.dtype = torch.float32, tokenizer: Tokenizer | None = None, draft: bool = False, **changes
) -> Model:
    """A nano model whose every parameter is random: a norm of ones or a bias of zeros could hide a mix-up.

    Experts are 32 wide, so that packed FP4 divides all of their rows.
    """
    config = Config.preset("nano", **{"moe_intermediate_size": 32} | changes)
    model = Model(config, tokenizer=tokenizer, dtype=dtype, draft=draft)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


def tokenizer_model() -> Model:
    """A nano model that needs its tokenizer: "The" and "the" share a compressed id."""
    tokenizer = Tokenizer.train(["the cat The Cat THE CAT " * 20], 280)
    return nano_model(tokenizer=tokenizer, vocab_size=300, engram_compressed_vocab_size=tokenizer.compressed_vocab_size)


def released(model: Model) -> dict[str, Tensor]:
    """The model's tensors under their released names."""
    return to_released(model.state_dict())


def assert_same_bits(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Same names, dtypes and bits, the sign of zero included."""
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name].contiguous().view(torch.uint8), tensor.contiguous().view(torch.uint8)), name


def files_of(folder: Path) -> dict[str, bytes]:
    """Every file's content."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def index_of(folder: Path) -> dict[str, str]:
    """Tensor name to shard, as the index has it."""
    return json.loads((folder / INDEX).read_text())["weight_map"]


def write_folder(folder: Path, config: Config, tensors: Mapping[str, Tensor]) -> Path:
    """A released folder of one shard, written without the code under test."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    shard = "model-00001-of-00001.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / shard)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(tensors, shard)}))
    return folder


def edit_tensors(folder: Path, edit: Callable[[dict[str, Tensor]], None]) -> None:
    """Changes what a folder of one shard holds; index and shard agree afterwards."""
    [shard] = set(index_of(folder).values())
    tensors = load_file(folder / shard)
    edit(tensors)
    save_file(tensors, folder / shard)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(tensors, shard)}))


def edit_config(folder: Path, **changes) -> None:
    """Changes fields of the text config."""
    path = folder / "config.json"
    content = json.loads(path.read_text())
    content["text_config"] |= changes
    path.write_text(json.dumps(content))
