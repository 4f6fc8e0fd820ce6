"""`tinyds41 plan`: which layer does what, whose KV it reads and whose indices it follows."""

from __future__ import annotations

import argparse
from pathlib import Path

from tinyds41.config import Config, preset_names


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser("plan", description="Print the layer plan of a model, one layer a line.")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--preset", metavar="NAME", help=f"one of {', '.join(preset_names())}")
    source.add_argument("--config", metavar="FILE", type=Path, help="a config.json, released or ours")


def run(args: argparse.Namespace) -> int:
    config = Config.preset(args.preset) if args.config is None else Config.from_json(args.config)
    print(config.plan())
    return 0
