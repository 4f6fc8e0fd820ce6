"""Writing text: prefill once, then token after token from a session."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch
from torch import Tensor

from tinyds41.infer.draft import Drafter, Sampling
from tinyds41.infer.padding import left_padded
from tinyds41.infer.scheduler import Scheduler
from tinyds41.infer.session import Session
from tinyds41.infer.speculate import Speculation, Writer, drafter_of
from tinyds41.model.transformer import Model
from tinyds41.tokenizer import Tokenizer


def generate(
    model: Model | Session, prompt: str | Sequence[str], *, max_new_tokens: int = 100, temperature: float = 1.0,
    top_k: int | None = None, top_p: float | None = None, seed: int = 0, stop_ids: Iterable[int] = (),
    stop: str | Sequence[str] = (), mode: str = "exact", speculate: bool | Drafter = False,
    draft_tokens: int | None = None, speculation: Speculation | None = None, schedule: Scheduler | None = None,
) -> str | list[str]:  # fmt: skip
    """Continues a prompt and returns the new text alone; several prompts run as one batch and give a list.

    temperature: 0 takes the likeliest token. top_k, top_p: see `sample`. stop_ids, stop: an id or a text that ends
    the answer and is not part of it. seed: row i draws from seed + i, so it writes what it would write alone.
    mode: of the prefill. A session goes on from what it holds; afterwards it has read all of the answer but the last
    token, or with a stop text what came after it.

    speculate: True, or a `Drafter`: steps of several tokens, that write what single ones would. At temperature 0 these
    are the same tokens; above it they are drawn from the same chances, by other random numbers. draft_tokens: how many
    are drafted at a time, the drafter's depth where None. speculation: counts what became of them. schedule: decides
    in each step whether tokens are drafted and how many are verified, from the drafter's confidences.

    Raises: ValueError for a model without a tokenizer, an empty prompt or stop text, impossible numbers, more tokens
        than max_position_embeddings, several prompts for a session, a drafter that does not suit (`drafter_of`) or
        whose drafts do not (`check_draft`); FloatingPointError for logits that are not finite.
    Source: spec 10.7.
    """
    options = {"max_new_tokens": max_new_tokens, "temperature": temperature, "top_k": top_k, "top_p": top_p,
               "stop_ids": stop_ids, "mode": mode, "speculate": speculate, "draft_tokens": draft_tokens,
               "speculation": speculation, "schedule": schedule}  # fmt: skip
    if isinstance(prompt, str):
        return "".join(stream(model, prompt, stop=stop, seed=seed, **options))
    if isinstance(model, Session):
        raise ValueError(f"{len(prompt)} prompts for a session: it goes on with one text, pass the model")
    session, tokenizer, stops = _session(model), _tokenizer(model), _stops(stop)
    ids, mask = padded([tokenizer.encode(text) for text in prompt])
    texts = [_Text(tokenizer, stops) for _ in prompt]
    for new in tokens(session, ids, mask=mask, seed=seed, ended=lambda b: texts[b].ended, **options):
        for text, token in zip(texts, new, strict=True):
            if token is not None:
                text.add(token)
    return [text.sure + text.finish() for text in texts]


def stream(
    model: Model | Session, prompt: str, *, stop: str | Sequence[str] = (), seed: int = 0, **options
) -> Iterator[str]:
    """`generate` piece by piece, as soon as a piece is sure; whoever stops early leaves the session usable.

    A piece waits while it may be the beginning of a stop text, or half a character.
    Raises: ValueError as `generate`, at the first piece.
    """
    session, text = _session(model), _Text(_tokenizer(model), _stops(stop))
    ids = torch.tensor([text.tokenizer.encode(prompt)], dtype=torch.long)
    for (token,) in tokens(session, ids, seed=seed, **options):
        if token is None:  # a stop id
            break
        piece = text.add(token)
        if piece:
            yield piece
        if text.ended:
            return
    rest = text.finish()
    if rest:
        yield rest


def generate_ids(model: Model | Session, ids: Tensor, *, mask: Tensor | None = None, **options) -> list[list[int]]:
    """The same for token ids: the new ids of each row. Shapes: ids [B,S], mask [B,S] as in `Session.prefill`."""
    if isinstance(model, Session) and ids.ndim == 2 and len(ids) > 1:
        raise ValueError(f"{len(ids)} prompts for a session: rows that end would leave it, pass the model")
    rows: list[list[int]] = [[] for _ in (ids if ids.ndim == 2 else ids.unsqueeze(0))]
    for new in tokens(_session(model), ids, mask=mask, **options):
        for row, token in zip(rows, new, strict=True):
            if token is not None:
                row.append(token)
    return rows


@torch.no_grad()
def tokens(
    session: Session, ids: Tensor, *, max_new_tokens: int, mask: Tensor | None = None, temperature: float = 1.0,
    top_k: int | None = None, top_p: float | None = None, seed: int = 0, stop_ids: Iterable[int] = (),
    mode: str = "exact", speculate: bool | Drafter = False, draft_tokens: int | None = None,
    speculation: Speculation | None = None, schedule: Scheduler | None = None, ended=lambda row: False,
) -> Iterator[list[int | None]]:  # fmt: skip
    """Prefills `ids`, then yields the next id of every row; None for a row that has ended, or waits for others.

    The tokens that one step writes in a row are yielded one after the other. A row that ended leaves the batch, and
    the session. The last token of a row is never read, nor what was drafted behind it.

    Raises: ValueError as `generate`, at the first step.
    """
    ids, sampling = session.checked(ids), Sampling(temperature, top_k, top_p)
    max_new_tokens, stop_ids = operator.index(max_new_tokens), {operator.index(token) for token in stop_ids}
    _check_room(session, ids, mask, max_new_tokens)
    drafter, depth = drafter_of(session, speculate, draft_tokens)
    if schedule is not None and drafter is None:
        raise ValueError("schedule without speculate: there is nobody to draft what it would schedule")
    writer = Writer(session, sampling, [seed + b for b in range(len(ids))], drafter, depth, speculation, schedule)
    device = session.model.device
    logits = session.prefill(ids.to(device), mode=mode, mask=None if mask is None else mask.to(device))
    rows = [_Row(b, max_new_tokens) for b in range(len(ids))]
    new = writer.first(logits) if max_new_tokens else []
    while new:
        try:
            for column in zip_longest(*new):
                told: list[int | None] = [None] * len(ids)
                for row, token in zip(rows, column, strict=True):
                    if token is not None and not row.over:
                        told[row.number] = row.take(token, stop_ids)
                yield told
                for row in rows:
                    row.over = row.over or ended(row.number)
                if all(row.over for row in rows):
                    break
        finally:  # also where nobody wants the rest
            writer.settle([row.taken for row in rows])
        going = [i for i, row in enumerate(rows) if not row.over]
        if not going:
            return
        if len(going) < len(rows):
            writer.keep(going)
            rows = [rows[i] for i in going]
        new = writer.step([row.begin() for row in rows], [row.left for row in rows])


@dataclass
class _Row:
    """One prompt's answer: its number, the tokens it may still have, those of this step and the last of them."""

    number: int
    left: int
    taken: int = 0
    last: int = 0
    over: bool = False

    def begin(self) -> int:
        """A step begins; behind which token."""
        self.taken = 0
        return self.last

    def take(self, token: int, stop_ids: set[int]) -> int | None:
        """One more token; None where it ends the answer and is not part of it."""
        self.last, self.taken, self.left = token, self.taken + 1, self.left - 1
        self.over = token in stop_ids or not self.left
        return None if token in stop_ids else token


