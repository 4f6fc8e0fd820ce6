"""Trains a shipped example on one thread and stores it with a record of how it was made.

    python -m tinyds41.train.make_example text --steps 300 --out data/examples/text

The text's toy is stored in the released formats; its record holds the held-out loss before and after the weights were
rounded to FP8 and FP4. The toys of tasks are stored in float32, bit for bit, for lessons go on training them; their
record holds the training losses and the share of right answers. The drafter is stored alone, in float32, for
the text's toy, which it leaves as it is; its record holds what it does on held-out text, and its calibration. Inside
the shipped data folder the checksums of the manifest follow.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tinyds41.checkpoint.layout import is_model_file
from tinyds41.checkpoint.read import load
from tinyds41.checkpoint.write import save, save_draft
from tinyds41.config import Config
from tinyds41.model.transformer import Model
from tinyds41.tokenizer import Tokenizer
from tinyds41.train.calibrate_example import measure
from tinyds41.train.corpus import Corpus, data_folder, documents
from tinyds41.train.draft_report import LENGTH, OTHER
from tinyds41.train.evaluate import evaluate
from tinyds41.train.examples import DRAFT, EXAMPLES, RECORD, command, example
from tinyds41.train.fit_tokenizer import TRAINED_ON, enter_in_manifest
from tinyds41.train.history import History
from tinyds41.train.snapshot import FILE_NAME as SNAPSHOT
from tinyds41.train.task_examples import recipe
from tinyds41.train.train_draft import DraftConfig, DraftHistory, train_draft
from tinyds41.train.trainer import train
from tinyds41.whole_file import write_whole

HELD_OUT = "plays"
DRAFTING = DraftConfig()
ASKED = 100  # rows of a task


def make(
    name: str, steps: int, out: Path, *, seed: int = 0, max_tokens: int | None = None, run: Path | None = None
) -> dict[str, Any]:
    """Trains, saves, evaluates what was saved, and returns the record that now lies beside it.

    max_tokens: of the held-out text that are predicted; all by default. run: a folder for the snapshots of a drafter's
        training, which goes on from there.
    Raises: FileExistsError before any training when the folder holds what no example has.
    """
    require_free(out)
    if name == "text":
        made = make_text(steps, out, seed, max_tokens)
    elif name == DRAFT:
        made = make_draft(steps, out, seed, max_tokens, run)
    else:
        made = make_task(name, steps, out, seed)
    history, trained_on, measured = made
    record = {
        "name": name, "command": command(name, steps, seed, out), "date": datetime.date.today().isoformat(),
        "trained_on": trained_on, "steps": history.step, "tokens": history.step * history.tokens_per_step,
        "threads": torch.get_num_threads(), "torch": torch.__version__, **measured,
    }  # fmt: skip
    write_whole(out / RECORD, json.dumps(record, indent=1) + "\n")
    return record


Made = tuple[History | DraftHistory, Any, dict[str, Any]]  # how it went, what it read, what it then could


def make_text(steps: int, out: Path, seed: int, max_tokens: int | None) -> Made:
    """The toy of plays and jargon, in the released formats."""
    tokenizer = Tokenizer.load(data_folder())
    training = Corpus.from_texts(tokenizer, [text for source in TRAINED_ON for text in documents(source)])
    held_out = Corpus.from_texts(tokenizer, documents(HELD_OUT, "held_out"))
    config = Config.preset("toy", engram_compressed_vocab_size=tokenizer.compressed_vocab_size)
    model = Model(config, tokenizer=tokenizer, seed=seed)
    history = train(model, training, steps=steps, seed=seed)
    require_complete(history, steps, out)
    before = evaluate(model, held_out, train=training, max_tokens=max_tokens)
    store(model, out)
    after = evaluate(load(out), held_out, max_tokens=max_tokens)
    held_out_record = {
        "text": HELD_OUT, "tokens": after.n_tokens, "loss": round(after.loss, 4),
        "loss_before_rounding": round(before.loss, 4), "unigram_loss": round(before.unigram_loss or 0, 4),
    }  # fmt: skip
    return history, list(TRAINED_ON), {"held_out": held_out_record}


def make_draft(steps: int, out: Path, seed: int, max_tokens: int | None, run: Path | None) -> Made:
    """The drafter of the text's toy, bit for bit, its temperatures fitted on held-out text."""
    model = example("text")
    model.add_draft(seed=seed)
    tokenizer = model.tokenizer
    assert tokenizer is not None
    training = Corpus.from_texts(tokenizer, [text for source in TRAINED_ON for text in documents(source)])
    resume = run is not None and (run / SNAPSHOT).is_file()
    history = train_draft(model, training, DRAFTING, steps=steps, seed=seed, folder=run, resume=resume)
    require_complete(history, steps, out)
    found = measure(model, None if max_tokens is None else max(1, max_tokens // LENGTH))
    (out / RECORD).unlink(missing_ok=True)  # `save_draft` refuses a folder with anything that it does not know
    save_draft(model, out)
    measured = {"held_out": found["fitted_on"], "temperatures": found["temperatures"], OTHER: found["asked"],
                "losses": [round(loss, 4) for loss in history.losses]}  # fmt: skip
    return history, list(TRAINED_ON), measured


def make_task(name: str, steps: int, out: Path, seed: int) -> Made:
    """The toy of a task, bit for bit, and which part of other rows' questions it answers right."""
    chosen = recipe(name)
    model = Model(chosen.config, seed=seed)
    history = train(model, chosen.taught, steps=steps, seed=seed, **chosen.training)
    require_complete(history, steps, out)
    (out / RECORD).unlink(missing_ok=True)  # `save` refuses a folder with anything that it does not know
    save(model, out)
    right = chosen.right(load(out), ASKED)
    return history, str(chosen.taught), {"right": right, "losses": [round(loss, 4) for loss in history.losses]}


def require_complete(history: History | DraftHistory, steps: int, out: Path) -> None:
    """Raises: KeyboardInterrupt for a training that was stopped."""
    if history.interrupted:
        raise KeyboardInterrupt(f"after {history.step} of {steps} steps: {out} is as it was")


def require_free(out: Path) -> None:
    """Raises: FileExistsError naming a file that is part of no example."""
    foreign = [file.name for file in sorted(out.glob("*")) if file.name != RECORD and not is_model_file(file.name)]
    if foreign:
        raise FileExistsError(f"{out} holds {foreign[0]}, which is no part of an example: nothing was trained")


def store(model: Model, out: Path) -> None:
    """Saves a model in the released formats, embedding and head in bfloat16: in float32 they are a quarter of it all.

    Everything else that is not quantised, such as gates, stays in float32: their choices are fragile.
    """
    model = copy.deepcopy(model)
    for table in (model.embed, model.head):
        table.to(torch.bfloat16)
    (out / RECORD).unlink(missing_ok=True)  # `save` refuses a folder with anything that it does not know
    save(model, out, quantize=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tinyds41.train.make_example",
                                     description="Train a shipped example on one thread.")  # fmt: skip
    parser.add_argument("name", choices=EXAMPLES)
    parser.add_argument("--steps", type=int, help="those of the shipped example by default")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="folder of the model and its record")
    parser.add_argument("--run", type=Path, metavar="FOLDER",
                        help="snapshots of a drafter's training, to go on from")  # fmt: skip
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    record = make(args.name, args.steps or EXAMPLES[args.name], args.out, seed=args.seed, run=args.run)
    print(json.dumps(record, indent=1))
    if data_folder() in args.out.resolve().parents:
        enter_in_manifest(data_folder(), sorted(args.out.resolve().iterdir()), record["command"])


if __name__ == "__main__":
    main()
