"""What teaches a drafter: where its blocks begin in training texts, and the three losses of a block."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tinyds41.mixing import at_least_fp32
from tinyds41.model.context import PADDING

SHARES = {"ce": 0.1, "tv": 0.9, "confidence": 1.0}  # of the losses in their sum (spec 10.4)


@dataclass(frozen=True)
class DraftLoss:
    """Losses of some blocks and what they say of the drafts.

    total: 0.1 ce + 0.9 tv + 1.0 confidence, each a mean over blocks and, weighted, over positions. acceptance [n,k]:
    the chance 1 - TV that a token stands once those before it do. Units: ce and confidence in nats.
    """

    total: Tensor
    ce: Tensor
    tv: Tensor
    confidence: Tensor
    acceptance: Tensor

    @property
    def accepted_length(self) -> float:
        """Tokens a step brings when it drafts whole blocks: 1 + the sum over k of the chances up to k, multiplied."""
        return 1 + float(self.acceptance.cumprod(-1).sum(-1).mean())


def position_weights(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """e^(-(k-1)/size) for k = 1..size, over their sum. Shapes: [size]. Source: spec 10.4; the decay is ours."""
    weights = torch.exp(-torch.arange(size, dtype=dtype, device=device) / size)
    return weights / weights.sum()


def draft_loss(draft: Tensor, target: Tensor, tokens: Tensor, confidence: Tensor) -> DraftLoss:
    """The three losses of n blocks; the target and what confidence shall foretell pass no gradient.

    Shapes: draft and target [n,k,V] logits of the same positions, tokens [n,k] what stands there, confidence [n,k]
        logits.
    Raises: ValueError for shapes that do not fit each other.
    Source: spec 10.4.
    """
    shape = tuple(tokens.shape)
    if draft.shape != target.shape or draft.shape[:2] != shape or confidence.shape != shape:
        raise ValueError(f"draft {tuple(draft.shape)}, target {tuple(target.shape)}, tokens {shape}, confidence "
                         f"{tuple(confidence.shape)}: expected [n,k,V] twice and [n,k] twice")  # fmt: skip
    draft, target = at_least_fp32(draft), at_least_fp32(target).detach()
    ce_nk = F.cross_entropy(draft.flatten(0, 1), tokens.flatten(), reduction="none").view(shape)
    tv_nk = (draft.softmax(-1) - target.softmax(-1)).abs().sum(-1) / 2
    acceptance_nk = (1 - tv_nk).detach().clamp(0, 1)
    bce_nk = F.binary_cross_entropy_with_logits(at_least_fp32(confidence), acceptance_nk, reduction="none")
    weight_k = position_weights(shape[1], ce_nk.dtype, ce_nk.device)
    ce, tv, bce = ((loss_nk * weight_k).sum(-1).mean() for loss_nk in (ce_nk, tv_nk, bce_nk))
    total = SHARES["ce"] * ce + SHARES["tv"] * tv + SHARES["confidence"] * bce
    return DraftLoss(total, ce, tv, bce, acceptance_nk)


def choose_anchors(
    ids: Tensor, documents: Tensor | None, n: int, size: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Row and token number of n anchors whose block lies in one document, each at most once; all where there are fewer.

    The token of an anchor and the `size` behind it are of the same run of ids. Shapes: ids and documents [B,S+1] ->
        two of [<= n].
    Raises: ValueError where no document has size + 1 tokens.
    Source: spec 10.4.
    """
    n_starts = ids.shape[1] - size
    if documents is None:
        fits = torch.ones(ids.shape[0], max(0, n_starts), dtype=torch.bool)
    else:
        documents = documents.cpu()
        run = F.pad((documents[:, 1:] != documents[:, :-1]).long(), (1, 0)).cumsum(1)
        fits = (run[:, :max(0, n_starts)] == run[:, size:]) & (documents[:, size:] != PADDING)
    places = fits.nonzero()
    if not len(places):
        raise ValueError(f"no document of {tuple(ids.shape)} ids has {size + 1} tokens, for an anchor and its block")
    chosen = places[torch.randperm(len(places), generator=generator)[:n]].to(ids.device)
    return chosen[:, 0], chosen[:, 1]
