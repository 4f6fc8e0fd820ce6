"""Several tokens per step, losslessly: drafted, verified in one `extend`, taken back where they do not stand."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from tinyds41.infer.draft import Draft, Drafter, Sampling
from tinyds41.infer.dspark_drafter import DSparkDrafter
from tinyds41.infer.scheduler import Scheduler
from tinyds41.infer.session import Session
from tinyds41.model.transformer import Model


@dataclass
class Speculation:
    """What became of drafts. An object to hand to `generate`, which counts into it, and to read afterwards.

    steps: runs of the model after the prefill. proposed_at, accepted_at: drafted tokens that were verified and that
    stood, by their place behind the anchor, summed over rows; a token stands only where those before it do.

    Source: spec 10.7.
    """

    steps: int = 0
    proposed_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)

    @property
    def proposed(self) -> int:
        """Drafted tokens that were verified."""
        return sum(self.proposed_at)

    @property
    def accepted(self) -> int:
        """Those that stood."""
        return sum(self.accepted_at)

    @property
    def acceptance(self) -> list[float]:
        """By place, the share of drafted tokens that stood."""
        return [accepted / proposed for accepted, proposed in zip(self.accepted_at, self.proposed_at, strict=True)]

    @property
    def accepted_length(self) -> float:
        """Tokens that one draft brings, with the one that follows it in the same step; 1 where nothing is drafted."""
        return 1 + self.accepted / max(1, self.proposed_at[0] if self.proposed_at else 0)

    def add(self, proposed: int, accepted: int) -> None:
        """Counts one draft of one row."""
        for counts, n in ((self.proposed_at, proposed), (self.accepted_at, accepted)):
            counts += [0] * (proposed - len(counts))
            counts[:n] = [count + 1 for count in counts[:n]]


def accept(p: Tensor, q: Tensor | None, drafted: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """How many drafted tokens stand, and what the token after them is drawn from, up to a factor.

    So tokens have the chances `p` exactly, whoever drafts. Greedy decoding is the case of a `p` that is 1 for one id.

    Shapes: p [...,k+1,V] the model's chances behind the anchor and each drafted token; q [...,k,V] what these were
        drawn from, or None where each was certain; drafted [...,k] ids; uniforms [...,k] random in [0,1)
        -> [...], [...,V].
    Source: spec 10.7.
    """
    q = F.one_hot(drafted, p.shape[-1]).to(p.dtype) if q is None else q
    token = drafted.unsqueeze(-1)
    p_token, q_token = p[..., :-1, :].gather(-1, token), q.gather(-1, token)
    # u < min(1, p/q), for u below 1
    stands = (uniforms.unsqueeze(-1) * q_token < p_token).squeeze(-1)
    count = stands.long().cumprod(-1).sum(-1)
    # max(0, p - q) where the first token fell; behind a whole draft nothing was drafted, q is 0, and p remains.
    place = count[..., None, None].expand(*count.shape, 1, p.shape[-1])
    p_next, q_next = (x.gather(-2, place).squeeze(-2) for x in (p, F.pad(q, (0, 0, 0, 1))))
    rest = (p_next - q_next).clamp(min=0)
    # A token can fall where p and q differ by rounding alone.
    return count, torch.where(rest.sum(-1, keepdim=True) > 0, rest, p_next)


def drafter_of(
    session: Session, speculate: bool | Drafter, draft_tokens: int | None
) -> tuple[Drafter | None, int]:
    """Who drafts for a session, and how many tokens at a time; nobody and 0 without `speculate`.

    Raises: ValueError for True and a model without a drafter, a drafter of another model, draft_tokens that it cannot
        propose or the session cannot take back, or without speculate; TypeError for what is no drafter.
    """
    if speculate is False:
        if draft_tokens is not None:
            raise ValueError(f"draft_tokens={draft_tokens} without speculate: there is nobody to draft them")
        return None, 0
    drafter = _own_drafter(session.model) if speculate is True else speculate
    if not callable(getattr(drafter, "propose", None)):
        raise TypeError(f"speculate is a {type(speculate).__name__}: True, False or a Drafter is needed")
    if getattr(drafter, "model", session.model) is not session.model:
        raise ValueError(f"this {type(drafter).__name__} was made for another model: it must be made from this one")
    depth = drafter.depth if draft_tokens is None else operator.index(draft_tokens)
    if not 1 <= depth <= drafter.depth:
        raise ValueError(f"draft_tokens={depth}: this {type(drafter).__name__} proposes 1 to {drafter.depth} tokens")
    if depth > session.rollback:
        raise ValueError(f"drafts of {depth} tokens: the session takes back rollback={session.rollback} tokens at most")
    return drafter, depth


def _own_drafter(model: Model) -> Drafter:
    if model.mtp is None:
        raise ValueError("this model has no drafter: load(folder, draft=True) reads one where there is one, and "
                         "speculate=NGramDrafter() works with any model")  # fmt: skip
    return DSparkDrafter(model, model.config.dspark_temperatures)


class Writer:
    """Writes on in the rows of a session, step by step; without a drafter one token each: plain decoding.

    The last token of a row, its anchor, is written and not read. Each row draws from generators of its own, and
    drafts from others than what judges them, so that it writes what it would write alone. (But where the longest row is
    about to fill max_position_embeddings, all rows draft less. And a scheduler looks at all rows: with one, other rows
    change which random numbers a row's tokens come from, not the chances they have.)
    """

    def __init__(self, session: Session, sampling: Sampling, seeds: Sequence[int], drafter: Drafter | None = None,
                 depth: int = 0, counts: Speculation | None = None, scheduler: Scheduler | None = None):  # fmt: skip
        self.session, self.sampling, self.drafter, self.depth = session, sampling, drafter, depth
        self.scheduler = scheduler
        self.counts = Speculation() if counts is None else counts
        self.generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        self.drafting = [_another(seed) for seed in seeds] if drafter else list(self.generators)
        model = session.model
        # Ids behind the tokenizer's, where a model has them, stand for no text.
        self.n_ids = model.config.vocab_size if model.tokenizer is None else model.tokenizer.vocab_size
        self._ahead = 0  # drafted tokens that the session has read and that are not settled

    def first(self, logits: Tensor) -> list[list[int]]:
        """The first token of each row, from the logits [B,V] of a prefill."""
        return self._written(logits.unsqueeze(1), None, [0] * len(logits))

    def step(self, anchors: list[int], left: list[int]) -> list[list[int]]:
        """One to left[b] more tokens for each row b, whose last one was anchors[b]; `settle` comes before the next.

        Raises: ValueError for a draft that this model could not have been given, see `check_draft`.
        """
        # A step writes one token more than it drafts. So much fits into max_position_embeddings for each row alone.
        limits = [min(self.depth, n - 1) for n in left]
        ids, draft = torch.tensor(anchors).unsqueeze(1), None
        # All rows read equally many tokens: near the end of the positions of one, none drafts more than it can read.
        room = self.session.model.config.max_position_embeddings - max(self.session.lengths) - 1
        ahead = min(room, max(limits))
        if self.drafter is not None and ahead and (self.scheduler is None or self.scheduler.begin(len(anchors))):
            # Always the whole depth: what a row draws must not follow from how far the others are.
            draft = self.drafter.propose(self.session, ids[:, 0], self.depth, self.sampling, self.drafting)
            draft = check_draft(draft, len(anchors), self.depth, self.n_ids, self.session.model.config.vocab_size)
            ahead = min(ahead, self._scheduled(draft, limits))
            ids, limits = torch.cat([ids, draft.tokens[:, :ahead]], 1), [min(ahead, n) for n in limits]
        logits = self.session.extend(ids.to(self.session.model.device))
        self.counts.steps, self._ahead = self.counts.steps + 1, ids.shape[1] - 1
        try:
            return self._written(logits, draft, limits)
        except BaseException:
            self.settle([1] * len(anchors))
            raise

    def _scheduled(self, draft: Draft, limits: list[int]) -> int:
        """How many drafted tokens all rows verify. It follows from no token that it admits (spec 10.6)."""
        if self.scheduler is None:
            return self.depth
        if draft.confidence is None:
            raise ValueError(f"a schedule needs confidences: {type(self.drafter).__name__} gives none")
        allowed = torch.arange(self.depth) < torch.tensor(limits).unsqueeze(1)
        return self.scheduler.common_length((draft.confidence.cpu() * allowed).numpy())

    def settle(self, taken: Sequence[int]) -> None:
        """Of the last step only the first taken[b] tokens are kept in row b; the last of these is no longer read."""
        ahead, self._ahead = self._ahead, 0
        if ahead:
            lengths = [n - ahead + max(1, kept) - 1 for n, kept in zip(self.session.lengths, taken, strict=True)]
            self.session.truncate(lengths)

    def keep(self, rows: list[int]) -> None:
        """The other rows leave, and the session too."""
        self.session.reorder(rows)
        self.generators = [self.generators[b] for b in rows]
        self.drafting = [self.drafting[b] for b in rows]

    def _written(self, logits: Tensor, draft: Draft | None, limits: list[int]) -> list[list[int]]:
        """What each row writes. Shapes: logits [B,k+1,V], behind the anchor and each drafted token."""
        p = self.sampling.chances(logits[..., : self.n_ids].cpu())
        if draft is None:
            return [[self._draw(p[b, 0], b)] for b in range(len(p))]
        return [self._judged(b, p[b, : n + 1], draft) for b, n in enumerate(limits)]

    def _judged(self, b: int, p: Tensor, draft: Draft) -> list[int]:
        """The drafted tokens of a row that stand, and one more. Shapes: p [n+1,V]."""
        n, generator = len(p) - 1, self.generators[b]
        drafted = draft.tokens[b, :n]
        q = None if draft.chances is None else draft.chances[b, :n]
        count, chances = accept(p, q, drafted, torch.rand(n, generator=generator, dtype=p.dtype))
        self.counts.add(n, int(count))
        return [*drafted[: int(count)].tolist(), self._draw(chances, b)]

    def _draw(self, chances: Tensor, b: int) -> int:
        if self.sampling.temperature == 0:
            return int(chances.argmax())
        return int(chances.multinomial(1, generator=self.generators[b]))


def _another(seed: int) -> torch.Generator:
    """A generator whose numbers have nothing to do with those of the generator of this seed."""
    other = torch.randint(1 << 31, (1,), generator=torch.Generator().manual_seed(seed))
    return torch.Generator().manual_seed(int(other))


def check_draft(draft: Draft, rows: int, depth: int, n_ids: int, vocab_size: int) -> Draft:
    """The draft on the CPU, with chances for the ids 0..n_ids-1 that stand for text.

    Raises: ValueError for another shape, an id that stands for no text, chances that are negative, not finite, do not
        add up to 1 or give nothing to a drafted token; TypeError for ids that are no whole numbers.
    """
    tokens, chances = draft.tokens.cpu(), draft.chances
    if tokens.shape != (rows, depth):
        raise ValueError(f"a draft of shape {tuple(tokens.shape)}: expected ({rows}, {depth})")
    if tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool:
        raise TypeError(f"drafted ids of {tokens.dtype}: whole numbers are needed")
    low, high = (int(value) for value in tokens.aminmax())
    if low < 0 or high >= n_ids:
        raise ValueError(f"drafted id {low if low < 0 else high}: the model has the ids 0 to {n_ids - 1}, "
                         "the drafter another vocabulary")  # fmt: skip
    if chances is None:
        return replace(draft, tokens=tokens.long())
    if chances.shape != (rows, depth, vocab_size):
        raise ValueError(f"chances of shape {tuple(chances.shape)}: expected {(rows, depth, vocab_size)}")
    chances = chances[..., :n_ids].cpu().double()
    wrong = chances[~((chances >= 0) & chances.isfinite())]
    if len(wrong):
        raise ValueError(f"the drafter gives a chance of {float(wrong[0])}: 0 to 1 is needed")
    sums = chances.sum(-1)
    if ((sums - 1).abs() > 1e-6).any():
        worst = float(sums.flatten()[(sums - 1).abs().argmax()])
        raise ValueError(f"chances of a drafted token add up to {worst} over the ids 0 to {n_ids - 1}, not to 1")
    nothing = (chances.gather(-1, tokens.long().unsqueeze(-1)) == 0).flatten().nonzero()
    if len(nothing):
        raise ValueError(f"the drafter gives {int(tokens.flatten()[nothing[0, 0]])} a chance of 0 and proposes it")
    return replace(draft, tokens=tokens.long(), chances=chances)
