"""Engram rows in files: random rows, and the toy's prefill with its own tables and with some of the released size."""

from __future__ import annotations

import copy
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tinyds41.bench import page_cache
from tinyds41.bench.forward import random_ids
from tinyds41.bench.measure import circumstances
from tinyds41.config import Config
from tinyds41.infer import session
from tinyds41.infer.engram_host import engram_to_host, host_rows, open_host_rows, table_file
from tinyds41.infer.host_rows import HostRows, RowReads, total
from tinyds41.infer.host_table import HostTable
from tinyds41.infer.host_writer import new_table
from tinyds41.infer.session import Session
from tinyds41.model.context import Sequence
from tinyds41.model.engram import Engram, identity_map
from tinyds41.model.transformer import Model

ROWS = 49_152  # of the large tables that are written and read: those of 1,024 tokens at the released sizes
CHUNK = 256  # of those tokens at a time, so that there is a next chunk to send for
PROMPT = 4096  # tokens of the toy with its own tables, in chunks of the usual size
# What gives the toy tables of the released size: 768,022,850 rows of 264 bytes.
RELEASED = ("engram_vocab_size", "engram_max_ngram_size", "engram_n_heads", "engram_head_dim", "engram_num_embeddings")


@dataclass
class Run:
    """What one run took, and what it read."""

    seconds: float
    reads: RowReads
    from_disk: int | None  # bytes


