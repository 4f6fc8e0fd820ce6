"""The training loop: one call that trains a model, shows its progress and never loses a run."""

from __future__ import annotations

import dataclasses
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from tqdm.auto import tqdm

from tinyds41.memory import require_bytes
from tinyds41.model.transformer import Model
from tinyds41.model.variant import twin
from tinyds41.train.corpus import Batch
from tinyds41.train.finite import first_not_finite, gradient_not_finite, require_finite, require_finite_weights
from tinyds41.train.history import History
from tinyds41.train.indexer_loss import indexer_loss, is_dense, recall, sample_queries, teachers
from tinyds41.train.interrupt import interrupt_as_flag
from tinyds41.train.losses import IGNORED, balance, cross_entropy, run, targets
from tinyds41.train.optim import learning_rate_at, move_gate_biases, optimizers, require_trainable, set_learning_rate
from tinyds41.train.replay import Hits, draw_hits, run_replayed
from tinyds41.train.snapshot import Snapshot, hash_of, read_snapshot, require_same_run, save_snapshot
from tinyds41.train.step_log import StepLog
from tinyds41.train.train_config import TrainConfig

# Of a TrainConfig, what may change when a run goes on: it decides no number of the run.
FREE_ON_RESUME = ("snapshot_every",)


class Batches(Protocol):
    """A corpus or task: batches that depend on (seed, step) alone, for runs that resume."""

    def batch(self, step: int, batch_size: int, length: int, seed: int) -> Batch: ...


def train(
    model: Model, corpus: Batches, config: TrainConfig | None = None, *, folder: str | Path | None = None,
    resume: bool = False, progress: bool = True, **changes: Any,
) -> History:  # fmt: skip
    """Trains `model` in place: `train(model, corpus, steps=300, seed=0)`.

    `changes` replace fields of `config`. With a `folder`, a snapshot and a log of all steps are kept there, and
    `resume` goes on from the snapshot. Ctrl-C finishes the present step, saves, and returns with
    `history.interrupted`; a second one stops at once. The same model, corpus, config and number of threads give the
    same bits, resumed or not: batches follow from (seed, step), and nothing else is drawn.

    Raises: ValueError for a field out of range, a text too short, a float16 model, one without weights, or a snapshot
        that is damaged, of another config (naming the fields) or of other rows; TypeError for an unknown field;
        FileNotFoundError when there is nothing to resume; MemoryError before the first step when gradients and
        moments, or a part of a batch, cannot fit; FloatingPointError naming the step and where it began when a loss or
        gradient is not finite: the model then is as it was before that step, and the last snapshot stays. It stays too
        when weights are not finite, which are never saved.
    """
    config = dataclasses.replace(config or TrainConfig(), **changes)
    require_trainable(model, config.optimizer)
    _require_room(model, config)
    plain = _without_formats(model, config)
    optimizer = optimizers(model, config)
    folder = None if folder is None else Path(folder)
    history = History(tokens_per_step=config.batch_size * config.length)
    identity = {} if folder is None else _identity(model, corpus, config)
    if resume and folder is None:
        raise ValueError("resume=True needs the folder whose snapshot is to go on")
    if resume and folder is not None:
        history = _resumed(read_snapshot(folder), identity, model, optimizer)

    def save() -> None:
        require_finite_weights(model, history.step - 1)
        if folder is not None:
            record = {"step": history.step, **identity, "history": dataclasses.asdict(history)}
            save_snapshot(folder, model, optimizer, record)

    first, saved_at = history.step, -1
    # Once a second: a notebook's bar sends messages, and a cell that sends a thousand unread loses the last ones.
    bar = tqdm(total=config.steps, initial=first, disable=not progress, unit="step", mininterval=1.0)
    log = nullcontext() if folder is None else StepLog(folder, first)
    with bar, log, interrupt_as_flag() as interrupt:
        for step in range(first, config.steps):
            _step(plain if step < config.quantize_from else model, corpus, optimizer, config, history, step)
            if isinstance(log, StepLog):
                log.write(step, history.of(step))
            bar.update()
            bar.set_postfix(loss=f"{history.losses[-1]:.3f}", indexer=f"{history.indexer_losses[-1]:.3f}",
                            refresh=False)  # fmt: skip
            if config.snapshot_every and (step + 1) % config.snapshot_every == 0:
                save()
                saved_at = history.step
            if interrupt.requested:
                break
        if saved_at != history.step:  # still with Ctrl-C as a flag: a last snapshot that is cut off saves nothing
            save()
        history.interrupted = interrupt.requested
    return history


def _identity(model: Model, corpus: Batches, config: TrainConfig) -> dict[str, Any]:
    """What decides a run: both configs, and a hash of the rows of step 0, which tell one text or task from another."""
    rows = hash_of(corpus.batch(0, config.batch_size, config.length, config.seed))
    return {"train": config.to_dict(), "model": model.config.to_dict(), "rows": rows}


def _resumed(
    snapshot: Snapshot, identity: dict[str, Any], model: Model, optimizer: torch.optim.Optimizer
) -> History:  # fmt: skip
    """Loads a snapshot of the same run; returns what it showed so far. Raises: ValueError, see `require_same_run`."""
    require_same_run(snapshot, identity, TrainConfig().to_dict(), FREE_ON_RESUME)
    snapshot.restore(model, optimizer)
    history = History(**snapshot.record["history"])
    history.interrupted = False
    return history


