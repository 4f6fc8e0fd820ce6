"""The state of a run in one safetensors file, replaced as a whole: there is always one good snapshot."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

FILE_NAME = "snapshot.safetensors"


def save_snapshot(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, record: Mapping[str, Any]) -> Path:
    """Weights, optimiser state and `record` in one file, written beside and then moved.

    The record is JSON in the file's header.

    Raises: OSError when the folder cannot be written; the snapshot before stays as it was.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    for parameter_name, state in _states(optimizer).items():
        tensors |= {f"optimizer.{parameter_name}.{key}": value for key, value in state.items()}
    path = folder / FILE_NAME
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        contiguous = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
        save_file(contiguous, partial, metadata={"record": json.dumps(record)})
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def load_snapshot(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    """Puts a snapshot's weights into `model`, its state into `optimizer`; returns its record.

    Raises: FileNotFoundError naming the file; ValueError for a damaged file, or for weights of another
        model, which is left as it was.
    """
    path = folder / FILE_NAME
    with _opened(path) as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a dict)
        record = _record(file)
    prefix = "model."
    weights = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
    _require_same_model(path, weights, model.state_dict())
    model.load_state_dict(weights)
    if optimizer is not None:
        _restore(optimizer, tensors)
    return record


def read_record(folder: Path) -> dict[str, Any]:
    """A snapshot's record alone: what it was trained with, before anything is loaded.

    Raises: FileNotFoundError naming the file; ValueError for a damaged one.
    """
    with _opened(folder / FILE_NAME) as file:
        return _record(file)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    if not path.is_file():
        raise FileNotFoundError(f"no snapshot at {path}")
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, KeyError, ValueError) as error:
        raise ValueError(f"{path} is not a sound snapshot: {error}") from error


def _record(file: Any) -> dict[str, Any]:
    return json.loads((file.metadata() or {})["record"])


def _require_same_model(path: Path, weights: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    """Before anything is copied: torch would fill the tensors that fit and then complain about the others."""
    for name in sorted({*weights, *wanted}):
        here, there = (_kind(tensors.get(name)) for tensors in (wanted, weights))
        if here != there:
            raise ValueError(f"{path} is of another model: {name} is {there} there and {here} here")


def _kind(tensor: Tensor | None) -> str:
    return "missing" if tensor is None else f"{tensor.dtype} {tuple(tensor.shape)}"


def _states(optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Tensor]]:
    """The optimiser's tensors by parameter name; its groups know the names."""
    return {
        name: optimizer.state[parameter]
        for group in optimizer.param_groups
        for name, parameter in zip(group["names"], group["params"], strict=True)
        if parameter in optimizer.state
    }


def _restore(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    for group in optimizer.param_groups:
        for name, parameter in zip(group["names"], group["params"], strict=True):
            prefix = f"optimizer.{name}."
            state = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
            if state:
                optimizer.state[parameter] = {key: value.to(parameter.device) for key, value in state.items()}
