"""How far a prompt whose beginning was found, or whose decoder ran on its end alone, is from one read whole."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from tinyds41.model.transformer import Model
from tinyds41.train.corpus import Corpus
from tinyds41.train.dialogue_task import Dialogue
from tinyds41.train.losses import run
from tinyds41.train.replay import Hits, run_replayed
from tinyds41.train.tasks import TEST_STEP

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


@torch.no_grad()
def resumed_answers(
    model: Model, task: Dialogue, *, length: int, n_rows: int = 64, seed: int = 0
) -> dict[str, dict[str, float]]:  # fmt: skip
    """What a model answers at the end of each turn but the first, by how much of the dialogue lay in a store.

    `cold`: nothing, read whole. `turns before`: all but the newest turn. `all`: everything, so that only the last
    token runs again beside the replay. Each has `right`, the share of right answers, and `kl`, from the cold reading.

    The rows are those of a step that training never reaches. Units: nats.
    Raises: ValueError for less than one row, and as the task's `batch`.
    """
    if n_rows < 1:
        raise ValueError(f"n_rows={n_rows}: at least one row is needed")
    ids, _, wanted = task.batch(TEST_STEP, n_rows, length, seed)
    assert wanted is not None
    ids, ends = ids[:, :-1].to(model.device), task.ends(length)
    asked = torch.tensor(ends[1:]) - 1
    cold, _ = run(model, ids)
    said: dict[str, list[Tensor]] = {"cold": list(cold[:, asked].unbind(1)), "turns before": [], "all": []}
    for before, end in pairwise(ends):
        for name, found in (("turns before", before), ("all", end)):
            hits = Hits(torch.full((n_rows,), found), torch.full((n_rows,), end))
            said[name].append(run_replayed(model, ids, None, hits)[0][:, end - 1])
    logits = {name: torch.stack(parts, 1) for name, parts in said.items()}
    right = {name: (own.argmax(-1).cpu() == wanted[:, asked]).double().mean().item() for name, own in logits.items()}
    return {name: {"right": right[name], "kl": divergence(logits["cold"].flatten(0, 1), own.flatten(0, 1))}
            for name, own in logits.items()}  # fmt: skip
