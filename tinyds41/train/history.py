"""What a training run showed, step by step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class History:
    """What a run showed, step by step; `records` holds what is kept every `record_every` steps.

    Units: losses in nats per token, indexer_losses in nats, seconds per step. A record has step, load (share of the
        choices [L][E], even = 1/E) and recall ({source: {selection, pool}}, see `indexer_loss.Recall`).
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

    def of(self, step: int) -> dict[str, Any]:
        """What one step showed, as a line of the log has it."""
        shown = {"loss": self.losses[step], "indexer_loss": self.indexer_losses[step],
                 "balance_loss": self.balance_losses[step], "learning_rate": self.learning_rates[step],
                 "seconds": self.seconds[step]}  # fmt: skip
        record = self.records[-1] if self.records and self.records[-1]["step"] == step else {}
        return shown | {name: record[name] for name in ("load", "recall") if record}

    @property
    def tokens_per_second(self) -> float:
        """Mean over the steps so far, without the first: it also pays for what happens once."""
        later = self.seconds[1:] or self.seconds
        return self.tokens_per_step * len(later) / sum(later) if later else 0.0
