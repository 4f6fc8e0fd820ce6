"""A task of two kinds of knowledge: names whose value never changes, and keys whose value only the row tells."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tinyds41.config import Config
from tinyds41.model.engram import table_primes
from tinyds41.model.transformer import Model
from tinyds41.train.corpus import Batch
from tinyds41.train.losses import IGNORED
from tinyds41.train.task_rows import as_batch, blank_rows, check_counts, check_length
from tinyds41.train.tasks import Needle, needle_config

NAME, SLOT = 3, 4  # tokens of a name, and of the slot in a row that holds one thing


@dataclass(frozen=True, kw_only=True)
class Facts(Needle):
    """Names of three letters whose value is the same in every row, among the facts and questions of a needle.

    A row is slots of four tokens, then `n_facts` questions. A slot holds a name and a filler, or a key with its value
    and two fillers, or fillers alone. At the last letter of a name its value is wanted, which nothing in the row tells:
    it has to be known. At a question the value is wanted that this row gave to the key, which no weights can know.

    n_facts: may be 0, for rows of names alone. n_names: the same book of names for every row, step and seed.
    Shapes: ids are those of the needle, then letters.
    """

    n_facts: int = 2
    n_names: int = 512
    n_letters: int = 10
    n_mentions: int = 6

    def __post_init__(self) -> None:
        check_counts(self, "n_names", "n_letters", "n_mentions")
        if self.n_names > self.n_letters**NAME:
            raise ValueError(
                f"n_names={self.n_names} exceeds the {self.n_letters**NAME} names of {NAME} letters that "
                f"n_letters={self.n_letters} make"
            )
        if self.n_facts == 0 and not isinstance(self.n_facts, bool):
            return
        super().__post_init__()

    @property
    def first_letter(self) -> int:
        return self.first_filler + self.n_fillers

    @property
    def vocab_size(self) -> int:
        return self.first_letter + self.n_letters

    @property
    def shortest(self) -> int:
        """Tokens of a row without a free slot."""
        return SLOT * (self.n_facts + self.n_mentions) + self.n_facts

    @cached_property
    def book(self) -> tuple[Tensor, Tensor]:
        """All names and what they stand for, as token ids. Shapes: int64 [n_names,3] and [n_names]."""
        generator = np.random.default_rng([self.n_names, self.n_letters, self.n_values])
        numbers = generator.choice(self.n_letters**NAME, self.n_names, replace=False)
        letters = np.stack(np.unravel_index(numbers, (self.n_letters,) * NAME), -1)
        values = generator.integers(0, self.n_values, self.n_names)
        return torch.from_numpy(self.first_letter + letters), torch.from_numpy(self.first_value + values)

    def batch(self, step: int, batch_size: int, length: int, seed: int = 0) -> Batch:
        """Rows that depend on (seed, step) alone. Raises: ValueError for a length that cannot hold everything."""
        check_length(length, self.shortest, f"{self.n_mentions} names and {self.n_facts} facts in slots of {SLOT} "
                                            f"tokens, and {self.n_facts} questions")  # fmt: skip
        generator, ids, wanted = blank_rows(self, step, batch_size, length, seed)
        names, values = (tensor.numpy() for tensor in self.book)
        body = length - self.n_facts
        for row in range(batch_size):
            places = SLOT * generator.choice(body // SLOT, self.n_mentions + self.n_facts, replace=False)
            named, told = places[: self.n_mentions], places[self.n_mentions :]
            who = generator.integers(0, self.n_names, self.n_mentions)
            ids[row, named[:, None] + np.arange(NAME)] = names[who]
            wanted[row, named + NAME - 1] = values[who]
            keys = self.first_key + generator.choice(self.n_keys, self.n_facts, replace=False)
            said = self.first_value + generator.integers(0, self.n_values, self.n_facts)
            ids[row, told], ids[row, told + 1] = keys, said
            asked = generator.permutation(self.n_facts)
            ids[row, body:length], wanted[row, body:] = keys[asked], said[asked]
        return as_batch(ids, wanted)


def facts_config(task: Facts, *, rows: int, **changes: Any) -> Config:
    """Three layers for the task, two with windows and a Full one, and a table of n-grams before layer 1.

    rows: `engram_vocab_size`: each column of the table has the next free prime from there on as its number of rows.
    """
    sizes = {
        "num_hidden_layers": 3, "compress_ratios": (0, 0, 2), "kv_source_layer_ids": (2,),
        "index_source_layer_ids": (2,), "candidate_source_layer_id": None, "engram_layer_ids": (1,),
        "engram_vocab_size": rows, "engram_max_ngram_size": 4, "engram_n_heads": 2, "engram_head_dim": 32,
        "engram_compressed_vocab_size": task.vocab_size,
    }  # fmt: skip
    sizes |= changes
    n_tables = len(sizes["engram_layer_ids"])
    config = needle_config(task, **sizes, engram_num_embeddings=(1,) * n_tables)
    return config.replace(engram_num_embeddings=tuple(map(sum, table_primes(config))) if n_tables else ())


@dataclass(frozen=True)
class Recall:
    """What a model said at names and at questions.

    Shapes: who int64 [n], the name at each mention by its place in the book; names bool [n] and needles bool
        [B,n_facts], whether the likeliest token was right.
    """

    who: Tensor
    names: Tensor
    needles: Tensor


@torch.no_grad()
def recall(model: Model, task: Facts, *, length: int | None = None, n_rows: int = 200, seed: int = 1) -> Recall:
    """Asks a model rows that it was not trained on: the names are those it met, the values of keys are new."""
    ids, _, wanted = task.batch(0, n_rows, length or task.shortest, seed)
    assert wanted is not None
    ids = ids[:, :-1]
    right = model(ids.to(model.device)).argmax(-1).cpu() == wanted
    body = ids.shape[1] - task.n_facts
    row, last = (wanted[:, :body] != IGNORED).nonzero(as_tuple=True)
    letters_n3 = torch.stack([ids[row, last - back] for back in (2, 1, 0)], -1)
    who = (letters_n3.unsqueeze(1) == task.book[0]).all(-1).int().argmax(-1)
    return Recall(who, right[row, last], right[:, body:])


@dataclass
class Quiz:
    """A task that asks the model before every `every`-th step of its training; what came out is in `found`, by step."""

    task: Facts
    model: Model
    every: int = 20
    n_rows: int = 50
    found: dict[int, Recall] = field(default_factory=dict)

    def batch(self, step: int, batch_size: int, length: int, seed: int = 0) -> Batch:
        """The task's batch. The rows asked are as long."""
        if step % self.every == 0:
            self.found[step] = recall(self.model, self.task, length=length, n_rows=self.n_rows)
        return self.task.batch(step, batch_size, length, seed)
