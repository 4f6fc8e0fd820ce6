"""`tinyds41 bench NAME`: a table, the ratios of this run, and JSON."""

from __future__ import annotations

import argparse
import inspect
import json
from pathlib import Path

from tinyds41.bench.decode import bench_decode
from tinyds41.bench.engram import bench_engram
from tinyds41.bench.flat import bench_flat
from tinyds41.bench.forward import bench_forward
from tinyds41.bench.measure import table, write_json
from tinyds41.bench.prefill import bench_prefill
from tinyds41.bench.replay import bench_replay
from tinyds41.bench.schedule import bench_schedule
from tinyds41.bench.sessions import bench_sessions
from tinyds41.bench.speculate import bench_speculate
from tinyds41.bench.store import bench_store
from tinyds41.memory import set_threads

BENCHES = {
    "decode": bench_decode, "engram": bench_engram, "flat": bench_flat, "forward": bench_forward,
    "prefill": bench_prefill, "replay": bench_replay, "schedule": bench_schedule, "sessions": bench_sessions,
    "speculate": bench_speculate, "store": bench_store,
}  # fmt: skip


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser("bench", description="Measure speed and memory on this machine.")
    parser.add_argument("name", choices=BENCHES, help="what to measure")
    parser.add_argument("--threads", type=int, default=2, help="torch threads (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds, taken in turns (default %(default)s)")
    parser.add_argument("--peer", choices=("mlx-lm",), help="decode, prefill: also the same weights there")
    parser.add_argument("--contexts", type=_contexts, help="tokens, as 1024,4096, where contexts differ")
    parser.add_argument("--rows", type=int, help="engram: rows of its large tables; speculate, schedule: prompts")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result here ('-': print JSON only)")


def _contexts(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) >= 2 for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r}: whole numbers from 2 on are needed, with commas between")
    return tuple(int(part) for part in parts)


def run(args: argparse.Namespace) -> int:
    if args.rounds < 1:
        raise ValueError(f"--rounds={args.rounds}: at least 1 is needed")
    set_threads(args.threads)
    options = {name: value for name in ("peer", "contexts", "rows") if (value := getattr(args, name)) is not None}
    for name in options:
        if name not in inspect.signature(BENCHES[args.name]).parameters:
            raise ValueError(f"--{name}: `bench {args.name}` has no such choice")
    result = BENCHES[args.name](args.rounds, **options)
    if str(args.json) == "-":
        print(json.dumps(result, indent=1))
        return 0
    print(f"{result['device']}, {result['dtype']}, {result['threads']} threads, {result['date']}")
    print(table(result["rows"]))
    for what, ratio in result["ratios"].items():
        print(f"{what}: {ratio:.2f}")
    if args.json is not None:
        write_json(args.json, result)
    return 0
