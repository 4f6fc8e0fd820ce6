"""A stored prefix of `small` end to end: what each step of `Session.resume` costs against reading the prompt."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from tinyds41.bench.decode import warm, without_engram
from tinyds41.bench.forward import random_ids
from tinyds41.bench.measure import circumstances
from tinyds41.config import Config
from tinyds41.infer.prefix import restore
from tinyds41.infer.session import Session
from tinyds41.infer.tiered_store import TieredStore
from tinyds41.model.transformer import Model

CONTEXTS = (16384,)
WAYS = (("resume, exact", "exact", "replay"), ("resume, bounded", "bounded", "replay"),
        ("resume, windows in the pool", "bounded", "pool"))  # fmt: skip


def bench_store(rounds: int = 3, *, contexts: tuple[int, ...] = CONTEXTS) -> dict[str, Any]:
    """Reads a prompt, saves it, and resumes it with one token more, from a store opened anew with an empty pool."""
    model = without_engram(Config.preset("small"))
    warm(model)
    rows: list[dict[str, Any]] = []
    ratios = {}
    for context in contexts:
        with tempfile.TemporaryDirectory() as folder:
            seconds, n_bytes = _times(model, context, Path(folder) / "store.sqlite", rounds)
        for step, each in seconds.items():
            moved = n_bytes if step in ("save", "read and verify", "restore") else None
            rows.append({"context": context, "step": step, "seconds": round(each, 4), "bytes": moved,
                         "MB_per_second": None if moved is None else round(moved / each / 1e6, 1)})  # fmt: skip
        for step, _, _ in WAYS:
            ratios[f"{step} at {context}, times as fast as prefill"] = seconds["prefill"] / seconds[step]
    return {"name": "store", **circumstances(), "rows": rows, "ratios": ratios}


def _times(model: Model, context: int, path: Path, rounds: int) -> tuple[dict[str, float], int]:
    ids = random_ids(model.config, 1, context + 1)
    clock, text = _Clock(), ids[0, :context].tolist()
    clock("prefill", Session(model).prefill, ids)
    first = Session(model)
    first.prefill(ids[:, :context])
    with TieredStore(path, model) as store:
        n_bytes = clock("save", first.save, store)
    for _ in range(rounds):
        with TieredStore(path, model) as store:
            blocks = clock("read and verify", store.blocks.read, text)
            clock("restore", restore, Session(model).start(), text, blocks, store.block_tokens)
            for step, replay, windows in WAYS:
                if windows == "pool":
                    first.save(store)  # writes nothing anew, but its windows are in memory now
                else:
                    store.windows.clear()
                session = Session(model)
                clock(step, partial(session.resume, replay=replay), ids, store)
                assert session.resumed is not None
                if (session.resumed.found, session.resumed.windows) != (context, windows):
                    raise RuntimeError(f"{step}: {session.resumed} instead of {context} tokens by {windows}")
    return {step: median(times) for step, times in clock.seconds.items()}, n_bytes


class _Clock:
    """Calls and remembers the seconds by step."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    def __call__(self, step: str, call: Callable[..., Any], *arguments: Any) -> Any:
        started = time.perf_counter()
        result = call(*arguments)
        self.seconds.setdefault(step, []).append(time.perf_counter() - started)
        return result
