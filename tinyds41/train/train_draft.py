"""Training a drafter behind a frozen backbone."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from tinyds41.model.context import Sequence
from tinyds41.model.draft_context import DraftContext
from tinyds41.model.transformer import Model
from tinyds41.trace import Trace
from tinyds41.train.corpus import Batch
from tinyds41.train.draft_loss import DraftLoss, choose_anchors, draft_loss
from tinyds41.train.finite import require_finite, require_finite_weights
from tinyds41.train.interrupt import interrupt_as_flag
from tinyds41.train.losses import expert_counts
from tinyds41.train.optim import (
    BIAS_STEP,
    OPTIMIZERS,
    learning_rate_at,
    move_gate_biases,
    require_trainable,
    set_learning_rate,
)
from tinyds41.train.snapshot import hash_of, read_snapshot, require_same_run, save_snapshot
from tinyds41.train.step_log import StepLog
from tinyds41.train.trainer import Batches

FREE_ON_RESUME = ("snapshot_every",)  # decides no number of a run


@dataclass(frozen=True, kw_only=True)
class DraftConfig:
    """What decides a drafter's training. Units: steps, rows, tokens per row, blocks per step; ours, see docs/LOG.md.

    Raises: ValueError naming a number that is out of range.
    """

    steps: int = 600
    batch_size: int = 4
    length: int = 256
    anchors: int = 128
    learning_rate: float = 0.02
    optimizer: str = "report"  # as of a TrainConfig: Muon, balanced momentum and AdamW by role, or "adamw"
    table_factor: float = 4.0  # of the rate, for the two Markov tables
    warmup: int = 20
    clip: float = 1.0
    seed: int = 0
    bias_rate: float = BIAS_STEP  # how far a step moves a gate's bias; 0 leaves the experts to themselves
    snapshot_every: int = 50  # steps; 0 saves at the end alone

    def __post_init__(self) -> None:
        if self.optimizer not in tuple(OPTIMIZERS):
            raise ValueError(f"optimizer={self.optimizer!r}: one of {', '.join(OPTIMIZERS)} is needed")
        for name in ("steps", "batch_size", "length", "anchors"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: at least 1 is needed")
        for name in ("learning_rate", "table_factor", "clip"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name}={getattr(self, name)}: a positive finite number is needed")
        for name in ("warmup", "bias_rate", "snapshot_every", "seed"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name}={getattr(self, name)}: a finite number of at least 0 is needed")


@dataclass
class DraftHistory:
    """What a drafter's training showed, step by step.

    Units: losses in nats (ce, confidence) and shares of 1 (tv); acceptance [steps][k] means of 1 - TV by position;
        confidence_errors: mean distance of a confidence from the acceptance it foretells; seconds per step.
    """

    losses: list[float] = field(default_factory=list)
    ce: list[float] = field(default_factory=list)
    tv: list[float] = field(default_factory=list)
    confidence: list[float] = field(default_factory=list)
    confidence_errors: list[float] = field(default_factory=list)
    acceptance: list[list[float]] = field(default_factory=list)
    accepted_lengths: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    tokens_per_step: int = 0
    interrupted: bool = False

    @property
    def step(self) -> int:
        """Completed steps."""
        return len(self.losses)

    def of(self, step: int) -> dict[str, Any]:
        """What one step showed, as a line of the log has it."""
        return {"loss": self.losses[step], "ce": self.ce[step], "tv": self.tv[step],
                "confidence": self.confidence[step], "confidence_error": self.confidence_errors[step],
                "acceptance": self.acceptance[step], "accepted_length": self.accepted_lengths[step],
                "seconds": self.seconds[step]}  # fmt: skip

    def add(self, shown: DraftStep, seconds: float) -> None:
        """One step."""
        loss, confidence = shown.loss, shown.confidence.detach()
        for values, value in ((self.losses, loss.total), (self.ce, loss.ce), (self.tv, loss.tv),
                              (self.confidence, loss.confidence)):  # fmt: skip
            values.append(value.item())
        self.confidence_errors.append((confidence.sigmoid() - loss.acceptance).abs().mean().item())
        self.acceptance.append(loss.acceptance.mean(0).tolist())
        self.accepted_lengths.append(loss.accepted_length)
        self.seconds.append(seconds)


def train_draft(
    model: Model, corpus: Batches, config: DraftConfig | None = None, *, folder: str | Path | None = None,
    resume: bool = False, progress: bool = True, **changes: Any,
) -> DraftHistory:  # fmt: skip
    """Trains `model.mtp` in place; the backbone, with embedding and head, stays as it is in every bit.

    Blocks begin at random tokens, inside documents; what stands behind them is taught by the text and by the
    backbone's own chances. `folder`, `resume` and Ctrl-C are as in `train`: a snapshot of the drafter and a log of all
    steps, and a run that goes on. The same model, corpus and config give the same bits, resumed or not.

    Raises: ValueError for a model without a drafter or weights, a number out of range, texts too short for a block, a
        snapshot that is damaged, of another config, other rows or another backbone; TypeError for an unknown field;
        FileNotFoundError when there is nothing to resume; MemoryError before the first step where gradients and
        moments cannot fit; FloatingPointError naming the step whose loss or gradient is not finite: the drafter then
        is as it was before that step, and the last snapshot stays.
    Source: spec 10.4; experts are balanced by their biases as in spec 8. Optimisers by role (spec 11) are ours here.
    """
    config, drafter = dataclasses.replace(config or DraftConfig(), **changes), model.drafter
    if resume and folder is None:
        raise ValueError("resume=True needs the folder whose snapshot is to go on")
    with _frozen_backbone(model):
        require_trainable(model, config.optimizer)
        optimizer = _optimizer(model, config)
        run = _Run(model, corpus, config, optimizer, None if folder is None else Path(folder))
        if resume:
            run.resume()
        try:
            run.go(progress)
        finally:
            drafter.zero_grad()
    return run.history


class _Run:
    """A training run: its steps, and what of it lies in a folder."""

    def __init__(self, model: Model, corpus: Batches, config: DraftConfig, optimizer: torch.optim.Optimizer,
                 folder: Path | None):  # fmt: skip
        self.model, self.corpus, self.config = model, corpus, config
        self.optimizer, self.folder = optimizer, folder
        self.history = DraftHistory(tokens_per_step=config.batch_size * config.length)
        self.identity = {} if folder is None else _identity(model, corpus, config)

    def resume(self) -> None:
        """Loads the snapshot in the folder. Raises: ValueError for one of another run."""
        assert self.folder is not None
        snapshot = read_snapshot(self.folder)
        require_same_run(snapshot, self.identity, dataclasses.asdict(DraftConfig()), FREE_ON_RESUME)
        if snapshot.record["backbone"] != self.identity["backbone"]:
            raise ValueError(f"the snapshot in {self.folder} is of another run: another backbone there than here")
        snapshot.restore(self.model.drafter, self.optimizer)
        self.history = dataclasses.replace(DraftHistory(**snapshot.record["history"]), interrupted=False)

    def go(self, progress: bool) -> None:
        """The steps that are left."""
        config, history, first, saved_at = self.config, self.history, self.history.step, -1
        bar = tqdm(total=config.steps, initial=first, disable=not progress, unit="step", mininterval=1.0)
        log = nullcontext() if self.folder is None else StepLog(self.folder, first)
        with bar, log, interrupt_as_flag() as interrupt:
            for step in range(first, config.steps):
                self.step(step)
                if isinstance(log, StepLog):
                    log.write(step, history.of(step))
                bar.update()
                bar.set_postfix(loss=f"{history.losses[-1]:.3f}", length=f"{history.accepted_lengths[-1]:.2f}",
                                refresh=False)  # fmt: skip
                if config.snapshot_every and (step + 1) % config.snapshot_every == 0:
                    self.save()
                    saved_at = history.step
                if interrupt.requested:
                    break
            if saved_at != history.step:  # still with Ctrl-C as a flag: a last snapshot that is cut off saves nothing
                self.save()
            history.interrupted = interrupt.requested

    def save(self) -> None:
        """Raises: FloatingPointError for weights that are not finite, which are never saved."""
        require_finite_weights(self.model, self.history.step - 1)
        if self.folder is not None:
            record = {"step": self.history.step, **self.identity, "history": dataclasses.asdict(self.history)}
            save_snapshot(self.folder, self.model.drafter, self.optimizer, record)

    def step(self, step: int) -> None:
        """Forward, backward, update; what it showed goes to the history."""
        begin, config, model = time.perf_counter(), self.config, self.model
        batch = self.corpus.batch(step, config.batch_size, config.length, config.seed)
        generator = torch.Generator().manual_seed((config.seed << 32) + step)
        shown = draft_step(model, batch, config.anchors, generator)
        require_finite("drafter's loss", shown.loss.total, step)
        self.optimizer.zero_grad()
        shown.loss.total.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.drafter.parameters(), config.clip)
        require_finite("drafter's gradient norm", norm, step)
        rate = learning_rate_at(step, base=config.learning_rate, warmup=config.warmup, steps=config.steps)
        set_learning_rate(self.optimizer, rate)
        self.optimizer.step()
        move_gate_biases(model, shown.load, config.bias_rate, blocks="mtp")
        self.history.add(shown, time.perf_counter() - begin)


def _optimizer(model: Model, config: DraftConfig) -> torch.optim.Optimizer:
    """That of the backbone's training, for what is not frozen; the Markov tables have a rate of their own."""
    optimizer = OPTIMIZERS[config.optimizer](model, config.learning_rate)
    for group in optimizer.param_groups:
        if group["role"] == "table":
            group["lr_factor"] *= config.table_factor
    return optimizer


