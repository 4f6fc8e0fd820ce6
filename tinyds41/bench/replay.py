"""Windows behind a stored prefix: read back from disk or memory, or made anew, against reading the whole prompt."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tinyds41.bench import page_cache
from tinyds41.bench.decode import warm, without_engram
from tinyds41.bench.forward import random_ids
from tinyds41.bench.measure import alternate, circumstances
from tinyds41.config import Config
from tinyds41.infer.cache import Cache
from tinyds41.infer.prefix import Windows
from tinyds41.infer.replay import again, first_replayed
from tinyds41.infer.session import CHUNK, Session
from tinyds41.model.transformer import Model

CONTEXTS = (1024, 4096, 16384)


def bench_replay(rounds: int = 3, *, contexts: tuple[int, ...] = CONTEXTS) -> dict[str, Any]:
    """Seconds until `small`'s encoder windows are there after a hit, on a cache of random rows."""
    model = without_engram(Config.preset("small"), max_position_embeddings=max(contexts) + CHUNK)
    warm(model)
    rows, ratios = [], {}
    with tempfile.TemporaryDirectory() as folder:
        for context in contexts:
            ways = _Ways(model, context, Path(folder) / f"{context}.windows")
            seconds = alternate(ways.runs(), rounds)
            for by, each in seconds.items():
                tokens, n_bytes = ways.work[by]
                rows.append({"context": context, "windows": by, "encoder_tokens": tokens, "bytes_read": n_bytes,
                             "milliseconds": round(each * 1e3, 3)})  # fmt: skip
            ratios |= _crossings(context, seconds, ways)
    return {"name": "replay", **circumstances(), "rows": rows, "ratios": ratios}


class _Ways:
    """One filled cache, and each way to the windows behind it. work: encoder tokens and bytes read, by way."""

    def __init__(self, model: Model, context: int, file: Path):
        self.model, self.context, self.file = model, context, file
        self.ids = random_ids(model.config, 1, context)
        session = Session(model)
        session.start().fill(context)
        self.session, self.windows = session, Windows.of(session.cache)
        write_windows(file, self.windows)
        self.disk = "disk" if page_cache.drop(file) and not page_cache.holds(file) else "disk, from the page cache"
        self.work: dict[str, tuple[int, int]] = {}

    def runs(self) -> dict[str, Callable[[], Any]]:
        n_bytes = self.windows.n_bytes
        self.work = {self.disk: (0, n_bytes), "memory": (0, n_bytes)}
        runs: dict[str, Callable[[], Any]] = {
            self.disk: self._from_disk, "memory": lambda: self._restored(self.windows)}
        for replay in ("bounded", "exact"):
            start = first_replayed(self.model.config, self.context, 0, replay)
            runs[replay] = lambda start=start: self._replayed(start)
            self.work[replay] = (self.context - start, 0)
        runs["prefill"] = lambda: Session(self.model).prefill(self.ids)
        self.work["prefill"] = (self.context, 0)
        return runs

    def _from_disk(self) -> None:
        page_cache.drop(self.file)
        self._restored(read_windows(self.file, self.windows))

    def _restored(self, windows: Windows) -> None:
        windows.restore(self._without_windows(), self.ids[0].tolist(), self.context)

    @torch.no_grad()
    def _replayed(self, start: int) -> None:
        cache = self._without_windows()
        for part, ctx in again(self.session, cache, self.ids[:, start:], start, CHUNK):
            self.model.encode(part, ctx)

    def _without_windows(self) -> Cache:
        cache = self.session.cache.fork()
        for recent, _ in cache.reaches(self.context):
            recent.forget(0)
        return cache


def _crossings(context: int, seconds: dict[str, float], ways: _Ways) -> dict[str, float]:
    rate = ways.windows.n_bytes / seconds["bounded"]
    return {
        f"bounded at {context}, times as fast as exact": seconds["exact"] / seconds["bounded"],
        f"bounded at {context}, times as fast as prefill": seconds["prefill"] / seconds["bounded"],
        f"exact at {context}, times as fast as prefill": seconds["prefill"] / seconds["exact"],
        f"reading windows at {context}, times as fast as bounded": seconds["bounded"] / seconds[ways.disk],
        f"MB/s at which reading them at {context} takes as long as bounded": rate / 1e6,
    }


def write_windows(file: Path, windows: Windows) -> int:
    """The rows one behind the other, on the disk when this returns. Units: -> bytes."""
    with file.open("wb") as out:
        for rows in windows.rows:
            out.write(rows.contiguous().view(torch.uint8).numpy().tobytes())
        out.flush()
        os.fsync(out.fileno())
    return file.stat().st_size


def read_windows(file: Path, like: Windows) -> Windows:
    """What `write_windows` wrote of windows of the same shapes."""
    data, rows, offset = file.read_bytes(), [], 0
    for shape in like.rows:
        n_bytes = shape.numel() * shape.element_size()
        rows.append(_tensor(data[offset : offset + n_bytes], shape))
        offset += n_bytes
    return Windows(like.length, tuple(rows), like.exact)


def _tensor(data: bytes, like: Tensor) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=like.dtype).view(like.shape) if data else torch.empty_like(like)
