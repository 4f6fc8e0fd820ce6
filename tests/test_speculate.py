"""Speculative decoding: the same answers as without a drafter, and a session that shows no trace of it."""

from __future__ import annotations

import pytest
import torch
from chi_square import chi_square_at_one_percent
from models import NANO, random_ids, scattered
from torch import Tensor

import tinyds41 as ds
from tinyds41.infer.draft import Draft, Sampling
from tinyds41.infer.generate import generate, generate_ids, stream, tokens
from tinyds41.infer.ngram_drafter import NGramDrafter
from tinyds41.infer.session import Session
from tinyds41.infer.speculate import Speculation, accept, check_draft

W = NANO.sliding_window
P = torch.tensor([0.5, 0.3, 0.2, 0.0, 0.0], dtype=torch.float64)  # truncated: the last two are never chosen
P2 = torch.tensor([0.1, 0.0, 0.25, 0.65, 0.0], dtype=torch.float64)
P3 = torch.tensor([0.0, 0.4, 0.0, 0.0, 0.6], dtype=torch.float64)
Q = torch.tensor([[0.15, 0.45, 0.0, 0.4, 0.0], [0.6, 0.0, 0.2, 0.0, 0.2]], dtype=torch.float64)


class Scripted:
    """Drafts what the model will write, wrong from token `right` on, in turns over the steps of a row.

    texts: prompts with their answers, in which a row finds itself.
    """

    def __init__(self, texts: list[list[int]], right, depth: int, n_ids: int = NANO.vocab_size):
        self.texts, self.right, self.depth, self.n_ids, self.n_calls = texts, right, depth, n_ids, 0

    def propose(self, session: Session, anchors: Tensor, depth: int, sampling, generators) -> Draft:
        rows = []
        for i, (text, anchor) in enumerate(zip(session.cache.texts, anchors.tolist(), strict=True)):
            seen = [*text, anchor]
            whole = next(whole for whole in self.texts if whole[: len(seen)] == seen)
            row = (whole[len(seen) :] + [0] * depth)[:depth]
            good = self.right(self.n_calls, i)
            rows.append(row[:good] + [(token + 1) % self.n_ids for token in row[good:]])
        self.n_calls += 1
        return Draft(torch.tensor(rows))


def texts_of(model, ids: Tensor, n: int) -> list[list[int]]:
    """Prompts with their greedy answers, and a few more tokens of each."""
    answers = generate_ids(model, ids, max_new_tokens=n + 6, temperature=0)
    return [[*prompt, *answer] for prompt, answer in zip(ids.tolist(), answers, strict=True)]


# ---- the rule ----


def test_tokens_are_distributed_as_the_target_whatever_the_draft():
    """200,000 drafts of two tokens; some chances are cut to 0 on both sides, as by top-k and top-p."""
    generator, n = torch.Generator().manual_seed(1), 200_000
    drafted = torch.stack([Q[i].multinomial(n, replacement=True, generator=generator) for i in range(2)], 1).tolist()
    first, second, third = ([0] * 5 for _ in range(3))
    for row in drafted:
        n_accepted, token = accept(lambda i: (P, P2, P3)[i], row, Q, generator)
        written = [*row[:n_accepted], token]
        for counts, choice in zip((first, second, third), written, strict=False):
            counts[choice] += 1
    assert sum(first) == n and sum(second) > n // 3 and sum(third) > n // 20
    for counts, chances in ((first, P), (second, P2), (third, P3)):
        assert chi_square_at_one_percent(counts, chances.tolist())


def test_a_certain_draft_is_weighed_against_the_target():
    generator, counts, n = torch.Generator().manual_seed(2), [0] * 5, 20_000
    for _ in range(n):
        n_accepted, token = accept(lambda i: (P, P2)[i], [1], None, generator)
        counts[1 if n_accepted else token] += 1
    assert chi_square_at_one_percent(counts, P.tolist())


