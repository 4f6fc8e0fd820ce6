"""The Kneser-Ney trigram against sums over a dictionary, written from the definition."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from tinyds41.train.corpus import Corpus
from tinyds41.train.kneser_ney import Trigram

V = 6


def text(seed=0, n=60, documents=3):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, V, (n,), generator=generator).square() % V
    return Corpus(ids.int(), torch.arange(n).mul(documents).div(n, rounding_mode="floor").int())


def slow_share(corpus, before, token):
    """Interpolated Kneser-Ney, one token at a time."""
    ids, borders = corpus.ids.tolist(), corpus.documents.tolist()
    trigrams = Counter(tuple(ids[i : i + 3]) for i in range(len(ids) - 2) if borders[i] == borders[i + 2])
    bigrams = Counter(run[1:] for run in trigrams)
    counts = {3: trigrams, 2: bigrams, 1: Counter(run[1:] for run in bigrams)}

    def share(context):
        order = len(context) + 1
        same = {run: n for run, n in counts[order].items() if run[:-1] == context}
        shorter = share(context[1:]) if context else 1 / V
        if not same:
            return shorter
        once, twice = (sum(n == k for n in counts[order].values()) for k in (1, 2))
        discount = once / (once + 2 * twice) if once else 0.5
        found = max(same.get((*context, token), 0) - discount, 0) + discount * len(same) * shorter
        return found / sum(same.values())

    return share(tuple(before))


@pytest.mark.parametrize("seed", range(4))
def test_shares_are_those_of_the_definition(seed):
    corpus = text(seed)
    asked = torch.randint(0, V, (5, 8), generator=torch.Generator().manual_seed(seed + 10))
    found = Trigram(corpus, V).log_shares(asked).exp()
    assert found.dtype == torch.float64 and found.shape == (5, 7)
    for row, shares in zip(asked.tolist(), found.tolist(), strict=True):
        slow = [slow_share(corpus, row[max(0, i - 2) : i], row[i]) for i in range(1, len(row))]
        assert shares == pytest.approx(slow, rel=1e-12)


def test_shares_of_all_tokens_add_up_to_one_after_any_two():
    trigram = Trigram(text(), V)
    for context in ([0, 1], [5, 5], [2, 4]):
        rows = torch.tensor([[*context, token] for token in range(V)])
        assert trigram.log_shares(rows)[:, -1].exp().sum().item() == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("ids", ([1, 2, 3, 1, 2, 3, 1], [*range(1, 5), *[i for a in range(1, 5) for i in (a, a, 1)]]))
def test_a_token_that_no_text_has_is_not_impossible(ids):
    """In the second text no token stands behind one other alone."""
    corpus = Corpus(torch.tensor(ids).int())
    assert Trigram(corpus, 9).log_shares(torch.tensor([[1, 2, 8]])).isfinite().all()


def test_no_run_crosses_a_border_of_documents():
    one, other, borders = [1, 2, 3] * 3, [4, 5, 0] * 3, torch.tensor([0] * 9 + [1] * 9).int()
    apart = Trigram(Corpus(torch.tensor(one + other).int(), borders), V)
    again = Trigram(Corpus(torch.tensor(other + one).int(), borders), V)
    asked = torch.tensor([[2, 3, 4], [1, 2, 3]])
    assert torch.equal(apart.log_shares(asked), again.log_shares(asked))


def test_a_row_that_changes_its_document_forgets_the_one_before():
    trigram = Trigram(text(), V)
    whole = trigram.log_shares(torch.tensor([[1, 2, 4, 3]]), torch.tensor([[0, 0, 1, 1]]))
    alone = trigram.log_shares(torch.tensor([[0, 4, 3]]), torch.tensor([[0, 1, 1]]))
    assert torch.equal(whole[:, 1:], alone)
    assert whole[0, 1].exp().item() == pytest.approx(slow_share(text(), [], 4))


def test_rows_that_it_has_read_are_likelier_than_others():
    corpus = Corpus((torch.arange(300) % 3).int())
    shares = Trigram(corpus, V).log_shares(torch.tensor([[0, 1, 2, 0], [0, 2, 1, 0]]))
    assert shares[0, 1:].min() > math.log(0.9) > math.log(0.2) > shares[1, 1:].max()


def test_what_cannot_be_counted_is_refused():
    with pytest.raises(ValueError, match=r"ids 1 to 7 do not fit vocab_size=6"):
        Trigram(Corpus(torch.tensor([1, 7, 2]).int()), V)
    with pytest.raises(ValueError, match=r"none of the 4 tokens has two others"):
        Trigram(Corpus(torch.tensor([1, 2, 3, 4]).int(), torch.tensor([0, 0, 1, 1]).int()), V)
