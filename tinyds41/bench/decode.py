"""Decoding with `small` at several contexts, beside a peer on the same weights."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from tinyds41.bench.forward import random_ids
from tinyds41.bench.measure import alternate, circumstances, gemm_rate
from tinyds41.bench.peer import MlxPeer
from tinyds41.config import Config
from tinyds41.cost.flops import decode_cost
from tinyds41.infer.session import Session
from tinyds41.model.transformer import Model

CONTEXTS = (1024, 4096, 16384)
TOKENS = 8  # decoded in one turn


def bench_decode(rounds: int = 3, *, contexts: tuple[int, ...] = CONTEXTS, peer: str | None = None) -> dict[str, Any]:
    """Reads a prompt of each length, then decodes in turns with the peer, which takes over the cache.

    Raises: ValueError without the peer's packages.
    """
    model = without_engram(Config.preset("small"))
    warm(model)
    cost, gemm, rows, ratios = decode_cost(model.config, "small"), gemm_rate(), [], {}
    other = None if peer is None else MlxPeer(model)
    for context in contexts:
        session = Session(model)
        started = time.perf_counter()
        session.prefill(random_ids(model.config, 1, context))
        first = time.perf_counter() - started
        runs: dict[str, Callable[[], Any]] = {
            "tinyds41": lambda session=session: [session.decode(7) for _ in range(TOKENS)]}
        apart = None
        if other is not None:
            other.copy_cache(session)
            apart = float((session.fork().decode(7)[0] - other.decode(7)).abs().max())
            other.copy_cache(session)
            runs[other.name] = lambda: [other.decode(7) for _ in range(TOKENS)]
        seconds = alternate(runs, rounds)
        for by, total in seconds.items():
            ours, each = by == "tinyds41", total / TOKENS
            rows.append({
                "context": context, "by": by, "ms_per_token": round(each * 1e3, 2),
                "tokens_per_second": round(1 / each, 1), "seconds_to_first_token": round(first, 2) if ours else None,
                "share_of_gemm_rate": round(cost.at(context).total / each / gemm, 4),
                "cache_bytes_per_token": round(session.report().bytes_per_token, 2) if ours else None,
                "logits_apart": None if ours else apart,
            })  # fmt: skip
        if other is not None:
            ratios[f"decode at {context}, times as fast as {other.name}"] = seconds[other.name] / seconds["tinyds41"]
    mine = [row["ms_per_token"] for row in rows if row["by"] == "tinyds41"]
    ratios[f"time per token at {contexts[-1]} over {contexts[0]}"] = mine[-1] / mine[0]
    return {"name": "decode", **circumstances(), "gemm_flops_per_second": round(gemm), "rows": rows, "ratios": ratios}


def without_engram(config: Config, **changes: Any) -> Model:
    """A model without tables, which peers lack; gradients are not recorded."""
    model = Model(config.replace(engram_layer_ids=[], engram_num_embeddings=[], **changes))
    return model.requires_grad_(False)


def warm(model: Model) -> None:
    """One prefill and one token, so that nothing is done for the first time while it is timed."""
    session = Session(model)
    session.prefill(random_ids(model.config, 1, 256))
    session.decode(7)
