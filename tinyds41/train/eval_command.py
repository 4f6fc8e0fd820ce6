"""`tinyds41 eval FOLDER`: what a model folder says to held-out text, or to a task's questions."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from tinyds41.checkpoint.read import load
from tinyds41.train.run_options import ASKED_ROWS, HELD_OUT_TOKENS, Subject, TaskSubject, TextSubject


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser("eval", description="Evaluate a model folder on held-out text or on a task.")
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="a model in the released layout")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--text", nargs="+", metavar="FILE", help="shipped texts or UTF-8 files (default plays)")
    what.add_argument("--task", metavar="NAME", help="a task with known answers, such as needle")
    parser.add_argument("--length", type=int, default=256, help="tokens of a row (default %(default)s)")
    parser.add_argument("--tokens", type=int, default=HELD_OUT_TOKENS,
                        help="of held-out text, about; 0 for all (default %(default)s)")  # fmt: skip
    parser.add_argument("--rows", type=int, default=ASKED_ROWS, help="of a task (default %(default)s)")
    parser.add_argument("--device", default="cpu", help="(default %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    model = load(args.folder, device=args.device)
    subject: Subject
    if args.task is not None:
        subject = TaskSubject(args.task, args.length, args.rows)
    elif model.tokenizer is not None:
        subject = TextSubject(model.tokenizer, args.text or ["plays"], args.length, args.tokens)
    else:
        raise ValueError(f"{args.folder} has no tokenizer: it reads no text, give a --task")
    found = subject.ask(model)
    print(json.dumps(found, indent=1) if args.json else "\n".join(f"{name}: {value}" for name, value in found.items()))
    return 0
