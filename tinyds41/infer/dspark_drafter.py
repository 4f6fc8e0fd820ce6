"""The model's own drafter at work: one run of the draft blocks, then token after token from its heads."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tinyds41.infer.draft import Draft, Sampling
from tinyds41.infer.session import Session
from tinyds41.model.draft_context import DraftContext
from tinyds41.model.transformer import Model


class DSparkDrafter:
    """Proposes tokens by the draft blocks of `model`, for sessions of that model; see `Drafter`.

    The block is not causal, so all of its slots are computed whatever the depth, and the first ones are given. Token k
    is drawn from base logits plus the Markov bias of token k - 1; a temperature above 0 draws, 0 takes the likeliest.

    temperatures: by which the confidence logits of each position are divided; none leaves them as they are.

    Raises: ValueError for a model without a drafter, temperatures that are too few or not above 0.
    Source: spec 10.2, 10.3, 10.5.
    """

    def __init__(self, model: Model, temperatures: Sequence[float] = ()):
        self.model, self._blocks = model, model.drafter
        if temperatures and (len(temperatures) != self.depth or min(temperatures) <= 0):
            raise ValueError(f"temperatures={tuple(temperatures)}: {self.depth} positive numbers are needed, or none")
        self.temperatures = tuple(temperatures)

    @property
    def depth(self) -> int:
        """The block the drafter was trained with."""
        return self.model.config.dspark_block_size or 0

    @torch.no_grad()
    def propose(
        self, session: Session, anchors: Tensor, depth: int, sampling: Sampling, generators: list[torch.Generator]
    ) -> Draft:
        """See `Drafter.propose`. Chances are None at temperature 0; ids behind the tokenizer's have none.

        Raises: ValueError for a depth beyond the trained block, a session of another model, anchors that are no ids;
            FloatingPointError for logits that are not finite.
        """
        self._check(session, anchors, depth)
        anchors, cache = anchors.to(self.model.device), session.cache
        rows, held = cache.target_rows()
        ctx = DraftContext(self.model.config, rows, _counts(held, cache.device), _counts(cache.lengths, cache.device))
        hidden, base = self.model.draft(anchors, ctx)
        tokens, chances = self._drawn(base[:, :depth], anchors, sampling, generators)
        previous = torch.cat([anchors.unsqueeze(1), tokens[:, :-1]], 1)
        confidence = self._confidence(self._blocks.confidence(hidden[:, :depth], previous))
        return Draft(tokens, chances, confidence)

    def _drawn(
        self, base: Tensor, anchors: Tensor, sampling: Sampling, generators: list[torch.Generator]
    ) -> tuple[Tensor, Tensor | None]:
        """Left to right, each token biased by the one before it. Shapes: [B,k,V], [B] -> [B,k], [B,k,V]."""
        model = self.model
        n_ids = model.config.vocab_size if model.tokenizer is None else model.tokenizer.vocab_size
        columns, drawn_from = [anchors], []
        for slot in range(base.shape[1]):
            logits_BV = (base[:, slot] + self._blocks.markov(columns[-1]))[:, :n_ids].cpu()
            if sampling.temperature == 0:
                ids = [_likeliest(row) for row in logits_BV]
            else:
                chances = [sampling.chances(row) for row in logits_BV]
                ids = [int(row.multinomial(1, generator=generator))
                       for row, generator in zip(chances, generators, strict=True)]  # fmt: skip
                drawn_from.append(torch.stack(chances))
            columns.append(torch.tensor(ids, device=anchors.device))
        chances = F.pad(torch.stack(drawn_from, 1), (0, base.shape[-1] - n_ids)) if drawn_from else None
        return torch.stack(columns[1:], 1), chances

    def _confidence(self, logits: Tensor) -> Tensor:
        """c_k = sigmoid(logit / tau_k), the one place where calibration enters. Shapes: [B,k] -> float64 [B,k]."""
        logits = logits.double().cpu()
        if self.temperatures:
            logits = logits / torch.tensor(self.temperatures[: logits.shape[1]], dtype=torch.float64)
        return logits.sigmoid()

    def _check(self, session: Session, anchors: Tensor, depth: int) -> None:
        size, vocabulary = self.depth, self.model.config.vocab_size
        if not 1 <= depth <= size:
            raise ValueError(f"draft length {depth} beyond the trained block: dspark_block_size={size} allows 1 to it")
        if session.model is not self.model:
            self._blocks.check_fits(session.model)  # names sizes that differ
            raise ValueError("the drafter belongs to another model than the session: make it from session.model")
        if anchors.shape != (session.cache.batch,):
            raise ValueError(f"anchors have shape {tuple(anchors.shape)}, expected ({session.cache.batch},)")
        low, high = (int(value) for value in anchors.aminmax())
        if low < 0 or high >= vocabulary:
            raise ValueError(f"anchor {low if low < 0 else high} is out of range: ids are 0..{vocabulary - 1}")


def _counts(numbers: list[int], device: torch.device) -> Tensor:
    return torch.tensor(numbers, device=device)


def _likeliest(logits: Tensor) -> int:
    """As `Sampling.chances` at temperature 0: of equal ones the lowest id. Shapes: [V]."""
    values = logits.double().numpy()
    best = int(values.argmax())  # NumPy takes the first of equal ones, and a NaN before all others
    if not abs(values[best]) < float("inf"):
        raise FloatingPointError("the drafter gives logits that are not finite: there is no token to choose")
    return best
