"""What a model's own drafter proposes along texts, and what would become of it: for calibration and the simulator."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tinyds41.infer.draft import Sampling
from tinyds41.infer.dspark_drafter import DSparkDrafter
from tinyds41.infer.session import Session
from tinyds41.infer.speculate import accept
from tinyds41.model.transformer import Model

LARGEST = 1 - torch.finfo(torch.float64).eps  # of a confidence: logits beyond 36 are 36


@dataclass(frozen=True)
class RecordedDrafts:
    """Drafts behind anchors of texts.

    Shapes, of n drafts of k tokens: tokens [n,k] ids; logits [n,k] float64, of the confidences without temperatures;
        chances [n,k] float64, min(1, p/q) of each drawn token; accepted [n] how many stood, 0..k; passages [n] row of
        the texts; positions [n] of the anchors in it.
    """

    tokens: Tensor
    logits: Tensor
    chances: Tensor
    accepted: Tensor
    passages: Tensor
    positions: Tensor


@torch.no_grad()
def record_drafts(
    model: Model, rows: Tensor, *, start: int, every: int, sampling: Sampling | None = None, seed: int = 0
) -> RecordedDrafts:
    """Drafts behind the tokens start, start + every, ... of each row, judged by the model; the text goes on as it is.

    Tokens are drawn as in `generate(speculate=True)`, by default at temperature 1; row b draws from seed + b.

    Shapes: rows [B,S] ids.
    Raises: ValueError for a model without a drafter, start or every below 1, rows too short for a draft behind
        `start`, and as `Session`.
    Source: spec 10.3, 10.5, 10.7.
    """
    sampling = sampling or Sampling(temperature=1.0)
    drafter, n_columns = DSparkDrafter(model), rows.shape[-1]
    if start < 1 or every < 1:
        raise ValueError(f"start={start}, every={every}: at least 1 is needed")
    if n_columns <= start + drafter.depth:
        raise ValueError(f"rows of {n_columns} tokens: a draft of {drafter.depth} behind the token start={start} needs "
                         f"{start + drafter.depth + 1}")  # fmt: skip
    session = Session(model, rollback=drafter.depth)
    session.prefill(rows[:, :start], mode="full")
    generators = [torch.Generator().manual_seed(seed + b) for b in range(len(rows))]
    anchors = range(start, n_columns - drafter.depth, every)
    parts = []
    for place in anchors:
        parts.append(_judged(session, drafter, rows[:, place], sampling, generators))
        session.truncate([place + 1] * len(rows))
        if place != anchors[-1] and every > 1:
            session.extend(rows[:, place + 1 : place + every])
    tokens, logits, chances, accepted = (torch.cat(columns) for columns in zip(*parts, strict=True))
    return RecordedDrafts(tokens, logits, chances, accepted, torch.arange(len(rows)).repeat(len(anchors)),
                          torch.tensor(anchors).repeat_interleave(len(rows)))  # fmt: skip


def _judged(
    session: Session, drafter: DSparkDrafter, anchors: Tensor, sampling: Sampling, generators: list[torch.Generator]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One draft per row; afterwards the session has read the anchor and the draft."""
    draft = drafter.propose(session, anchors, drafter.depth, sampling, generators)
    logits = session.extend(torch.cat([anchors.unsqueeze(1), draft.tokens.to(anchors.device)], 1))
    n_ids = session.model.config.vocab_size if session.model.tokenizer is None else session.model.tokenizer.vocab_size
    p = sampling.chances(logits[..., :n_ids].cpu())
    tokens, q = draft.tokens.cpu(), None if draft.chances is None else draft.chances[..., :n_ids].cpu()
    uniforms = torch.stack([torch.rand(drafter.depth, generator=g, dtype=p.dtype) for g in generators])
    assert draft.confidence is not None
    confidence = draft.confidence.clamp(1 - LARGEST, LARGEST)
    return tokens, torch.logit(confidence), _chances(p, q, tokens), accept(p, q, tokens, uniforms)[0]


def _chances(p: Tensor, q: Tensor | None, tokens: Tensor) -> Tensor:
    """min(1, p[x]/q[x]) of drawn tokens; q is 1 where they were certain. Shapes: [B,k+1,V], [B,k,V], [B,k] -> [B,k]."""
    p_token = p[:, :-1].gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    q_token = 1.0 if q is None else q.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    return (p_token / q_token).clamp(max=1)
