"""The shipped toys of made-up tasks: the first part of a lesson's training, or one of its toys, made beforehand."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tinyds41.config import Config
from tinyds41.model.transformer import Model
from tinyds41.train.dialogue_task import Dialogue
from tinyds41.train.fact_task import Facts, facts_config
from tinyds41.train.note import Note, known_by_distance, note_config
from tinyds41.train.replay_distance import resumed_answers
from tinyds41.train.tasks import Needle, answers, needle_config


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What a toy is, what it is taught first, and how; `training` goes to `train`.

    reach: the distances behind a note that the toy can answer, for the toys of notes.
    """

    config: Config
    taught: Needle | Note | Dialogue
    training: dict[str, Any] = field(default_factory=dict)
    reach: range | None = None

    def right(self, model: Model, n_rows: int) -> dict[str, Any]:
        """Which part of the questions of other rows a model answers right, and how many there were."""
        if isinstance(self.taught, Needle):
            found = answers(model, self.taught, length=self.training["length"], n_rows=n_rows)
            return {"rows": n_rows, "questions": found.right.numel(), "share": round(found.accuracy, 4)}
        if isinstance(self.taught, Dialogue):
            found = resumed_answers(model, self.taught, length=self.training["length"], n_rows=n_rows)
            by_hit = {name: {key: float(f"{value:.3g}") for key, value in one.items()} for name, one in found.items()}
            return {"rows": n_rows, "questions": n_rows * (self.taught.n_turns - 1), "share": by_hit["all"]["right"],
                    "by_hit": by_hit}  # fmt: skip
        assert self.reach is not None
        known = known_by_distance(model, self.taught, n_rows=n_rows)
        part = sum(known[distance] for distance in self.reach) / len(self.reach)
        return {"rows": n_rows, "questions": n_rows * len(self.reach), "share": round(part, 4)}


def recipe(name: str) -> Recipe:
    """The recipe of an example other than the text. Raises: KeyError for a name without one.

    needle: lesson 05, before its long rows. choosers: lesson 04, likewise, with four layers that choose. facts: lesson
    10, needles alone, before any name; its vocabulary has the letters of names already. relay: the toy of lesson 02
    that has windows of four tokens and nothing else. entries: that with entries beside them. replay: dialogues, read
    in a quarter of the steps as if their beginning came from a store.
    """
    task, note, dialogue = Needle(), Note(), Dialogue()
    rows = {"batch_size": 32, "length": 32, "learning_rate": 3e-3}
    every_one_chooses = {
        "num_hidden_layers": 6, "compress_ratios": (0, 0, 2, 2, 2, 2), "kv_source_layer_ids": (2,),
        "index_source_layer_ids": (2, 3, 4, 5), "candidate_source_layer_id": None, "candidate_topk_blocks": 0,
    }  # fmt: skip
    without_table = facts_config(Facts(n_names=512, n_mentions=6, n_facts=2), rows=256, engram_layer_ids=())
    return {
        "needle": Recipe(config=needle_config(task), taught=task, training=rows),
        "choosers": Recipe(config=needle_config(task, **every_one_chooses), taught=task, training=rows),
        "facts": Recipe(config=without_table, taught=task, training={**rows, "length": 24, "learning_rate": 4e-3}),
        "replay": Recipe(config=needle_config(dialogue), taught=dialogue,
                         training={**rows, "length": 48, "replay_share": 0.25}),
        "relay": Recipe(config=note_config(note), taught=note, training=rows, reach=range(1, 13)),
        "entries": Recipe(config=needle_config(note, sliding_window=4), taught=note, training=rows, reach=range(1, 49)),
    }[name]
