"""Measurements: fair turns, peaks of their own process, results that say where they were made."""

from __future__ import annotations

import json

import pytest

from tinyds41.bench import forward
from tinyds41.bench.bench_command import BENCHES
from tinyds41.bench.measure import alternate, circumstances, in_fresh_process, table, write_json
from tinyds41.cli import main
from tinyds41.config import Config
from tinyds41.peak_memory import peak_bytes


def test_contestants_take_turns_after_one_warm_up_each():
    calls: list[str] = []
    alternate({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, 2)
    assert calls == ["a", "b", "a", "b", "a", "b"]


def test_the_peak_of_a_fresh_process_is_its_own():
    """This process holds 400 MB more; what it starts must not show them."""
    ballast = bytearray(400_000_000)
    for start in range(0, len(ballast), 4096):
        ballast[start] = 1
    here = peak_bytes()
    there = in_fresh_process("tinyds41.bench.forward", "8", "1")["peak_bytes"]
    assert there < here - 100_000_000


def test_a_failing_process_says_why():
    with pytest.raises(RuntimeError, match=r"(?s)tinyds41\.bench\.forward no 1 failed:\n.*ValueError"):
        in_fresh_process("tinyds41.bench.forward", "no", "1")


def test_the_ratios_are_those_of_the_rows(monkeypatch, tmp_path, capsys):
    """On nano, in a moment; the JSON names device, dtype, threads and date."""
    nano = Config.preset("nano")
    monkeypatch.setattr(forward.Config, "preset", lambda name: nano)
    monkeypatch.setattr(forward, "in_fresh_process", lambda *a: {"seconds": int(a[1]) / 1000, "peak_bytes": 7})
    for name, value in {"COMPARED": 40, "LONG": 80, "STEP_BATCH": 2, "STEP_LENGTH": 9}.items():
        monkeypatch.setattr(forward, name, value)
    assert main(["bench", "forward", "--threads", "1", "--rounds", "1", "--json", str(tmp_path / "r" / "f.json")]) == 0
    result = json.loads((tmp_path / "r" / "f.json").read_text())
    assert {"date", "device", "dtype", "threads", "torch"} <= set(result) and result["threads"] == 1
    seconds = [row["seconds"] for row in result["rows"]]
    ratios = list(result["ratios"].values())
    assert ratios[1] == pytest.approx((80 / seconds[3]) / (40 / seconds[2]))
    assert all(ratio > 0 for ratio in ratios) and len(ratios) == 3
    assert "times as fast as reference" in capsys.readouterr().out


def test_rounds_below_one_are_refused(capsys):
    assert main(["bench", "forward", "--rounds", "0"]) == 2
    assert "--rounds=0" in capsys.readouterr().err


def test_a_table_is_aligned_and_a_result_is_written(tmp_path):
    assert table([{"a": 1, "bb": "x"}, {"a": 22, "bb": "yy"}]) == " a  bb\n 1   x\n22  yy"
    write_json(tmp_path / "deep" / "x.json", circumstances())
    assert json.loads((tmp_path / "deep" / "x.json").read_text())["dtype"] == "float32"
    assert "forward" in BENCHES
