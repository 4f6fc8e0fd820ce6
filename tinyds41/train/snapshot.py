"""The state of a run in one safetensors file, replaced as a whole: there is always one good snapshot."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from tinyds41.whole_file import whole_file

FILE_NAME = "snapshot.safetensors"


def save_snapshot(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, record: Mapping[str, Any]) -> Path:
    """Weights, optimiser state and `record` in one file, written beside and then moved.

    The record is JSON in the file's header, beside a hash of everything.

    Raises: OSError when the folder cannot be written; the snapshot before stays as it was.
    """
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    for parameter_name, state in _states(optimizer).items():
        tensors |= {f"optimizer.{parameter_name}.{key}": value for key, value in state.items()}
    tensors = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    header = {"record": json.dumps(record)}
    header["sha256"] = _seal(header["record"], tensors)
    path = folder / FILE_NAME
    with whole_file(path) as partial:
        save_file(tensors, partial, metadata=header)
    return path


@dataclass(frozen=True)
class Snapshot:
    """What a snapshot held when it was read: its record, and the tensors of model and optimiser by their names."""

    path: Path
    record: dict[str, Any]
    tensors: dict[str, Tensor]

    def restore(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Puts the weights into `model`, the state into `optimizer`.

        Raises: ValueError for weights of another model, which is left as it was.
        """
        prefix = "model."
        weights = {name.removeprefix(prefix): t for name, t in self.tensors.items() if name.startswith(prefix)}
        _require_same_model(self.path, weights, model.state_dict())
        model.load_state_dict(weights)
        if optimizer is not None:
            _restore(optimizer, self.tensors)


def read_snapshot(folder: Path) -> Snapshot:
    """The snapshot in a folder, compared with its hash: a flipped bit would change a run in silence.

    Raises: FileNotFoundError naming the file; ValueError for a damaged one.
    """
    path = folder / FILE_NAME
    if not path.is_file():
        raise FileNotFoundError(f"no snapshot at {path}")
    try:
        with safe_open(path, framework="pt") as file:
            header, tensors = file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        record, expected = header["record"], header["sha256"]
    except (SafetensorError, KeyError) as error:
        raise ValueError(f"{path} is not a sound snapshot: {error}") from error
    found = _seal(record, tensors)
    if found != expected:
        raise ValueError(f"{path} is damaged: its sha256 is {found}, its header says {expected}")
    return Snapshot(path, json.loads(record), tensors)


def hash_of(tensors: Iterable[Tensor | None]) -> str:
    """What tells the rows of one run, or the weights of one model, from those of another."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(b"none" if tensor is None else tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def require_same_run(
    snapshot: Snapshot, identity: Mapping[str, Any], defaults: Mapping[str, Any], free: Sequence[str] = ()
) -> None:
    """A snapshot goes on under the configs and with the rows it was made with, or it would be another run.

    identity: the configs "train" and "model", and the hash "rows". defaults: of "train"; a field that the snapshot
        lacks is younger than it: it was trained with what is now the default. free: fields that may change.
    Raises: ValueError naming the fields that differ, with both values.
    """
    now = json.loads(json.dumps({**identity["train"], **_fields(identity["model"])}))  # tuples as lists, as there
    before = {**defaults, **snapshot.record["train"], **_fields(snapshot.record["model"])}
    different = [f"{name}={before.get(name)!r} there and {now.get(name)!r} here" for name in sorted({*now, *before})
                 if before.get(name) != now.get(name) and name not in free]  # fmt: skip
    if not different and snapshot.record["rows"] != identity["rows"]:
        different = ["other rows there than here, of another text or task"]
    if different:
        raise ValueError(f"the snapshot in {snapshot.path.parent} is of another run: {'; '.join(different)}")


def _fields(released: dict[str, Any]) -> dict[str, Any]:
    """A model's fields in one level: the released layout nests those of the text model."""
    return {**released, **released.get("text_config", {}), "text_config": None}


def _seal(record: str, tensors: Mapping[str, Tensor]) -> str:
    """The hash of a record and of names, kinds and bytes of tensors."""
    digest = hashlib.sha256(record.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"\n{name} {_kind(tensor)}\n".encode())
        digest.update(tensor.cpu().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


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
