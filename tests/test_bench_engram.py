"""`tinyds41 bench engram` on nano: what it counts is what was read, and it says where cold rows came from."""

from __future__ import annotations

import json

import pytest
import torch
from models import NANO, random_ids

from tinyds41.bench import engram, page_cache
from tinyds41.bench.engram import Run, bench_engram, in_turns, served
from tinyds41.cli import main
from tinyds41.config import Config
from tinyds41.infer.host_rows import RowReads, total
from tinyds41.model.engram import table_primes


def wider():
    """In the place of flash: three heads, rows twice as wide."""
    config = NANO.replace(engram_vocab_size=60, engram_n_heads=3, engram_head_dim=64, engram_num_embeddings=[1, 1])
    return config.replace(engram_num_embeddings=[sum(primes) for primes in table_primes(config)])


@pytest.fixture
def on_nano(monkeypatch, tmp_path):
    monkeypatch.setattr(Config, "preset", lambda name: wider() if name == "flash" else NANO)
    monkeypatch.setattr(engram, "PROMPT", 20)
    monkeypatch.setattr(engram, "CHUNK", 5)
    monkeypatch.setattr(engram.tempfile, "tempdir", str(tmp_path))


@pytest.mark.usefixtures("on_nano")
def test_the_table_holds_what_was_read(tmp_path, capsys):
    """Bytes a token reads, shares between 0 and 1, rates that follow from their row; the files are gone afterwards."""
    options = ["--threads", "1", "--rounds", "1", "--rows", "195", "--json", str(tmp_path / "e.json")]
    assert main(["bench", "engram", *options]) == 0
    result, shown = json.loads((tmp_path / "e.json").read_text()), capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["e.json"]
    assert {"date", "device", "dtype", "threads"} <= set(result) and "toy, share of row reading hidden" in shown
    rows = {(row["what"], row["by"]): row for row in result["rows"]}
    assert len(rows) == len(result["rows"]) == 9
    for (what, by), row in rows.items():
        large = "large" in what
        assert row["tokens"] == (195 // 18 if large else 20)  # two tables, three orders, three heads
        # Rounded to a tenth of a millisecond in the row.
        assert row["tokens_per_second"] == pytest.approx(row["tokens"] / row["seconds"], rel=0.2)
        if by == "in memory":
            assert row["row_bytes_per_token"] is row["hidden"] is None
        else:
            assert row["row_bytes_per_token"] == (18 * 66 if large else 12 * 33)
            assert 0 <= row["hidden"] <= 1 and row["read_ms"] > 0 and row["stood_ms"] > 0
            assert row["hidden"] == 0 or "prefetched" in by
    assert result["large_tables"]["rows"] == sum(wider().engram_num_embeddings)
    assert result["large_tables"]["apparent_bytes"] == 2 * 4096 + result["large_tables"]["rows"] * 66
    assert result["large_tables"]["stored_bytes"] > 0


@pytest.mark.usefixtures("on_nano")
def test_the_written_rows_are_those_that_a_prefill_reads(tmp_path):
    """No row of the prompt is one of the zeros that were never written, and as many are read as a token has columns."""
    ids = random_ids(1, 25)
    model, _ = engram.large_toy(wider(), ids, tmp_path)
    seen = []
    for layer, reader in engram.host_rows(model).items():
        reader.register_forward_hook(lambda module, args, rows, layer=layer: seen.append((layer, args[0], rows)))
    model(ids)
    assert [layer for layer, *_ in seen] == [1, 3]
    for table, (_, numbers, rows) in enumerate(seen):
        assert torch.equal(numbers.flatten(), engram.addresses(wider(), table, ids))
        assert rows.any(-1).all()


def test_each_runs_in_turn_and_the_median_is_kept():
    calls = []

    def contestant(name, seconds):
        times = iter(seconds)

        def run():
            calls.append(name)
            return Run(next(times), RowReads(), 0)

        return run

    runs = in_turns({"a": contestant("a", [0, 5, 1, 3]), "b": contestant("b", [9, 2, 2, 2])}, 3)
    assert calls == ["a", "b"] * 4 and runs["a"].seconds == 3 and runs["b"].seconds == 2


@pytest.mark.usefixtures("on_nano")
def test_readers_start_anew_and_cold_ones_after_the_cache_was_dropped(tmp_path, monkeypatch):
    dropped = []
    model, _ = engram.large_toy(wider(), random_ids(1, 5), tmp_path)
    old = engram.host_rows(model)
    monkeypatch.setattr(page_cache, "drop", lambda path: dropped.append((path.name, old[3].table._file is None)))
    engram.reopen(model, ahead=False)
    assert not dropped and not engram.host_rows(model)[3].prefetch
    engram.reopen(model, cold=True)
    assert dropped == [("layer_01.engram", True), ("layer_03.engram", True)]
    model(random_ids(1, 5))
    assert total(reader.reads for reader in engram.host_rows(model).values()).rows == 5 * 18
    with pytest.raises(ValueError, match="closed"):
        old[1].table.take(torch.tensor([0]))


def test_where_cold_rows_came_from_is_said():
    reads = RowReads(direct=10, read_bytes=1000)
    assert served(Run(1, reads, 4096)) == "the disk"
    assert served(Run(1, reads, 0)).startswith("the page cache")
    assert served(Run(1, reads, None)).startswith("unknown")


@pytest.mark.usefixtures("on_nano")
def test_too_few_rows_and_other_benches_are_refused(capsys):
    with pytest.raises(ValueError, match="--rows=17: one token reads 18"):
        bench_engram(1, rows=17)
    assert main(["bench", "decode", "--threads", "1", "--rows", "5"]) == 2
    assert "--rows: `bench decode` has no such choice" in capsys.readouterr().err
