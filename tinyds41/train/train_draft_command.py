"""`tinyds41 train-draft FOLDER`: a drafter for the model in a folder, and what it does on held-out text."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from tinyds41.checkpoint.read import load
from tinyds41.checkpoint.replace import check_replaceable
from tinyds41.checkpoint.write import save
from tinyds41.memory import require_device
from tinyds41.model.transformer import Model
from tinyds41.train.corpus import Corpus, documents
from tinyds41.train.draft_report import acceptance, calibrate, calibration, drafts_on, rows_of
from tinyds41.train.examples import EXAMPLES, example
from tinyds41.train.fit_tokenizer import TRAINED_ON
from tinyds41.train.train_command import KINDS, RESULT
from tinyds41.train.train_draft import DraftConfig, train_draft
from tinyds41.whole_file import write_whole

ROWS = 64  # of held-out text: drafts of the first half fit temperatures, those of the second tell their error


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser("train-draft", description="Train a drafter for a model, which stays as it is. The "
                                   "output folder gets snapshot, log, model and result.")  # fmt: skip
    parser.add_argument("folder", metavar="FOLDER", help="a model in the released layout, or the name of an example")
    parser.add_argument("--out", type=Path, default=Path("runs/draft"), metavar="FOLDER", help="(default %(default)s)")
    parser.add_argument("--text", nargs="+", metavar="FILE", default=list(TRAINED_ON),
                        help="shipped texts or UTF-8 files (default plays jargon)")  # fmt: skip
    parser.add_argument("--resume", action="store_true", help="go on from the snapshot in the output folder")
    parser.add_argument("--calibrate", action=argparse.BooleanOptionalAction, default=True,
                        help="fit temperatures of the confidences on held-out text (default: yes)")  # fmt: skip
    parser.add_argument("--rows", type=int, default=ROWS, help="of held-out text (default %(default)s)")
    parser.add_argument("--device", default="cpu", help="(default %(default)s)")
    fields = parser.add_argument_group("fields of the DraftConfig")
    for field in dataclasses.fields(DraftConfig):
        fields.add_argument("--" + field.name.replace("_", "-"), type=KINDS[str(field.type)], default=field.default,
                            help="(default %(default)s)")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    config = DraftConfig(**{field.name: getattr(args, field.name) for field in dataclasses.fields(DraftConfig)})
    if args.rows < 2:
        raise ValueError(f"rows={args.rows}: at least 2 are needed, to fit and to ask")
    require_device(args.device)
    check_replaceable(args.out / "model")  # said now, not when all is trained
    model = _backbone(args.folder, args.device)
    taught, held_out = (_corpus(model, args.text, split, args.folder) for split in ("train", "held_out"))
    rows = rows_of(held_out, config.length, args.rows).to(model.device)
    model.add_draft(seed=config.seed)
    history = train_draft(model, taught, config, folder=args.out, resume=args.resume)
    if history.interrupted:
        print(f"Interrupted after {history.step} of {config.steps} steps: --resume goes on from {args.out}.")
        return 0
    result = {"text": args.text, "steps": history.step, "seconds": round(sum(history.seconds), 1),
              **measure(model, rows, calibrated=args.calibrate)}  # fmt: skip
    save(model, args.out / "model")
    write_whole(args.out / RESULT, json.dumps({**result, "train": dataclasses.asdict(config)}, indent=1) + "\n")
    print("\n".join(f"{name}: {value}" for name, value in result.items()))
    print(f"model: {args.out / 'model'}")
    return 0


def measure(model: Model, rows: Any, *, calibrated: bool) -> dict[str, Any]:
    """Acceptance on held-out rows; the error of the confidences on every second one, with temperatures of the others.

    The temperatures go into the model's config.
    """
    fitted, asked = drafts_on(model, rows[::2]), drafts_on(model, rows[1::2])
    model.config = model.config.replace(dspark_temperatures=())
    temperatures = calibrate(model, fitted) if calibrated else ()
    return {"acceptance": acceptance(asked), "temperatures": [round(t, 4) for t in temperatures],
            "confidence_error": calibration(asked, temperatures)}  # fmt: skip


def _backbone(folder: str, device: str) -> Model:
    """Raises: as `load`; ValueError for an example without a text."""
    if not Path(folder).exists() and folder in EXAMPLES:
        return example(folder).to(device)
    return load(folder, device=device)


def _corpus(model: Model, names: list[str], split: str, folder: str) -> Corpus:
    if model.tokenizer is None:
        raise ValueError(f"{folder} has no tokenizer: it reads no text")
    return Corpus.from_texts(model.tokenizer, [text for name in names for text in documents(name, split)])
