"""A needle beyond windows and top-K: rows so long that what is chosen and what is pooled are small parts of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tinyds41.config import Config
from tinyds41.train.corpus import Batch
from tinyds41.train.task_rows import check_counts
from tinyds41.train.tasks import Needle, needle_config

TOP_SHARE, POOL_SHARE = 0.05, 0.30  # of the entries that a question sees: what it may choose, what the pool may hold


@dataclass(frozen=True, kw_only=True)
class LongNeedle(Needle):
    """The needle with its facts at least `gap` tokens before the questions, on rows that grow while it is trained.

    A step has rows of `length_at(step)` tokens: `first_length` for `first_steps` steps, then twice as long every
    `double_every` steps, up to what `batch` is asked for. Short rows come in greater number, so that each step has as
    many tokens. A row that is too short for the gap has as much of it as fits.
    """

    gap: int = 64
    first_length: int = 32
    first_steps: int = 260
    double_every: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(self, "gap", "first_length", "first_steps", "double_every")
        if self.first_length < 3 * self.n_facts:
            raise ValueError(f"first_length={self.first_length} is too short for n_facts={self.n_facts}: at least "
                             f"{3 * self.n_facts} are needed")  # fmt: skip

    def length_at(self, step: int, length: int) -> int:
        """Tokens of a row at a step, by the step alone. Raises: ValueError for a length below `first_length`."""
        if length < self.first_length:
            raise ValueError(f"length={length} is below first_length={self.first_length}")
        doublings = max(0, step - self.first_steps + self.double_every) // self.double_every
        return min(length, self.first_length << min(doublings, 32))

    def room(self, body: int) -> int:
        return max(2 * self.n_facts, body - self.gap)

    def batch(self, step: int, batch_size: int, length: int, seed: int = 0) -> Batch:
        """Rows that depend on (seed, step) alone: [batch_size * (length // S), S+1] with S = `length_at(step, length)`.

        Raises: ValueError for a length below `first_length`.
        """
        shorter = self.length_at(step, length)
        return super().batch(step, batch_size * (length // shorter), shorter, seed)


@dataclass(frozen=True)
class Coverage:
    """What of the entries that the first question sees can be chosen and pooled. Units: entries."""

    visible: int
    chosen: int
    pooled: int

    @property
    def shares(self) -> tuple[float, float]:
        return self.chosen / self.visible, self.pooled / self.visible


def coverage(config: Config, task: Needle, length: int) -> Coverage:
    """How small a choice is on rows of `length` tokens; the layers' ratio is 2, as in `needle_config`."""
    visible = (length - task.n_facts + 1) // 2
    return Coverage(visible, min(config.index_topk, visible),
                    min(config.candidate_topk_blocks * config.candidate_block_size, visible))  # fmt: skip


def long_needle_config(task: LongNeedle, length: int, **changes: Any) -> Config:
    """`needle_config` with the largest choice and pool that `TOP_SHARE` and `POOL_SHARE` of rows so long allow.

    Raises: ValueError naming the sizes for rows too short to choose from, and for a gap that the windows or the newest
        K entries reach across.
    """
    visible = (length - task.n_facts + 1) // 2
    plain = needle_config(task, **changes)
    sizes = {"index_topk": int(TOP_SHARE * visible),
             "candidate_topk_blocks": int(POOL_SHARE * visible) // plain.candidate_block_size}  # fmt: skip
    sizes |= changes
    if min(sizes["index_topk"], sizes["candidate_topk_blocks"]) < 1:
        raise ValueError(f"length={length} is too short: {visible} entries give index_topk={sizes['index_topk']} and "
                         f"candidate_topk_blocks={sizes['candidate_topk_blocks']}")  # fmt: skip
    reach = max(plain.num_hidden_layers * (plain.sliding_window - 1), 2 * sizes["index_topk"])
    if task.gap < reach:
        raise ValueError(f"gap={task.gap}: windows or the newest K entries reach back {reach} tokens")
    return plain.replace(**sizes)
