"""The distance of replayed prompts from cold ones: of distributions, and nothing where nothing is cut."""

from __future__ import annotations

import math

import pytest
import torch

import tinyds41 as ds
from tinyds41.infer.session import Session
from tinyds41.train.corpus import Corpus
from tinyds41.train.dialogue_task import Dialogue
from tinyds41.train.replay import Hits, run_replayed
from tinyds41.train.replay_distance import PROMPTS, ROWS, divergence, replay_distances, resumed_answers
from tinyds41.train.tasks import TEST_STEP, needle_config


def test_divergence_is_that_of_the_distributions():
    p, q = torch.tensor([[0.5, 0.25, 0.25]]), torch.tensor([[0.125, 0.625, 0.25]])
    expected = 0.5 * math.log(4) + 0.25 * math.log(0.4)
    assert divergence(p.log(), q.log() + 3) == pytest.approx(expected, abs=1e-6)
    assert divergence(p.log(), p.log()) == pytest.approx(0, abs=1e-9)


def text() -> Corpus:
    return Corpus(torch.randint(4, 60, (1200,), generator=torch.Generator().manual_seed(0)).int())


def test_windows_that_hold_the_whole_text_lose_nothing():
    model = ds.Model(ds.Config.preset("nano", sliding_window=256), seed=0, dtype=torch.float64)
    assert max(replay_distances(model, text()).values()) < 1e-12


def test_a_bounded_prefill_is_as_far_as_that_of_a_session():
    """Of the prompt's last token; what comes behind it here is decoded from the same windows."""
    model = ds.Model(ds.Config.preset("nano", initializer_range=0.1), seed=0, dtype=torch.float64)
    found, (_, prompt) = replay_distances(model, text()), PROMPTS["kl_bounded_prefill"]
    total = 0.0
    for row in next(iter(text().in_order(ROWS, prompt + 15))).ids:
        cold, bounded = Session(model), Session(model)
        pairs = [(cold.prefill(row[:prompt], mode="full"), bounded.prefill(row[:prompt], mode="bounded"))]
        pairs += [(cold.decode(int(token)), bounded.decode(int(token))) for token in row[prompt:-1]]
        total += sum(divergence(a, b) for a, b in pairs) / len(pairs)
    assert found["kl_bounded_prefill"] == pytest.approx(total / ROWS, rel=1e-6) and found["kl_bounded_prefill"] > 1e-9
    assert found["kl_resumed"] > 1e-9


def test_a_text_without_a_passage_is_refused():
    model = ds.Model(ds.Config.preset("nano"), seed=0)
    with pytest.raises(ValueError, match="too short for a sequence of length 128"):
        replay_distances(model, Corpus(torch.full((128,), 5).int()))


def dialogues(**changes) -> tuple[ds.Model, Dialogue]:
    task = Dialogue(n_values=2)  # so that a model that knows nothing is sometimes right
    return ds.Model(needle_config(task, **changes), seed=0, dtype=torch.float64), task


def test_dialogues_are_answered_as_each_row_is_after_its_hit():
    model, task = dialogues(sliding_window=4)
    found = resumed_answers(model, task, length=40, n_rows=6)
    ids, _, wanted = task.batch(TEST_STEP, 6, 40)
    right, distance = {name: [] for name in found}, {name: [] for name in found}
    for row, answers in zip(ids[:, :-1], wanted, strict=True):
        for before, end in ((10, 20), (20, 30), (30, 40)):
            cold = model(row[None]).detach()[:, end - 1]
            for name, hit in (("turns before", before), ("all", end)):
                logits = run_replayed(model, row[None], None, Hits(torch.tensor([hit]), torch.tensor([end])))[0]
                right[name].append(int(logits[0, end - 1].argmax()) == int(answers[end - 1]))
                distance[name].append(divergence(cold, logits[:, end - 1].detach()))
            right["cold"].append(int(cold.argmax()) == int(answers[end - 1]))
            distance["cold"].append(0)
    assert {name: one["right"] for name, one in found.items()} == {n: sum(r) / 18 for n, r in right.items()}
    for name, one in found.items():
        assert one["kl"] == pytest.approx(sum(distance[name]) / 18, rel=1e-6, abs=1e-12)
    assert found["all"]["kl"] > found["turns before"]["kl"] > 1e-9


def test_a_dialogue_that_windows_hold_is_resumed_without_loss():
    model, task = dialogues(sliding_window=64)
    found = resumed_answers(model, task, length=40, n_rows=4)
    assert max(one["kl"] for one in found.values()) < 1e-12 and len({one["right"] for one in found.values()}) == 1


def test_dialogues_of_no_row_are_refused():
    model, task = dialogues()
    with pytest.raises(ValueError, match="n_rows=0: at least one row"):
        resumed_answers(model, task, length=40, n_rows=0)
