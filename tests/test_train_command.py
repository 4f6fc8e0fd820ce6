"""`tinyds41 train` and `tinyds41 eval`: from a text or a task to a model folder, and back."""

from __future__ import annotations

import json

import pytest
import torch

import tinyds41 as ds
from tinyds41.cli import main
from tinyds41.train.examples import example_folder
from tinyds41.train.step_log import read_log
from tinyds41.train.train_config import TrainConfig

QUICK = ["--steps", "2", "--batch-size", "2", "--length", "32", "--indexer-queries", "4"]


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def test_a_text_of_ones_own_becomes_a_model_that_eval_reads(tmp_path, capsys):
    (tmp_path / "mine.txt").write_text("A rose is a rose is a rose.\n" * 600)
    (tmp_path / "train.json").write_text(json.dumps({"steps": 9, "seed": 4}))
    out = tmp_path / "run"
    command = ["train", "--text", str(tmp_path / "mine.txt"), "--preset", "nano", "--out", str(out),
               "--train-config", str(tmp_path / "train.json"), *QUICK]  # fmt: skip
    assert main(command) == 0
    printed, result = capsys.readouterr().out, json.loads((out / "result.json").read_text())
    assert result["train"] == TrainConfig(steps=2, batch_size=2, length=32, indexer_queries=4, seed=4).to_dict()
    assert f"held_out_loss: {result['held_out_loss']}" in printed and result["tokens"] == 2 * 2 * 32
    assert [line["step"] for line in read_log(out)] == [0, 1]
    assert main(["eval", str(out / "model"), "--text", str(tmp_path / "mine.txt"), "--length", "32", "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again == {name: result[name] for name in again} and again["held_out_loss"] > 4
    assert again["held_out_tokens"] > 64
    whole = ["eval", str(out / "model"), "--text", str(tmp_path / "mine.txt"), "--length", "32", "--json", "--tokens"]
    counts = [(main([*whole, n]), json.loads(capsys.readouterr().out)["held_out_tokens"])[1] for n in ("0", "64")]
    assert counts[0] == again["held_out_tokens"] and 64 <= counts[1] < counts[0]


@pytest.mark.parametrize(("name", "length"), [("copy", 48), ("facts", 64), ("note", 32), ("long-needle", 512)])
def test_a_task_has_a_small_model_of_its_own(tmp_path, capsys, name, length):
    out = tmp_path / "run"
    assert main(["train", "--task", name, "--out", str(out), *QUICK, "--length", str(length), "--batch-size", "1"]) == 0
    result = json.loads((out / "result.json").read_text())
    assert result["task"] == name and 0 <= result["right"] <= 1 and result["answers"] >= 64
    assert ds.load(out / "model").config.vocab_size == ds.train.task(name).vocab_size
    capsys.readouterr()
    assert main(["eval", str(out / "model"), "--task", name, "--length", str(length)]) == 0
    assert f"right: {result['right']}" in capsys.readouterr().out
    few = ["eval", str(out / "model"), "--task", name, "--length", str(length), "--rows", "2", "--json"]
    assert main(few) == 0 and json.loads(capsys.readouterr().out)["answers"] < result["answers"] / 8


def test_an_interrupted_run_says_how_to_go_on_and_does(tmp_path, capsys, monkeypatch):
    from tinyds41.train import train_command

    out, whole = tmp_path / "run", tmp_path / "whole"
    command = ["train", "--task", "note", *QUICK, "--snapshot-every", "1"]
    train = train_command.train

    def stopped(*arguments, **options):
        history = train(*arguments, **options)
        history.interrupted = not options["resume"]
        return history

    monkeypatch.setattr(train_command, "train", stopped)
    assert main([*command, "--out", str(out)]) == 0
    assert "Interrupted after 2 of 2 steps: --resume goes on" in capsys.readouterr().out
    assert not (out / "model").exists()
    assert main([*command, "--out", str(out), "--resume"]) == 0
    monkeypatch.setattr(train_command, "train", train)
    assert main([*command, "--out", str(whole)]) == 0
    a, b = (json.loads((folder / "result.json").read_text())["right"] for folder in (out, whole))
    assert a == b


@pytest.mark.parametrize(("argv", "named"), [
    (["train", "--task", "chess"], "no task 'chess': the tasks are needle"),
    (["train", "--task", "note", "--preset", "toy"], "--preset toy is for texts"),
    (["train", "--task", "copy", "--length", "3"], "length=3 is too short"),
    (["train", "--text", "nowhere.txt"], "no text file nowhere.txt"),
    (["train", "--steps", "0"], "steps=0: at least 1 is needed"),
    (["train", "--device", "abacus"], "device 'abacus' cannot be used"),
    (["train", "--resume"], "no snapshot at"),
    (["train", "--task", ""], "no task ''"),
    (["train", "--task", "copy", "--length", "9000000000000"], "length=9000000000000 exceeds max_position_embeddings"),
    (["train", "--task", "note", "--seed", "99999999999999999999"], "seed=99999999999999999999: at most"),
    (["train", "--task", "note", "--device", "meta"], "the model is on the meta device"),
    (["eval", "nowhere"], "nowhere"),
    (["eval", "EXAMPLE", "--tokens", "-1"], "tokens=-1: a number of held-out tokens is needed"),
    (["eval", "EXAMPLE", "--task", "needle", "--rows", "0"], "rows=0: at least one must be asked"),
])  # fmt: skip
def test_bad_input_is_one_line_before_any_training(tmp_path, monkeypatch, capsys, argv, named):
    monkeypatch.chdir(tmp_path)
    assert main([str(example_folder("text")) if part == "EXAMPLE" else part for part in argv]) == 2
    assert named in capsys.readouterr().err
    assert not (tmp_path / "runs" / "train" / "model").exists()


def test_a_folder_that_cannot_hold_the_model_is_refused_before_training(tmp_path, capsys):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "thesis.txt").write_text("mine")
    assert main(["train", "--task", "note", "--out", str(tmp_path), *QUICK]) == 2
    assert "holds thesis.txt, which is no part of a model" in capsys.readouterr().err
    assert not (tmp_path / "log.jsonl").exists()


def test_eval_refuses_what_the_model_cannot_read(tmp_path, capsys):
    assert main(["train", "--task", "note", "--out", str(tmp_path), *QUICK]) == 0
    capsys.readouterr()
    assert main(["eval", str(tmp_path / "model")]) == 2
    assert "has no tokenizer: it reads no text, give a --task" in capsys.readouterr().err
    assert main(["eval", str(tmp_path / "model"), "--task", "copy", "--length", "48"]) == 2
    assert "the task copy has" in capsys.readouterr().err
    assert main(["eval", str(tmp_path / "model"), "--task", "note", "--length", "9000000000000"]) == 2
    assert "length=9000000000000 exceeds max_position_embeddings=4096" in capsys.readouterr().err