def bench_engram(rounds: int = 3, *, rows: int = ROWS) -> dict[str, Any]:
    """Makes two files of 101 GB in a temporary folder, of whose rows only `rows` are written: about 4 kB of disk each.

    Raises: ValueError for fewer rows than a token reads; OSError where such files cannot be made.
    """
    toy, flash = Config.preset("toy"), Config.preset("flash")
    large = toy.replace(**{name: getattr(flash, name) for name in RELEASED})
    per_token = sum(len(addresses(large, table, torch.tensor([[5]]))) for table in range(len(large.engram_layer_ids)))
    if rows < per_token:
        raise ValueError(f"--rows={rows}: one token reads {per_token}")
    prompt, ids = random_ids(toy, 1, PROMPT), random_ids(large, 1, rows // per_token)
    with tempfile.TemporaryDirectory(prefix="engram-") as folder:
        model = Model(toy).requires_grad_(False)
        host = copy.deepcopy(model)
        engram_to_host(host, Path(folder) / "own")
        own = in_turns({
            "in memory": prefill(model, prompt), "read directly": prefill(host, prompt, ahead=False),
            "prefetched": prefill(host, prompt)}, rounds)  # fmt: skip
        outside, sizes = large_toy(large, ids, Path(folder) / "large")
        random = in_turns({"warm": random_rows(outside, ids), "cold": random_rows(outside, ids, cold=True)}, rounds)
        released = in_turns({
            f"{by}, {state}": prefill(outside, ids, CHUNK, ahead=by == "prefetched", cold=state == "cold")
            for state in ("warm", "cold") for by in ("read directly", "prefetched")}, rounds)  # fmt: skip
    groups = {"prefill": (own, PROMPT), "random rows, large tables": (random, ids.numel()),
              "prefill, large tables": (released, ids.numel())}  # fmt: skip
    return {"name": "engram", **circumstances(), "large_tables": sizes, "cold_rows_came_from": served(random["cold"]),
            "rows": [_row(what, by, n, run) for what, (runs, n) in groups.items() for by, run in runs.items()],
            "ratios": _ratios(own, random, released)}  # fmt: skip


def large_toy(config: Config, ids: Tensor, folder: Path) -> tuple[Model, dict[str, int]]:
    """A model over tables of which only the rows that `ids` read are written, and the bytes of its files."""
    for table, layer in enumerate(config.engram_layer_ids):
        with new_table(table_file(folder, layer), config, table) as writer:
            numbers = addresses(config, table, ids).unique()
            writer.scatter(numbers, torch.randn(len(numbers), config.engram_head_dim or 0))
    readers = open_host_rows(folder, config)
    tables = [reader.table for reader in readers.values()]
    sizes = {"rows": sum(table.n_rows for table in tables), "row_bytes": tables[0].row_bytes,
             "apparent_bytes": sum(table.apparent_bytes for table in tables),
             "stored_bytes": sum(table.stored_bytes for table in tables)}  # fmt: skip
    return Model(config, engram=readers).requires_grad_(False), sizes


def addresses(config: Config, table: int, ids: Tensor) -> Tensor:
    """The rows of one table that a prompt reads, token by token. Shapes: [1,S] -> int64 [S*columns]."""
    with torch.device("meta"):
        engram = Engram(config, table)
    engram.token_map = identity_map(config)
    return engram.rows(Sequence(config, ids).look_back(ids, config.engram_max_ngram_size or 1)).flatten()


def reopen(model: Model, *, ahead: bool = True, cold: bool = False) -> None:
    """Readers with new counts; `cold`: after the system was asked to forget the files."""
    old = host_rows(model)
    for reader in old.values():
        reader.close()
        reader.table.close()
        if cold:
            page_cache.drop(reader.table.path)
    for layer, reader in old.items():  # not before all are dropped: what is mapped is kept
        table = HostTable(reader.table.path, model.config, model.config.engram_layer_ids.index(layer))
        model.engrams[layer].read_from(HostRows(table, prefetch=ahead))


def in_turns(contestants: Mapping[str, Callable[[], Run]], rounds: int) -> dict[str, Run]:
    """Of each the run of median time, in turns after one warm-up each."""
    runs: dict[str, list[Run]] = {name: [] for name in contestants}
    for contestant in contestants.values():
        contestant()
    for _ in range(rounds):
        for name, contestant in contestants.items():
            runs[name].append(contestant())
    return {name: sorted(each, key=lambda run: run.seconds)[rounds // 2] for name, each in runs.items()}


def prefill(model: Model, ids: Tensor, chunk: int = session.CHUNK, **state: bool) -> Callable[[], Run]:
    """Reads a prompt in chunks, with readers in that state."""
    return lambda: _timed(model, lambda: Session(model).prefill(ids, chunk=chunk), state)


def random_rows(model: Model, ids: Tensor, *, cold: bool = False) -> Callable[[], Run]:
    """Reads all rows of a prompt at once, and computes nothing."""
    wanted = {layer: addresses(model.config, table, ids) for table, layer in enumerate(model.config.engram_layer_ids)}

    def read() -> None:
        for layer, reader in host_rows(model).items():
            reader(wanted[layer])

    return lambda: _timed(model, read, {"ahead": False, "cold": cold})


def _timed(model: Model, run: Callable[[], Any], state: Mapping[str, bool]) -> Run:
    reopen(model, **state)
    before, started = page_cache.disk_bytes(), time.perf_counter()
    run()
    seconds, after = time.perf_counter() - started, page_cache.disk_bytes()
    reads = total(reader.reads for reader in host_rows(model).values())
    return Run(seconds, reads, None if before is None or after is None else after - before)


def served(cold: Run) -> str:
    """Where rows came from after the system was asked to forget them."""
    if cold.from_disk is None:
        return "unknown: this system does not count what is read from disks"
    return "the disk" if cold.from_disk > cold.reads.read_bytes / 2 else "the page cache: it was not emptied"


def _row(what: str, by: str, tokens: int, run: Run) -> dict[str, Any]:
    reads, known = run.reads, run.reads.rows > 0
    return {
        "what": what, "by": by, "tokens": tokens, "seconds": round(run.seconds, 4),
        "tokens_per_second": round(tokens / run.seconds),
        "row_bytes_per_token": round(reads.read_bytes / tokens) if known else None,
        "rows_per_second": round(reads.rows / reads.read_seconds) if known else None,
        "read_ms": round(reads.read_seconds * 1e3, 2) if known else None,
        "stood_ms": round(reads.stood_seconds * 1e3, 2) if known else None,
        "send_ms": round(reads.send_seconds * 1e3, 2) if known else None,
        "hidden": None if reads.hidden is None else round(reads.hidden, 3),
        "disk_megabytes": None if run.from_disk is None else round(run.from_disk / 1e6, 1),
    }  # fmt: skip


def _ratios(own: Mapping[str, Run], random: Mapping[str, Run], released: Mapping[str, Run]) -> dict[str, float]:
    ratios = {
        "toy, share of row reading hidden": own["prefetched"].reads.hidden or 0.0,
        "toy, tokens/s prefetched over in memory": own["in memory"].seconds / own["prefetched"].seconds,
        "random rows, warm, times as fast as cold": random["cold"].seconds / random["warm"].seconds,
    }
    for state in ("warm", "cold"):
        ahead, direct = released[f"prefetched, {state}"], released[f"read directly, {state}"]
        ratios[f"large tables {state}, share of row reading hidden"] = ahead.reads.hidden or 0.0
        ratios[f"large tables {state}, times as fast as read directly"] = direct.seconds / ahead.seconds
    return ratios
