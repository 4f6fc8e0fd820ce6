"""Training a drafter behind a frozen backbone."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from tqdm.auto import tqdm

from tinyds41.model.context import Sequence
from tinyds41.model.draft_context import DraftContext
from tinyds41.model.transformer import Model
from tinyds41.train.corpus import Batch
from tinyds41.train.draft_loss import DraftLoss, choose_anchors, draft_loss
from tinyds41.train.optim import learning_rate_at
from tinyds41.train.trainer import Batches


@dataclass(frozen=True, kw_only=True)
class DraftConfig:
    """What decides a drafter's training. Units: steps, rows, tokens per row, blocks per step; ours, see docs/LOG.md.

    Raises: ValueError naming a number that is out of range.
    """

    steps: int = 300
    batch_size: int = 4
    length: int = 256
    anchors: int = 64
    learning_rate: float = 2e-3
    warmup: int = 20
    clip: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "length", "anchors"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: at least 1 is needed")
        for name in ("learning_rate", "clip"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name}={getattr(self, name)}: a positive finite number is needed")
        if self.warmup < 0:
            raise ValueError(f"warmup={self.warmup} is negative")


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

    def add(self, loss: DraftLoss, confidence: Tensor, seconds: float) -> None:
        """One step. Shapes: confidence [n,k] logits."""
        for values, value in ((self.losses, loss.total), (self.ce, loss.ce), (self.tv, loss.tv),
                              (self.confidence, loss.confidence)):  # fmt: skip
            values.append(value.item())
        self.confidence_errors.append((confidence.sigmoid() - loss.acceptance).abs().mean().item())
        self.acceptance.append(loss.acceptance.mean(0).tolist())
        self.accepted_lengths.append(loss.accepted_length)
        self.seconds.append(seconds)


def train_draft(
    model: Model, corpus: Batches, config: DraftConfig | None = None, *, progress: bool = True, **changes
) -> DraftHistory:
    """Trains `model.mtp` in place; the backbone, with embedding and head, stays as it is in every bit.

    Blocks begin at random tokens, inside documents; what stands behind them is taught by the text and by the
    backbone's own chances. The same model, corpus and config give the same bits.

    Raises: ValueError for a model without a drafter, a number out of range, texts too short for a block;
        FloatingPointError naming the step whose loss is not finite.
    Source: spec 10.4. AdamW with a cosine is ours.
    """
    config, drafter = dataclasses.replace(config or DraftConfig(), **changes), model.drafter
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    history = DraftHistory()
    with _frozen_backbone(model), tqdm(total=config.steps, disable=not progress, unit="step", mininterval=1.0) as bar:
        for step in range(config.steps):
            begin = time.perf_counter()
            batch = corpus.batch(step, config.batch_size, config.length, config.seed)
            generator = torch.Generator().manual_seed((config.seed << 32) + step)
            loss, confidence = draft_step(model, batch, config.anchors, generator)
            if not bool(loss.total.isfinite()):
                raise FloatingPointError(f"step {step}: the drafter's loss is {loss.total.item()}")
            optimizer.zero_grad()
            loss.total.backward()
            torch.nn.utils.clip_grad_norm_(drafter.parameters(), config.clip)
            rate = learning_rate_at(step, base=config.learning_rate, warmup=config.warmup, steps=config.steps)
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            history.add(loss, confidence.detach(), time.perf_counter() - begin)
            bar.update()
            bar.set_postfix(loss=f"{history.losses[-1]:.3f}", length=f"{history.accepted_lengths[-1]:.2f}",
                            refresh=False)  # fmt: skip
        optimizer.zero_grad()
    return history


def draft_step(model: Model, batch: Batch, n_anchors: int, generator: torch.Generator) -> tuple[DraftLoss, Tensor]:
    """The losses of up to n_anchors blocks, and their confidence logits [n,k]; gradients reach the drafter alone."""
    size = model.config.dspark_block_size or 0
    ids = batch.ids.to(model.device)
    documents = None if batch.documents is None else batch.documents.to(model.device)
    rows, tokens = choose_anchors(ids, documents, n_anchors, size, generator)
    slots_nk = tokens.unsqueeze(1) + torch.arange(size, device=ids.device)
    ctx = Sequence(model.config, ids[:, :-1], None if documents is None else documents[:, :-1])
    with torch.no_grad():
        carry = model.decode(model.encode(ids[:, :-1], ctx, features=True), ctx)
        target = model.logits(carry)[rows.unsqueeze(1), slots_nk]
    past = DraftContext.at(model.config, model.target_rows(carry, ctx), ctx.positions, (rows, tokens))
    hidden, base = model.draft(ids[rows, tokens], past)
    previous, wanted = ids[rows.unsqueeze(1), slots_nk], ids[rows.unsqueeze(1), slots_nk + 1]
    confidence = model.drafter.confidence(hidden, previous)
    return draft_loss(base + model.drafter.markov(previous), target, wanted, confidence), confidence


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
