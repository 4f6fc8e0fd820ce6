"""Writing text: prefill once, then one token after the other from a session."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from tinyds41.infer.padding import left_padded
from tinyds41.infer.sample import check_sampling, sample
from tinyds41.infer.session import Session
from tinyds41.model.transformer import Model
from tinyds41.tokenizer import Tokenizer


def generate(
    model: Model | Session, prompt: str | Sequence[str], *, max_new_tokens: int = 100, temperature: float = 1.0,
    top_k: int | None = None, top_p: float | None = None, seed: int = 0, stop_ids: Iterable[int] = (),
    stop: str | Sequence[str] = (), mode: str = "exact",
) -> str | list[str]:  # fmt: skip
    """Continues a prompt and returns the new text alone; several prompts run as one batch and give a list.

    temperature: 0 takes the likeliest token. top_k, top_p: see `sample`. stop_ids, stop: an id or a text that ends
    the answer and is not part of it. seed: row i draws from seed + i, so it writes what it would write alone.
    mode: of the prefill. A session goes on from what it holds; afterwards it has read all of the answer but the last
    token, or with a stop text what came after it.

    Raises: ValueError for a model without a tokenizer, an empty prompt or stop text, impossible numbers, more tokens
        than max_position_embeddings, several prompts for a session; FloatingPointError for logits that are not finite.
    """
    options = {"max_new_tokens": max_new_tokens, "temperature": temperature, "top_k": top_k, "top_p": top_p,
               "stop_ids": stop_ids, "mode": mode}  # fmt: skip
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
    mode: str = "exact", ended=lambda row: False,
) -> Iterator[list[int | None]]:  # fmt: skip
    """Prefills `ids`, then yields the next id of every row; None for a row that has ended.

    A row that ended leaves the batch, and the session. The last token of a row is never read.

    Raises: ValueError as `generate`, at the first step.
    """
    ids = session.checked(ids)
    check_sampling(temperature, top_k, top_p)
    max_new_tokens, stop_ids = operator.index(max_new_tokens), {operator.index(token) for token in stop_ids}
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens={max_new_tokens} is negative")
    model = session.model
    room, (text, pads) = model.config.max_position_embeddings, (ids, None) if mask is None else left_padded(ids, mask)
    for row in range(len(ids)):
        past = session.lengths[row] if len(session.lengths) == len(ids) else 0
        held = past + text.shape[1] - (pads[row] if pads else 0)
        if held + max_new_tokens - 1 > room:
            raise ValueError(f"{held} tokens and {max_new_tokens} new ones exceed max_position_embeddings={room}")
    # Ids behind the tokenizer's, where a model has them, stand for no text.
    n_ids = model.config.vocab_size if model.tokenizer is None else model.tokenizer.vocab_size
    running = list(range(ids.shape[0]))
    generators = [torch.Generator().manual_seed(seed + row) for row in running]
    logits = session.prefill(ids.to(model.device), mode=mode, mask=None if mask is None else mask.to(model.device))
    for step in range(max_new_tokens):
        drawn = [sample(row[:n_ids].cpu(), temperature, top_k, generators[b], top_p)
                 for b, row in zip(running, logits, strict=True)]  # fmt: skip
        new: list[int | None] = [None] * ids.shape[0]
        for b, token in zip(running, drawn, strict=True):
            new[b] = None if token in stop_ids else token
        yield new
        going = [i for i, b in enumerate(running) if new[b] is not None and not ended(b)]
        if not going or step == max_new_tokens - 1:
            return
        if len(going) < len(running):
            session.reorder(going)
            running = [running[i] for i in going]
        logits = session.decode(torch.tensor([drawn[i] for i in going], device=model.device))


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
