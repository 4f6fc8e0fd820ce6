"""The task of names and needles: what is fixed, what changes from row to row, and who is asked what."""

from __future__ import annotations

import pytest
import torch

from tinyds41.model.engram import table_primes
from tinyds41.model.transformer import Model
from tinyds41.train.fact_task import Facts, Quiz, facts_config, recall
from tinyds41.train.losses import IGNORED
from tinyds41.train.tasks import share
from tinyds41.train.trainer import train

TASK = Facts(n_keys=6, n_values=5, n_facts=2, n_fillers=4, n_names=30, n_letters=4, n_mentions=3)


def test_every_name_has_one_value_in_every_row():
    names, values = TASK.book
    assert names.shape == (30, 3) and len(names.unique(dim=0)) == 30
    assert names.min() >= TASK.first_letter == 19 and names.max() < TASK.vocab_size == 23
    assert values.min() >= TASK.first_value and values.max() < TASK.first_filler
    known = dict(zip(map(tuple, names.tolist()), values.tolist(), strict=True))
    met = set()
    for step in range(20):
        ids, documents, wanted = TASK.batch(step, 5, 30, seed=step)
        assert documents is None and wanted is not None and ids.shape == (5, 31) and wanted.shape == (5, 30)
        for row, target in zip(ids.tolist(), wanted[:, :28].tolist(), strict=True):
            asked = [place for place, value in enumerate(target) if value != IGNORED]
            assert len(asked) == 3
            for last in asked:
                name = tuple(row[last - 2 : last + 1])
                assert target[last] == known[name]
                met.add(name)
    assert met == set(known)


def test_questions_ask_for_what_this_row_told():
    ids, _, wanted = TASK.batch(0, 40, 40)
    assert wanted is not None
    places = TASK.places(ids[:, :-1])
    assert torch.equal(wanted[:, -2:], ids.gather(1, places + 1)) and (places % 4 == 0).all()
    pairs = {(key, value) for row, target in zip(ids[:, -3:-1].tolist(), wanted[:, -2:].tolist(), strict=True)
             for key, value in zip(row, target, strict=True)}  # fmt: skip
    assert len(pairs) > 6 * 5 / 2  # a key has many values


def test_a_value_wanted_at_a_name_is_not_told_beside_it():
    """A filler follows the name: nothing to copy."""
    ids, _, wanted = TASK.batch(0, 40, TASK.shortest)
    assert wanted is not None
    row, last = (wanted[:, :-2] != IGNORED).nonzero(as_tuple=True)
    after = ids[row, last + 1]
    assert ((after >= TASK.first_filler) & (after < TASK.first_letter)).all()


def test_rows_depend_on_seed_and_step_alone():
    one, again, later = (TASK.batch(step, 4, 30, seed=1) for step in (2, 2, 3))
    assert torch.equal(one.ids, again.ids) and not torch.equal(one.ids, later.ids)


def test_rows_of_names_alone_have_no_questions():
    task = Facts(n_facts=0, n_names=30, n_letters=4, n_mentions=3)
    _, _, wanted = task.batch(0, 8, task.shortest)
    assert wanted is not None and task.shortest == 12 and (wanted != IGNORED).sum() == 8 * 3
    assert recall(Model(facts_config(task, rows=8)), task, n_rows=2).needles.shape == (2, 0)


@pytest.mark.parametrize(("sizes", "message"), [
    ({"n_names": 0}, "n_names=0: a whole number of at least 1"),
    ({"n_mentions": True}, "n_mentions=True"),
    ({"n_letters": 3, "n_names": 28}, "n_names=28 exceeds the 27 names of 3 letters that n_letters=3 make"),
    ({"n_facts": -1}, "n_facts=-1"),
    ({"n_facts": False}, "n_facts=False"),
    ({"n_keys": 1, "n_facts": 2}, "n_facts=2 exceeds n_keys=1"),
])  # fmt: skip
def test_sizes_that_make_no_task_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        Facts(**sizes)


def test_a_row_too_short_is_refused():
    assert TASK.shortest == 22
    with pytest.raises(ValueError, match=r"length=21 is too short for 3 names and 2 facts .* at least 22"):
        TASK.batch(0, 1, 21)


def test_the_config_has_the_primes_that_the_library_wants():
    config = facts_config(TASK, rows=16)
    assert config.engram_num_embeddings == (sum(table_primes(config)[0]),) == (17 + 19 + 23 + 29 + 31 + 37,)
    assert facts_config(TASK, rows=16, engram_layer_ids=()).engram_num_embeddings == ()
    assert len(facts_config(TASK, rows=16, engram_layer_ids=(0, 2)).engram_num_embeddings) == 2


class Says(Model):
    """Knows the first half of the book, and says one value at every question."""

    def forward(self, ids, *args, **kwargs):
        said = torch.full_like(ids, TASK.first_value + 1)
        for name, value in zip(TASK.book[0][:15], TASK.book[1][:15], strict=True):
            for row, last in ((ids.unfold(1, 3, 1) == name).all(-1)).nonzero().tolist():
                said[row, last + 2] = value
        for name in TASK.book[0][15:]:
            for row, last in ((ids.unfold(1, 3, 1) == name).all(-1)).nonzero().tolist():
                said[row, last + 2] = 0
        return torch.nn.functional.one_hot(said, TASK.vocab_size).float()


def test_recall_tells_who_was_known():
    model = Says(facts_config(TASK, rows=8))
    found = recall(model, TASK, n_rows=60)
    assert found.who.shape == found.names.shape == (180,) and found.needles.shape == (60, 2)
    assert torch.equal(found.names, found.who < 15)
    _, _, wanted = TASK.batch(0, 60, TASK.shortest, seed=1)
    assert wanted is not None and torch.equal(found.needles, wanted[:, -2:] == TASK.first_value + 1)


def test_a_quiz_asks_before_the_step_and_changes_nothing():
    """The bits after training are those without it; before step 0 the model is as it was."""
    models = [Model(facts_config(TASK, rows=16), seed=3) for _ in range(3)]
    quiz = Quiz(TASK, models[0], every=2, n_rows=4)
    for task, model in ((quiz, models[0]), (TASK, models[1])):
        train(model, task, steps=5, batch_size=4, length=24, seed=5, progress=False)
    assert list(quiz.found) == [0, 2, 4]
    assert all(torch.equal(a, b) for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True))
    first = recall(models[2], TASK, length=24, n_rows=4)
    assert torch.equal(quiz.found[0].names, first.names) and torch.equal(quiz.found[0].who, first.who)
    assert 0 <= share(quiz.found[4].names) <= 1
