"""Golden data for the tests: the stored files; toy A and a drafter as configs with their released-name weights."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from tinyds41.config import Config

GOLDEN = Path(__file__).parent / "golden"


def load(name: str) -> dict[str, torch.Tensor]:
    """The tensors of tests/golden/NAME.safetensors as stored."""
    return load_file(GOLDEN / f"{name}.safetensors")


def toy_a(dtype: torch.dtype, **changes) -> tuple[Config, dict[str, torch.Tensor]]:
    """Config and weights of toy A. The F8 and BF16 storage is exact: casting gives the values themselves."""
    config = Config.from_json(GOLDEN / "toyA_config.json")
    weights = {name: tensor.to(dtype) for name, tensor in load("toyA_weights").items()}
    return config.replace(**changes) if changes else config, weights


def dspark(dtype: torch.dtype, **changes) -> tuple[Config, dict[str, torch.Tensor]]:
    """Config of a model with draft blocks, and the weights of these, of the embedding and of the head alone."""
    config = Config.from_json(GOLDEN / "dspark_config.json")
    weights = {name: tensor.to(dtype) for name, tensor in load("dspark_weights").items()}
    return config.replace(**changes) if changes else config, weights
