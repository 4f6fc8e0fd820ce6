"""How good a model is on held-out text, and what counting words alone would reach on the same tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tinyds41.mixing import at_least_fp32
from tinyds41.model.transformer import Model
from tinyds41.train.corpus import Corpus, Numbers
from tinyds41.train.kneser_ney import Trigram
from tinyds41.train.losses import IGNORED, targets


@dataclass(frozen=True)
class Evaluation:
    """Mean loss over held-out tokens.

    Units: the losses in nats per token; bits_per_character in bits; n_tokens counts predicted tokens.
    """

    loss: float
    bits_per_character: float | None  # None when the corpus does not know its characters
    n_tokens: int
    unigram_loss: float | None  # None without a training text to count
    trigram_loss: float | None = None  # None without a trigram


@torch.no_grad()
def evaluate(
    model: Model, corpus: Corpus, *, train: Corpus | None = None, trigram: Trigram | None = None,
    length: int = 256, batch_size: int = 8, max_tokens: int | None = None,
) -> Evaluation:  # fmt: skip
    """The loss over consecutive windows of `corpus`, at most about `max_tokens`.

    `train` gives the unigram baseline, `trigram` its own.

    Differs: every window starts with an empty context, so the loss is a little above that of one long pass.
    Raises: ValueError when no window of the corpus has a token to predict.
    """
    total, unigram_total, trigram_total, n_tokens = 0.0, 0.0, 0.0, 0
    log_share_V = None if train is None else unigram(train.ids, model.config.vocab_size)
    for ids, documents, _ in corpus.in_order(batch_size, length):
        wanted = targets(ids, documents)
        present = wanted != IGNORED
        logits = model(ids[:, :-1].to(model.device), documents=_inputs(documents, model.device))
        total += _total_loss(logits, wanted.to(model.device))
        if log_share_V is not None:
            unigram_total -= float(log_share_V[wanted[present]].sum())
        if trigram is not None:
            trigram_total -= float(trigram.log_shares(ids, documents)[present].sum())
        n_tokens += int(present.sum())
        if max_tokens is not None and n_tokens >= max_tokens:
            break
    if not n_tokens:
        raise ValueError(f"none of the {len(corpus)} tokens can be predicted from its own document")
    loss = total / n_tokens
    return Evaluation(loss, bits_per_character(loss, corpus), n_tokens,
                      None if train is None else unigram_total / n_tokens,
                      None if trigram is None else trigram_total / n_tokens)  # fmt: skip


def _inputs(documents: Tensor | None, device: torch.device) -> Tensor | None:
    return None if documents is None else documents[:, :-1].to(device)


def _total_loss(logits: Tensor, wanted: Tensor) -> float:
    flat = at_least_fp32(logits).flatten(0, 1)
    return float(F.cross_entropy(flat, wanted.flatten(), ignore_index=IGNORED, reduction="sum"))


def bits_per_character(loss: float, corpus: Corpus) -> float | None:
    """Nats per token to bits per character of the text.

    The first token of a document is given, not predicted.
    """
    if not corpus.characters:
        return None
    return loss / math.log(2) * (len(corpus) - corpus.n_documents) / corpus.characters


def unigram(ids: Numbers, vocab_size: int) -> Tensor:
    """log share of each token in a text, each counted once more so that none is impossible.

    Shapes: [T] -> [V].
    """
    counts_V = torch.ones(vocab_size, dtype=torch.float64)
    for first in range(0, len(ids), 2**20):  # a mapped text may be longer than memory
        counts_V += torch.bincount(ids[first : first + 2**20].long(), minlength=vocab_size)
    return (counts_V / counts_V.sum()).log()
