"""How many of a task's answers a model has right, on rows that no training run draws."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tinyds41.model.transformer import Model
from tinyds41.train.corpus import Batch
from tinyds41.train.losses import IGNORED
from tinyds41.train.tasks import TEST_STEP


class Task(Protocol):
    """What makes rows whose answers are known."""

    @property
    def vocab_size(self) -> int: ...
    def batch(self, step: int, batch_size: int, length: int, seed: int = 0) -> Batch: ...


@dataclass(frozen=True)
class Score:
    """What a model said to rows of a task. Shapes: int64 [B,S]; wanted is IGNORED where nothing is asked."""

    ids: Tensor
    wanted: Tensor
    said: Tensor

    @property
    def asked(self) -> Tensor:
        """Where something is wanted. Shapes: bool [B,S]."""
        return self.wanted != IGNORED

    @property
    def accuracy(self) -> float:
        """Share of right answers."""
        return (self.said == self.wanted)[self.asked].float().mean().item()

    def by(self, kind: Tensor) -> dict[int, float]:
        """The share of right answers for each kind of question. Shapes: kind int64 [B,S]."""
        asked, right = kind[self.asked], (self.said == self.wanted)[self.asked].float()
        return {k: right[asked == k].mean().item() for k in asked.unique().tolist()}


@torch.no_grad()
def score(model: Model, task: Task, *, length: int, n_rows: int = 64, seed: int = 0, batch_size: int = 16) -> Score:
    """Asks a model; the likeliest token is its answer.

    The rows are those of a step that training never reaches, so a run of any seed is asked new ones.
    Raises: ValueError for less than one row, and as the task's `batch`.
    """
    if n_rows < 1:
        raise ValueError(f"n_rows={n_rows}: at least one row is needed")
    ids, _, wanted = task.batch(TEST_STEP, n_rows, length, seed)
    assert wanted is not None
    ids = ids[:, :-1]
    said = [model(part.to(model.device)).argmax(-1).cpu() for part in ids.split(batch_size)]
    return Score(ids, wanted, torch.cat(said))