def _require_room(model: Model, config: TrainConfig) -> None:
    """Raises: MemoryError when not even the least that a part of a batch keeps for its gradients can fit."""
    needed = least_kept_bytes(model, config.batch_size // config.accumulate, config.length)
    rows = f"{config.batch_size // config.accumulate} rows of {config.length} tokens"
    require_bytes(needed, model.device, f"a step with {rows} (raise accumulate, or lower batch_size or length)")


def least_kept_bytes(model: Model, n_rows: int, length: int) -> int:
    """What a step surely keeps for its gradients: the streams that enter each half of a layer, and logits with theirs.

    Units: bytes. In truth it is several times as much: this bound refuses only what could never fit.
    """
    config, size = model.config, next(model.parameters()).element_size()
    streams = 2 * config.num_hidden_layers * config.hc_mult * config.hidden_size
    return n_rows * length * size * (streams + 2 * config.vocab_size)


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
    parts = _parts(model, corpus, config, step)
    n_targets = torch.stack([(part.wanted != IGNORED).sum() for part in parts]).sum()
    recorded = config.record_every > 0 and step % config.record_every == 0
    optimizer.zero_grad()
    shown = [_forward_backward(model, part, n_targets, config, step, recorded=recorded) for part in parts]
    clip(model, config.clip, step)
    rate = learning_rate_at(step, base=config.learning_rate, warmup=config.warmup, steps=config.steps)
    set_learning_rate(optimizer, rate)
    optimizer.step()
    load = torch.stack([one.load for one in shown]).sum(0)
    move_gate_biases(model, load, config.bias_rate)

    if recorded:
        share = load / load.sum(-1, keepdim=True).clamp(min=1)
        history.records.append({"step": step, "load": share.tolist(), "recall": shown[0].recall})
    history.losses.append(sum(one.next_token for one in shown))
    history.indexer_losses.append(sum(one.imitation for one in shown) / len(shown))
    history.balance_losses.append(sum(one.balance for one in shown) / len(shown))
    history.learning_rates.append(rate)
    history.seconds.append(time.perf_counter() - started)


@dataclass(frozen=True)
class _Part:
    """Some rows of a batch. Shapes: ids, documents, wanted [b,S]."""

    ids: Tensor
    documents: Tensor | None
    wanted: Tensor
    hits: Hits | None


def _parts(model: Model, corpus: Batches, config: TrainConfig, step: int) -> list[_Part]:
    """A step's batch on the model's device, cut into `accumulate` parts."""
    ids, documents, wanted = corpus.batch(step, config.batch_size, config.length, config.seed)
    wanted = targets(ids, documents) if wanted is None else wanted
    hits = draw_hits(model.config, step, (len(ids), ids.shape[1] - 1), config.replay_share, config.seed)
    wanted = wanted if hits is None else hits.served(wanted)
    found, n = [], len(ids) // config.accumulate
    for rows in (slice(first, first + n) for first in range(0, len(ids), n)):
        own = None if documents is None else documents[rows, :-1].to(model.device)
        found.append(_Part(ids[rows, :-1].to(model.device), own, wanted[rows].to(model.device),
                           None if hits is None else hits.rows(rows)))  # fmt: skip
    return found


@dataclass(frozen=True)
class _Shown:
    """What a part showed: its share of the step's loss, its other losses, its load [L,E], and recall if asked for."""

    next_token: float
    imitation: float
    balance: float
    load: Tensor
    recall: dict[str, Any]


def _forward_backward(
    model: Model, part: _Part, n_targets: Tensor, config: TrainConfig, step: int, *, recorded: bool
) -> _Shown:  # fmt: skip
    """Adds a part's gradients to the step's. Of its targets each counts alike; of the other losses each part does.

    Recall is that of the first part.
    """
    queries = sample_queries(step, part.ids.shape[1], config.indexer_queries, config.seed).to(model.device)
    with torch.autocast(model.device.type, torch.bfloat16, enabled=config.autocast):
        inputs = part.ids, part.documents
        logits, ctx = run(model, *inputs) if part.hits is None else run_replayed(model, *inputs, part.hits)
        teaching = teachers(model, ctx, queries) if config.indexer_weight or recorded else {}
        next_token = cross_entropy(logits, part.wanted, n_targets)
        balance_loss, load = balance(model, ctx)
        dense = is_dense(step, config.steps, config.indexer_dense)
        imitation = indexer_loss(model, ctx, queries, teaching, dense=dense)
        others = config.balance_weight * balance_loss + config.indexer_weight * imitation
    loss = next_token + others / config.accumulate
    if not torch.isfinite(loss):
        require_finite("loss", loss, step, first_not_finite(model, *inputs))
    loss.backward()
    recalled = recall(model, ctx, queries, teaching) if recorded else {}
    return _Shown(float(next_token.detach()), float(imitation.detach()), float(balance_loss.detach()), load,
                  {str(source): dataclasses.asdict(one) for source, one in recalled.items()})  # fmt: skip


def clip(model: Model, largest: float, step: int) -> None:
    """Bounds the gradient's norm, the indexers' apart.

    How badly they imitate must not slow the model down.

    Raises: FloatingPointError naming the step when a gradient is not finite.
    """
    parts: dict[bool, list[Tensor]] = {True: [], False: []}
    for name, parameter in model.named_parameters():
        parts[".indexer." in name].append(parameter)
    for parameters in parts.values():
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        if not torch.isfinite(norm):
            require_finite("gradient norm", norm, step, gradient_not_finite(model))
    for parameters in parts.values():
        torch.nn.utils.clip_grad_norm_(parameters, largest)
