"""The draft stepper: its steps are those of `generate`, and what it says of a token follows from what was drawn."""

import html
import sys

import pytest
import torch
from drafters import Scripted
from models import random_ids, scattered
from sessions import DRAFTING

import tinyds41 as ds
from tinyds41.infer.draft import Sampling
from tinyds41.infer.generate import generate_ids
from tinyds41.infer.ngram_drafter import NGramDrafter
from tinyds41.infer.session import Session
from tinyds41.show.explore_draft import draft_steps, draft_view, explore_draft

PROMPT = random_ids(1, 9)[0].tolist()


@pytest.fixture(scope="module")
def model():
    return scattered(DRAFTING, draft=True)


@pytest.fixture(scope="module")
def greedy(model):
    """What plain decoding writes at temperature 0."""
    return generate_ids(model, torch.tensor([PROMPT]), max_new_tokens=20, temperature=0)[0]


def scripted(greedy, right: int) -> Scripted:
    return Scripted([[*PROMPT, *greedy]], 4, lambda _: right)


def written(steps) -> list[int]:
    """The text after the last step, without the prompt."""
    last = steps[-1]
    return [*last.text, *(one.token for one in last.drafted[: last.accepted]), last.next_token][len(PROMPT) :]


# ---------------------------------------------------------------------------------------------- steps


@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize("drafter", [True, NGramDrafter(3)])
def test_the_steps_write_what_generate_writes(model, temperature, drafter):
    options = {"max_new_tokens": 20, "temperature": temperature, "seed": 3, "speculate": drafter}
    steps = draft_steps(model, PROMPT, **options)
    assert written(steps) == generate_ids(model, torch.tensor([PROMPT]), **options)[0]
    assert sum(step.accepted + 1 for step in steps) == 19  # the first token is the prefill's


def test_each_token_has_the_chances_it_was_drawn_and_judged_by(model):
    sampling, depth = Sampling(1.0), DRAFTING.dspark_block_size
    steps = draft_steps(model, PROMPT, max_new_tokens=12, seed=1)
    assert [len(step.drafted) for step in steps[:2]] == [depth, depth]
    for step in steps:
        session = Session(model)
        session.prefill(step.text[:-1])
        p = sampling.chances(session.extend([step.text[-1], *(one.token for one in step.drafted)]))[0]
        open_ = True
        for place, one in enumerate(step.drafted):
            assert one.p == pytest.approx(float(p[place, one.token]), rel=1e-9)
            assert 0 < one.q < 1 and 0 <= one.u < 1
            assert one.confidence is not None and 0 < one.confidence < 1
            assert one.stands is (one.u * one.q < one.p if open_ else None)
            open_ = open_ and one.stands


@pytest.mark.parametrize("right", [0, 2, 4])
def test_accepted_corrections_and_bonus_tokens_are_told_apart(model, greedy, right):
    steps = draft_steps(model, PROMPT, max_new_tokens=16, temperature=0, speculate=scripted(greedy, right))
    first = steps[0]
    assert written(steps) == greedy[:16] and first.accepted == right
    assert [one.stands for one in first.drafted] == [True] * right + [False, None, None, None][: 4 - right]
    assert first.next_token == greedy[1 + right]
    assert first.next_kind.startswith("bonus" if right == 4 else "correction")
    assert all(one.q == 1 and one.confidence is None for one in first.drafted)


def test_a_last_step_without_a_draft_is_plain(model, greedy):
    *_, last = draft_steps(model, PROMPT, max_new_tokens=7, temperature=0, speculate=scripted(greedy, 4))
    assert not last.drafted and last.next_kind.startswith("plain") and last.next_token == greedy[6]


@pytest.mark.parametrize("right", [0, 1, 3, 4])
def test_stores_are_counted_before_the_step_with_the_draft_and_after_the_rollback(model, greedy, right):
    for step in draft_steps(model, PROMPT, max_new_tokens=14, temperature=0, speculate=scripted(greedy, right))[:2]:
        before = len(step.text) - 1
        assert step.tokens == (before, before + 5, before + 1 + right)
        for moment, n in enumerate(step.tokens):
            session = Session(model)
            session.prefill([*PROMPT, *greedy][:n])
            rows: dict[str, int] = {}
            for store in session.report().stores:
                rows[store.kind] = rows.get(store.kind, 0) + store.rows
            assert {kind: counts[moment] for kind, counts in step.stores.items()} == rows
    assert set(rows) == {"global_kv", "index_keys", "group", "window", "draft_window"}


