"""`tinyds41 inspect FOLDER`: what a model folder holds, without loading its weights."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from tinyds41.checkpoint.inspect import inspect


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser("inspect", description="Show what a model folder holds; no weight is loaded.")
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="a model in the released layout")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    report = inspect(args.folder)
    print(json.dumps(report.to_dict(), indent=1) if args.json else report)
    return 0
