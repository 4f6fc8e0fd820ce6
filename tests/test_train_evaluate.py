"""Held-out loss, bits per character and the unigram baseline against plain counting."""

import math

import pytest
import torch

from tinyds41.config import Config
from tinyds41.model.transformer import Model
from tinyds41.train.corpus import Corpus
from tinyds41.train.evaluate import bits_per_character, evaluate, unigram
from tinyds41.train.kneser_ney import Trigram


@pytest.fixture(scope="module")
def model():
    torch.set_num_threads(1)
    return Model(Config.preset("nano"), seed=1)


@pytest.fixture
def corpus():
    """Three documents of 20 tokens, 130 characters behind them."""
    ids = torch.randint(3, 64, (60,), generator=torch.Generator().manual_seed(0))
    return Corpus(ids.int(), (torch.arange(60) // 20).int(), characters=130)


def test_a_model_that_knows_nothing_loses_ln_v(model, corpus):
    blank = Model(Config.preset("nano"))
    torch.nn.init.zeros_(blank.head.weight)
    found = evaluate(blank, corpus, length=7, batch_size=2)
    # fp32 log-softmax.
    assert found.loss == pytest.approx(math.log(64), abs=1e-6)
    # 8 windows of 7 targets; 2 of the targets open another document.
    assert found.n_tokens == 56 - 2
    assert found.unigram_loss is None


def test_the_loss_is_the_mean_over_targets_whatever_the_batch(model, corpus):
    one, four = (evaluate(model, corpus, length=7, batch_size=n) for n in (1, 4))
    total, count = 0.0, 0
    for start in range(0, 56, 7):
        ids, documents = corpus.ids[start : start + 8].long(), corpus.documents[start : start + 8]
        logits = model(ids[None, :-1], documents=documents[None, :-1].long())[0].detach()
        for t in range(7):
            if documents[t] == documents[t + 1]:
                total, count = total - float(logits[t].log_softmax(0)[ids[t + 1]]), count + 1
    # fp32 sums in another order; a batch of another size may round FP8 and FP4 codes differently.
    assert one.loss == pytest.approx(total / count, abs=1e-5)
    assert four.loss == pytest.approx(total / count, abs=1e-3)


def test_the_unigram_baseline_counts_the_training_text_plus_one(model, corpus):
    train = Corpus(torch.tensor([3, 3, 3, 9, 50] * 10).int())
    counts = {token: int((train.ids == token).sum()) + 1 for token in range(64)}
    wanted = [int(corpus.ids[i]) for i in range(1, 57) if corpus.documents[i] == corpus.documents[i - 1]]
    plain = -sum(math.log(counts[token] / (50 + 64)) for token in wanted) / len(wanted)
    assert evaluate(model, corpus, train=train, length=7).unigram_loss == pytest.approx(plain, abs=1e-12)
    assert float(unigram(train.ids, 64).exp().sum()) == pytest.approx(1, abs=1e-12)


def test_the_trigram_is_asked_about_the_tokens_that_the_model_predicts(model, corpus):
    train = Corpus(torch.tensor([3, 4, 5, 9, 50] * 10).int())
    trigram, total, count = Trigram(train, 64), 0.0, 0
    for start in range(0, 56, 7):
        ids, documents = corpus.ids[start : start + 8].long(), corpus.documents[start : start + 8].long()
        shares = trigram.log_shares(ids[None], documents[None])[0]
        own = documents[1:] == documents[:-1]
        total, count = total - float(shares[own].sum()), count + int(own.sum())
    found = evaluate(model, corpus, trigram=trigram, length=7)
    assert found.trigram_loss == pytest.approx(total / count, abs=1e-12) and count == found.n_tokens
    assert found.unigram_loss is None and evaluate(model, corpus, train=train, length=7).trigram_loss is None


def test_bits_per_character_spread_the_loss_of_predicted_tokens_over_the_text(corpus):
    # 57 tokens are predicted (3 open a document), 130 characters.
    assert bits_per_character(2.0, corpus) == pytest.approx(2 * 57 / math.log(2) / 130)
    assert bits_per_character(2.0, Corpus(corpus.ids)) is None


def test_max_tokens_stops_early(model, corpus):
    assert evaluate(model, corpus, length=7, batch_size=1, max_tokens=10).n_tokens == 14


def test_a_text_without_a_predictable_token_is_refused(model):
    lonely = Corpus(torch.arange(20).int(), torch.arange(20).int())
    with pytest.raises(ValueError, match="none of the 20 tokens"):
        evaluate(model, lonely, length=7)
