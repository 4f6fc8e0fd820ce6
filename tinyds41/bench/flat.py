"""The flat curve: counted work at `flash` sizes, and milliseconds of `small`, from 4K to 1M tokens of context."""

from __future__ import annotations

from typing import Any

from tinyds41.bench.decode import without_engram
from tinyds41.bench.measure import alternate, circumstances
from tinyds41.config import Config
from tinyds41.cost.counted import counted_work, narrowed, one_step
from tinyds41.cost.flops import linear_flops
from tinyds41.infer.session import Session
from tinyds41.model.transformer import Model

CONTEXTS = (4096, 16384, 65536, 262144, 1048576)
TOKENS = 4  # decoded in one turn


def bench_flat(rounds: int = 3, *, contexts: tuple[int, ...] = CONTEXTS) -> dict[str, Any]:
    """Decodes on random rows, so that no long prompt has to be read.

    Counts come from `flash`'s plan with few channels, times from `small` with longer positions.
    """
    flash = Config.preset("flash")
    narrow, linear = Model(narrowed(flash)).requires_grad_(False), linear_flops(flash)
    small = without_engram(Config.preset("small"), max_position_embeddings=max(contexts) + TOKENS * (rounds + 2))
    rows = []
    for context in contexts:
        counters = one_step(Session(narrow), context)
        raw, weighted = (counted_work(flash, linear, counters, context, name) for name in ("raw", "weighted"))
        session = Session(small)
        one_step(session, context)
        seconds = alternate({"small": lambda s=session: [s.decode(7) for _ in range(TOKENS)]}, rounds)["small"] / TOKENS
        rows.append({
            "context": context, "entries_scored": sum(counters.entries_scored.values()),
            "rows_gathered": sum(counters.rows_decoded.values()), "raw_gflop": round(raw.total / 1e9, 3),
            "weighted_gflop": round(weighted.total / 1e9, 3), "small_ms_per_token": round(seconds * 1e3, 2),
        })  # fmt: skip
    ratios = {f"{name} at {row['context']} over {rows[0]['context']}": row[name] / rows[0][name]
              for row in rows[1:] for name in ("raw_gflop", "weighted_gflop", "small_ms_per_token")}  # fmt: skip
    return {"name": "flat", **circumstances(), "rows": rows, "ratios": ratios}
