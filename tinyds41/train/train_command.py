"""`tinyds41 train`: a text or a task, from a config to a model folder."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from tinyds41.checkpoint.replace import check_replaceable
from tinyds41.checkpoint.write import save
from tinyds41.memory import require_device
from tinyds41.model.transformer import Model
from tinyds41.tokenizer import Tokenizer
from tinyds41.train.corpus import data_folder
from tinyds41.train.run_options import Subject, TaskSubject, TextSubject
from tinyds41.train.train_config import TrainConfig
from tinyds41.train.trainer import train
from tinyds41.whole_file import write_whole

RESULT = "result.json"
KINDS = {"int": int, "float": float, "str": str}  # of options; what is true or false has two


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "train", description="Train a model on a text or a task. The folder gets snapshot, log, model and result.")
    parser.add_argument("--out", type=Path, default=Path("runs/train"), metavar="FOLDER", help="(default %(default)s)")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--text", nargs="+", metavar="FILE", help="shipped texts or UTF-8 files (default plays)")
    what.add_argument("--task", metavar="NAME", help="a task with known answers, such as needle")
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument("--preset", help="of the model, for texts (default toy)")
    sizes.add_argument("--config", metavar="FILE", help="a model's config.json")
    parser.add_argument("--train-config", type=Path, metavar="FILE", help="a TrainConfig as JSON")
    parser.add_argument("--resume", action="store_true", help="go on from the snapshot in the folder")
    parser.add_argument("--device", default="cpu", help="(default %(default)s)")
    fields = parser.add_argument_group("fields of the TrainConfig, which win over its file")
    for field in dataclasses.fields(TrainConfig):
        option, kind = "--" + field.name.replace("_", "-"), KINDS.get(str(field.type))
        if kind is None:
            fields.add_argument(option, action=argparse.BooleanOptionalAction, default=None)
        else:
            fields.add_argument(option, type=kind, help=f"(default {field.default})")


def run(args: argparse.Namespace) -> int:
    config = TrainConfig() if args.train_config is None else TrainConfig.from_json(args.train_config)
    given = {field.name: getattr(args, field.name) for field in dataclasses.fields(TrainConfig)}
    config = dataclasses.replace(config, **{name: value for name, value in given.items() if value is not None})
    require_device(args.device)
    check_replaceable(args.out / "model")  # said now, not when all is trained
    tokenizer = Tokenizer.load(data_folder()) if args.task is None else None
    subject: Subject = TaskSubject(args.task or "", config.length) if tokenizer is None else TextSubject(
        tokenizer, args.text or ["plays"], config.length)  # fmt: skip
    model = Model(subject.config(args.preset, args.config), tokenizer=tokenizer, device=args.device, seed=config.seed)
    history = train(model, subject.taught, config, folder=args.out, resume=args.resume)
    if history.interrupted:
        print(f"Interrupted after {history.step} of {config.steps} steps: --resume goes on from {args.out}.")
        return 0
    save(model, args.out / "model")
    result: dict[str, Any] = {"steps": history.step, "tokens": history.step * history.tokens_per_step,
                              "seconds": round(sum(history.seconds), 1), **subject.ask(model)}  # fmt: skip
    write_whole(args.out / RESULT, json.dumps({**result, "train": config.to_dict()}, indent=1) + "\n")
    print("\n".join(f"{name}: {value}" for name, value in result.items()))
    print(f"model: {args.out / 'model'}")
    return 0
