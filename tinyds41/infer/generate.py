"""Writing text: prefill once, then one token after the other from a session."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from tinyds41.infer.draft import Draft, Drafter, Sampling
from tinyds41.infer.padding import left_padded
from tinyds41.infer.session import Session
from tinyds41.infer.speculate import Speculation, accept, check_draft, drafter_of
from tinyds41.model.transformer import Model
from tinyds41.tokenizer import Tokenizer


def generate(
    model: Model | Session, prompt: str | Sequence[str], *, max_new_tokens: int = 100, temperature: float = 1.0,
    top_k: int | None = None, top_p: float | None = None, seed: int = 0, stop_ids: Iterable[int] = (),
    stop: str | Sequence[str] = (), mode: str = "exact", speculate: bool | Drafter = False,
    draft_tokens: int | None = None, speculation: Speculation | None = None,
) -> str | list[str]:  # fmt: skip
    """Continues a prompt and returns the new text alone; several prompts run as one batch and give a list.

    temperature: 0 takes the likeliest token. top_k, top_p: see `sample`. stop_ids, stop: an id or a text that ends
    the answer and is not part of it. seed: row i draws from seed + i, so it writes what it would write alone.
    mode: of the prefill. A session goes on from what it holds; afterwards it has read all of the answer but the last
    token, or with a stop text what came after it.

    speculate: a drafter proposes `draft_tokens` tokens at a time, by default all it can, and the model checks them in
    one run. Answers are distributed as without, and at temperature 0 the same up to rounding. True is the model's own
    drafter. speculation: counts what was proposed and accepted.

    Raises: ValueError for a model without a tokenizer, an empty prompt or stop text, impossible numbers, more tokens
        than max_position_embeddings, several prompts for a session, and as `drafter_of` and `check_draft`;
        FloatingPointError for logits that are not finite.
    """
    options = {"max_new_tokens": max_new_tokens, "temperature": temperature, "top_k": top_k, "top_p": top_p,
               "stop_ids": stop_ids, "mode": mode, "speculate": speculate, "draft_tokens": draft_tokens,
               "speculation": speculation}  # fmt: skip
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
        piece = "" if token is None else text.add(token)
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
    mode: str = "exact", ended=lambda row: False, speculate: bool | Drafter = False, draft_tokens: int | None = None,
    speculation: Speculation | None = None,
) -> Iterator[list[int | None]]:  # fmt: skip
    """Prefills `ids`, then yields the next id of every row; None for a row that has none, or none at this time.

    A row that ended leaves the batch, and the session. The last token of a row is never read.

    Raises: ValueError as `generate`, at the first step.
    """
    ids, sampling = session.checked(ids), Sampling(temperature, top_k, top_p)
    max_new_tokens, stop_ids = operator.index(max_new_tokens), {operator.index(token) for token in stop_ids}
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens={max_new_tokens} is negative")
    drafter, depth = drafter_of(session, speculate, draft_tokens)
    model = session.model
    room, (text, pads) = model.config.max_position_embeddings, (ids, None) if mask is None else left_padded(ids, mask)
    for row in range(len(ids)):
        past = session.lengths[row] if len(session.lengths) == len(ids) else 0
        held = past + text.shape[1] - (pads[row] if pads else 0)
        if held + max_new_tokens - 1 > room:
            raise ValueError(f"{held} tokens and {max_new_tokens} new ones exceed max_position_embeddings={room}")
    # Ids behind the tokenizer's, where a model has them, stand for no text.
    n_ids = model.config.vocab_size if model.tokenizer is None else model.tokenizer.vocab_size
    rows = [_Row(b, torch.Generator().manual_seed(seed + b)) for b in range(len(ids))]
    logits = session.prefill(ids.to(model.device), mode=mode, mask=None if mask is None else mask.to(model.device))
    logits, draft = logits.unsqueeze(1), None
    while max_new_tokens:
        _take(session, rows, logits[..., :n_ids].cpu(), draft, sampling, speculation)
        try:
            while any(row.waiting for row in rows):
                new: list[int | None] = [None] * len(ids)
                for row in rows:
                    new[row.number] = row.next(stop_ids, max_new_tokens)
                yield new
                for row in rows:
                    if ended(row.number):
                        row.end()
        finally:  # also where the caller stops here
            _take_back(session, rows, draft)
        going = [i for i, row in enumerate(rows) if not row.ended]
        if not going:
            return
        if len(going) < len(rows):
            session.reorder(going)
            rows = [rows[i] for i in going]
        columns = torch.tensor([[row.last] for row in rows], device=model.device)
        # As deep near the end of an answer: what a row draws must not depend on how far the others are.
        k, draft = min(depth, room - 1 - max(session.lengths)), None
        if drafter is not None and k > 0:
            draft = drafter.propose(session, columns[:, 0], k, sampling, [row.generator for row in rows])
            check_draft(draft, len(rows), k, n_ids)
            columns = torch.cat([columns, draft.tokens.to(columns)], 1)
        logits = session.extend(columns)


class _Row:
    """One answer: the tokens that stand and wait to be given."""

    def __init__(self, number: int, generator: torch.Generator):
        self.number, self.generator = number, generator
        self.waiting: deque[int] = deque()
        self.last, self.n_given, self.ended = 0, 0, False
        self.read = 0  # tokens the session has to keep: all but the last one given

    def next(self, stop_ids: set[int], max_new_tokens: int) -> int | None:
        """The next token, None where there is none; the last one ends the answer."""
        if not self.waiting:
            return None
        self.last, self.read, self.n_given = self.waiting.popleft(), self.read + 1, self.n_given + 1
        if self.last in stop_ids:
            return self.end()
        if self.n_given == max_new_tokens:
            self.end()
        return self.last

    def end(self) -> None:
        self.ended = True
        self.waiting.clear()


def _take(
    session: Session, rows: list[_Row], logits: Tensor, draft: Draft | None, sampling: Sampling,
    speculation: Speculation | None,
) -> None:  # fmt: skip
    """The drafted tokens that stand and the one behind them, for every row. Shapes: logits [B,k+1,V]."""
    k = logits.shape[1] - 1
    for i, row in enumerate(rows):
        tokens = [] if draft is None else draft.tokens[i].tolist()
        chances = None if draft is None or draft.chances is None else draft.chances[i, :, : logits.shape[2]].cpu()
        n, token = accept(lambda position, i=i: sampling.chances(logits[i, position]), tokens, chances, row.generator)
        row.waiting.extend([*tokens[:n], token])
        row.read = session.lengths[i] - k - 1
        if draft is not None and speculation is not None:
            speculation.add(k, n)


def _take_back(session: Session, rows: list[_Row], draft: Draft | None) -> None:
    """What fell, or came behind the end of an answer, leaves no trace in the session."""
    if draft is not None:
        session.truncate([row.read for row in rows])


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
