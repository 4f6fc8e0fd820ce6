"""`tinyds41 tour`: the whole tour in one command."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path

from tinyds41.course.tour import TourOptions, tour


def add_parser(subparsers) -> None:
    default = {field.name: field.default for field in fields(TourOptions)}
    parser = subparsers.add_parser("tour", description="Train a toy on real text and look inside it.")
    parser.add_argument("--steps", type=int, default=default["steps"], help="training steps (default %(default)s)")
    parser.add_argument("--text", default=default["text"], metavar="FILE",
                        help="a UTF-8 text file, or a shipped text (default %(default)s)")  # fmt: skip
    parser.add_argument("--device", default=default["device"], help="torch device (default %(default)s)")
    parser.add_argument("--seed", type=int, default=default["seed"], help="of weights, data order and sampling")
    parser.add_argument("--out", type=Path, default=default["out"], metavar="FOLDER",
                        help="where report, figures and model go (default %(default)s)")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    tour(TourOptions(steps=args.steps, text=args.text, device=args.device, seed=args.seed, out=args.out))
    return 0
