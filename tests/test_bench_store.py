"""Benches of the persistent cache, on nano: what they time is what they say, and their bytes are those of the rows."""

from __future__ import annotations

import pytest
import torch

from tinyds41.bench import replay, sessions, store
from tinyds41.config import Config
from tinyds41.cost.kv_bytes import kv_bytes
from tinyds41.infer.prefix import Windows
from tinyds41.infer.session import Session
from tinyds41.model.transformer import Model

NANO = Config.preset("nano", max_position_embeddings=1024, engram_layer_ids=[], engram_num_embeddings=[])


@pytest.fixture(autouse=True)
def on_nano(monkeypatch):
    monkeypatch.setattr(Config, "preset", lambda name: NANO)


def test_replay_names_tokens_and_bytes_of_each_way():
    result = replay.bench_replay(1, contexts=(90,))
    rows = {row["windows"].split(",")[0]: row for row in result["rows"]}
    assert set(rows) == {"disk", "memory", "bounded", "exact", "prefill"}
    window, plan = NANO.sliding_window, NANO.plan()
    assert rows["bounded"]["encoder_tokens"] == window and rows["prefill"]["encoder_tokens"] == 90
    assert rows["exact"]["encoder_tokens"] == plan.n_encoder * (window - 1)
    assert rows["disk"]["bytes_read"] == rows["memory"]["bytes_read"] > 0 == rows["bounded"]["bytes_read"]
    seconds = {name: row["milliseconds"] for name, row in rows.items()}
    found = result["ratios"]["bounded at 90, times as fast as prefill"]
    assert found == pytest.approx(seconds["prefill"] / seconds["bounded"], rel=0.05)  # milliseconds are rounded


def test_windows_written_to_a_file_are_read_back(tmp_path):
    session = Session(Model(NANO))
    session.start().fill(70)
    windows = Windows.of(session.cache)
    assert replay.write_windows(tmp_path / "w", windows) == windows.n_bytes
    back = replay.read_windows(tmp_path / "w", windows)
    assert back.length == 70 and all(torch.equal(a, b) for a, b in zip(back.rows, windows.rows, strict=True))


def test_store_times_every_step_of_a_resumed_prompt():
    result = store.bench_store(2, contexts=(128,))
    steps = {row["step"]: row for row in result["rows"]}
    assert set(steps) == {"prefill", "save", "read and verify", "restore", "resume, bounded", "resume, exact",
                          "resume, windows in the pool"}  # fmt: skip
    assert steps["save"]["bytes"] == 128 * kv_bytes(NANO).bytes_per_token + 2  # a mark per block of 64
    ratio = steps["prefill"]["seconds"] / steps["resume, bounded"]["seconds"]
    assert result["ratios"]["resume, bounded at 128, times as fast as prefill"] == pytest.approx(ratio, rel=0.05)


def test_sessions_count_what_is_written_per_turn(monkeypatch):
    for name, value in {"TURNS": 3, "PROMPT": 40, "ANSWER": 8, "BLOCK_TOKENS": 8, "CONVERSATION": 48}.items():
        monkeypatch.setattr(sessions, name, value)
    monkeypatch.setattr(sessions, "BUDGET", 100_000)
    result = sessions.bench_sessions(1)
    per_token, windows = kv_bytes(NANO).bytes_per_token, kv_bytes(NANO).window_bytes
    assert [row["tokens"] for row in result["rows"]] == [48, 96, 144]
    assert [row["found"] for row in result["rows"]] == [0, 48, 96]
    for turn, row in enumerate(result["rows"], 1):
        written = 48 * per_token + 6  # a mark per block of 8
        assert row["written"] == written and row["kept"] == turn * written
        assert row["kept_with_windows"] == row["kept"] + 2 * turn * windows  # of all layers, twice a turn
    counts = {name.rsplit(", ", 1)[-1] if "unshared" not in name else name.split("bytes, ")[1]: count
              for name, count in result["ratios"].items() if name.startswith("sessions of")}  # fmt: skip
    assert counts["packed"] > counts["bf16"] >= 1 and counts["packed"] > counts["packed, unshared"]
    # A session more would not have fitted.
    session = Session(Model(NANO))
    session.prefill(torch.arange(4, 52)[None] % NANO.vocab_size)
    assert counts["packed"] == 100_000 // session.report().total_bytes
