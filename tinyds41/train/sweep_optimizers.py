"""Which optimiser and rate the toy learns the shipped text best with, at equal steps on one thread.

    python -m tinyds41.train.sweep_optimizers --steps 100 --out docs/results/optimizers.json

Each finished row is printed at once. One seed and one length of training: it shows which rates are sane, not which
optimiser is better in the long run.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tinyds41.config import Config
from tinyds41.model.transformer import Model
from tinyds41.tokenizer import Tokenizer
from tinyds41.train.corpus import Corpus, data_folder, documents
from tinyds41.train.evaluate import evaluate
from tinyds41.train.fit_tokenizer import TRAINED_ON
from tinyds41.train.optim import OPTIMIZERS
from tinyds41.train.train_config import TrainConfig
from tinyds41.train.trainer import train
from tinyds41.whole_file import write_whole

RATES = (1e-3, 2e-3, 4e-3)
HELD_OUT = "plays"


def measure(config: TrainConfig, max_tokens: int | None) -> dict[str, Any]:
    """A toy trained so: its loss on about `max_tokens` of held-out text at most, and CPU seconds per step."""
    tokenizer = Tokenizer.load(data_folder())
    training = Corpus.from_texts(tokenizer, [text for name in TRAINED_ON for text in documents(name)])
    held_out = Corpus.from_texts(tokenizer, documents(HELD_OUT, "held_out"))
    sizes = Config.preset("toy", engram_compressed_vocab_size=tokenizer.compressed_vocab_size)
    model = Model(sizes, tokenizer=tokenizer, seed=config.seed)
    started = time.process_time()
    history = train(model, training, config, progress=False)
    taken = time.process_time() - started
    quality = evaluate(model, held_out, max_tokens=max_tokens)
    return {
        "optimizer": config.optimizer, "learning_rate": config.learning_rate, "seed": config.seed,
        "steps": config.steps, "training_loss": round(statistics.mean(history.losses[-10:]), 4),
        "held_out_loss": round(quality.loss, 4), "held_out_tokens": quality.n_tokens,
        "cpu_seconds_per_step": round(taken / config.steps, 3),
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Compare optimisers and learning rates at equal steps.")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rates", type=float, nargs="+", default=RATES)
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=tuple(OPTIMIZERS))
    parser.add_argument("--max-tokens", type=int, default=30_000, help="held-out tokens (default %(default)s)")
    parser.add_argument("--out", type=Path, help="also write the rows here as JSON")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows = []
    for rate in args.rates:
        for optimizer in args.optimizers:
            config = TrainConfig(steps=args.steps, seed=args.seed, learning_rate=rate, optimizer=optimizer)
            rows.append(measure(config, args.max_tokens))
            print(json.dumps(rows[-1]), flush=True)
    content = {"name": "optimizers", "date": datetime.date.today().isoformat(), "device": "cpu",
               "threads": torch.get_num_threads(), "torch": torch.__version__, "rows": rows}  # fmt: skip
    if args.out is not None:
        write_whole(args.out, json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
