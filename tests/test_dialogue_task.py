"""Dialogues: what a turn asks an earlier one told, and at a turn's end the text can be saved and resumed."""

from __future__ import annotations

import pytest
import torch

from tinyds41.infer.session import Session
from tinyds41.infer.tiered_store import TieredStore
from tinyds41.model.transformer import Model
from tinyds41.train.dialogue_task import Dialogue
from tinyds41.train.losses import IGNORED
from tinyds41.train.tasks import needle_config

TASK = Dialogue(n_keys=9, n_values=5, n_turns=4, n_told=2, n_asked=2, n_fillers=3)
ENDS = (16, 32, 48, 64)


def asked(batch) -> list[tuple[list[int], int, int]]:
    return [(row, place, value) for row, target in zip(batch.ids.tolist(), batch.wanted.tolist(), strict=True)
            for place, value in enumerate(target) if value != IGNORED]  # fmt: skip


def test_a_plain_reader_of_earlier_turns_answers_everything():
    """And none of it from the turn itself: it reads up to where the turn begins."""
    questions = asked(TASK.batch(3, 50, 65, seed=1))
    assert len(questions) == 50 * 2 * 3
    for row, place, value in questions:
        earlier = row[: place // 16 * 16]
        assert row[place - 1] == TASK.question_mark and row[place] not in row[place // 16 * 16 : place : 2]
        assert row[earlier.index(row[place]) + 1] == value


def test_a_reader_of_the_turn_alone_does_not():
    """A key and what its own turn tells go with every value, evenly."""
    counts: dict[int, list[int]] = {}
    for row, place, value in asked(TASK.batch(0, 400, 64)):
        counts.setdefault(row[place], []).append(value)
    assert len(counts) == 9
    for values in counts.values():
        # A fifth each, give or take 5 deviations.
        assert max(values.count(v) for v in set(values)) / len(values) < 0.2 + 5 * (0.16 / len(values)) ** 0.5


def test_turns_end_alike_in_all_rows_and_end_with_questions():
    assert TASK.ends(64) == TASK.ends(65) == TASK.ends(71) == ENDS and TASK.ends(72)[-1] == 72
    ids, _, wanted = TASK.batch(0, 30, 70)
    for start, end in zip((0, *ENDS), ENDS, strict=False):
        assert (ids[:, start : start + 2] == TASK.turn_mark).all()
        marked = ids[:, [end - 4, end - 2]] == TASK.question_mark
        assert marked.all() if start else not marked.any()
        assert ((wanted[:, [end - 3, end - 1]] != IGNORED) == bool(start)).all()
    assert (ids == TASK.turn_mark).sum() == 30 * 8 and (ids[:, 64:] >= TASK.first_filler).all()


def test_a_key_is_told_once():
    for row in TASK.batch(0, 40, 64).ids.tolist():
        told = [row[i] for i in range(0, 64, 2) if TASK.first_key <= row[i] < TASK.first_value]
        assert len(told) == len(set(told)) == 8


def test_turns_back_are_counted_from_fact_to_question():
    ids, _, wanted = TASK.batch(0, 60, 64)
    back = TASK.turns_back(ids[:, :-1])
    assert torch.equal(back > 0, wanted != IGNORED)
    for row, turns in zip(ids.tolist(), back.tolist(), strict=True):
        for place, n in enumerate(turns):
            assert n == 0 or n == place // 16 - row.index(row[place]) // 16
    assert set(back.flatten().tolist()) == {0, 1, 2, 3}


@pytest.mark.parametrize("replay", ["exact", "bounded"])
def test_a_dialogue_can_be_saved_and_resumed_between_turns(tmp_path, replay):
    """Each turn is a session of its own, which begins from what the one before saved and answers when it has read."""
    model = Model(needle_config(TASK), seed=2).double()
    ids = TASK.batch(0, 1, 64).ids[:, :-1]
    whole = model(ids)[0]
    with TieredStore(tmp_path / "store.sqlite", model, block_tokens=4) as store:
        for end in TASK.ends(64):
            session = Session(model)
            logits = session.resume(ids[:, :end], store, replay=replay)[0]
            session.save(store)
            store.windows.clear()
            assert session.resumed is not None
            assert (session.resumed.found, session.resumed.new) == (end - 16, 16) and logits.isfinite().all()
            if replay == "exact":  # sums in another order, in float64; bounded only approximates
                assert (logits - whole[end - 1]).abs().max() < 1e-9


def test_sizes_and_lengths_that_make_no_task_are_refused():
    for sizes, message in (({"n_told": 0}, "n_told=0"), ({"n_turns": 1}, "n_turns=1: at least 2"),
                           ({"n_turns": 9}, "n_turns=9 of n_told=2 facts exceed n_keys=16")):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            Dialogue(**sizes)
    assert TASK.shortest == 40 and TASK.ends(40) == (10, 20, 30, 40)
    with pytest.raises(ValueError, match="length=39 is too short for 4 turns of 2 facts and 2 questions: at least 40"):
        TASK.batch(0, 1, 39)
