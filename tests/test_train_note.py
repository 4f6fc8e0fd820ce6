"""The note task: its texts say what they should, and a model is asked at every distance."""

from __future__ import annotations

import pytest
import torch

from tinyds41.model.transformer import Model
from tinyds41.plan import SWA
from tinyds41.train.losses import IGNORED
from tinyds41.train.note import Note, known_by_distance, note_config

TASK = Note(n_notes=5, n_fillers=3)


def test_one_note_stands_in_the_first_half_and_is_wanted_from_there_on():
    ids, documents, wanted = TASK.batch(2, 60, 11, seed=1)
    assert documents is None and wanted is not None and ids.shape == (60, 12) and wanted.shape == (60, 11)
    seen = set()
    for row, target in zip(ids.tolist(), wanted.tolist(), strict=True):
        [place] = [i for i, token in enumerate(row) if token < TASK.first_filler]
        assert 0 <= place < 5 and 4 <= row[place] < 9 and max(row) < TASK.vocab_size == 12
        assert target == [IGNORED] * place + [row[place]] * (11 - place)
        seen.add((place, row[place]))
    assert {place for place, _ in seen} == set(range(5)) and {note for _, note in seen} == set(range(4, 9))


def test_a_batch_depends_on_seed_and_step_alone():
    one, again = TASK.batch(4, 8, 30, seed=2), TASK.batch(4, 8, 30, seed=2)
    assert torch.equal(one.ids, again.ids) and torch.equal(one.wanted, again.wanted)
    assert not torch.equal(one.ids, TASK.batch(5, 8, 30, seed=2).ids)
    assert not torch.equal(one.ids, TASK.batch(4, 8, 30, seed=3).ids)


@pytest.mark.parametrize(("sizes", "message"), [
    ({"n_notes": 0}, "n_notes=0"), ({"n_fillers": 1.5}, r"n_fillers=1\.5"), ({"n_notes": True}, "n_notes=True"),
])  # fmt: skip
def test_sizes_that_make_no_task_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        Note(**sizes)


def test_a_text_without_a_first_half_is_refused():
    with pytest.raises(ValueError, match="length=1 is too short"):
        TASK.batch(0, 1, 1)


def test_its_model_has_windows_alone():
    config = note_config(TASK, layers=3, sliding_window=5)
    assert [layer.mode for layer in config.plan()] == [SWA] * 3
    assert config.sliding_window == 5 and config.vocab_size == 12 and note_config(TASK).sliding_window == 4


def test_answers_are_counted_by_their_distance_behind_the_note():
    """A model that says the note up to two tokens behind it, and a filler later."""
    model = Model(note_config(TASK), seed=0)

    class Short(torch.nn.Module):
        device = model.device

        def forward(self, ids):
            recent = torch.stack([ids.roll(shift, 1) for shift in range(3)]).clone()
            for shift in range(3):
                recent[shift, :, :shift] = TASK.first_filler
            return torch.eye(TASK.vocab_size)[recent.amin(0)]  # notes have the lower ids

    found = known_by_distance(Short(), TASK, length=20, n_rows=30)
    assert found == {0: 1.0, 1: 1.0, 2: 1.0} | dict.fromkeys(range(3, 11), 0.0)
