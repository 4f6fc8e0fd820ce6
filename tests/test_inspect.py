"""`tinyds41 inspect` shows what files hold, from their headers alone."""

import argparse
import json
import subprocess
import sys

import pytest
import torch
from folders import edit_tensors, index_of, nano_model, released

from tinyds41.checkpoint import inspect_command
from tinyds41.checkpoint.inspect import inspect
from tinyds41.checkpoint.write import save


@pytest.fixture(scope="module")
def model():
    return nano_model(torch.bfloat16)


def run(*argv) -> None:
    parser = argparse.ArgumentParser()
    inspect_command.add_parser(parser.add_subparsers())
    inspect_command.run(parser.parse_args(["inspect", *argv]))


@pytest.mark.parametrize("quantize", [False, True])
def test_parameters_and_bytes_are_those_of_the_model_and_its_files(tmp_path, model, quantize):
    folder = save(model, tmp_path / "model", quantize=quantize, max_shard_bytes=100_000)
    report = inspect(folder)
    assert report.n_parameters == sum(parameter.numel() for parameter in model.parameters())
    total = json.loads((folder / "model.safetensors.index.json").read_text())["metadata"]["total_size"]
    assert report.n_bytes == total
    assert report.shards == {name: (folder / name).stat().st_size for name in sorted(set(index_of(folder).values()))}
    assert len(report.shards) > 2
    assert sum(group.count for group in report.groups) == len(released(model))


def test_formats_shapes_and_bytes_of_quantised_tensors(tmp_path, model):
    report = inspect(save(model, tmp_path / "model", quantize=True))
    rows = {group.name: (group.component, group.count, group.shape, group.format, group.n_parameters, group.n_bytes)
            for group in report.groups}  # fmt: skip
    # 8 layers of 4 experts; 512 bytes of codes and 32 scales each.
    assert rows["layers.*.ffn.experts.*.w2.weight"] == (
        "routed experts", 32, (32, 32), "packed fp4", 32 * 1024, 32 * (512 + 32))  # fmt: skip
    # Attention's wq_b is 64 x 16: two tiles.
    assert rows["layers.*.attn.wq_b.weight"] == ("attention", 8, (64, 16), "fp8 tiles", 8 * 1024, 8 * (1024 + 2))
    assert rows["embed.weight"] == ("token embedding", 1, (64, 32), "BF16", 2048, 4096)
    tables = [group for group in report.groups if group.component == "Engram rows"]
    assert [(group.shape, group.format, group.n_bytes) for group in tables] == [
        ((156, 32), "fp8 rows", 156 * 33), ((304, 32), "fp8 rows", 304 * 33)]  # fmt: skip


def test_every_tensor_of_the_model_has_a_component(tmp_path, model):
    components = inspect(save(model, tmp_path / "model")).components()
    assert list(components) == [
        "token embedding", "Engram rows", "Engram projections", "attention", "compressor", "indexer", "router",
        "routed experts", "shared expert", "hyper-connections", "norms", "output head"]  # fmt: skip
    assert components["router"][0] == 8 * (4 * 32 + 4 + 4)
    assert components["compressor"][0] == 2 * (32 * 32 + 32) + 32 * 32  # only ratio 2 has a gate
    assert components["norms"][0] == 32 + 8 * 2 * 32


def test_parts_that_are_not_loaded_are_shown(tmp_path, model):
    folder = save(model, tmp_path / "model")
    extra = {"mtp.0.main_norm.weight": torch.ones(3), "vision.a": torch.ones(2), "what": torch.ones(5),
             "head.weight": torch.ones(64, 32).to(torch.float8_e4m3fn)}  # fmt: skip
    edit_tensors(folder, lambda tensors: tensors.update(extra))
    report = inspect(folder)
    components = report.components()
    assert [components[name][0] for name in ("draft blocks", "vision", "other")] == [3, 2, 5]
    [head] = [group for group in report.groups if group.component == "output head"]
    assert head.format == "F8_E4M3 without scale"


def test_draft_blocks_are_those_stored_not_those_of_the_config(tmp_path, model):
    """The config of nano names 3, as the released one does; the model has none."""
    folder = save(model, tmp_path / "model")
    assert "Engram before layers [1, 3]; 0 of 3 draft blocks stored" in str(inspect(folder))
    extra = {f"mtp.{name}.weight": torch.ones(3) for name in ("0.main_norm", "0.attn.q_norm", "10.main_norm")}
    edit_tensors(folder, lambda tensors: tensors.update(extra))
    report = inspect(folder)
    assert "2 of 3 draft blocks stored" in str(report) and report.to_dict()["draft_blocks"] == 2


def test_the_command_prints_tables_or_json(tmp_path, model, capsys):
    folder = save(model, tmp_path / "model", quantize=True)
    report = inspect(folder)
    run(str(folder))
    shown = capsys.readouterr().out
    assert "8 layers: 4 encoder, 4 decoder; 2 SWA, 2 FULL, 3 REUSE, 1 REINDEX" in shown
    for word in (f"{report.n_parameters:,}", f"{report.n_bytes:,}", "layers.*.attn.wq_b.weight", "64 x 16", "fp8 rows"):
        assert word in shown
    run(str(folder), "--json")
    content = json.loads(capsys.readouterr().out)
    assert content["parameters"] == report.n_parameters
    assert content["components"]["router"] == {"parameters": 1088, "bytes": 2176}
    assert content["config"] == model.config.to_dict()
    assert {row["format"] for row in content["tensors"]} == {"BF16", "fp8 tiles", "packed fp4", "fp8 rows"}


def test_inspecting_does_not_load_torch(tmp_path, model):
    folder = save(model, tmp_path / "model", quantize=True)
    code = ("import sys; from tinyds41.checkpoint.inspect import inspect; print(inspect(sys.argv[1]));"
            "sys.exit(str({'torch', 'safetensors'} & set(sys.modules) or ''))")  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == ""
    assert "routed experts" in done.stdout