def test_a_greedy_target_draws_nothing():
    generator = torch.Generator().manual_seed(3)
    state = generator.get_state()
    target = torch.eye(5, dtype=torch.float64)
    assert accept(lambda i: target[i], [0, 1, 4], None, generator) == (2, 2)
    assert accept(lambda i: target[i], [0, 1], None, generator) == (2, 2)
    assert torch.equal(state, generator.get_state())


# ---- greedy answers ----


@pytest.mark.parametrize("depth", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_greedy_answers_of_200_prompts_are_those_of_plain_decoding(depth, dtype):
    """40 prompts per depth and type, as one batch whose rows accept differently.

    In fp32 a step of several tokens differs from single ones in the last bits, which a cache format may enlarge to a
    whole code (spec 15): there the rows stay unrounded.
    """
    model = scattered(NANO.replace(quantize_cache=dtype == torch.float64), dtype=dtype)
    ids = random_ids(40, W + 3 + depth, seed=depth)
    texts = texts_of(model, ids, 12)
    for right in (lambda call, row: depth, lambda call, row: depth - 1, lambda call, row: 0,
                  lambda call, row: (call * 7 + row * 3) % (depth + 1)):  # fmt: skip
        counts = Speculation()
        found = generate_ids(model, ids, max_new_tokens=12, temperature=0, speculation=counts,
                             speculate=Scripted(texts, right, depth))  # fmt: skip
        for answer, text in zip(found, texts, strict=True):
            assert answer == text[ids.shape[1] : ids.shape[1] + 12]
        assert counts.proposed[0] > 0


@pytest.mark.parametrize("drafter", [True, NGramDrafter(4)])
def test_greedy_answers_with_a_real_drafter(drafter):
    model = scattered(draft=True)
    ids = random_ids(8, 20)
    plain = generate_ids(model, ids, max_new_tokens=10, temperature=0)
    counts = Speculation()
    assert generate_ids(model, ids, max_new_tokens=10, temperature=0, speculate=drafter, speculation=counts) == plain
    assert counts.proposed[0] > 0  # trap S4


def test_an_identity_drafter_is_always_right_at_any_length():
    """Trap S7: what is proposed stands at every distance from the start."""
    model = scattered()
    ids = random_ids(1, 5)
    texts = texts_of(model, ids, 60)
    counts = Speculation()
    generate_ids(model, ids, max_new_tokens=60, temperature=0, speculation=counts,
                 speculate=Scripted(texts, lambda call, row: 4, 4))  # fmt: skip
    assert counts.accepted == counts.proposed and counts.acceptance == [1.0] * 4
    assert counts.accepted_length == 1 + sum(counts.accepted) / counts.steps > 4


# ---- no trace ----


@pytest.mark.parametrize("right", range(5))
@pytest.mark.parametrize("length", [W - 2, W - 1, W, W + 1, W + 2, 2 * W + 1])
def test_a_session_shows_no_trace_of_rejected_tokens(right, length):
    """Trap S1: every number of accepted tokens, around W and at every phase of a group."""
    model = scattered(draft=True)
    ids = random_ids(1, length)
    texts = texts_of(model, ids, 11)
    plain, drafted = Session(model), Session(model)
    generate_ids(plain, ids, max_new_tokens=11, temperature=0)
    generate_ids(drafted, ids, max_new_tokens=11, temperature=0, speculate=Scripted(texts, lambda call, row: right, 4))
    assert drafted.lengths == plain.lengths == [length + 10]
    assert drafted.fingerprint() == plain.fingerprint()


def test_rows_of_different_length_show_no_trace():
    model = scattered(draft=True)
    ids = random_ids(3, 17)
    mask = torch.arange(17) >= torch.tensor([[0], [4], [9]])
    alone = [generate_ids(model, row[keep].unsqueeze(0), max_new_tokens=9, temperature=0)[0]
             for row, keep in zip(ids, mask, strict=True)]  # fmt: skip
    texts = [[*row[keep].tolist(), *answer, *[0] * 5] for row, keep, answer in zip(ids, mask, alone, strict=True)]
    session = Session(model)
    script = Scripted(texts, lambda call, row: (call + row) % 4, 3)
    written: list[list[int]] = [[], [], []]
    for new in tokens(session, ids, mask=mask, max_new_tokens=9, temperature=0, speculate=script):
        for row, token in zip(written, new, strict=True):
            row += [] if token is None else [token]
    assert written == alone


@pytest.mark.parametrize("n_kept", range(1, 10))
def test_whoever_stops_early_leaves_a_session_as_plain_decoding_would(n_kept):
    model = scattered()
    ids = random_ids(1, 12)
    texts = texts_of(model, ids, 12)
    prints = []
    for speculate in (False, Scripted(texts, lambda call, row: 4, 4)):
        session = Session(model)
        given = tokens(session, ids, max_new_tokens=12, temperature=0, speculate=speculate)
        for _ in range(n_kept):
            next(given)
        given.close()
        assert session.lengths == [12 + n_kept - 1]
        prints.append(session.fingerprint())
    assert prints[0] == prints[1]


@pytest.mark.parametrize("at", range(8))
def test_a_stop_id_inside_a_draft_ends_the_answer(at):
    model = scattered()
    ids = random_ids(1, 12)
    texts = texts_of(model, ids, 10)
    stop = texts[0][12 + at]
    answers, prints = [], []
    for speculate in (False, Scripted(texts, lambda call, row: 4, 4)):
        session = Session(model)
        answers += generate_ids(session, ids, max_new_tokens=10, temperature=0, stop_ids=[stop], speculate=speculate)
        prints.append(session.fingerprint())
    assert answers[0] == answers[1] and stop not in answers[0]
    assert prints[0] == prints[1]


@pytest.mark.parametrize("n", range(8))
def test_never_more_tokens_than_asked_for(n):
    model = scattered()
    ids = random_ids(1, 12)
    texts = texts_of(model, ids, 8)
    session = Session(model)
    script = Scripted(texts, lambda call, row: 5, 5)
    assert generate_ids(session, ids, max_new_tokens=n, temperature=0, speculate=script) == [texts[0][12 : 12 + n]]
    assert session.lengths == [12 + max(0, n - 1)]


def test_the_last_position_can_be_reached():
    model = scattered(NANO.replace(max_position_embeddings=32))
    ids = random_ids(1, 26)
    plain = generate_ids(model, ids, max_new_tokens=7, temperature=0)
    script = Scripted([[*ids[0].tolist(), *plain[0], *[0] * 9]], lambda call, row: 5, 5)
    assert generate_ids(model, ids, max_new_tokens=7, temperature=0, speculate=script) == plain


# ---- sampling ----


def test_a_row_writes_what_it_writes_alone():
    model = scattered(draft=True)
    ids = random_ids(3, 12)
    options = {"max_new_tokens": 9, "temperature": 0.8, "top_k": 20, "speculate": True}
    together = generate_ids(model, ids, seed=5, **options)
    assert together == [generate_ids(model, row.unsqueeze(0), seed=5 + b, **options)[0] for b, row in enumerate(ids)]


@pytest.mark.parametrize("drafter", [True, NGramDrafter(3)])
def test_500_draws_through_a_model_follow_its_chances(drafter):
    """The first two tokens of 500 rows, with the likeliest 3 each time, against the products of the model's chances."""
    model, sampling = scattered(draft=True), Sampling(1.5, top_k=3)
    ids = random_ids(1, 14)
    first = sampling.chances(model(ids)[0, -1].detach())
    cells, chances = {}, []
    for a in first.nonzero().flatten().tolist():
        second = sampling.chances(model(torch.cat([ids, torch.tensor([[a]])], 1))[0, -1].detach())
        for b in second.nonzero().flatten().tolist():
            cells[a, b] = len(chances)
            chances.append(float(first[a] * second[b]))
    counts = [0] * len(chances)
    rows = generate_ids(model, ids.expand(500, -1), max_new_tokens=2 + 1, temperature=1.5, top_k=3, speculate=drafter,
                        draft_tokens=2)  # fmt: skip
    for row in rows:
        counts[cells[row[0], row[1]]] += 1
    assert chi_square_at_one_percent(counts, chances)


# ---- texts ----


def test_texts_and_streams_are_those_of_plain_decoding():
    model = ds.example("text")
    prompts = ["KING: ", "The night is "]
    plain = generate(model, prompts, max_new_tokens=16, temperature=0)
    assert generate(model, prompts, max_new_tokens=16, temperature=0, speculate=NGramDrafter(4)) == plain
    pieces = list(stream(model, prompts[0], max_new_tokens=16, temperature=0, speculate=NGramDrafter(4)))
    assert "".join(pieces) == plain[0]
    stop = plain[0][6:9]
    cut = generate(model, prompts[0], max_new_tokens=16, temperature=0, stop=stop, speculate=NGramDrafter(4))
    assert cut == plain[0][: plain[0].index(stop)]


# ---- refusals ----


def test_without_a_drafter_the_reason_is_named():
    with pytest.raises(ValueError, match=r"this model has no drafter"):
        generate_ids(scattered(), random_ids(1, 5), max_new_tokens=3, speculate=True)


@pytest.mark.parametrize(("n", "message"), [(0, r"draft_tokens=0: .* 1 to 5"), (6, r"draft_tokens=6: .* 1 to 5")])
def test_draft_lengths_beyond_the_trained_block_are_refused(n, message):
    with pytest.raises(ValueError, match=message):
        generate_ids(scattered(draft=True), random_ids(1, 5), max_new_tokens=3, speculate=True, draft_tokens=n)


def test_a_session_must_be_able_to_take_a_draft_back():
    with pytest.raises(ValueError, match=r"draft_tokens=4: .* rollback=3"):
        generate_ids(Session(scattered(), rollback=3), random_ids(1, 5), max_new_tokens=3,
                     speculate=NGramDrafter(4))  # fmt: skip


def test_odd_options_are_refused():
    model, ids = scattered(), random_ids(1, 5)
    with pytest.raises(ValueError, match=r"draft_tokens=2 without speculate"):
        generate_ids(model, ids, max_new_tokens=3, draft_tokens=2)
    with pytest.raises(ValueError, match=r"speculate='yes'"):
        generate_ids(model, ids, max_new_tokens=3, speculate="yes")


@pytest.mark.parametrize(("draft", "message"), [
    (Draft(torch.zeros(1, 3, dtype=torch.long)), r"shape \(1, 3\), expected \(1, 2\)"),
    (Draft(torch.tensor([[0, 9]])), r"id 9: the model's ids are 0..4"),
    (Draft(torch.tensor([[-1, 0]])), r"id -1"),
    (Draft(torch.tensor([[0, 1]]), Q[None, :, :3]), r"chances have shape \(1, 2, 3\)"),
    (Draft(torch.tensor([[0, 0]]), 2 * Q[None]), r"add up to 2..2 instead of 1"),
    (Draft(torch.tensor([[0, 0]]), Q[None] * torch.nan), r"add up to nan"),
    (Draft(torch.tensor([[0, 0]]), Q[None] + torch.tensor([0.1, -0.1, 0, 0, 0])), r"none may be negative"),
    (Draft(torch.tensor([[0, 1]]), Q[None]), r"chance 0 to a token"),
])  # fmt: skip
def test_impossible_drafts_are_refused(draft, message):
    with pytest.raises(ValueError, match=message):
        check_draft(draft, 1, 2, 5)


def test_a_drafter_of_another_vocabulary_is_refused():
    class Foreign(NGramDrafter):
        def propose(self, session, anchors, depth, sampling, generators):
            return Draft(torch.full((len(anchors), depth), NANO.vocab_size))

    with pytest.raises(ValueError, match=rf"id {NANO.vocab_size}: the model's ids are"):
        generate_ids(scattered(), random_ids(1, 5), max_new_tokens=3, speculate=Foreign(2))
