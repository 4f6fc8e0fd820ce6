"""What decides a training run, in one frozen object that survives JSON."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinyds41.train.optim import BIAS_STEP, OPTIMIZERS


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Everything that decides a run, beside the model and the text.

    Units: length in tokens, learning_rate per step at its peak, record_every and snapshot_every in steps (0 = never).
    Raises: ValueError naming the field and its value.
    """

    steps: int = 300
    batch_size: int = 8
    length: int = 256
    accumulate: int = 1  # parts of a batch that run one after the other, for batches that do not fit
    autocast: bool = False  # matrix products in bfloat16; weights, moments and sums stay as they are
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
        if not isinstance(self.autocast, bool):
            raise ValueError(f"autocast={self.autocast!r}: true or false is needed")
        for f in dataclasses.fields(self):
            if f.type in ("str", "bool"):
                continue
            value, whole = getattr(self, f.name), f.type == "int"
            if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
                raise ValueError(f"{f.name}={value!r}: a {'whole ' if whole else ''}number is needed")
        for name in ("steps", "batch_size", "length", "accumulate", "indexer_queries"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: at least 1 is needed")
        if self.batch_size % self.accumulate:
            raise ValueError(f"accumulate={self.accumulate}: parts of batch_size={self.batch_size} rows would differ, "
                             "a divisor is needed")  # fmt: skip
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
