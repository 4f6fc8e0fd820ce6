"""`tinyds41 params`: how many parameters a model has, where they sit and how many a token uses."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from tinyds41.config import Config, preset_names
from tinyds41.cost.parameters import count_parameters


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser("params", description="Count a model's parameters by component.")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--preset", metavar="NAME", help=f"one of {', '.join(preset_names())}")
    source.add_argument("--config", metavar="FILE", type=Path, help="a config.json, released or ours")
    parser.add_argument("--draft", action="store_true", help="count the draft blocks too, apart from the backbone")
    parser.add_argument("--json", action="store_true", help="print raw counts as JSON")


def run(args: argparse.Namespace) -> int:
    config = Config.preset(args.preset) if args.config is None else Config.from_json(args.config)
    parameters = count_parameters(config, draft=args.draft)
    print(json.dumps(parameters.to_dict(), indent=1) if args.json else parameters)
    return 0
