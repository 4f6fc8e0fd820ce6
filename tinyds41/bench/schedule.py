"""The scheduler of drafted tokens beside fixed lengths, on recorded drafts and measured seconds."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from tinyds41.bench.measure import circumstances
from tinyds41.bench.speculate import held_out
from tinyds41.infer.dspark_drafter import DSparkDrafter
from tinyds41.infer.record_drafts import record_drafts
from tinyds41.infer.simulate import BLOCKS, Throughput, over_best_fixed, simulate
from tinyds41.infer.step_curve import POINTS, measure_curve, measure_drafting
from tinyds41.model.transformer import Model
from tinyds41.train.calibrate import confidences
from tinyds41.train.examples import example

PASSAGES, LENGTH, START, EVERY = 32, 512, 64, 4  # of the held-out play: 3,552 drafts
REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
TOKENS = (*POINTS, 512, 1024, 1536)  # up to 256 requests with whole drafts
THRESHOLDS = (0.3, 0.5, 0.7)


def bench_schedule(rounds: int = 3, *, rows: int = PASSAGES, blocks: int = 8 * BLOCKS) -> dict[str, Any]:
    """Drafts of the shipped drafter at temperature 1 on a play that it has not read, replayed at 1 to 256 requests.

    Seconds of steps and of making drafts are those of this machine. A step's are of one row: rows that lie side by
    side take somewhat longer.

    rows: passages on which drafts are recorded. blocks: drafts replayed at each load, at least.
    """
    model = example("draft")
    recorded = record_drafts(model, passages(model, rows), start=START, every=EVERY)
    confidence = confidences(recorded.logits.numpy(), model.config.dspark_temperatures)
    curve = measure_curve(model, tokens=TOKENS, rounds=rounds)
    drafting = measure_drafting(DSparkDrafter(model), model, requests=REQUESTS, rounds=rounds)
    found = simulate(confidence, recorded.accepted.numpy(), curve, loads=REQUESTS, thresholds=THRESHOLDS,
                     drafting=drafting, blocks=blocks)  # fmt: skip
    ratios = {f"{load} requests: scheduler over the best fixed length": ratio
              for load, ratio in over_best_fixed(found).items()}  # fmt: skip
    return {
        "name": "schedule", **circumstances(), "drafts": len(confidence),
        "step_seconds": dict(zip(map(str, curve.tokens), curve.times, strict=True)),
        "drafting_seconds": dict(zip(map(str, drafting.tokens), drafting.times, strict=True)),
        "rows": [_rounded(row) for row in found],
        "ratios": ratios,
    }  # fmt: skip


def _rounded(row: Throughput) -> dict[str, Any]:
    """Without the setting of the scheduler, which has none: nan is no JSON."""
    columns = {name: round(value, 4) if isinstance(value, float) else value for name, value in asdict(row).items()}
    return {**columns, "setting": None if row.kind == "scheduler" else row.setting}


def passages(model: Model, n: int) -> torch.Tensor:
    """Rows from places all over the held-out play. Shapes: -> [n,LENGTH]."""
    ids = held_out(model)
    apart = (len(ids) - LENGTH) // n
    return torch.tensor([ids[i * apart : i * apart + LENGTH] for i in range(n)])
