"""Made-up tasks whose answers are known, so that a lesson can count what a model finds and what it misses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from tinyds41.config import Config
from tinyds41.model.transformer import Model
from tinyds41.trace import Trace
from tinyds41.train.corpus import Batch
from tinyds41.train.task_rows import KeyedWords, as_batch, blank_rows, check_counts, check_length

TEST_STEP = 2**31  # no training comes so far: rows of this step are new to a run of any seed


@dataclass(frozen=True, kw_only=True)
class Needle(KeyedWords):
    """Facts hidden among fillers, then questions: a key must fetch the value that once stood behind it.

    A fact is a key and a value, side by side at an even position: with ratio 2 they share one entry. The last
    `n_facts` tokens of a row are its questions, every key once more in another order; the target of each is its value,
    and nothing else is a target. A key has another value in every row, so weights cannot know it.

    Shapes: ids are special 0..3, then keys, values and fillers.
    """

    n_keys: int = 16
    n_values: int = 16
    n_facts: int = 8
    n_fillers: int = 16

    def __post_init__(self) -> None:
        check_counts(self, "n_keys", "n_values", "n_facts", "n_fillers")
        if self.n_facts > self.n_keys:
            raise ValueError(f"n_facts={self.n_facts} exceeds n_keys={self.n_keys}: a key is used once per row")

    @property
    def shortest(self) -> int:
        """Tokens of a row without fillers."""
        return 3 * self.n_facts

    def batch(self, step: int, batch_size: int, length: int, seed: int = 0) -> Batch:
        """Rows that depend on (seed, step) alone. Raises: ValueError for a length that cannot hold the facts."""
        check_length(length, self.shortest, f"{self.n_facts} facts of 2 tokens and as many questions")
        generator, ids, wanted = blank_rows(self, step, batch_size, length, seed)
        body = length - self.n_facts
        for row in range(batch_size):
            keys = generator.choice(self.n_keys, self.n_facts, replace=False)
            values = generator.integers(0, self.n_values, self.n_facts)
            places = 2 * generator.choice(self.room(body) // 2, self.n_facts, replace=False)
            ids[row, places], ids[row, places + 1] = self.first_key + keys, self.first_value + values
            asked = generator.permutation(self.n_facts)
            ids[row, body:length] = self.first_key + keys[asked]
            wanted[row, body:] = self.first_value + values[asked]
        return as_batch(ids, wanted)

    def room(self, body: int) -> int:
        """How many of the first tokens facts may take, of the `body` that come before the questions."""
        return body

    def places(self, ids: Tensor) -> Tensor:
        """Where the fact of each question stands: the position of its key. Shapes: [B,S] -> int64 [B,n_facts]."""
        questions_BF = ids[:, -self.n_facts :]
        return (ids.unsqueeze(1) == questions_BF.unsqueeze(-1)).int().argmax(-1)  # of equal ids the first


class Worded(Protocol):
    """A task that knows its words."""

    @property
    def vocab_size(self) -> int: ...


def needle_config(task: Worded, **changes: Any) -> Config:
    """Four layers that learn the task in half a minute: two windows, a Full layer that forms the pool, a Reindex one.

    Rows of 32 tokens are 16 entries, all of which the index may choose; longer rows make it choose.
    """
    sizes = {
        "vocab_size": task.vocab_size, "hidden_size": 64, "num_hidden_layers": 4, "compress_ratios": (0, 0, 2, 2),
        "kv_source_layer_ids": (2,), "index_source_layer_ids": (2, 3), "candidate_source_layer_id": 2,
        "q_lora_rank": 32, "o_lora_rank": 16, "sliding_window": 8, "index_topk": 16, "index_n_heads": 4,
        "candidate_topk_blocks": 8, "candidate_block_size": 4, "moe_intermediate_size": 32,
        "engram_layer_ids": (), "engram_num_embeddings": (), "num_nextn_predict_layers": 0,
        "max_position_embeddings": 4096, "rope_scaling": None,
        # 64 channels with the 0.02 that suits thousands learn nothing for hundreds of steps.
        "initializer_range": 0.06,
    }  # fmt: skip
    return Config.preset("nano", **{**sizes, **changes})


@dataclass(frozen=True)
class Answers:
    """What a model said to each question, and whether its index sources had found the fact.

    Shapes: ids [B,S]; places and said int64 [B,n_facts], where the facts stand and what was answered; right, each of
        chosen (by index source) and pooled bool [B,n_facts]: answered right, fact among the chosen entries, its block
        in the candidate pool.
    """

    ids: Tensor
    places: Tensor
    said: Tensor
    right: Tensor
    chosen: dict[int, Tensor]
    pooled: Tensor | None  # None for a model without a pool

    @property
    def accuracy(self) -> float:
        """Share of questions answered right."""
        return share(self.right)


def share(mask: Tensor) -> float:
    """Part of a mask that is True; 0 of nothing."""
    return mask.float().mean().item() if mask.numel() else 0.0


@torch.no_grad()
def answers(
    model: Model, task: Needle, *, length: int, n_rows: int = 32, seed: int = 1, step: int = 0
) -> Answers:  # fmt: skip
    """Asks a model rows of a seed that it was not trained with; the likeliest token is its answer.

    At `TEST_STEP` rows are new to runs of every seed, and those of a task that grows are as long as asked for.

    Rows go one by one, so that a long one needs no more memory than itself. Whether a fact was chosen is judged by the
    entry of its key, which with ratio 2 holds the value too.
    """
    if n_rows < 1:
        raise ValueError(f"n_rows={n_rows}: at least one row is needed")
    batch = task.batch(step, n_rows, length, seed)
    assert batch.wanted is not None
    ids = batch.ids[:, :-1]
    parts = [_ask(model, task, row[None]) for row in ids]
    said, chosen, pooled = zip(*parts, strict=True)
    said = torch.cat(said)
    return Answers(
        ids, task.places(ids), said, said == batch.wanted[:, -task.n_facts :],
        {layer: torch.cat([part[layer] for part in chosen]) for layer in chosen[0]},
        None if pooled[0] is None else torch.cat(pooled),
    )  # fmt: skip


def _ask(model: Model, task: Needle, ids: Tensor) -> tuple[Tensor, dict[int, Tensor], Tensor | None]:
    """One row: the answers, whose choice holds the fact, and whether the pool does. Shapes: [1,S] -> [1,n_facts]."""
    sources = [layer for layer in model.plan if layer.selects]
    names = [f"layers.{layer.layer}.indexer.selection" for layer in sources]
    names += [f"layers.{layer.layer}.indexer.pool" for layer in sources if layer.forms_pool]
    trace = Trace("logits", *names, queries=list(range(ids.shape[1] - task.n_facts, ids.shape[1])))
    model(ids.to(model.device), trace=trace)
    said = trace["logits"].argmax(-1).cpu()
    place_BF1, pooled = task.places(ids).unsqueeze(-1), None
    chosen = {layer.layer: (trace[f"layers.{layer.layer}.indexer.selection"].cpu() == place_BF1 // layer.ratio).any(-1)
              for layer in sources}  # fmt: skip
    for layer in (layer for layer in sources if layer.forms_pool):
        block_BF1 = place_BF1 // layer.ratio // model.config.candidate_block_size
        pooled = (trace[f"layers.{layer.layer}.indexer.pool"].cpu() == block_BF1).any(-1)
    return said, chosen, pooled
