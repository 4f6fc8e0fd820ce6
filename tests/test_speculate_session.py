"""Speculation with the model's own drafter: the same answers as without, and no trace in what it keeps."""

from __future__ import annotations

import pytest
import torch
from chi_square import chi_square_at_one_percent
from models import NANO, random_ids, scattered
from torch import Tensor

from tinyds41.infer.draft import Draft, Sampling
from tinyds41.infer.generate import generate_ids, tokens
from tinyds41.infer.ngram_drafter import NGramDrafter
from tinyds41.infer.session import Session
from tinyds41.infer.speculate import Speculation

W = NANO.sliding_window
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


@pytest.mark.parametrize("drafter", [True, NGramDrafter(4)])
def test_greedy_answers_with_a_real_drafter(drafter):
    model = scattered(draft=True)
    ids = random_ids(8, 20)
    plain = generate_ids(model, ids, max_new_tokens=10, temperature=0)
    counts = Speculation()
    assert generate_ids(model, ids, max_new_tokens=10, temperature=0, speculate=drafter, speculation=counts) == plain
    assert counts.proposed > 0  # trap S4


def test_an_identity_drafter_is_always_right_at_any_length():
    """Trap S7: what is proposed stands at every distance from the start."""
    model = scattered()
    ids = random_ids(1, 5)
    texts = texts_of(model, ids, 60)
    counts = Speculation()
    generate_ids(model, ids, max_new_tokens=60, temperature=0, speculation=counts,
                 speculate=Scripted(texts, lambda call, row: 4, 4))  # fmt: skip
    assert counts.accepted == counts.proposed and counts.acceptance == [1.0] * 4
    assert counts.accepted_length > 4


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