def _identity(model: Model, corpus: Batches, config: DraftConfig) -> dict[str, Any]:
    """What decides a run: both configs, and hashes of the rows of step 0 and of the backbone."""
    rows = hash_of(corpus.batch(0, config.batch_size, config.length, config.seed))
    backbone = hash_of(tensor for name, tensor in sorted(model.state_dict().items()) if not name.startswith("mtp."))
    return {"train": dataclasses.asdict(config), "model": model.config.to_dict(), "rows": rows, "backbone": backbone}


@dataclass(frozen=True)
class DraftStep:
    """What some blocks showed.

    Shapes: confidence [n,k] logits; load [S,E] how often each draft block chose each of its experts.
    """

    loss: DraftLoss
    confidence: Tensor
    load: Tensor


def draft_step(model: Model, batch: Batch, n_anchors: int, generator: torch.Generator) -> DraftStep:
    """The losses of up to n_anchors blocks, and what they are of; gradients reach the drafter alone."""
    size = model.config.dspark_block_size or 0
    ids = batch.ids.to(model.device)
    documents = None if batch.documents is None else batch.documents.to(model.device)
    rows, tokens = choose_anchors(ids, documents, n_anchors, size, generator)
    slots_nk = tokens.unsqueeze(1) + torch.arange(size, device=ids.device)
    ctx = Sequence(model.config, ids[:, :-1], None if documents is None else documents[:, :-1])
    with torch.no_grad():
        carry = model.decode(model.encode(ids[:, :-1], ctx, features=True), ctx)
        target = model.logits(carry)[rows.unsqueeze(1), slots_nk]
    trace = Trace("mtp.*.ffn.experts")
    past = DraftContext.at(model.config, model.target_rows(carry, ctx), ctx.positions, (rows, tokens), trace)
    hidden, base = model.draft(ids[rows, tokens], past)
    previous, wanted = ids[rows.unsqueeze(1), slots_nk], ids[rows.unsqueeze(1), slots_nk + 1]
    confidence = model.drafter.confidence(hidden, previous)
    loss = draft_loss(base + model.drafter.markov(previous), target, wanted, confidence)
    return DraftStep(loss, confidence, _load(model, past))


def _load(model: Model, ctx: DraftContext) -> Tensor:
    """How often each draft block chose each of its experts. Shapes: -> float32 [S,E]."""
    assert ctx.trace is not None
    n_experts = model.config.dspark_n_routed_experts or 0
    counts = (expert_counts(ctx.trace[f"mtp.{number}.ffn.experts"], n_experts, ctx.alive).sum(0)
              for number in range(model.config.num_nextn_predict_layers))  # fmt: skip
    return torch.stack(list(counts))


@contextmanager
def _frozen_backbone(model: Model) -> Iterator[None]:
    """Parameters outside the drafter ask for no gradient in here."""
    drafting = {id(parameter) for parameter in model.drafter.parameters()}
    backbone = [p for p in model.parameters() if id(p) not in drafting and p.requires_grad]
    for parameter in backbone:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in backbone:
            parameter.requires_grad_(True)
