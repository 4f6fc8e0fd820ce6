"""Conversations of `toy`: bytes written and kept per turn, time to the first token, sessions that a budget admits."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tinyds41.bench.decode import warm
from tinyds41.bench.forward import random_ids
from tinyds41.bench.measure import circumstances
from tinyds41.config import Config
from tinyds41.infer.cache import Cache
from tinyds41.infer.session import Session
from tinyds41.infer.tiered_store import TieredStore
from tinyds41.model.transformer import Model

TURNS, PROMPT, ANSWER = 6, 192, 64  # tokens
BLOCK_TOKENS = 32
BUDGET, CONVERSATION = 2_000_000, 512  # bytes, tokens of each session


def bench_sessions(rounds: int = 1) -> dict[str, Any]:
    """Six turns of one conversation, resumed each time, then as many sessions as a budget of bytes holds.

    Windows are saved twice a turn in the other layout, as V4 does (`cost.persistent`). `rounds` repeats the turns.
    """
    model = Model(_without_engram(Config.preset("toy"))).requires_grad_(False)
    warm(model)
    rows = [row for number in range(rounds) for row in _conversation(model, number)]
    last = rows[-1]
    ratios = {
        "bytes kept with windows over without": last["kept_with_windows"] / last["kept"],
        "first token at the last turn, cold over resumed by replay": last["cold_ms"] / last["replay_ms"],
        "first token at the last turn, cold over windows in the pool": last["cold_ms"] / last["pool_ms"],
    }
    admitted = {kind: _admitted(config, dtype) for kind, (config, dtype) in _layouts().items()}
    for kind, count in admitted.items():
        ratios[f"sessions of {CONVERSATION} tokens in {BUDGET} bytes, {kind}"] = count
    return {"name": "sessions", **circumstances(), "rows": rows, "ratios": ratios}


def _conversation(model: Model, number: int) -> list[dict[str, Any]]:
    text, rows, kept, kept_with = random_ids(model.config, 1, 0), [], 0, 0
    with tempfile.TemporaryDirectory() as folder:  # noqa: SIM117 - the store closes before its folder goes
        with TieredStore(Path(folder) / "store.sqlite", model, block_tokens=BLOCK_TOKENS) as store:
            for turn in range(1, TURNS + 1):
                text = torch.cat([text, random_ids(model.config, 1, PROMPT, turn)], 1)
                cold_ms, _ = _first_token(Session(model), text, None)
                pool_ms, _ = _first_token(Session(model), text, store)
                store.windows.clear()
                session = Session(model)
                replay_ms, logits = _first_token(session, text, store)
                assert session.resumed is not None
                windows = _window_bytes(session.cache)
                text = _answered(session, logits, text)
                windows += _window_bytes(session.cache)
                written = session.save(store)
                kept, kept_with = kept + written, kept_with + written + windows
                if kept != store.blocks.bytes_stored():
                    raise RuntimeError(f"{kept} bytes written, {store.blocks.bytes_stored()} stored")
                rows.append({
                    "round": number, "turn": turn, "tokens": text.shape[1], "found": session.resumed.found,
                    "written": written, "kept": kept, "written_with_windows": written + windows,
                    "kept_with_windows": kept_with, "cold_ms": round(cold_ms, 1), "pool_ms": round(pool_ms, 1),
                    "replay_ms": round(replay_ms, 1),
                })  # fmt: skip
    return rows


def _first_token(session: Session, text: Tensor, store: TieredStore | None) -> tuple[float, Tensor]:
    """Milliseconds until the logits of the first new token, and these."""
    started = time.perf_counter()
    logits = session.prefill(text) if store is None else session.resume(text, store)
    return (time.perf_counter() - started) * 1e3, logits


def _answered(session: Session, logits: Tensor, text: Tensor) -> Tensor:
    """Reads its own ANSWER most likely tokens."""
    for _ in range(ANSWER):
        token = logits.argmax(-1, keepdim=True)
        text, logits = torch.cat([text, token], 1), session.decode(token[:, 0])
    return text


def _window_bytes(cache: Cache) -> int:
    """Of all layers' windows, decoder included: what V4 saves, with our rows."""
    return cache.report().window_bytes


def _layouts() -> dict[str, tuple[Config, torch.dtype]]:
    """The toy's cache packed, in bf16 rows, and with a store of its own in every layer that has global entries."""
    shared = _without_engram(Config.preset("toy"))
    own = [layer.layer for layer in shared.plan() if layer.kv_source is not None]
    unshared = shared.replace(kv_source_layer_ids=own, index_source_layer_ids=own, candidate_source_layer_id=None)
    return {
        "packed": (shared, torch.float32),
        "bf16": (shared.replace(quantize_cache=False), torch.bfloat16),
        "packed, unshared": (unshared, torch.float32),
        "bf16, unshared": (unshared.replace(quantize_cache=False), torch.bfloat16),
    }


def _admitted(config: Config, dtype: torch.dtype) -> int:
    """How many sessions with a conversation read fit into BUDGET, by the bytes of their stores."""
    model = Model(config, dtype=dtype).requires_grad_(False)
    sessions, held = [], 0
    while True:
        session = Session(model)
        session.prefill(random_ids(config, 1, CONVERSATION, seed=len(sessions)))
        held += session.report().total_bytes
        if held > BUDGET:
            return len(sessions)
        sessions.append(session)


def _without_engram(config: Config) -> Config:
    return config.replace(engram_layer_ids=[], engram_num_embeddings=[])
