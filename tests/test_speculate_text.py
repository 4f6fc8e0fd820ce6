"""Several tokens per step write what single ones write, and leave the session that single ones leave."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
from drafters import WRONG, Certain, Given, Guessing, Scripted, mixed
from models import random_ids, scattered
from sessions import SHORT, alone, ratio
from test_speculate import chi_square
from torch import Tensor

import tinyds41 as ds
from tinyds41.infer.draft import Draft, Sampling
from tinyds41.infer.generate import generate, generate_ids, padded, stream, tokens
from tinyds41.infer.ngram_drafter import NGramDrafter
from tinyds41.infer.session import Session
from tinyds41.infer.speculate import Speculation
from tinyds41.model.transformer import Model

DEPTH = 5
N_PROMPTS = 200


@pytest.fixture(scope="module")
def model() -> Model:
    return scattered(SHORT)


def prompts(n: int, seed: int = 0) -> list[list[int]]:
    """Rows of 3 to 16 ids."""
    return [random_ids(1, 3 + (7 * b + seed) % 14, seed=seed + b)[0].tolist() for b in range(n)]


# ---- greedy ----


def choices(model: Model, text: list[int]) -> Tensor:
    """Logits behind each token of a text that is read at once. Shapes: -> [S,V]."""
    return Session(model).extend(torch.tensor([text]))[0]


def assert_same_choices(model: Model, starts: list[list[int]], found: list[list[int]], plain: list[list[int]]) -> None:
    """Equal answers, or one that parts where two logits differ by less than 1e-6: T3."""
    for start, mine, other in zip(starts, found, plain, strict=True):
        if mine != other:
            part = next(i for i, (a, b) in enumerate(zip(mine, other, strict=True)) if a != b)
            logits = choices(model, [*start, *other[:part]])[-1]
            assert abs(float(logits[mine[part]] - logits[other[part]])) < 1e-6, (start, part)


@pytest.fixture(scope="module", params=[torch.float64, torch.float32], ids=str)
def answered(request) -> tuple[Model, list[list[int]], list[list[int]]]:
    """A model, 200 prompts, and its greedy answers, token by token."""
    model, starts = scattered(SHORT, request.param), prompts(N_PROMPTS)
    ids, mask = padded(starts)
    return model, starts, generate_ids(model, ids, mask=mask, max_new_tokens=10, temperature=0)


@pytest.mark.parametrize("depth", range(1, DEPTH + 1))
def test_greedy_answers_to_200_prompts_are_those_of_single_tokens(answered, depth):
    """All right, last wrong, all wrong and random in one batch, so that rows part and end at their own step."""
    model, starts, plain = answered
    ids, mask = padded(starts)
    texts = [start + answer for start, answer in zip(starts, plain, strict=True)]
    for drafter in (Scripted(texts, depth, mixed(depth)), NGramDrafter(depth)):
        counts = Speculation()
        found = generate_ids(model, ids, mask=mask, max_new_tokens=10, temperature=0, speculate=drafter,
                             speculation=counts)  # fmt: skip
        assert_same_choices(model, starts, found, plain)
        assert counts.proposed > counts.accepted > 0


def test_the_shipped_model_writes_its_greedy_text_whoever_drafts():
    """One row at a time, where a few tokens go through NumPy."""
    model, options, counts = ds.example("text"), {"max_new_tokens": 20, "temperature": 0}, Speculation()
    for prompt in ("PROSPERO:\n", "To be, or not to be"):
        ids = model.tokenizer.encode(prompt)
        (answer,) = generate_ids(model, torch.tensor([ids]), **options)
        for drafter in (NGramDrafter(4), *(Scripted([ids + answer], 5, right) for right in (mixed(5), lambda _: 2))):
            text = generate(model, prompt, speculate=drafter, speculation=counts, **options)
            assert text == model.tokenizer.decode(answer)
    assert counts.proposed > counts.accepted > 0


# ---- no trace ----


def plain_states(model: Model, ids: Tensor, n: int) -> tuple[list[int], list[str]]:
    """n greedy tokens, and the session's fingerprint after each."""
    session, written, states = Session(model), [], []
    for (token,) in tokens(session, ids, max_new_tokens=n, temperature=0):
        written.append(token)
        states.append(session.fingerprint())
    return written, states


def stopped_after(session: Session, ids: Tensor, n: int, **options) -> list[int | None]:
    """The first n tokens of a longer answer."""
    return [token for (token,) in itertools.islice(tokens(session, ids, **options), n)]


