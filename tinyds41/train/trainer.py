"""The training loop: one call that trains a model, shows its progress and never loses a run."""

from __future__ import annotations

import dataclasses
import json
import math
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from tqdm.auto import tqdm

from tinyds41.model.transformer import Model
from tinyds41.model.variant import twin
from tinyds41.train.corpus import Batch
from tinyds41.train.indexer_loss import indexer_loss, is_dense, recall, sample_queries, teachers
from tinyds41.train.losses import balance, cross_entropy, run, targets
from tinyds41.train.optim import (
    BIAS_STEP,
    OPTIMIZERS,
    learning_rate_at,
    move_gate_biases,
    optimizers,
    require_trainable,
    set_learning_rate,
)
from tinyds41.train.replay import draw_hits, run_replayed
from tinyds41.train.snapshot import load_snapshot, read_record, save_snapshot


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Everything that decides a run, beside the model and the text.

    Units: length in tokens, learning_rate per step at its peak, record_every and snapshot_every in steps (0 = never).
    Raises: ValueError naming the field and its value.
    """

    steps: int = 300
    batch_size: int = 8
    length: int = 256
    learning_rate: float = 2e-3
    optimizer: str = "adamw"  # or "report": Muon, balanced momentum and AdamW, each for its roles
    warmup: int = 20
    seed: int = 0
    clip: float = 1.0  # largest norm of a gradient, the indexers' on its own
    balance_weight: float = 1e-4
    bias_rate: float = BIAS_STEP  # how far a step moves a gate's bias; 0 leaves the experts to themselves
    indexer_weight: float = 1.0  # 0 leaves the indexers untrained
    indexer_queries: int = 64  # sampled per step
    indexer_dense: float = 1.0  # share of the steps that teach all visible entries; later ones what a source may choose
    quantize_from: int = 0  # first step whose cache rows are rounded to their formats, where the config has them
    replay_share: float = 0.0  # share of the steps whose rows are read as if their beginning came from a store
    record_every: int = 10  # how often recall and expert load are kept
    snapshot_every: int = 100

    def __post_init__(self):
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(f"optimizer={self.optimizer!r}: one of {', '.join(OPTIMIZERS)} is needed")
        for f in dataclasses.fields(self):
            if f.type == "str":
                continue
            value, whole = getattr(self, f.name), f.type == "int"
            if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
                raise ValueError(f"{f.name}={value!r}: a {'whole ' if whole else ''}number is needed")
        for name in ("steps", "batch_size", "length", "indexer_queries"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: at least 1 is needed")
        whole_or_weight = ("warmup", "seed", "record_every", "snapshot_every", "quantize_from", "balance_weight",
                           "indexer_weight")  # fmt: skip
        for name in (*whole_or_weight, "bias_rate"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)}: a finite number of at least 0 is needed")
        for name in ("indexer_dense", "replay_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)}: a share of the steps is needed, 0 to 1")
        for name in ("learning_rate", "clip"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise ValueError(f"{name}={getattr(self, name)}: a positive finite number is needed")

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> TrainConfig:
        if not isinstance(content, dict):
            raise ValueError(f"a TrainConfig is a JSON object, got {type(content).__name__}")
        unknown = sorted(set(content) - {f.name for f in dataclasses.fields(cls)})
        if unknown:
            raise ValueError(f"unknown field {unknown[0]!r} in a TrainConfig")
        return cls(**content)

    def to_json(self, path: str | Path) -> None:
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def from_json(cls, path: str | Path) -> TrainConfig:
        try:
            return cls.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error


@dataclass
class History:
    """What a run showed, step by step; `records` holds what is kept every `record_every` steps.

    Units: losses in nats per token, indexer_losses in nats, seconds per step. A record has step, load (share of the
        choices [L][E], even = 1/E) and recall ({source: {selection, pool}}, see `losses.Recall`).
    """

    losses: list[float] = field(default_factory=list)
    indexer_losses: list[float] = field(default_factory=list)
    balance_losses: list[float] = field(default_factory=list)
    learning_rates: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    records: list[dict[str, Any]] = field(default_factory=list)
    tokens_per_step: int = 0
    interrupted: bool = False

    @property
    def step(self) -> int:
        """Completed steps."""
        return len(self.losses)

    @property
    def tokens_per_second(self) -> float:
        """Mean over the steps so far, without the first: it also pays for what happens once."""
        later = self.seconds[1:] or self.seconds
        return self.tokens_per_step * len(later) / sum(later) if later else 0.0


class Batches(Protocol):
    """A corpus or task: batches that depend on (seed, step) alone, for runs that resume."""

    def batch(self, step: int, batch_size: int, length: int, seed: int) -> Batch: ...


def train(
    model: Model, corpus: Batches, config: TrainConfig | None = None, *, folder: str | Path | None = None,
    resume: bool = False, progress: bool = True, **changes: Any,
) -> History:  # fmt: skip
    """Trains `model` in place: `train(model, corpus, steps=300, seed=0)`.

    `changes` replace fields of `config`. With a `folder`, a snapshot is kept there and `resume` goes on from it.
    Ctrl-C finishes the present step, saves, and returns with `history.interrupted`.
    The same model, corpus, config and number of threads give the same bits.

    Raises: ValueError for a field out of range, a text too short, a float16 model or a snapshot of another optimiser,
        TypeError for an unknown field; FileNotFoundError when there is nothing to resume; MemoryError before the first
        step when gradients and moments cannot fit; FloatingPointError naming the step when a loss or gradient is not
        finite: the model then is as it was before that step, and the last snapshot stays.
    """
    config = dataclasses.replace(config or TrainConfig(), **changes)
    require_trainable(model, config.optimizer)
    plain = _without_formats(model, config)
    optimizer = optimizers(model, config)
    folder = None if folder is None else Path(folder)
    history = History(tokens_per_step=config.batch_size * config.length)
    if resume and folder is None:
        raise ValueError("resume=True needs the folder whose snapshot is to go on")
    if resume and folder is not None:
        _require_same_optimizer(folder, config.optimizer)
        history = History(**load_snapshot(folder, model, optimizer)["history"])
        history.interrupted = False

    def save() -> None:
        if folder is not None:
            record = {"step": history.step, "train": config.to_dict(), "history": dataclasses.asdict(history)}
            save_snapshot(folder, model, optimizer, record)

    first, saved_at = history.step, -1
    # Once a second: a notebook's bar sends messages, and a cell that sends a thousand unread loses the last ones.
    bar = tqdm(total=config.steps, initial=first, disable=not progress, unit="step", mininterval=1.0)
    with bar, _interrupt_as_flag() as interrupt:
        for step in range(first, config.steps):
            _step(plain if step < config.quantize_from else model, corpus, optimizer, config, history, step)
            bar.update()
            bar.set_postfix(loss=f"{history.losses[-1]:.3f}", indexer=f"{history.indexer_losses[-1]:.3f}",
                            refresh=False)  # fmt: skip
            history.interrupted = interrupt.requested
            if interrupt.requested or (config.snapshot_every and (step + 1) % config.snapshot_every == 0):
                save()
                saved_at = history.step
            if interrupt.requested:
                break
    if saved_at != history.step:
        save()
    return history


def _require_same_optimizer(folder: Path, optimizer: str) -> None:
    """Moments of another optimiser mean nothing to this one. Snapshots from before there was a choice are AdamW's."""
    before = read_record(folder).get("train", {}).get("optimizer", "adamw")
    if before != optimizer:
        raise ValueError(f"the snapshot in {folder} was trained with optimizer={before!r}, not {optimizer!r}")


