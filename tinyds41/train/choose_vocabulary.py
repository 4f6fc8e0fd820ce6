"""Which vocabulary size the toy learns the shipped text best with, at equal CPU time on one thread.

    python -m tinyds41.train.choose_vocabulary --seconds 150 --out docs/results/vocabulary.json

Bits per character compare across sizes, nats per token do not: a larger vocabulary has fewer, harder tokens and a
larger output layer, so in the same time it also sees another number of steps.
"""

from __future__ import annotations

import argparse
import datetime
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tinyds41.config import Config
from tinyds41.model.transformer import Model
from tinyds41.tokenizer import Tokenizer
from tinyds41.train.corpus import Corpus, documents
from tinyds41.train.evaluate import evaluate
from tinyds41.train.fit_tokenizer import TRAINED_ON, bytes_per_token, fit
from tinyds41.train.trainer import train
from tinyds41.whole_file import write_whole

SIZES = (1024, 2048, 4096)
HELD_OUT = "plays"
TRIAL_STEPS = 25
TOLERANCE = 0.03  # how far a run's time may be from the time asked for before it is repeated with other steps


def measure(vocab_size: int, seconds: float, seed: int) -> dict[str, Any]:
    """Fits a tokenizer, trains a toy with it for about `seconds`, evaluates it on held-out text."""
    tokenizer = fit(vocab_size)
    training = Corpus.from_texts(tokenizer, [text for name in TRAINED_ON for text in documents(name)])
    held_out = Corpus.from_texts(tokenizer, documents(HELD_OUT, "held_out"))
    config = Config.preset("toy", vocab_size=vocab_size, engram_compressed_vocab_size=tokenizer.compressed_vocab_size)
    per_step = _trained(config, tokenizer, training, TRIAL_STEPS, seed)[2] / TRIAL_STEPS
    while True:
        steps = max(1, round(seconds / per_step))
        model, tokens, taken = _trained(config, tokenizer, training, steps, seed)
        if abs(taken / seconds - 1) <= TOLERANCE:
            break
        per_step = taken / steps
    quality = evaluate(model, held_out)
    return {
        "vocab_size": vocab_size, "steps": steps, "tokens": tokens, "seconds": round(taken, 1),
        "bytes_per_token": round(bytes_per_token(tokenizer, HELD_OUT), 3), "loss": round(quality.loss, 4),
        "bits_per_character": round(quality.bits_per_character or 0, 4),
    }  # fmt: skip


def _trained(config: Config, tokenizer: Tokenizer, training: Corpus, steps: int, seed: int) -> tuple[Model, int, float]:
    """A toy trained for so many steps, its tokens, and the CPU seconds it took: other processes do not count."""
    model = Model(config, tokenizer=tokenizer, seed=seed)
    started = time.process_time()
    history = train(model, training, steps=steps, seed=seed, progress=False)
    return model, steps * history.tokens_per_step, time.process_time() - started


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Compare vocabulary sizes at equal training time.")
    parser.add_argument("--seconds", type=float, default=150.0,
                        help="CPU seconds of training per size, on one thread (default %(default)s)")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="also write the rows here as JSON")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows = []
    for size in SIZES:
        rows.append(measure(size, args.seconds, args.seed))
        print(json.dumps(rows[-1]))
    content = {"name": "vocabulary", "date": datetime.date.today().isoformat(), "device": "cpu",
               "threads": torch.get_num_threads(), "seed": args.seed, "rows": rows}  # fmt: skip
    if args.out is not None:
        write_whole(args.out, json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