@pytest.mark.parametrize("m", [1, 2, 3])
def test_a_draft_accepted_in_part_leaves_the_session_of_single_tokens(m):
    """S1: 0 to 5 of 5 accepted at every phase of a group and around W = 4, 2W; whoever stops anywhere in the step."""
    model = scattered(ratio(m))
    for length in range(1, 11):
        ids = random_ids(1, length, seed=length)
        written, states = plain_states(model, ids, DEPTH + 2)
        text = [*ids[0].tolist(), *written]
        for accepted in range(DEPTH + 1):
            drafter = Scripted([text], DEPTH, lambda number, n=accepted: n)
            for taken in {accepted + 2, 2 + length % (accepted + 1)}:
                session = Session(model)
                options = {"max_new_tokens": 20, "temperature": 0, "speculate": drafter}
                found = stopped_after(session, ids, taken, **options)
                assert found == written[:taken]
                assert session.fingerprint() == states[taken - 1], (length, accepted, taken)


@pytest.mark.parametrize("kind", [*WRONG, "n-gram"])
def test_a_whole_answer_leaves_the_session_of_single_tokens(model, kind):
    """S1, over many steps; and the next prompt goes on from there."""
    ids, more, options = random_ids(1, 7), random_ids(1, 3, seed=1), {"temperature": 0, "max_new_tokens": 17}
    plain, session, counts = Session(model), Session(model), Speculation()
    (answer,) = generate_ids(plain, ids, **options)
    text = [*ids[0].tolist(), *answer]
    drafter = NGramDrafter(DEPTH) if kind == "n-gram" else Scripted([text], DEPTH, lambda _: WRONG[kind](DEPTH))
    assert generate_ids(session, ids, speculate=drafter, speculation=counts, **options) == [answer]
    assert counts.proposed > 0 and session.lengths == plain.lengths == [7 + 16]
    assert session.fingerprint() == plain.fingerprint()
    (rest,) = generate_ids(plain, more, **options)
    drafter = NGramDrafter(DEPTH)
    assert generate_ids(session, more, speculate=drafter, speculation=counts, **options) == [rest]
    assert session.fingerprint() == plain.fingerprint()


def test_sampled_drafts_leave_no_trace(model):
    """What stands and what falls is drawn; the session has read just what was written."""
    q = torch.full((64,), 1 / 64, dtype=torch.float64)
    for seed in range(4):
        session, ids, counts = Session(model), random_ids(1, 5), Speculation()
        (answer,) = generate_ids(session, ids, max_new_tokens=14, temperature=2.0, top_k=40, seed=seed,
                                 speculate=Guessing(q, 4), speculation=counts)  # fmt: skip
        clean = Session(model)
        clean.prefill(torch.cat([ids, torch.tensor([answer[:-1]])], 1), mode="full")
        assert len(answer) == 14 and counts.proposed > counts.accepted > 0
        assert session.fingerprint() == clean.fingerprint()


def test_rows_that_part_are_each_what_it_is_alone(model):
    """Rows of different length with 0 to 5 accepted tokens in one step: tokens, and the stores of each row."""
    starts = prompts(6)
    ids, mask = padded(starts)
    lone = [plain_states(model, torch.tensor([row]), DEPTH + 2) for row in starts]
    texts = [[*row, *written] for row, (written, _) in zip(starts, lone, strict=True)]
    session = Session(model)
    told = tokens(session, ids, mask=mask, max_new_tokens=20, temperature=0,
                  speculate=Scripted(texts, DEPTH, lambda number: number))  # fmt: skip
    columns = list(itertools.islice(told, 1 + DEPTH + 1))
    told.close()
    for b, (written, states) in enumerate(lone):
        assert [column[b] for column in columns] == [*written[: b + 2], *[None] * (DEPTH - b)]
        assert alone(session, b) == states[b + 1]


@pytest.mark.parametrize("window", [1, 2, 4, 7])
def test_a_rollback_as_deep_as_the_draft_is_enough(window):
    """S2: every window and depth, all wrong, with just so much rollback; one less is refused with the reason."""
    model, ids = scattered(SHORT.replace(sliding_window=window)), random_ids(1, 9)
    plain = Session(model)
    (answer,) = generate_ids(plain, ids, max_new_tokens=6, temperature=0)
    for depth in (1, 2, 5, 9):
        drafter = Scripted([[*ids[0].tolist(), *answer]], depth, lambda number: 0)
        session = Session(model, rollback=depth)
        options = {"max_new_tokens": 20, "temperature": 0, "speculate": drafter}
        assert stopped_after(session, ids, 6, **options) == answer
        assert session.fingerprint() == plain.fingerprint()
        session = Session(model, rollback=depth - 1)
        with pytest.raises(ValueError, match=f"drafts of {depth} tokens: .* rollback={depth - 1} tokens at most"):
            generate_ids(session, ids, **options)


