"""`tinyds41 train-draft`: from a model folder to one with a drafter, and what the drafter does."""

from __future__ import annotations

import json

import pytest
import torch
from folders import assert_same_bits, released

import tinyds41 as ds
from tinyds41.cli import main
from tinyds41.config import Config
from tinyds41.model.transformer import Model
from tinyds41.tokenizer import Tokenizer
from tinyds41.train import train_draft_command
from tinyds41.train.corpus import data_folder
from tinyds41.train.train_draft import DraftConfig

QUICK = ["--steps", "2", "--batch-size", "2", "--length", "48", "--anchors", "8", "--rows", "4"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.set_num_threads(1)
    place = tmp_path_factory.mktemp("drafting")
    tokenizer = Tokenizer.load(data_folder())
    config = Config.preset("nano", vocab_size=tokenizer.vocab_size,
                           engram_compressed_vocab_size=tokenizer.compressed_vocab_size)  # fmt: skip
    ds.save(Model(config, tokenizer=tokenizer), place / "model")
    (place / "mine.txt").write_text("A rose is a rose is a rose.\n" * 600)
    return place


def command(folder, out, *options):
    return ["train-draft", str(folder / "model"), "--text", str(folder / "mine.txt"), "--out", str(out), *QUICK,
            *options]  # fmt: skip


def test_a_model_gets_a_drafter_with_temperatures_and_stays_as_it_was(folder, tmp_path, capsys):
    out = tmp_path / "run"
    assert main(command(folder, out, "--seed", "3")) == 0
    printed, result = capsys.readouterr().out, json.loads((out / "result.json").read_text())
    assert result["train"]["seed"] == 3 and result["steps"] == 2 and result["train"]["length"] == 48
    model, backbone = ds.load(out / "model", draft=True), ds.load(folder / "model")
    assert_same_bits({k: v for k, v in released(model).items() if k[:4] != "mtp."}, released(backbone))
    assert list(model.config.dspark_temperatures) == pytest.approx(result["temperatures"], abs=1e-4)
    found = result["acceptance"]
    assert len(found["by_position"]) == model.config.dspark_block_size == len(result["temperatures"])
    assert 1 <= found["accepted_length"][0] <= found["accepted_length"][-1] and f"acceptance: {found}" in printed
    for name in ("before", "after"):
        error = result["confidence_error"][name]
        assert 0 <= error["error"] <= 1 and 0 <= error["interval"][0] <= error["interval"][1]
    assert ds.generate(model, "A rose", max_new_tokens=6, speculate=True, seed=1)


def test_without_calibration_there_are_no_temperatures(folder, tmp_path, capsys):
    assert main(command(folder, tmp_path / "run", "--no-calibrate")) == 0
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["temperatures"] == [] == list(ds.load(tmp_path / "run" / "model").config.dspark_temperatures)
    error = result["confidence_error"]
    assert error["before"] == error["after"]


def test_an_interrupted_run_says_how_to_go_on_and_does(folder, tmp_path, capsys, monkeypatch):
    train = train_draft_command.train_draft

    def stopped(*arguments, **options):
        history = train(*arguments, **options)
        history.interrupted = not options["resume"]
        return history

    monkeypatch.setattr(train_draft_command, "train_draft", stopped)
    out, whole = tmp_path / "run", tmp_path / "whole"
    assert main(command(folder, out)) == 0
    assert "Interrupted after 2 of 2 steps: --resume goes on" in capsys.readouterr().out
    assert not (out / "model").exists()
    assert main(command(folder, out, "--resume")) == 0
    monkeypatch.setattr(train_draft_command, "train_draft", train)
    assert main(command(folder, whole)) == 0
    a, b = (json.loads((place / "result.json").read_text())["acceptance"] for place in (out, whole))
    assert a == b


def test_temperatures_are_fitted_on_every_second_row_and_asked_on_the_others(folder, tmp_path, monkeypatch):
    seen, record = [], train_draft_command.drafts_on
    monkeypatch.setattr(train_draft_command, "drafts_on", lambda model, rows: seen.append(rows) or record(model, rows))
    assert main(command(folder, tmp_path / "run")) == 0
    assert [rows.shape for rows in seen] == [(2, 48), (2, 48)]
    assert not {tuple(row) for row in seen[0].tolist()} & {tuple(row) for row in seen[1].tolist()}


def test_an_example_is_known_by_its_name(monkeypatch):
    model = train_draft_command._backbone("text", "cpu")
    assert model.mtp is None and model.tokenizer is not None


@pytest.mark.parametrize(("change", "message"), [
    (["--rows", "1"], "rows=1: at least 2"), (["--steps", "0"], "steps=0"), (["--text", "poems"], "no text file poems"),
    (["--length", "60000"], "has no row of 60000"), (["--resume"], "no snapshot at"),
])  # fmt: skip
def test_bad_input_takes_one_line(folder, tmp_path, capsys, change, message):
    assert main(command(folder, tmp_path / "run", *change)) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_model_without_a_tokenizer_reads_no_text(tmp_path, capsys):
    ds.save(Model(Config.preset("nano")), tmp_path / "model")
    assert main(["train-draft", str(tmp_path / "model"), "--out", str(tmp_path / "run"), *QUICK]) == 2
    assert "has no tokenizer: it reads no text" in capsys.readouterr().err


def test_every_field_of_the_config_is_an_option(capsys):
    with pytest.raises(SystemExit):
        main(["train-draft", "--help"])
    shown = capsys.readouterr().out
    assert all("--" + name.replace("_", "-") in shown for name in DraftConfig.__dataclass_fields__)