def _without_formats(model: Model, config: TrainConfig) -> Model:
    """What runs before the formats come in: the same parameters under another config."""
    if config.quantize_from and not model.config.quantize_cache:
        raise ValueError(f"quantize_from={config.quantize_from}: the model's config has quantize_cache=False, so no "
                         "formats could come in")  # fmt: skip
    return twin(model, quantize_cache=False) if config.quantize_from else model


def _step(
    model: Model, corpus: Batches, optimizer: torch.optim.Optimizer, config: TrainConfig, history: History, step: int
) -> None:
    """Forward, backward, update; what it showed goes to the history."""
    started = time.perf_counter()
    device = model.device
    ids, documents, wanted = corpus.batch(step, config.batch_size, config.length, config.seed)
    wanted = (targets(ids, documents) if wanted is None else wanted).to(device)
    inputs = ids[:, :-1].to(device), None if documents is None else documents[:, :-1].to(device)
    hits = draw_hits(model.config, step, inputs[0].shape, config.replay_share, config.seed)
    logits, ctx = run(model, *inputs) if hits is None else run_replayed(model, *inputs, hits)
    wanted = wanted if hits is None else hits.served(wanted)
    queries = sample_queries(step, inputs[0].shape[1], config.indexer_queries, config.seed).to(device)
    recorded = config.record_every > 0 and step % config.record_every == 0
    teaching = teachers(model, ctx, queries) if config.indexer_weight or recorded else {}
    next_token = cross_entropy(logits, wanted)
    balance_loss, load = balance(model, ctx)
    dense = is_dense(step, config.steps, config.indexer_dense)
    imitation = indexer_loss(model, ctx, queries, teaching, dense=dense)
    loss = next_token + config.balance_weight * balance_loss + config.indexer_weight * imitation
    _require_finite("loss", loss, step)

    optimizer.zero_grad()
    loss.backward()
    clip(model, config.clip, step)
    rate = learning_rate_at(step, base=config.learning_rate, warmup=config.warmup, steps=config.steps)
    set_learning_rate(optimizer, rate)
    optimizer.step()
    move_gate_biases(model, load, config.bias_rate)

    if recorded:
        recalls = {str(source): dataclasses.asdict(r) for source, r in recall(model, ctx, queries, teaching).items()}
        share = load / load.sum(-1, keepdim=True).clamp(min=1)
        history.records.append({"step": step, "load": share.tolist(), "recall": recalls})
    history.losses.append(float(next_token.detach()))
    history.indexer_losses.append(float(imitation.detach()))
    history.balance_losses.append(float(balance_loss.detach()))
    history.learning_rates.append(rate)
    history.seconds.append(time.perf_counter() - started)


