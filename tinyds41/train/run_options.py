"""What `tinyds41 train` and `eval` read: a text or a task, and the model that suits it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

from tinyds41.config import Config
from tinyds41.model.transformer import Model
from tinyds41.tokenizer import Tokenizer
from tinyds41.train.corpus import Corpus, documents
from tinyds41.train.evaluate import bits_per_character, evaluate
from tinyds41.train.fact_task import facts_config
from tinyds41.train.kneser_ney import Trigram
from tinyds41.train.long_needle_task import long_needle_config
from tinyds41.train.note import note_config
from tinyds41.train.task_names import task
from tinyds41.train.task_score import Task, score
from tinyds41.train.tasks import needle_config
from tinyds41.train.trainer import Batches

HELD_OUT_TOKENS, ASKED_ROWS = 20_000, 64


class Subject(Protocol):
    """What a model learns and is asked."""

    @property
    def taught(self) -> Batches: ...
    def config(self, preset: str | None, path: str | None) -> Config: ...
    def ask(self, model: Model) -> dict[str, Any]: ...


class TextSubject:
    """Shipped texts or UTF-8 files: the model predicts their held-out parts, about `tokens` of them or all (0).

    Raises: as `documents`, and ValueError where a part is too short for one sequence, or for less than no tokens.
    """

    def __init__(self, tokenizer: Tokenizer, names: list[str], length: int, tokens: int = HELD_OUT_TOKENS):
        if tokens < 0:
            raise ValueError(f"tokens={tokens}: a number of held-out tokens is needed, or 0 for all")
        self.tokenizer, self.names, self.length, self.tokens = tokenizer, names, length, tokens
        self.taught = self._corpus("train")
        self.held_out = self._corpus("held_out")

    def _corpus(self, split: str) -> Corpus:
        corpus = Corpus.from_texts(self.tokenizer, [text for name in self.names for text in documents(name, split)])
        corpus.require(self.length)
        return corpus

    def config(self, preset: str | None, path: str | None) -> Config:
        """Of a file, or a preset with the vocabulary of the tokenizer ("toy" by default)."""
        if path is not None:
            return Config.from_json(path)
        return Config.preset(preset or "toy", vocab_size=self.tokenizer.vocab_size,
                             engram_compressed_vocab_size=self.tokenizer.compressed_vocab_size)  # fmt: skip

    def ask(self, model: Model) -> dict[str, Any]:
        """Loss and bits on held-out text, beside counting single tokens and three in the training part."""
        trigram = Trigram(self.taught, model.config.vocab_size)
        found = evaluate(model, self.held_out, train=self.taught, trigram=trigram, length=self.length,
                         max_tokens=self.tokens or None)  # fmt: skip
        assert found.unigram_loss is not None and found.trigram_loss is not None
        losses = {"held_out_loss": found.loss, "unigram_loss": found.unigram_loss, "trigram_loss": found.trigram_loss}
        bits = {"bits_per_character": found.loss, "trigram_bits_per_character": found.trigram_loss}
        bits = {name: bits_per_character(loss, self.held_out) or math.nan for name, loss in bits.items()}
        return {"text": self.names, "held_out_tokens": found.n_tokens,
                **{name: round(value, 4) for name, value in {**losses, **bits}.items()}}  # fmt: skip


class TaskSubject:
    """A task by its name, on rows of `length` tokens; `rows` of them are asked.

    Raises: ValueError for an unknown name, or less than one row.
    """

    def __init__(self, name: str, length: int, rows: int = ASKED_ROWS):
        if rows < 1:
            raise ValueError(f"rows={rows}: at least one must be asked")
        self.name, self.length, self.rows = name, length, rows
        self.taught: Any = task(name)

    def config(self, preset: str | None, path: str | None) -> Config:
        """Of a file, or the small one made for the task.

        Raises: ValueError for a preset, another vocabulary, or a length that the task or the config does not take.
        """
        if preset is not None:
            raise ValueError(f"--preset {preset} is for texts: the task {self.name} has a small config of its own")
        config = CONFIGS.get(self.name, _plain)(self.taught, self.length) if path is None else Config.from_json(path)
        return self._fits(config)

    def ask(self, model: Model) -> dict[str, Any]:
        """The share of right answers, on rows that training never draws."""
        self._fits(model.config)
        found = score(model, self.taught, length=self.length, n_rows=self.rows)
        return {"task": self.name, "length": self.length, "answers": int(found.asked.sum()),
                "right": round(found.accuracy, 4)}  # fmt: skip

    def _fits(self, config: Config) -> Config:
        if config.vocab_size != self.taught.vocab_size:
            raise ValueError(f"the task {self.name} has {self.taught.vocab_size} tokens, the config "
                             f"vocab_size={config.vocab_size}")  # fmt: skip
        if self.length > config.max_position_embeddings:  # before a row so long is drawn
            raise ValueError(f"length={self.length} exceeds max_position_embeddings={config.max_position_embeddings}")
        self.taught.batch(0, 1, self.length)  # refuses one too short before anything is built
        return config


def _plain(taught: Task, length: int) -> Config:
    return needle_config(taught)


CONFIGS: dict[str, Callable[[Any, int], Config]] = {
    "long-needle": long_needle_config, "facts": lambda taught, length: facts_config(taught, rows=256),
    "note": lambda taught, length: note_config(taught),
}  # fmt: skip
