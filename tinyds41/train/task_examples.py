"""The shipped toys of made-up tasks: each is the first part of its lesson's training, run beforehand."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tinyds41.config import Config
from tinyds41.train.fact_task import Facts, facts_config
from tinyds41.train.tasks import Needle, needle_config


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What a toy is, what it is taught first, and how; `training` goes to `train`."""

    config: Config
    taught: Needle
    training: dict[str, Any] = field(default_factory=dict)


def recipe(name: str) -> Recipe:
    """The recipe of an example other than the text. Raises: KeyError for a name without one.

    needle: lesson 05, before its long rows. choosers: lesson 04, likewise, with four layers that choose. facts: lesson
    10, needles alone, before any name; its vocabulary has the letters of names already.
    """
    task = Needle()
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
    }[name]
