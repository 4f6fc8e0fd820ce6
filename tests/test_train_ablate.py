"""Ablations: every variant is a sound config, rows are stored at once, and a stopped run goes on where it was."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from tinyds41.cli import main
from tinyds41.train import ablate as module
from tinyds41.train.ablate import ablate, one_row, summary
from tinyds41.train.ablations import ABLATIONS, Ablation, Variant
from tinyds41.train.run_options import TaskSubject
from tinyds41.train.train_config import TrainConfig

SMALL = Ablation(question="Is a wider window of use?", subject="note", unseen="anything else",
                 train={"steps": 3, "batch_size": 2, "length": 16, "indexer_queries": 4},
                 variants=(Variant(name="4"), Variant(name="2", config={"sliding_window": 2})))  # fmt: skip


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setitem(ABLATIONS, "small", SMALL)


def quiet(line):
    pass


@pytest.mark.parametrize("name", ABLATIONS)
def test_every_variant_is_a_sound_config_and_differs_from_the_others(name):
    from tinyds41.config import Config

    ablation = ABLATIONS[name]
    base = Config.preset("toy") if ablation.subject == "text" else TaskSubject(
        ablation.subject, ablation.train["length"]).config(None, None)  # fmt: skip
    made = [(base.replace(**{**ablation.config, **variant.config}), TrainConfig(**{**ablation.train, **variant.train}))
            for variant in ablation.variants]  # fmt: skip
    assert len({(str(config.to_dict()), str(train.to_dict())) for config, train in made}) == len(made) > 1
    assert len({variant.name for variant in ablation.variants}) == len(made) and ablation.unseen


def test_a_decoder_alone_prefills_with_all_but_its_last_layer():
    """In the encoder-decoder half of the layers read a prompt; with entries of their own nearly all must."""
    from tinyds41.config import Config

    halves = [Config.preset("toy", **variant.config).plan().boundary for variant in ABLATIONS["ced"].variants]
    assert halves == [4, 7]


def test_a_row_is_one_training_and_its_numbers(small, monkeypatch):
    row = one_row(SMALL, SMALL.variants[1], seed=1)
    assert 0 <= row["right"] <= 1 and row["bytes_per_token"] == 0 and row["parameters"] > 1000
    assert row == one_row(SMALL, SMALL.variants[1], seed=1) | {"seconds": row["seconds"]}
    seeds, train = [], module.train
    monkeypatch.setattr(module, "train", lambda *a, **k: seeds.append(a[2].seed) or train(*a, **k))
    assert one_row(SMALL, SMALL.variants[1], seed=2)["right"] != row["right"] and seeds == [2]


def test_finished_rows_stay_when_a_run_stops_and_are_not_trained_again(small, tmp_path, monkeypatch):
    path, trained, row = tmp_path / "out" / "small.json", [], one_row

    def counted(ablation, variant, seed, steps):
        if len(trained) == 3:
            raise KeyboardInterrupt
        trained.append((variant.name, seed))
        return row(ablation, variant, seed, steps)

    monkeypatch.setattr(module, "one_row", counted)
    with pytest.raises(KeyboardInterrupt):
        ablate("small", path, (0, 1), say=quiet)
    assert [(row["variant"], row["seed"]) for row in json.loads(path.read_text())["rows"]] == trained
    monkeypatch.setattr(module, "one_row", lambda *arguments: trained.append("again") or row(*arguments))
    content = ablate("small", path, (0, 1), say=quiet)
    assert trained == [("4", 0), ("2", 0), ("4", 1), "again"] and len(content["rows"]) == 4
    assert content == json.loads(path.read_text()) and ablate("small", path, (0, 1), say=quiet) == content


def test_a_training_that_another_ablation_has_is_not_repeated(small, tmp_path, monkeypatch):
    """The same sizes, recipe and seed give the same numbers, whatever the question."""
    first = ablate("small", tmp_path / "small.json", (0,), say=quiet)
    (tmp_path / "notes.json").write_text("{}")
    variants = (Variant(name="two"), Variant(name="3", config={"sliding_window": 3}))
    other = dataclasses.replace(SMALL, config={"sliding_window": 2}, variants=variants)
    monkeypatch.setitem(ABLATIONS, "again", other)
    trained, row = [], one_row
    monkeypatch.setattr(module, "one_row", lambda *a: trained.append((a[1].name, a[2])) or row(*a))
    content = ablate("again", tmp_path / "again.json", (0, 1), say=quiet)
    assert trained == [("3", 0), ("two", 1), ("3", 1)]
    borrowed, known = content["rows"][0], first["rows"][1]
    assert borrowed == {**known, "variant": "two", "trained_for": "small"}
    assert "trained_for" not in content["summary"]["two"] and content["summary"]["two"]["right"]["spread"] >= 0


@pytest.mark.parametrize("change", ({"torch": "1.0"}, {"threads": 2}))
def test_rows_of_another_torch_or_other_threads_are_not_taken_over(small, tmp_path, monkeypatch, change):
    ablate("small", tmp_path / "small.json", (0,), say=quiet)
    file = tmp_path / "small.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    monkeypatch.setitem(ABLATIONS, "again", dataclasses.replace(SMALL, question="Again?"))
    content = ablate("again", tmp_path / "again.json", (0,), say=quiet)
    assert not any("trained_for" in row for row in content["rows"])
    if "torch" in change:
        with pytest.raises(ValueError, match=r"was made otherwise: torch='1\.0' there and '"):
            ablate("small", file, (0,), say=quiet)


def test_means_and_spreads_are_those_of_the_rows():
    rows = [{"variant": "a", "seed": s, "loss": loss} for s, loss in ((0, 1.0), (1, 3.0))]
    assert summary([*rows, {"variant": "b", "seed": 0, "loss": 5.0}]) == {
        "a": {"loss": {"mean": 2.0, "spread": pytest.approx(2**0.5)}}, "b": {"loss": {"mean": 5.0, "spread": 0.0}}}
    late = [{"variant": "a", "seed": 0}, {"variant": "a", "seed": 1, "mass": 0.5}]
    assert summary(late) == {"a": {"mass": {"mean": 0.5, "spread": 0.0}}}


def test_a_file_of_another_recipe_is_not_continued(small, tmp_path, monkeypatch):
    path = tmp_path / "small.json"
    ablate("small", path, (0,), say=quiet)
    before = path.read_bytes()
    monkeypatch.setitem(ABLATIONS, "small", dataclasses.replace(SMALL, train={**SMALL.train, "steps": 4}))
    with pytest.raises(ValueError, match=r"was made otherwise: the recipe's train$"):
        ablate("small", path, (0,), say=quiet)
    with pytest.raises(ValueError, match=r"the recipe's steps"):
        ablate("small", path, (0,), steps=1, say=quiet)
    assert path.read_bytes() == before


@pytest.mark.parametrize("change", [
    {"rows": {}}, {"rows": 3}, {"rows": [{}]}, {"rows": [[1]]}, {"rows": [{"variant": "4", "loss": 1.0}]},
    {"rows": [{"variant": "4", "seed": 0, "loss": "low"}]}, {"recipe": None}, {"recipe": "x"}, {"rows": None},
    "[]", "", "[" * 100_000,
])  # fmt: skip
def test_a_file_that_is_none_is_not_overwritten(small, tmp_path, change):
    path = tmp_path / "mine.json"
    content = {"name": "small", "threads": 1, "recipe": {}, "rows": [], "summary": {}}
    path.write_text(change if isinstance(change, str) else json.dumps({**content, **change}))
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r"mine\.json is no file of an ablation"):
        ablate("small", path, (0,), say=quiet)
    assert path.read_bytes() == before


def test_where_no_row_can_be_written_none_is_trained(small, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "one_row", lambda *arguments: pytest.fail("trained all the same"))
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "file" / "small.json"):
        with pytest.raises(OSError, match=r"is a folder|File exists"):
            ablate("small", path, (0,), say=quiet)


def test_ctrl_c_in_a_training_ends_the_run_and_keeps_finished_rows(small, tmp_path, monkeypatch, capsys):
    path, train = tmp_path / "small.json", module.train
    calls = []

    def stopped(*arguments, **options):
        history = train(*arguments, **options)
        calls.append(history.step)
        history.interrupted = len(calls) == 2
        return history

    monkeypatch.setattr(module, "train", stopped)
    assert main(["ablate", "small", "--out", str(path)]) == 130
    assert "interrupted" in capsys.readouterr().err and len(json.loads(path.read_text())["rows"]) == 1
    assert [file.name for file in tmp_path.iterdir()] == ["small.json"]


@pytest.mark.parametrize("threads", ["0", "-1", "1000000000"])
def test_threads_that_no_machine_has_are_refused(small, tmp_path, capsys, threads):
    assert main(["ablate", "small", "--threads", threads, "--out", str(tmp_path / "x.json")]) == 2
    assert f"--threads {threads}: 1 to 1024 are possible" in capsys.readouterr().err


def test_the_command_prints_a_table_with_what_is_not_shown(small, tmp_path, capsys):
    assert main(["ablate", "small", "--seeds", "0", "--steps", "2", "--out", str(tmp_path / "small.json")]) == 0
    printed = capsys.readouterr().out
    assert "variant" in printed and "±" in printed and "Not shown: anything else." in printed


def test_an_unknown_ablation_names_the_known(tmp_path, capsys):
    assert main(["ablate", "everything", "--out", str(tmp_path / "x.json")]) == 2
    assert "no ablation 'everything': there are ced, sharing, top-k" in capsys.readouterr().err
