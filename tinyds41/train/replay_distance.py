"""How far a prompt whose beginning was found, or whose decoder ran on its end alone, is from one read whole."""

from __future__ import annotations

import torch
from torch import Tensor

from tinyds41.model.transformer import Model
from tinyds41.train.corpus import Corpus
from tinyds41.train.losses import run
from tinyds41.train.replay import Hits, run_replayed

ROWS, BEHIND = 8, 16  # passages, and predictions from a prompt's last token on
PROMPTS = {"kl_bounded_prefill": (0, 112), "kl_resumed": (96, 112)}  # tokens found, tokens of the prompt


def divergence(cold: Tensor, other: Tensor) -> float:
    """Mean KL(cold || other) of next-token distributions. Shapes: logits [B,V]. Units: nats."""
    log_p, log_q = cold.double().log_softmax(-1), other.double().log_softmax(-1)
    return float((log_p.exp() * (log_p - log_q)).sum(-1).mean())


@torch.no_grad()
def replay_distances(model: Model, held_out: Corpus) -> dict[str, float]:
    """KL from a cold reading: of a bounded prefill, and of a prompt that was mostly found; means over passages.

    Windows of the model must be shorter than what is found, or nothing is cut.
    Units: nats, of the predictions of the prompt's last token and those behind it.
    Raises: ValueError for a text without a passage of the length needed.
    """
    found = {}
    for name, (hit, prompt) in PROMPTS.items():
        held_out.require(prompt + BEHIND)
        rows = next(iter(held_out.in_order(ROWS, prompt + BEHIND - 1))).ids[:, :-1]
        cold, _ = run(model, rows)
        hits = Hits(torch.full((len(rows),), hit), torch.full((len(rows),), prompt))
        replayed, _ = run_replayed(model, rows, None, hits)
        found[name] = divergence(cold[:, prompt - 1 :].flatten(0, 1), replayed[:, prompt - 1 :].flatten(0, 1))
    return found
