"""Each check of lesson 07 accepts what is right and refuses the mistakes that readers make."""


import torch
from exercise_checks import three_tests

import tinyds41 as ds
from tinyds41.course.lesson_07 import (
    check_at_par,
    check_exact,
    check_found,
    encoder_window_bytes,
    known_after_hit,
)
from tinyds41.train.note import Note, note_config


def at_par(config: ds.Config) -> float:
    cache = ds.Cache(config)
    cache.fill(64)
    return encoder_window_bytes(config) / cache.report().bytes_per_token


RIGHT = [(check_found, lambda n, b: n // b * b), (check_found, lambda n, b: n - n % b), (check_exact, 20 * 127),
         (check_at_par, at_par)]  # fmt: skip
WRONG = [
    (check_found, lambda n, b: n, "63 shared tokens in blocks of 64"),
    (check_found, lambda n, b: -(-n // b) * b, "63 shared tokens in blocks of 64"),
    (check_found, lambda n, b: n // b, "64 shared tokens in blocks of 64"),
    (check_exact, 128, "20 encoder layers"),
    (check_exact, 20 * 128, "20 encoder layers"),
    (check_exact, 40 * 127, "20 encoder layers"),
    (check_at_par, lambda config: 2 * at_par(config), "flash"),
    (check_at_par, lambda config: at_par(ds.Config.preset("flash")), "small"),
]  # fmt: skip

(test_a_right_answer_is_accepted, test_an_open_exercise_is_neither_right_nor_wrong,
 test_a_wrong_answer_is_refused_with_a_reason) = three_tests(RIGHT, WRONG)  # fmt: skip


def test_the_encoders_windows_are_those_of_a_full_cache():
    config = ds.Config.preset("toy")
    cache = ds.Cache(config)
    cache.fill(config.sliding_window + 5)
    stores = [store for store in cache.report().stores if store.kind == "window"]
    assert encoder_window_bytes(config) == sum(store.bytes for store in stores[: config.plan().n_encoder])


def test_a_hit_is_asked_for_the_note_at_its_distance(monkeypatch):
    """A model that says what stands three tokens back knows the note at distance 3 alone, found or read anew."""
    task, asked = Note(), []

    def said(model, text, replay, store, new):
        asked.append((replay, store.block_tokens, new, text.shape))
        return torch.nn.functional.one_hot(text[:, -4], task.vocab_size).float()

    monkeypatch.setattr("tinyds41.course.lesson_07._answer", said)
    model = ds.Model(note_config(task))
    found = known_after_hit(model, task, "exact", (2, 3, 5), n_texts=4, length=20, new=3)
    assert found[3] == 1 and found[2] < 0.5 and found[5] < 0.5
    assert set(asked) == {("exact", 17, 3, (1, 20))}


def test_resumed_texts_are_found_but_for_the_new_tokens():
    """Untrained, but the exact way answers as reading anew does, text by text."""
    task = Note()
    model = ds.Model(note_config(task))
    ways = [known_after_hit(model, task, replay, (4, 9), n_texts=8, length=24) for replay in (None, "exact")]
    assert ways[0] == ways[1]