def test_a_fault_between_reading_and_writing_takes_the_draft_back(model, monkeypatch):
    """Ctrl-C while tokens are judged: as for single tokens, the session has read what was written, and no draft."""
    ids = random_ids(1, 6)
    written, states = plain_states(model, ids, 3)
    session, stopped = Session(model), lambda *_: (_ for _ in ()).throw(KeyboardInterrupt())
    told = tokens(session, ids, max_new_tokens=9, temperature=0, speculate=Given(Draft(torch.full((1, 3), 4))))
    assert next(told) == written[:1]
    monkeypatch.setattr("tinyds41.infer.speculate.accept", stopped)
    with pytest.raises(KeyboardInterrupt):
        next(told)
    assert session.fingerprint() == states[1] and session.lengths == [7]


# ---- ends ----


@pytest.mark.parametrize("n", range(8))
def test_an_answer_has_just_as_many_tokens_as_were_asked_for(model, n):
    """Nothing is read behind the end: the drafts get shorter with the rest of the answer."""
    ids = random_ids(1, 5)
    (answer,) = generate_ids(model, ids, max_new_tokens=n, temperature=0)
    text = [*ids[0].tolist(), *answer]
    session = Session(model)
    found = generate_ids(session, ids, max_new_tokens=n, temperature=0, speculate=Scripted([text], 5, lambda _: 5))
    assert found == [answer] and len(answer) == n
    assert session.lengths == [5 + max(0, n - 1)]


def test_the_text_may_fill_all_positions_while_others_are_far_from_it():
    """The longest row leaves no room for whole drafts in its last steps, whatever the others could read."""
    model = scattered(SHORT.replace(max_position_embeddings=24))
    starts = [random_ids(1, n, seed=n)[0].tolist() for n in (15, 4, 9)]
    ids, mask = padded(starts)
    options = {"mask": mask, "max_new_tokens": 10, "temperature": 0}
    plain = generate_ids(model, ids, **options)
    texts = [start + answer for start, answer in zip(starts, plain, strict=True)]
    for right in (lambda number: (0, 5, 5)[number], lambda number: (5, 0, 2)[number], mixed(5)):
        assert generate_ids(model, ids, speculate=Scripted(texts, 5, right), **options) == plain


def test_stop_ids_end_rows_in_the_middle_of_a_step(model):
    """Each of the first tokens of an answer as the stop id; the session is that of single tokens."""
    ids = random_ids(1, 6)
    (answer,) = generate_ids(model, ids, max_new_tokens=8, temperature=0)
    for stop in dict.fromkeys(answer):
        options = {"max_new_tokens": 8, "temperature": 0, "stop_ids": (stop,)}
        plain, session = Session(model), Session(model)
        expected = generate_ids(plain, ids, **options)
        drafter = Scripted([[*ids[0].tolist(), *answer]], 5, lambda number: 5)
        assert generate_ids(session, ids, speculate=drafter, **options) == expected == [answer[: answer.index(stop)]]
        assert session.fingerprint() == plain.fingerprint()


def test_rows_of_a_batch_end_at_stop_ids_of_their_own(answered):
    model, starts, plain = answered
    starts, plain = starts[:12], plain[:12]
    ids, mask = padded(starts)
    stops = {plain[1][3], plain[4][1], plain[7][0], plain[9][8]}
    texts = [start + answer for start, answer in zip(starts, plain, strict=True)]
    expected = [list(itertools.takewhile(lambda token: token not in stops, row)) for row in plain]
    assert len({len(row) for row in expected}) >= 4
    for right in (mixed(5), lambda number: 5):
        found = generate_ids(model, ids, mask=mask, max_new_tokens=10, temperature=0, stop_ids=stops,
                             speculate=Scripted(texts, 5, right))  # fmt: skip
        assert_same_choices(model, starts, found, expected)


