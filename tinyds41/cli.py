"""The `tinyds41` command: only routes; each subpackage owns its commands in a module of its own."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType


@dataclass(frozen=True)
class Command:
    """Where a command lives. Its module has `add_parser(subparsers)` and `run(args)`."""

    module: str
    summary: str  # its line in `tinyds41 --help`


COMMANDS = {
    "tour": Command("tinyds41.course.tour_command", "train a toy on real text and look inside it"),
    "plan": Command("tinyds41.show.plan_command", "print the layer plan of a model"),
    "params": Command("tinyds41.cost.params_command", "count a model's parameters by component"),
    "bytes": Command("tinyds41.cost.bytes_command", "cache bytes, and bytes read per generated token"),
    "flops": Command("tinyds41.cost.flops_command", "work per generated token and per prompt"),
    "bench": Command("tinyds41.bench.bench_command", "measure speed and memory on this machine"),
    "train": Command("tinyds41.train.train_command", "train a model on a text or a task"),
    "train-draft": Command("tinyds41.train.train_draft_command", "train a drafter for a model folder"),
    "eval": Command("tinyds41.train.eval_command", "evaluate a model folder on held-out text or on a task"),
    "ablate": Command("tinyds41.train.ablate_command", "train with one thing changed, over seeds"),
    "lessons": Command("tinyds41.course.lessons_command", "execute or check the lesson notebooks"),
    "inspect": Command("tinyds41.checkpoint.inspect_command", "show what a model folder holds"),
}

# What bad input raises, and training that runs away; see the modules' docstrings.
USER_ERRORS = (ValueError, OSError, MemoryError, FloatingPointError)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command. Returns 0, or 2 after bad input, which takes one line on stderr."""
    # Read when torch is loaded, below: threads that wait should soon sleep. Beside another busy program the usual long
    # spin made a step of training take ten seconds; no spin at all costs a third on a quiet machine (docs/LOG.md).
    os.environ.setdefault("GOMP_SPINCOUNT", "3000")
    argv = sys.argv[1:] if argv is None else list(argv)
    name = next((word for word in argv if not word.startswith("-")), None)
    # Only the chosen command is imported: the others may need torch, which takes seconds.
    module = import_module(COMMANDS[name].module) if name in COMMANDS else None
    args = _parser(name, module).parse_args(argv)
    assert module is not None  # argparse exits where the command is missing or unknown
    return _run(module, args)


def _parser(chosen: str | None, module: ModuleType | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tinyds41", description="DeepSeek-V4.1-Flash, complete and small.")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        if name == chosen and module is not None:
            module.add_parser(subparsers)
            # Also after the command, where one adds it; SUPPRESS keeps it from undoing the one before.
            subparsers.choices[name].add_argument("--debug", action="store_true", default=argparse.SUPPRESS,
                                                  help="show the traceback of an error")  # fmt: skip
        else:
            subparsers.add_parser(name, help=command.summary)
    return parser


def _run(module: ModuleType, args: argparse.Namespace) -> int:
    try:
        status = module.run(args) or 0
        sys.stdout.flush()  # a closed pipe shows up here rather than at exit
        return status
    except BrokenPipeError:  # `tinyds41 ... | head`: the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except USER_ERRORS as error:
        if args.debug:
            raise
        print(f"tinyds41: error: {_one_line(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("tinyds41: interrupted", file=sys.stderr)
        return 130


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
