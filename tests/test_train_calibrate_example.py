"""The calibration of the shipped drafter: measured by a command, and what its stored result says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tinyds41.train import calibrate_example
from tinyds41.train.examples import example

STORED = Path(__file__).parents[1] / "docs" / "results" / "calibration.json"


def test_a_few_rows_are_measured_and_written(tmp_path, capsys):
    torch.set_num_threads(1)
    calibrate_example.main(["--rows", "2", "--out", str(tmp_path / "found.json")])
    found, printed = json.loads((tmp_path / "found.json").read_text()), json.loads(capsys.readouterr().out)
    assert found["command"].endswith("calibrate_example --rows 2") and found["device"] == "cpu" and found["date"]
    assert printed == {name: value for name, value in found.items() if name != "reliability"}
    assert found["asked"]["passages"] == 2 and found["fitted_on"]["passages"] == 4  # two of each text
    assert found["asked"]["blocks"] == 2 * 55 and found["fitted_on"]["blocks"] == 4 * 28
    assert len(found["temperatures"]) == 5
    assert sum(part["count"] for part in found["reliability"]["after"]) == 5 * found["asked"]["blocks"]
    assert found["met"] == (found["asked"]["after"]["error"] <= found["allowed"])


def test_the_stored_result_is_of_the_shipped_drafter_and_meets_the_target():
    found = json.loads(STORED.read_text())
    assert found["command"] == "python -m tinyds41.train.calibrate_example"
    assert found["fitted_on"]["blocks"] >= 4_000 and found["asked"]["texts"] == ["devil"]
    assert found["temperatures"] == pytest.approx(list(example("draft").config.dspark_temperatures), abs=1e-4)
    assert found["met"] and found["asked"]["after"]["error"] <= max(0.015, found["asked"]["before"]["error"] / 2)
    low, high = found["asked"]["after"]["interval"]
    assert low < high