def _check_room(session: Session, ids: Tensor, mask: Tensor | None, max_new_tokens: int) -> None:
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens={max_new_tokens} is negative")
    room, (text, pads) = session.model.config.max_position_embeddings, (ids, None)
    if mask is not None:
        text, pads = left_padded(ids, mask)
    for row in range(len(ids)):
        past = session.lengths[row] if len(session.lengths) == len(ids) else 0
        held = past + text.shape[1] - (pads[row] if pads else 0)
        if held + max_new_tokens - 1 > room:
            raise ValueError(f"{held} tokens and {max_new_tokens} new ones exceed max_position_embeddings={room}")


def padded(rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Prompts of different length as ids and mask [B,S], padded on the left.

    Raises: ValueError for a prompt without tokens, or none at all.
    """
    empty = [b for b, row in enumerate(rows) if not row]
    if not rows or empty:
        raise ValueError(f"an empty prompt: {len(rows)} prompts, without tokens are {empty}")
    longest = max(len(row) for row in rows)
    ids = torch.tensor([[0] * (longest - len(row)) + list(row) for row in rows])
    lengths = torch.tensor([len(row) for row in rows])
    return ids, torch.arange(longest) >= (longest - lengths).unsqueeze(1)


class _Text:
    """The text of one answer as it grows: what of it is sure, and whether a stop text has come."""

    def __init__(self, tokenizer: Tokenizer, stops: tuple[str, ...]):
        self.tokenizer, self.stops = tokenizer, stops
        self.ids: list[int] = []
        self.sure, self.ended = "", False

    def add(self, token: int) -> str:
        """One more token; returns what has become sure by it."""
        self.ids.append(token)
        text = self.tokenizer.decode(self.ids)
        found = [place for place in (text.find(stop) for stop in self.stops) if place >= 0]
        if found:
            self.ended = True
            return self._grow(text[: min(found)])
        # Half a character decodes as U+FFFD until the rest of its bytes comes.
        end = len(text.rstrip("\ufffd"))
        while end > len(self.sure) and any(stop.startswith(text[end - n : end]) for stop in self.stops
                                           for n in range(1, min(len(stop), end + 1))):  # fmt: skip
            end -= 1
        return self._grow(text[:end])

    def finish(self) -> str:
        """What waited, when no more tokens come."""
        return "" if self.ended else self._grow(self.tokenizer.decode(self.ids))

    def _grow(self, text: str) -> str:
        piece, self.sure = text[len(self.sure) :], max(self.sure, text, key=len)
        return piece


def _session(model: Model | Session) -> Session:
    return model if isinstance(model, Session) else Session(model)


def _tokenizer(model: Model | Session) -> Tokenizer:
    tokenizer = model.model.tokenizer if isinstance(model, Session) else model.tokenizer
    if tokenizer is None:
        raise ValueError("this model has no tokenizer: use generate_ids")
    return tokenizer


def _stops(stop: str | Sequence[str]) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    if not all(isinstance(text, str) for text in stops):
        raise ValueError(f"stop={stop!r}: texts are needed")
    if "" in stops:
        raise ValueError("stop: an empty text would end every answer")
    return stops
