"""The tasks by their names, for whoever has a name only: a command line, a table of ablations."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from tinyds41.train.arithmetic_task import Arithmetic
from tinyds41.train.copy_task import Copying
from tinyds41.train.dialogue_task import Dialogue
from tinyds41.train.fact_task import Facts
from tinyds41.train.long_needle_task import LongNeedle
from tinyds41.train.note import Note
from tinyds41.train.recall_task import AssociativeRecall
from tinyds41.train.task_score import Task
from tinyds41.train.tasks import Needle

TASKS = {
    "needle": Needle, "long-needle": LongNeedle, "recall": AssociativeRecall, "copy": Copying, "arithmetic": Arithmetic,
    "dialogue": Dialogue, "facts": Facts, "note": Note,
}  # fmt: skip


def task(name: str, **sizes: Any) -> Task:
    """A task with other sizes than its own where given: `task("copy", n_copied=4)`.

    Raises: ValueError naming the tasks there are, or the fields that this one has; as the task for a size.
    """
    if name not in TASKS:
        raise ValueError(f"no task {name!r}: the tasks are {', '.join(TASKS)}")
    known = [f.name for f in fields(TASKS[name])]
    unknown = sorted(set(sizes) - set(known))
    if unknown:
        raise ValueError(f"the task {name!r} has no field {unknown[0]!r}: it has {', '.join(known)}")
    return TASKS[name](**sizes)
