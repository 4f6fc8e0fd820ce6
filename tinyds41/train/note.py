"""A task of one thing to remember: how far windows carry it, distance by distance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tinyds41.config import Config
from tinyds41.model.transformer import Model
from tinyds41.train.corpus import Batch
from tinyds41.train.losses import IGNORED
from tinyds41.train.task_rows import N_SPECIAL, as_batch, blank_rows, check_counts
from tinyds41.train.tasks import needle_config


@dataclass(frozen=True, kw_only=True)
class Note:
    """One note among fillers; from its own token on, every token must say it.

    So each row asks at every distance at once. The note stands in the first half of its row, at any position; tokens
    before it have no target.

    Shapes: ids are special 0..3, then notes and fillers.
    """

    n_notes: int = 16
    n_fillers: int = 16

    def __post_init__(self) -> None:
        check_counts(self, "n_notes", "n_fillers")

    @property
    def first_note(self) -> int:
        return N_SPECIAL

    @property
    def first_filler(self) -> int:
        return self.first_note + self.n_notes

    @property
    def vocab_size(self) -> int:
        return self.first_filler + self.n_fillers

    def batch(self, step: int, batch_size: int, length: int, seed: int = 0) -> Batch:
        """Rows that depend on (seed, step) alone. Raises: ValueError for a length without a first half."""
        if length < 2:
            raise ValueError(f"length={length} is too short: the note needs a first half to stand in")
        generator, ids, _ = blank_rows(self, step, batch_size, length, seed)
        places = generator.integers(0, length // 2, batch_size)
        notes = self.first_note + generator.integers(0, self.n_notes, batch_size)
        ids[np.arange(batch_size), places] = notes
        behind = np.arange(length) >= places[:, None]
        return as_batch(ids, np.where(behind, notes[:, None], IGNORED))


def note_config(task: Note, *, layers: int = 4, **changes: Any) -> Config:
    """Layers with a window of four tokens and nothing else; otherwise as `needle_config`."""
    alone = {
        "num_hidden_layers": layers, "compress_ratios": (0,) * layers, "kv_source_layer_ids": (),
        "index_source_layer_ids": (), "candidate_source_layer_id": None, "sliding_window": 4,
    }  # fmt: skip
    return needle_config(task, **{**alone, **changes})


@torch.no_grad()
def known_by_distance(
    model: Model, task: Note, *, length: int = 96, n_rows: int = 50, seed: int = 1
) -> dict[int, float]:  # fmt: skip
    """Share of rows whose likeliest token is the note, by distance behind it, on rows not trained on.

    All rows count at every distance: those from 0 to half the length.
    """
    batch = task.batch(0, n_rows, length, seed)
    assert batch.wanted is not None
    right_BS = model(batch.ids[:, :-1].to(model.device)).argmax(-1).cpu() == batch.wanted
    place_B = (batch.wanted != IGNORED).int().argmax(-1)
    rows = torch.arange(n_rows)
    return {distance: right_BS[rows, place_B + distance].float().mean().item() for distance in range(length // 2 + 1)}