def clip(model: Model, largest: float, step: int) -> None:
    """Bounds the gradient's norm, the indexers' apart.

    How badly they imitate must not slow the model down.

    Raises: FloatingPointError naming the step when a gradient is not finite.
    """
    parts: dict[bool, list[Tensor]] = {True: [], False: []}
    for name, parameter in model.named_parameters():
        parts[".indexer." in name].append(parameter)
    for parameters in parts.values():
        _require_finite("gradient norm", torch.nn.utils.clip_grad_norm_(parameters, largest), step)


def _require_finite(what: str, value: Tensor, step: int) -> None:
    if not torch.isfinite(value):
        found = float(value.detach())
        raise FloatingPointError(f"the {what} is {found} at step {step}: the update of this step was not made")


@dataclass
class _Interrupt:
    requested: bool = False


@contextmanager
def _interrupt_as_flag() -> Iterator[_Interrupt]:
    """Ctrl-C sets a flag that is read between steps: half an update is never saved.

    A second one stops at once.
    """
    interrupt = _Interrupt()

    def remember(number: int, frame: Any) -> None:
        if interrupt.requested:
            raise KeyboardInterrupt
        interrupt.requested = True

    try:
        before = signal.signal(signal.SIGINT, remember)
    except ValueError:  # not the main thread: signals are not ours to catch
        yield interrupt
        return
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, before)
