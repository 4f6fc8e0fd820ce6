"""Measurements: fair turns, peaks of their own process, results that say where they were made."""

from __future__ import annotations

import json

import pytest

from tinyds41.bench import decode, flat, forward, prefill
from tinyds41.bench.bench_command import BENCHES
from tinyds41.bench.measure import alternate, circumstances, in_fresh_process, table, write_json
from tinyds41.cli import main
from tinyds41.config import Config
from tinyds41.cost.flops import decode_cost
from tinyds41.cost.kv_bytes import kv_bytes
from tinyds41.cost.prefill import prefill_cost
from tinyds41.cost.rows import gathered_rows, scored_entries
from tinyds41.infer.session import Session
from tinyds41.peak_memory import peak_bytes


def test_contestants_take_turns_after_one_warm_up_each():
    calls: list[str] = []
    alternate({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, 2)
    assert calls == ["a", "b", "a", "b", "a", "b"]


def test_contestants_are_timed_by_the_clock_that_is_asked_for():
    now = iter([0.0, 2.0, 10.0, 13.0, 20.0, 27.0])
    assert alternate({"a": lambda: None}, 3, lambda: next(now)) == {"a": 3.0}


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
    for name, value in {"COMPARED": 40, "LONG": 80, "STEPS": ((2, 9), (1, 11))}.items():
        monkeypatch.setattr(forward, name, value)
    assert main(["bench", "forward", "--threads", "1", "--rounds", "1", "--json", str(tmp_path / "r" / "f.json")]) == 0
    result = json.loads((tmp_path / "r" / "f.json").read_text())
    assert {"date", "device", "dtype", "threads", "torch"} <= set(result) and result["threads"] == 1
    seconds = [row["seconds"] for row in result["rows"]]
    ratios = list(result["ratios"].values())
    assert ratios[1] == pytest.approx((80 / seconds[3]) / (40 / seconds[2]))
    assert all(ratio > 0 for ratio in ratios) and len(ratios) == 4
    for i, tokens in ((2, 2 * 9), (3, 11)):
        own = result["rows"][2 * i : 2 * i + 2]
        assert [row["tokens"] for row in own] == [tokens, tokens]
        assert [row["by"] for row in own] == ["tinyds41", "reference"]
    assert "times as fast as reference" in capsys.readouterr().out


def test_rounds_below_one_are_refused(capsys):
    assert main(["bench", "forward", "--rounds", "0"]) == 2
    assert "--rounds=0" in capsys.readouterr().err
    assert main(["bench", "forward", "--threads", "0"]) == 2
    assert "--threads 0: 1 to 1024 are possible" in capsys.readouterr().err


def test_a_table_is_aligned_and_a_result_is_written(tmp_path):
    assert table([{"a": 1, "bb": "x"}, {"a": 22, "bb": "yy"}]) == " a  bb\n 1   x\n22  yy"
    write_json(tmp_path / "deep" / "x.json", circumstances())
    assert json.loads((tmp_path / "deep" / "x.json").read_text())["dtype"] == "float32"
    assert "forward" in BENCHES


# ---------------------------------------------------------------------------------------------- sessions, on nano

NANO = Config.preset("nano", max_position_embeddings=1024)
FLASH = Config.preset("flash")
SECONDS = {"tinyds41": 0.5, "mlx-lm": 2.0, "exact": 0.2, "bounded": 0.1, "full": 0.4, "reference": 1.0, "small": 0.3}


class PeerOf:
    """In the place of mlx-lm: the session itself, its logits a quarter too high."""

    name = "mlx-lm"

    def __init__(self, model):
        self.model = model

    def copy_cache(self, session):
        self.session = session.fork()

    def decode(self, token):
        return self.session.decode(token)[0] + 0.25

    def prefill(self, ids):
        return Session(self.model).prefill(ids)[0]


@pytest.fixture
def on_nano(monkeypatch):
    """Nano for `small`, two tokens a turn, a machine of 1 GFLOP/s, and each contestant's fixed seconds."""
    def alternate(runs, rounds):
        for _ in range(rounds):
            for run in runs.values():
                run()
        return {name: SECONDS[name] for name in runs}

    monkeypatch.setattr(Config, "preset", lambda name: FLASH if name == "flash" else NANO)
    for module in (decode, flat, prefill):
        monkeypatch.setattr(module, "alternate", alternate)
    for module in (decode, prefill):
        monkeypatch.setattr(module, "gemm_rate", lambda: 1e9)
        monkeypatch.setattr(module, "MlxPeer", PeerOf)
    for module in (decode, flat):
        monkeypatch.setattr(module, "TOKENS", 2)


@pytest.mark.usefixtures("on_nano")
def test_decode_gives_time_per_token_and_its_share_of_a_matrix_products_rate():
    result = decode.bench_decode(1, contexts=(16, 42))
    assert [(row["context"], row["by"]) for row in result["rows"]] == [(16, "tinyds41"), (42, "tinyds41")]
    cost = decode_cost(NANO.replace(engram_layer_ids=[], engram_num_embeddings=[]))
    for row in result["rows"]:
        assert (row["ms_per_token"], row["tokens_per_second"]) == (250, 4)
        assert row["share_of_gemm_rate"] == round(cost.at(row["context"]).total / 0.25 / 1e9, 4) > 0
        # Even lengths leave no group open.
        assert row["cache_bytes_per_token"] == round(float(kv_bytes(NANO).bytes_per_token), 2)
        assert row["seconds_to_first_token"] >= 0 and row["logits_apart"] is None
    assert result["ratios"] == {"time per token at 42 over 16": 1} and result["gemm_flops_per_second"] == 1e9
    assert {"date", "device", "dtype", "threads"} <= set(result)


@pytest.mark.usefixtures("on_nano")
def test_decode_beside_a_peer_that_takes_over_the_cache():
    result = decode.bench_decode(2, contexts=(16,), peer="mlx-lm")
    mine, theirs = result["rows"]
    assert theirs["by"] == "mlx-lm" and theirs["ms_per_token"] == 1000 and theirs["cache_bytes_per_token"] is None
    assert theirs["logits_apart"] == pytest.approx(0.25, abs=1e-6)  # float32, one addition
    assert mine["ms_per_token"] == 250
    assert result["ratios"]["decode at 16, times as fast as mlx-lm"] == 4


@pytest.mark.usefixtures("on_nano")
def test_prefill_compares_modes_with_the_reference_and_a_peer(monkeypatch):
    started = []
    monkeypatch.setattr(prefill, "in_fresh_process", lambda *a: started.append(a) or {"seconds": 4, "peak_bytes": 3e9})
    monkeypatch.setattr(prefill, "WITH_REFERENCE", 40)
    result = prefill.bench_prefill(1, contexts=(40, 81), peer="mlx-lm")
    by = {(row["tokens"], row["by"]): row for row in result["rows"]}
    modes = ("exact", "bounded", "full")
    assert set(by) == {*((n, mode) for n in (40, 81) for mode in (*modes, "mlx-lm")), (40, "reference"),
                       (324, "exact, own process")}  # fmt: skip
    assert by[81, "bounded"]["tokens_per_second"] == 810 and by[324, "exact, own process"]["tokens_per_second"] == 81
    cost = prefill_cost(NANO.replace(engram_layer_ids=[], engram_num_embeddings=[]))
    for mode in modes:
        work = cost.at(81, mode).total
        assert by[81, mode]["share_of_gemm_rate"] == round(work / SECONDS[mode] / 1e9, 4) > 0
    assert by[40, "reference"]["share_of_gemm_rate"] is None
    ratios = result["ratios"]
    assert ratios["exact at 40, times as fast as reference"] == 5
    assert ratios["bounded at 81, times as fast as full"] == 4
    assert ratios["exact at 40, times as fast as mlx-lm"] > 0
    assert ratios["peak GB at 324"] == 3 and started[0][:2] == ("tinyds41.bench.prefill", "324")


@pytest.mark.usefixtures("on_nano")
def test_the_longest_prompt_follows_the_contexts_up_to_the_models_positions(monkeypatch):
    monkeypatch.setattr(prefill, "in_fresh_process", lambda *a: {"seconds": 4, "peak_bytes": 3e9})
    for contexts, longest in (((9, 5), 36), ((300,), NANO.max_position_embeddings)):
        assert prefill.bench_prefill(1, contexts=contexts)["rows"][-1]["tokens"] == longest


@pytest.mark.usefixtures("on_nano")
def test_a_prefill_of_its_own_reports_seconds_and_peak():
    found = prefill.one_prefill(60)
    assert found["seconds"] > 0 and found["peak_bytes"] > 1_000_000


@pytest.mark.usefixtures("on_nano")
def test_flat_counts_the_work_of_flash_and_times_a_smaller_model():
    contexts = (600, 20_001)
    result, cost = flat.bench_flat(1, contexts=contexts), decode_cost(FLASH)
    for row, context in zip(result["rows"], contexts, strict=True):
        full, pool = scored_entries(FLASH, context)
        assert row["context"] == context
        assert row["entries_scored"] == sum(full.values()) + sum(pool.values())
        assert row["rows_gathered"] == sum(gathered_rows(FLASH, context).values())
        assert row["raw_gflop"] == round(cost.at(context).total / 1e9, 3)
        assert row["weighted_gflop"] == round(cost.at(context, "weighted").total / 1e9, 3)
        assert row["small_ms_per_token"] == 150
    ratios, (first, last) = result["ratios"], result["rows"]
    assert ratios["raw_gflop at 20001 over 600"] == last["raw_gflop"] / first["raw_gflop"] > 1
    assert ratios["small_ms_per_token at 20001 over 600"] == 1 and len(ratios) == 3


@pytest.mark.usefixtures("on_nano")
def test_contexts_reach_the_bench_and_json_alone_is_printed(capsys):
    assert main(["bench", "decode", "--threads", "1", "--rounds", "1", "--contexts", "5,9", "--json", "-"]) == 0
    assert [row["context"] for row in json.loads(capsys.readouterr().out)["rows"]] == [5, 9]


def test_what_a_bench_cannot_take_is_refused(capsys):
    assert main(["bench", "forward", "--contexts", "5,9"]) == 2
    assert "--contexts: `bench forward` has no such choice" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["bench", "decode", "--contexts", "1,9"])
    assert "--contexts: '1,9': whole numbers from 2 on" in capsys.readouterr().err
