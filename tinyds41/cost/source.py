"""Which model a cost command is about: a preset, a file, a generation, or all generations."""

from __future__ import annotations

import argparse
from pathlib import Path

from tinyds41.config import Config, preset_names
from tinyds41.cost.generations import GENERATIONS, ConfigGeneration, Generation, generation

SHORT_CONTEXT = 4096  # where growth is measured from; a model of fewer positions starts at one window


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """--preset, --config, --generation, --context and --json."""
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--preset", metavar="NAME", help=f"one of {', '.join(preset_names())}")
    source.add_argument("--config", metavar="FILE", type=Path, help="a config.json, released or ours")
    source.add_argument("--generation", metavar="NAME",
                        help=f"one of {', '.join(GENERATIONS)} (default: all of them, side by side)")  # fmt: skip
    parser.add_argument("--context", metavar="N", type=int, help="tokens of one sequence (default: short and longest)")
    parser.add_argument("--json", action="store_true", help="print raw counts as JSON")


def chosen(args: argparse.Namespace) -> tuple[str, Config | Generation | None]:
    """Name and sizes of the model asked for; None for all generations.

    Raises: ValueError for an unknown preset or generation, or a file that is no config of this architecture; OSError
        for a file that cannot be read.
    """
    if args.preset is not None:
        return args.preset, Config.preset(args.preset)
    if args.config is not None:
        return str(args.config), Config.from_json(args.config)
    if args.generation is None:
        return "generations", None
    model = generation(args.generation)
    return model.name, model.config if isinstance(model, ConfigGeneration) else model


def contexts(asked: int | None, longest: int, window: int) -> list[int]:
    """The context asked for, or a short one and the longest."""
    if asked is not None:
        return [asked]
    return sorted({SHORT_CONTEXT if longest > SHORT_CONTEXT else min(window, longest), longest})