def test_what_cannot_be_stepped_through_is_refused(model):
    with pytest.raises(ValueError, match="max_new_tokens=1: the first token is the prefill's"):
        draft_steps(model, PROMPT, max_new_tokens=1)
    with pytest.raises(ValueError, match="no tokenizer: the prompt must be token ids"):
        draft_steps(model, "the cat")
    with pytest.raises(ValueError, match="this model has no drafter"):
        draft_steps(scattered(DRAFTING), PROMPT)


# ---------------------------------------------------------------------------------------------- static twin


def test_the_view_has_a_line_per_token_and_a_line_per_store(model, greedy):
    steps = draft_steps(model, PROMPT, max_new_tokens=16, temperature=0, speculate=scripted(greedy, 2))
    lines = draft_view(model, steps, 2).splitlines()
    step = steps[1]
    assert lines[0] == f"step 2 of {len(steps)}; tokens a step so far 3.00"
    assert lines[1].endswith(" ".join(map(str, step.text[:-1]))[-20:])
    assert lines[2] == f"anchor {step.text[-1]}: written, not yet read"
    for place, (line, one) in enumerate(zip(lines[5:9], step.drafted, strict=True), 1):
        cells = line.split(maxsplit=6)
        verdict = "1.000: stands" if place < 3 else "0.000: falls" if place == 3 else "not judged"
        assert cells[:6] == [str(place), str(one.token), "-", "1.000", f"{one.p:.3f}", f"{one.u:.3f}"]
        assert cells[6].endswith(verdict)
    assert lines[10] == f"writes {step.drafted[0].token} {step.drafted[1].token} {step.next_token}"
    assert lines[11] == "the last one is a correction: drawn from max(0, p - q)"
    rows = {kind: tuple(map(int, counts)) for kind, *counts in (line.split() for line in lines[14:])}
    assert rows == {"tokens": step.tokens, **step.stores}


def test_a_step_that_is_not_there_is_refused(model, greedy):
    steps = draft_steps(model, PROMPT, max_new_tokens=6, temperature=0, speculate=scripted(greedy, 4))
    for wrong in (0, len(steps) + 1):
        with pytest.raises(ValueError, match=rf"step={wrong} is outside 1\.\.{len(steps)}"):
            draft_view(model, steps, wrong)


def test_a_text_model_is_shown_in_words():
    speaking = ds.example("text")
    speaking.add_draft(seed=0)
    steps = draft_steps(speaking, "KING:\nthe king", max_new_tokens=4, seed=0)
    lines = draft_view(speaking, steps).splitlines()
    assert lines[1] == "text ...KING:↵the king" and lines[2].startswith("anchor ")
    generated = ds.generate(speaking, "KING:\nthe king", max_new_tokens=4, seed=0, speculate=True)
    ids = [*steps[-1].text, *(one.token for one in steps[-1].drafted[: steps[-1].accepted]), steps[-1].next_token]
    assert speaking.tokenizer is not None
    assert speaking.tokenizer.decode(ids) == f"KING:\nthe king{generated}"


# ---------------------------------------------------------------------------------------------- widget


def parts(box) -> dict:
    rows, picture, text = box.children
    return {**{control.description: control for control in rows.children}, "picture": picture, "shown": text}


def test_step_and_seed_change_the_text_to_that_of_the_view(model):
    pytest.importorskip("ipywidgets")
    found = parts(explore_draft(model, PROMPT, max_new_tokens=10, seed=2))
    steps = {seed: draft_steps(model, PROMPT, max_new_tokens=10, seed=seed) for seed in (2, 5)}

    def shown(seed, step):
        return html.escape(draft_view(model, steps[seed], step))

    assert shown(2, 1) in found["shown"].value and found["step"].max == len(steps[2])
    found["step"].value = 3
    assert shown(2, 3) in found["shown"].value
    found["seed"].value = 5
    assert shown(5, 3) in found["shown"].value and found["step"].max == len(steps[5])
    assert found["picture"].layout.display == "none"


def test_a_shorter_text_of_another_seed_shows_its_last_step(model):
    """The slider may stand behind the end of the new text."""
    pytest.importorskip("ipywidgets")
    counts = {seed: len(draft_steps(model, PROMPT, max_new_tokens=10, seed=seed)) for seed in range(12)}
    longer, shorter = max(counts, key=lambda seed: counts[seed]), min(counts, key=lambda seed: counts[seed])
    assert counts[shorter] < counts[longer]
    found = parts(explore_draft(model, PROMPT, max_new_tokens=10, seed=longer))
    found["step"].value = counts[longer]
    found["seed"].value = shorter
    assert f"step {counts[shorter]} of {counts[shorter]};" in found["shown"].value


def test_without_ipywidgets_the_explorer_names_the_extra(model, monkeypatch):
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    with pytest.raises(ImportError, match=r"pip install 'tinyds41\[notebooks\]'"):
        explore_draft(model, PROMPT)
