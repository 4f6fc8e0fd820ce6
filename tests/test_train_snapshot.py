"""A snapshot gives back what was saved, or is refused: cut, changed, of another model."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tinyds41.config import Config
from tinyds41.model.transformer import Model
from tinyds41.train.optim import ByRole
from tinyds41.train.snapshot import FILE_NAME, read_snapshot, save_snapshot

RECORD = {"step": 7, "train": {"clip": 0.1}}


def trained() -> tuple[Model, ByRole]:
    """A nano and its optimisers behind one step along random gradients."""
    model, generator = Model(Config.preset("nano"), seed=1), torch.Generator().manual_seed(3)
    optimizer = ByRole(model, 0.01)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer.step()
    return model, optimizer


@pytest.fixture
def folder(tmp_path):
    save_snapshot(tmp_path, *trained(), RECORD)
    return tmp_path


def same(one, other) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))


def test_what_was_saved_comes_back(folder):
    (model, optimizer), fresh = trained(), Model(Config.preset("nano"), seed=9)
    empty, snapshot = ByRole(fresh, 0.01), read_snapshot(folder)
    snapshot.restore(fresh, empty)
    assert snapshot.record == RECORD and same(fresh, model)
    before, after = (one.state_dict()["state"] for one in (optimizer, empty))
    assert {(n, k) for n in before for k in before[n]} == {(n, k) for n in after for k in after[n]}
    assert all(torch.equal(before[n][k], after[n][k]) for n in before for k in before[n])


def test_one_changed_bit_anywhere_is_found(folder):
    """In a weight or a moment it would change the run in silence."""
    file = folder / FILE_NAME
    data = file.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    for place in (begin, (begin + len(data)) // 2, len(data) - 1):
        file.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        with pytest.raises(ValueError, match=r"safetensors is damaged: its sha256 is \w{64}, its header says \w{64}"):
            read_snapshot(folder)
    file.write_bytes(data.replace(b'clip', b'clap', 1))
    with pytest.raises(ValueError, match="is damaged"):
        read_snapshot(folder)


def test_a_cut_or_longer_snapshot_is_named(folder):
    file = folder / FILE_NAME
    data = file.read_bytes()
    for changed in (data[:0], data[:4], data[:100], data[:-10], data + b"x"):
        file.write_bytes(changed)
        with pytest.raises(ValueError, match=r"snapshot\.safetensors is not a sound snapshot"):
            read_snapshot(folder)


@pytest.mark.parametrize("change", ["record", "tensor", "no header"])
def test_what_no_run_has_saved_is_named(folder, change):
    """Another record or a missing moment under the old hash, or a safetensors file of another kind."""
    file = folder / FILE_NAME
    with safe_open(file, framework="pt") as opened:
        header, tensors = opened.metadata(), {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    if change == "record":
        header["record"] = json.dumps([])
    if change == "tensor":
        del tensors["optimizer.embed.weight.momentum"]
    save_file(tensors, file, metadata=None if change == "no header" else header)
    with pytest.raises(ValueError, match=r"snapshot\.safetensors is (damaged|not a sound snapshot)"):
        read_snapshot(folder)


def test_a_snapshot_of_another_model_is_refused(folder):
    other = Model(Config.preset("nano", vocab_size=65, engram_compressed_vocab_size=65))
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    with pytest.raises(ValueError, match=r"is of another model: embed.weight is torch.float32 \(64, 32\) there and"):
        read_snapshot(folder).restore(other)
    assert all(torch.equal(tensor, before[name]) for name, tensor in other.state_dict().items())


def test_a_missing_snapshot_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no snapshot at .*snapshot\.safetensors"):
        read_snapshot(tmp_path)


def test_bfloat16_and_scalars_are_saved(tmp_path):
    model = torch.nn.Module()
    model.register_parameter("number", torch.nn.Parameter(torch.tensor(1.5, dtype=torch.bfloat16)))
    model.register_parameter("none", torch.nn.Parameter(torch.zeros(0, 3)))
    save_snapshot(tmp_path, model, torch.optim.SGD([{"params": [], "names": []}], lr=1.0), {})
    assert read_snapshot(tmp_path).tensors["model.number"] == 1.5
