"""What all tasks have in common: a name, rows that depend on seed and step alone, test rows that no run is shown."""

from __future__ import annotations

import dataclasses
import inspect
import sys

import pytest
import torch

import tinyds41
from tinyds41.train import task
from tinyds41.train.losses import IGNORED
from tinyds41.train.task_names import TASKS
from tinyds41.train.tasks import TEST_STEP

LENGTH = 64
NAMES = pytest.mark.parametrize("name", TASKS)


def rows(batch) -> set[tuple[int, ...]]:
    return set(map(tuple, batch.ids.tolist()))


@NAMES
def test_a_task_is_made_by_its_name(name):
    made = task(name)
    assert type(made) is TASKS[name] and made == TASKS[name]()
    assert dataclasses.is_dataclass(made) and made.__dataclass_params__.frozen
    first = dataclasses.fields(made)[0].name
    assert getattr(tinyds41.train.task(name, **{first: 20}), first) == 20


def test_unknown_names_and_fields_are_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="no task 'needel': the tasks are needle, long-needle, recall, copy, arithm"):
        task("needel")
    with pytest.raises(ValueError, match="'copy' has no field 'n_keys': it has n_letters, n_copied, n_fillers"):
        task("copy", n_keys=3)
    with pytest.raises(ValueError, match="n_copied=0"):
        task("copy", n_copied=0)


def test_every_class_that_makes_batches_has_a_name():
    """Of the modules that define tasks, each dataclass with `batch` and `vocab_size` is in the list."""
    modules = [sys.modules[one.__module__] for one in TASKS.values()]
    classes = {cls for module in modules for _, cls in inspect.getmembers(module, dataclasses.is_dataclass)}
    assert {cls for cls in classes if hasattr(cls, "batch") and hasattr(cls, "vocab_size")} == set(TASKS.values())


@NAMES
def test_rows_depend_on_seed_and_step_alone(name):
    drawn = ((4, 2), (4, 2), (5, 2), (4, 3))
    one, again, later, other = (task(name).batch(step, 8, LENGTH, seed) for step, seed in drawn)
    assert torch.equal(one.ids, again.ids) and torch.equal(one.wanted, again.wanted)
    assert not torch.equal(one.ids, later.ids) and not torch.equal(one.ids, other.ids)
    # (seed, step) and (step, seed) are different draws: a sum of the two would tie them.
    assert not torch.equal(task(name).batch(2, 4, LENGTH, seed=4).ids, task(name).batch(4, 4, LENGTH, seed=2).ids)


@NAMES
def test_ids_and_answers_are_words_of_the_task(name):
    made = task(name)
    ids, documents, wanted = made.batch(TEST_STEP, 20, LENGTH)
    assert ids.dtype == wanted.dtype == torch.int64 and documents is None
    assert ids.shape == (20, LENGTH + 1) and wanted.shape == (20, LENGTH)
    assert ids.min() >= 4 and ids.max() < made.vocab_size and ids.max() > made.vocab_size - 8
    asked = wanted[wanted != IGNORED]
    assert len(asked) >= 20 and asked.min() >= 4 and asked.max() < made.vocab_size
    assert (wanted != IGNORED).any(-1).all()


@NAMES
def test_no_run_is_shown_a_test_row(name):
    """Of three seeds, 40 steps each: not one row is that of a test of any of these seeds, nor do two runs share one."""
    made = task(name)
    if name == "long-needle":  # rows as long as those of the test, at once
        made = dataclasses.replace(made, first_length=LENGTH)
    seeds = (0, 1, 2)
    trained = [{row for step in range(40) for row in rows(made.batch(step, 8, LENGTH, seed))} for seed in seeds]
    tested = [rows(made.batch(TEST_STEP, 64, LENGTH, seed)) for seed in seeds]
    assert all(len(run) == 320 for run in trained) and all(len(test) == 64 for test in tested)
    assert len(set().union(*trained, *tested)) == 3 * (320 + 64)
