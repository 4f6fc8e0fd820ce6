"""`tinyds41 lessons`: execute the lessons again, or check that the stored ones are sound."""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path

from tinyds41.course import notebook_rules, notebooks


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser("lessons", description="Execute lessons from their .py, or check the stored ones.")
    parser.add_argument("action", choices=("run", "check"), help="run: execute on one thread and store; check: verify")
    parser.add_argument("name", nargs="?", metavar="NAME", help="one lesson, such as 00_tour (default: all)")
    parser.add_argument("--folder", type=Path, default=Path("notebooks"), help="where they are (default %(default)s)")


def run(args: argparse.Namespace) -> int:
    missing = [name for name in ("jupytext", "nbclient", "nbformat") if find_spec(name) is None]
    if missing:
        raise ValueError(f"lessons need {', '.join(missing)}: pip install 'tinyds41[notebooks]'")
    wrong = []
    for script in notebooks.lessons(args.folder, args.name):
        if args.action == "run":
            print(f"{script.stem}: executed, stored in {notebooks.run(script)}")
        found = notebook_rules.check(script)
        print("\n".join(found or [f"{script.stem}: sound"]))
        wrong += found
    return 1 if wrong else 0