def test_stop_texts_and_pieces_are_those_of_single_tokens():
    model = ds.example("text")
    prompt, options = "PROSPERO:\n", {"max_new_tokens": 16, "temperature": 0}
    whole, ids = generate(model, prompt, **options), model.tokenizer.encode(prompt)
    pieces = list(stream(model, prompt, **options))
    (answer,) = generate_ids(model, torch.tensor([ids]), **options)
    drafter = Scripted([[*ids, *answer]], 5, lambda number: 5)
    assert list(stream(model, prompt, speculate=drafter, **options)) == pieces
    for stop in (whole[5:8], whole[11], "never there"):
        plain, session = Session(model), Session(model)
        expected = generate(plain, prompt, stop=stop, **options)
        assert generate(session, prompt, stop=stop, speculate=drafter, **options) == expected
        assert session.lengths == plain.lengths
        assert generate(model, [prompt, prompt], stop=stop, speculate=drafter, **options) == [expected, expected]


@pytest.mark.parametrize("taken", range(1, 8))
def test_nothing_is_told_behind_the_token_that_ended_a_row(model, taken):
    """As a stop text does, in the middle of a step."""
    ids = random_ids(1, 6)
    written, states = plain_states(model, ids, 8)
    told, session = [], Session(model)
    drafter = Scripted([[*ids[0].tolist(), *written]], 5, lambda number: 5)
    for (token,) in tokens(session, ids, max_new_tokens=8, temperature=0, speculate=drafter,
                           ended=lambda row: len(told) == taken):  # fmt: skip
        told.append(token)
    assert told == written[:taken] and session.fingerprint() == states[taken - 1]


# ---- sampled ----


@pytest.mark.parametrize("kind", ["drawn", "certain"])
def test_500_answers_of_a_model_have_the_chances_of_single_tokens(model, kind):
    """All 27 beginnings of three tokens, where three are allowed at each place, at 1 %.

    The first token comes from the prefill, then drafts of two are judged; the drafter gets the chances wrong.
    """
    start, sampling = random_ids(1, 6)[0].tolist(), Sampling(3.0, top_k=3)
    exact = {(): 1.0}
    for _ in range(3):
        exact = {(*text, token): chance * float(behind[token]) for text, chance in exact.items()
                 for behind in [sampling.chances(choices(model, [*start, *text])[-1])]
                 for token in behind.nonzero().flatten().tolist()}  # fmt: skip
    if kind == "drawn":
        allowed = torch.zeros(64, dtype=torch.float64)
        allowed[[token for text in exact for token in text]] = 1
        q = allowed * torch.linspace(0.2, 1, 64, dtype=torch.float64)
        drafter = Guessing(q / q.sum(), 2)
    else:
        drafter = Certain(list(max(exact, key=exact.__getitem__))[1:])
    counts = Speculation()
    rows = generate_ids(model, torch.tensor([start] * 500), max_new_tokens=4, temperature=3.0, top_k=3, seed=11,
                        speculate=drafter, speculation=counts)  # fmt: skip
    drawn = Counter(tuple(row[:3]) for row in rows)
    assert drawn.keys() <= exact.keys() and counts.proposed > counts.accepted > 50
    found, limit = chi_square(torch.tensor([drawn[text] for text in exact]), torch.tensor([*exact.values()]))
    assert found < limit


@pytest.mark.parametrize("top_p", [None, 0.8])
def test_a_sampled_row_writes_in_a_batch_what_it_writes_alone(model, top_p):
    """Rows of different length that accept and end differently: none draws from the numbers of another."""
    starts = prompts(5, seed=3)
    q = torch.softmax(torch.randn(64, generator=torch.Generator().manual_seed(2), dtype=torch.float64), -1)
    options = {"max_new_tokens": 12, "temperature": 1.5, "top_p": top_p, "speculate": Guessing(q, 3)}
    lone = [generate_ids(model, torch.tensor([row]), seed=5 + b, **options)[0] for b, row in enumerate(starts)]
    stop = lone[1][4]
    expected = [list(itertools.takewhile(lambda token: token != stop, row)) for row in lone]
    ids, mask = padded(starts)
    assert generate_ids(model, ids, mask=mask, seed=5, stop_ids=(stop,), **options) == expected
    assert len({len(row) for row in expected}) > 1 and len(set(map(tuple, expected))) == 5


def test_a_seed_gives_a_text_and_another_seed_another():
    model = ds.example("text")
    first, again, other = (generate(model, "PROSPERO:\n", max_new_tokens=12, seed=seed, speculate=NGramDrafter(3))
                           for seed in (1, 1, 2))  # fmt: skip
    assert first == again != other
