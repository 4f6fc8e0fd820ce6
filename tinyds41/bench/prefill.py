"""Reading a prompt with `small`: the three modes, the reference and a peer, and the peak memory of a long prompt."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from tinyds41 import reference
from tinyds41.bench.decode import warm, without_engram
from tinyds41.bench.forward import random_ids
from tinyds41.bench.measure import alternate, circumstances, gemm_rate, in_fresh_process
from tinyds41.bench.peer import MlxPeer
from tinyds41.checkpoint.names import to_released
from tinyds41.config import Config
from tinyds41.cost.prefill import prefill_cost
from tinyds41.infer.prefill_modes import MODES
from tinyds41.infer.session import Session
from tinyds41.peak_memory import peak_bytes

CONTEXTS = (4096, 16384)
WITH_REFERENCE = 4096  # the reference keeps every score: longer prompts would not fit
LONGER = 4  # times the longest context: the prompt whose peak memory is measured


def bench_prefill(rounds: int = 3, *, contexts: tuple[int, ...] = CONTEXTS, peer: str | None = None) -> dict[str, Any]:
    """Seconds from a prompt to the logits of its first new token, and the peak memory of a longer prompt.

    That one is LONGER times the longest context, as far as the model has positions, and is read in a process of its
    own. The peer reads each prompt once: it takes minutes.

    Raises: ValueError without the peer's packages.
    """
    model = without_engram(Config.preset("small"))
    warm(model)
    weights, gemm, cost = to_released(model.state_dict()), gemm_rate(), prefill_cost(model.config, "small")
    other = None if peer is None else MlxPeer(model)
    rows, ratios = [], {}
    for context in contexts:
        ids = random_ids(model.config, 1, context)
        runs: dict[str, Callable[[], Any]] = {
            mode: lambda mode=mode, ids=ids: Session(model).prefill(ids, mode=mode) for mode in MODES}
        if context <= WITH_REFERENCE:
            runs["reference"] = lambda ids=ids: reference.forward(model.config, weights, ids)
        with torch.no_grad():
            seconds = alternate(runs, rounds)
        if other is not None:
            started = time.perf_counter()
            other.prefill(ids)
            seconds[other.name] = time.perf_counter() - started
        for by, each in seconds.items():
            work = cost.at(context, by).total if by in MODES else None
            rows.append({
                "tokens": context, "by": by, "seconds_to_first_token": round(each, 3),
                "tokens_per_second": round(context / each),
                "share_of_gemm_rate": None if work is None else round(work / each / gemm, 4),
            })  # fmt: skip
            if by not in MODES:
                ratios[f"exact at {context}, times as fast as {by}"] = each / seconds["exact"]
        ratios[f"bounded at {context}, times as fast as full"] = seconds["full"] / seconds["bounded"]
    tokens = min(LONGER * max(contexts), model.config.max_position_embeddings)
    long = in_fresh_process("tinyds41.bench.prefill", str(tokens), str(torch.get_num_threads()))
    rows.append({"tokens": tokens, "by": "exact, own process", "seconds_to_first_token": round(long["seconds"], 1),
                 "tokens_per_second": round(tokens / long["seconds"]), "share_of_gemm_rate": None})  # fmt: skip
    ratios[f"peak GB at {tokens}"] = long["peak_bytes"] / 1e9
    return {"name": "prefill", **circumstances(), "gemm_flops_per_second": round(gemm), "rows": rows, "ratios": ratios}


def one_prefill(length: int) -> dict[str, Any]:
    """One exact prefill of `small`; returns seconds, and the largest size this process reached."""
    model = without_engram(Config.preset("small"))
    warm(model)
    started = time.perf_counter()
    Session(model).prefill(random_ids(model.config, 1, length))
    return {"seconds": time.perf_counter() - started, "peak_bytes": peak_bytes()}


if __name__ == "__main__":  # in a process of its own, see `in_fresh_process`
    torch.set_num_threads(int(sys.argv[2]))
    print(json.dumps(one_prefill(int(sys.argv[1]))))
