"""Timing side by side, a run in a fresh process, and where a number was measured."""

from __future__ import annotations

import datetime
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from tinyds41.machine import device_name
from tinyds41.tables import aligned
from tinyds41.whole_file import write_whole


def alternate(
    contestants: Mapping[str, Callable[[], Any]], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """Median seconds of each, in turns after one warm-up each.

    What disturbs the machine disturbs all of them. clock: `time.process_time` for the CPU's seconds of this process.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for function in contestants.values():
        function()
    for _ in range(rounds):
        for name, function in contestants.items():
            started = clock()
            function()
            seconds[name].append(clock() - started)
    return {name: statistics.median(times) for name, times in seconds.items()}


def gemm_rate(size: int = 1024, rounds: int = 5) -> float:
    """What a square matrix product reaches here and now. Units: FLOP/s, fp32."""
    a, b = torch.randn(size, size), torch.randn(size, size)
    return 2 * size**3 / alternate({"gemm": lambda: a @ b}, rounds)["gemm"]


def in_fresh_process(module: str, *arguments: str) -> dict[str, Any]:
    """Runs `python -m module arguments` and returns the JSON of its last line.

    For peaks that nothing else raised.

    Raises: RuntimeError with what the process wrote when it fails.
    """
    done = subprocess.run([sys.executable, "-m", module, *arguments], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{module} {' '.join(arguments)} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def circumstances(device: str = "cpu", dtype: str = "float32") -> dict[str, Any]:
    """What a reader must know to compare a measured number."""
    return {
        "date": datetime.date.today().isoformat(),
        "device": f"{device}: {device_name(device)}",
        "dtype": dtype,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    write_whole(path, json.dumps(content, indent=1) + "\n")


def table(rows: list[Mapping[str, Any]]) -> str:
    """Rows of equal columns as aligned text."""
    head = list(rows[0])
    cells = (["-" if row[column] is None else str(row[column]) for column in head] for row in rows)
    return "\n".join(aligned(head, cells, left=()))
