"""The needle task: its rows say what they should, its answers are in them, and a tiny model can learn to fetch them."""

from __future__ import annotations

import pytest
import torch

from tinyds41.model.transformer import Model
from tinyds41.trace import Trace
from tinyds41.train.losses import IGNORED
from tinyds41.train.tasks import Needle, answers, needle_config, share
from tinyds41.train.trainer import train

TASK = Needle(n_keys=6, n_values=5, n_facts=3, n_fillers=4)


def test_every_question_repeats_a_key_whose_value_is_wanted():
    ids, documents, wanted = TASK.batch(3, 20, 24, seed=1)
    assert documents is None and wanted is not None and ids.shape == (20, 25) and wanted.shape == (20, 24)
    assert (wanted[:, :-3] == IGNORED).all()
    for row, target in zip(ids[:, :-1].tolist(), wanted.tolist(), strict=True):
        facts = {row[i]: row[i + 1] for i in range(0, 21, 2) if 4 <= row[i] < 10}
        assert len(facts) == 3 and sorted(row[-3:]) == sorted(facts)
        assert target[-3:] == [facts[key] for key in row[-3:]]
        assert all(10 <= value < 15 for value in facts.values())
        others = [token for token in row[:-3] if token not in facts and token not in facts.values()]
        assert all(15 <= token < 19 for token in others)
    assert TASK.vocab_size == 19


def test_values_do_not_follow_from_keys():
    """Over many rows each key meets every value: nothing to learn by heart."""
    ids = TASK.batch(0, 200, 24).ids
    pairs = {(row[i], row[i + 1]) for row in ids.tolist() for i in range(0, 20, 2) if 4 <= row[i] < 10}
    assert len(pairs) == 6 * 5


def test_places_are_those_of_the_facts():
    ids = TASK.batch(0, 50, 24).ids[:, :-1]
    places = TASK.places(ids)
    assert places.shape == (50, 3) and (places % 2 == 0).all() and (places < 21).all()
    assert torch.equal(ids.gather(1, places), ids[:, -3:])
    assert (ids.gather(1, places + 1) >= TASK.first_value).all()


def test_a_batch_depends_on_seed_and_step_alone():
    one, again = TASK.batch(4, 8, 30, seed=2), TASK.batch(4, 8, 30, seed=2)
    assert torch.equal(one.ids, again.ids) and torch.equal(one.wanted, again.wanted)
    assert not torch.equal(one.ids, TASK.batch(5, 8, 30, seed=2).ids)
    assert not torch.equal(one.ids, TASK.batch(4, 8, 30, seed=3).ids)


def test_the_shortest_row_is_full_of_facts():
    ids = TASK.batch(0, 5, 9).ids
    assert (ids[:, 0:6:2] < TASK.first_value).all()
    with pytest.raises(ValueError, match=r"length=8 is too short for 3 facts .* at least 9"):
        TASK.batch(0, 5, 8)


@pytest.mark.parametrize(("sizes", "message"), [
    ({"n_facts": 0}, "n_facts=0"), ({"n_keys": 2.5}, r"n_keys=2\.5"), ({"n_values": True}, "n_values=True"),
    ({"n_facts": 17}, "n_facts=17 exceeds n_keys=16"),
])  # fmt: skip
def test_sizes_that_make_no_task_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        Needle(**sizes)


def test_the_trainer_learns_what_a_task_wants_not_the_next_token():
    """12 steps leave the likeliest answer among the values; the next token of a question would be another key."""
    task = Needle(n_facts=4)
    model = Model(needle_config(task), seed=0)
    history = train(model, task, steps=12, batch_size=8, length=16, learning_rate=3e-3, warmup=2, progress=False)
    assert history.losses[-1] < history.losses[0] - 0.5
    logits = model(task.batch(0, 4, 16, seed=9).ids[:, :-1])[:, -4:]
    said = logits.argmax(-1)
    assert ((said >= task.first_value) & (said < task.first_filler)).all()


def test_answers_are_judged_by_the_likeliest_token():
    """A model whose head always says one value is right just where that value is wanted."""
    model = Model(needle_config(TASK), seed=0)
    with torch.no_grad():
        model.norm.weight.zero_()  # all logits 0: the first id is the likeliest, and that is no value
    found = answers(model, TASK, length=24, n_rows=6)
    assert found.accuracy == 0 and found.right.shape == found.places.shape == (6, 3) and found.ids.shape == (6, 24)

    said = TASK.first_value + 2
    model.logits = lambda carry: torch.eye(TASK.vocab_size)[said].expand(*carry.collapsed.shape[:2], -1)
    wanted = TASK.batch(0, 6, 24, seed=1).wanted[:, -3:]
    assert torch.equal(answers(model, TASK, length=24, n_rows=6).right, wanted == said)


def test_answers_know_whether_a_fact_was_within_reach():
    """Compared with the indices themselves, row by row: entries of two tokens, blocks of four entries."""
    model = Model(needle_config(TASK, index_topk=12, candidate_topk_blocks=5), seed=1)
    found = answers(model, TASK, length=64, n_rows=12)
    trace = Trace("layers.*.indexer.selection", "layers.*.indexer.pool")
    with torch.no_grad():
        model(found.ids, trace=trace)
    assert list(found.chosen) == [2, 3] and found.pooled is not None
    for row in range(12):
        for question in range(3):
            entry = found.places[row, question].item() // 2
            for layer, chosen in found.chosen.items():
                picks = trace[f"layers.{layer}.indexer.selection"][row, 61 + question].tolist()
                assert chosen[row, question].item() == (entry in picks)
            blocks = trace["layers.2.indexer.pool"][row, 61 + question].tolist()
            assert found.pooled[row, question].item() == (entry // 4 in blocks)
    assert 0 < share(found.chosen[2]) < 1 and 0 < share(found.pooled) < 1
    assert not (found.chosen[3] & ~found.pooled).any()


def test_a_model_of_windows_alone_has_neither_choice_nor_pool():
    config = needle_config(TASK, compress_ratios=(0, 0, 0, 0), kv_source_layer_ids=(), index_source_layer_ids=(),
                           candidate_source_layer_id=None)  # fmt: skip
    found = answers(Model(config, seed=0), TASK, length=24, n_rows=2)
    assert found.chosen == {} and found.pooled is None


def test_answers_to_nothing_are_refused():
    with pytest.raises(ValueError, match="n_rows=0: at least one row"):
        answers(Model(needle_config(TASK), seed=0), TASK, length=24, n_rows=0)
