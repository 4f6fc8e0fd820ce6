"""What decides a training run, in one frozen object that survives JSON."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinyds41.train.optim import BIAS_STEP, OPTIMIZERS
from tinyds41.whole_file import write_whole

# What numbers of a TrainConfig may be; all others are finite and at least 0.
COUNTS = ("steps", "batch_size", "length", "accumulate", "indexer_queries")  # at least 1
SHARES = ("indexer_dense", "replay_share")  # 0 to 1
POSITIVE = ("learning_rate", "clip")
LARGEST = 2**63 - 1  # what generators of random numbers take, and floats can be made of


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
        if self.optimizer not in tuple(OPTIMIZERS):  # of a dict it would also have to have a hash
            raise ValueError(f"optimizer={self.optimizer!r}: one of {', '.join(OPTIMIZERS)} is needed")
        if not isinstance(self.autocast, bool):
            raise ValueError(f"autocast={self.autocast!r}: true or false is needed")
        for f in dataclasses.fields(self):
            if f.type in ("int", "float"):
                self._check_number(f.name, whole=f.type == "int")
        if self.batch_size % self.accumulate:
            raise ValueError(f"accumulate={self.accumulate}: parts of batch_size={self.batch_size} rows would differ, "
                             "a divisor is needed")  # fmt: skip

    def _check_number(self, name: str, *, whole: bool) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
            raise ValueError(f"{name}={value!r}: a {'whole ' if whole else ''}number is needed")
        if isinstance(value, int) and value > LARGEST:
            raise ValueError(f"{name}={value}: at most {LARGEST} is needed")
        if name in COUNTS and value < 1:
            raise ValueError(f"{name}={value}: at least 1 is needed")
        if name in SHARES and not 0 <= value <= 1:
            raise ValueError(f"{name}={value}: a share of the steps is needed, 0 to 1")
        if name in POSITIVE and not 0 < value < math.inf:
            raise ValueError(f"{name}={value}: a positive finite number is needed")
        if not 0 <= value < math.inf:
            raise ValueError(f"{name}={value}: a finite number of at least 0 is needed")

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> TrainConfig:
        """Raises: ValueError for what is no object, an unknown field, or as the class."""
        if not isinstance(content, dict):
            raise ValueError(f"a TrainConfig is a JSON object, got {type(content).__name__}")
        unknown = sorted(set(content) - {f.name for f in dataclasses.fields(cls)})
        if unknown:
            raise ValueError(f"unknown field {unknown[0]!r} in a TrainConfig")
        return cls(**content)

    def to_json(self, path: str | Path) -> None:
        """Raises: OSError where the file cannot be written; one that was there stays."""
        write_whole(Path(path), json.dumps(self.to_dict(), indent=1) + "\n")

    @classmethod
    def from_json(cls, path: str | Path) -> TrainConfig:
        """Raises: OSError when unreadable; ValueError naming the file."""
        try:
            return cls.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))
        except (ValueError, RecursionError) as error:  # the second: brackets without end
            raise ValueError(f"{path}: {error}") from error
