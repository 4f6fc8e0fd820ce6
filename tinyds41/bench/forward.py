"""Forward of `small` and a training step of `toy`, each beside `reference`, and the peak memory of a long forward."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tinyds41 import reference
from tinyds41.bench.measure import alternate, circumstances, in_fresh_process
from tinyds41.checkpoint.names import to_released
from tinyds41.config import Config
from tinyds41.model.transformer import Model
from tinyds41.peak_memory import peak_bytes
from tinyds41.train.losses import cross_entropy

COMPARED, LONG = 4096, 16384  # tokens
STEPS = ((8, 512), (1, 1024))  # rows and their tokens in a training step


def random_ids(config: Config, batch: int, length: int, seed: int = 0) -> Tensor:
    """Random token ids behind the four special ones. Shapes: -> [batch, length]."""
    return torch.randint(4, config.vocab_size, (batch, length), generator=torch.Generator().manual_seed(seed))


def bench_forward(rounds: int = 3) -> dict[str, Any]:
    """Measures everything and returns rows and ratios. Takes some minutes on two cores."""
    threads = str(torch.get_num_threads())
    long = in_fresh_process("tinyds41.bench.forward", str(LONG), threads)
    short = in_fresh_process("tinyds41.bench.forward", str(COMPARED), threads)
    forward = compare_forward(rounds)
    steps = {(batch, length): compare_step(rounds, batch, length) for batch, length in STEPS}
    rows = [
        _row("small forward, in turns", COMPARED, "tinyds41", forward["tinyds41"], None),
        _row("small forward, in turns", COMPARED, "reference", forward["reference"], None),
        _row("small forward, own process", COMPARED, "tinyds41", short["seconds"], short["peak_bytes"]),
        _row("small forward, own process", LONG, "tinyds41", long["seconds"], long["peak_bytes"]),
    ]
    rows += [_row(f"toy training step {batch} x {length}, in turns", batch * length, by, seconds, None)
             for (batch, length), step in steps.items() for by, seconds in step.items()]  # fmt: skip
    ratios = {
        f"forward at {COMPARED}, times as fast as reference": forward["reference"] / forward["tinyds41"],
        f"tokens/s at {LONG} over tokens/s at {COMPARED}": (LONG / long["seconds"]) / (COMPARED / short["seconds"]),
        **{f"training step {batch} x {length}, times as fast as reference": step["reference"] / step["tinyds41"]
           for (batch, length), step in steps.items()},
    }  # fmt: skip
    return {"name": "forward", **circumstances(), "rows": rows, "ratios": ratios}


def _row(what: str, tokens: int, by: str, seconds: float, peak: int | None) -> dict[str, Any]:
    return {"what": what, "tokens": tokens, "by": by, "seconds": round(seconds, 3),
            "tokens_per_second": round(tokens / seconds), "peak_bytes": peak}  # fmt: skip


def compare_forward(rounds: int) -> dict[str, float]:
    """Seconds of one forward of `small`, ours and the reference's, on the same weights."""
    model = Model(Config.preset("small"))
    weights, ids = to_released(model.state_dict()), random_ids(model.config, 1, COMPARED)
    def definition() -> Tensor:
        return reference.forward(model.config, weights, ids)

    with torch.no_grad():
        return alternate({"tinyds41": lambda: model(ids), "reference": definition}, rounds)


def compare_step(rounds: int, batch: int, length: int) -> dict[str, float]:
    """Seconds of forward and backward of `toy`; the reference loops over experts."""
    model = Model(Config.preset("toy"))
    ids = random_ids(model.config, batch, length + 1)
    weights = {name: tensor.detach().requires_grad_() for name, tensor in to_released(model.state_dict()).items()}

    def step(forward: Callable[[Tensor], Tensor]) -> Callable[[], None]:
        return lambda: cross_entropy(forward(ids[:, :-1]), ids[:, 1:]).backward()

    ours, definition = step(model), step(lambda x: reference.forward(model.config, weights, x))
    return alternate({"tinyds41": ours, "reference": definition}, rounds)


def one_forward(length: int) -> dict[str, Any]:
    """One forward of `small` after a short warm-up.

    Returns seconds, and the largest size this process reached.
    """
    model = Model(Config.preset("small"))
    with torch.no_grad():
        model(random_ids(model.config, 1, 256))
        started = time.perf_counter()
        model(random_ids(model.config, 1, length))
        return {"seconds": time.perf_counter() - started, "peak_bytes": peak_bytes()}


if __name__ == "__main__":  # in a process of its own, see `in_fresh_process`
    torch.set_num_threads(int(sys.argv[2]))
    print(json.dumps(one_forward(int(sys.argv[1]))))
