"""The hash explorer: which table rows the last token of a text reads, and which other n-grams read them too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tinyds41.model.context import Sequence as Run
from tinyds41.model.engram import Engram, compress_look_back
from tinyds41.model.transformer import Model
from tinyds41.show.explorer import explorer, require_widgets
from tinyds41.show.gate_plot import readable
from tinyds41.tables import aligned

NAMED = 2  # collisions written out; the rest are counted
HEAD = ("order", "n-gram", "seen", "head", "column", "prime", "row", "shares its row with")


@dataclass(frozen=True)
class HashedRow:
    """One row of the table that the last token reads.

    ngram: token ids, oldest first, -1 where the text has not begun. seen: how often this n-gram stands in the texts,
    counted as Engram does: in compressed ids. column: of all columns, order-major. row: address in the whole table.
    collisions: other n-grams of the texts with the same address, each once, in the order in which they are met.
    """

    order: int
    ngram: tuple[int, ...]
    seen: int
    head: int
    column: int
    prime: int
    row: int
    collisions: tuple[tuple[int, ...], ...]


def hashed_rows(engram: Engram, texts: Sequence[Sequence[int]]) -> list[HashedRow]:
    """What the last token of the first text reads, beside every n-gram of all texts.

    texts: token ids, each text a document of its own. Addresses are those of `Engram.rows`.
    Raises: ValueError for an empty text or an id outside the vocabulary.
    Source: spec 9.2.
    """
    lookback_Sn = torch.cat([_look_back(engram, text) for text in texts])
    rows_SX = engram.rows(lookback_Sn[None])[0].cpu()
    compressed_Sn = _compressed(engram, lookback_Sn)
    last, n_heads = len(texts[0]) - 1, engram.config.engram_n_heads or 1
    found = []
    for column, prime in enumerate(engram.primes.tolist()):
        order = 2 + column // n_heads
        same = (compressed_Sn[:, :order] == compressed_Sn[last, :order]).all(-1)
        clash = (rows_SX[:, column] == rows_SX[last, column]) & ~same
        others: dict[tuple[int, ...], tuple[int, ...]] = {}  # by compressed ids: "The" and "the" are one
        for place in clash.nonzero().flatten().tolist():
            others.setdefault(tuple(compressed_Sn[place, :order].tolist()), _ngram(lookback_Sn[place, :order]))
        found.append(HashedRow(order, _ngram(lookback_Sn[last, :order]), int(same.sum()), column % n_heads, column,
                               prime, int(rows_SX[last, column]), tuple(others.values())))  # fmt: skip
    return found


def _look_back(engram: Engram, ids: Sequence[int]) -> Tensor:
    """What each n-gram is made of, -1 from the start of the text or a pad on. Shapes: -> [S,n], nearest first."""
    config = engram.config
    if not len(ids):
        raise ValueError("the text is empty: its last token is what is looked at")
    outside = [token for token in ids if not 0 <= token < config.vocab_size]
    if outside:
        raise ValueError(f"id {outside[0]} is out of range: ids are 0..{config.vocab_size - 1}")
    assert config.engram_max_ngram_size
    ids_BS = torch.tensor([list(ids)], device=_token_map(engram).device)
    lookback_Sn = Run(config, ids_BS).look_back(ids_BS, config.engram_max_ngram_size)[0]
    ended = (lookback_Sn < 0) | (lookback_Sn == config.engram_pad_token_id)
    return lookback_Sn.masked_fill(ended.cummax(-1).values, -1)


def _compressed(engram: Engram, lookback: Tensor) -> Tensor:
    """The ids that are hashed. Shapes: [S,n] -> [S,n]."""
    token_map = _token_map(engram)
    return compress_look_back(
        lookback, token_map, lookback < 0, int(token_map[engram.config.engram_pad_token_id])
    ).cpu()


def _token_map(engram: Engram) -> Tensor:
    assert isinstance(engram.token_map, Tensor)
    return engram.token_map


def _ngram(lookback: Tensor) -> tuple[int, ...]:
    return tuple(lookback.flip(0).tolist())


def hash_view(
    model: Model, text: str | Sequence[int], *, among: str | Sequence[int] = "", layer: int | None = None
) -> str:  # fmt: skip
    """The rows that the last token of `text` reads, as a table: order, n-gram, head, address, collisions.

    text, among: a text, or token ids; for a model without a tokenizer a text is ids with blanks between.
    among: a second document whose n-grams are compared as well. layer: an Engram layer; None for the first.
    Raises: ValueError for a model or layer without Engram, an empty text, an id outside the vocabulary.
    Source: spec 9.2. Lesson: 10.
    """
    engram = _engram(model, layer)
    texts = [_ids(model, text), *([_ids(model, among)] if len(among) else [])]
    rows = hashed_rows(engram, texts)
    n_rows, tokens = int(engram.primes.sum()), sum(map(len, texts))
    title = f"{engram.path}: {n_rows:,} rows in {len(rows)} columns; n-grams of {tokens:,} tokens compared"
    return "\n".join([title, "", *aligned(HEAD, (_cells(model, row) for row in rows), left=(1, 7))])


def _engram(model: Model, layer: int | None) -> Engram:
    layers = model.config.engram_layer_ids
    if not layers:
        raise ValueError("the model has no Engram layer: engram_layer_ids is empty")
    layer = layers[0] if layer is None else layer
    if layer not in layers:
        raise ValueError(f"layer={layer} has no Engram: engram_layer_ids={list(layers)}")
    engram = model.layers[layer].engram
    assert isinstance(engram, Engram)
    return engram


def _ids(model: Model, text: str | Sequence[int]) -> list[int]:
    if not isinstance(text, str):
        return [int(token) for token in text]
    if model.tokenizer is not None:
        return model.tokenizer.encode(text)
    wrong = [word for word in text.split() if not word.isdecimal()]
    if wrong:
        raise ValueError(
            f"{wrong[0]!r} is no token id: the model has no tokenizer, so a text is ids with blanks between"
        )
    return [int(word) for word in text.split()]


def _cells(model: Model, row: HashedRow) -> tuple[str, ...]:
    # Blanks between n-grams: a token shows its own as ·, and commas and bars may be tokens.
    others = "  ".join(_shown(model, ngram) for ngram in row.collisions[:NAMED])
    more = len(row.collisions) - NAMED
    return (str(row.order), _shown(model, row.ngram), str(row.seen), str(row.head), str(row.column), f"{row.prime:,}",
            f"{row.row:,}", (others or "-") + (f" and {more} more" if more > 0 else ""))  # fmt: skip


def _shown(model: Model, ngram: tuple[int, ...]) -> str:
    """Tokens with | between them; what would stand before the text is the pad."""
    tokenizer = model.tokenizer

    def word(token: int) -> str:
        if token < 0:
            return "(pad)"
        known = tokenizer is not None and token < tokenizer.vocab_size
        return readable(tokenizer.decode([token])) if tokenizer is not None and known else str(token)

    return "|".join(map(word, ngram))


def explore_hash(model: Model, text: str, *, among: str | Sequence[int] = "") -> Any:
    """A line to type in and a choice of layer, above `hash_view`.

    Raises: ImportError without ipywidgets; ValueError for a model without Engram.
    Lesson: 10.
    """
    widgets = require_widgets()
    _engram(model, None)  # refuses a model without Engram in its own words
    layers = model.config.engram_layer_ids
    controls = {
        # Each key stroke changes the last token: shown when typing ends, by Enter or a click elsewhere.
        "text": widgets.Text(text, description="text", continuous_update=False, layout={"width": "60%"}),
        "layer": widgets.Dropdown(options=layers, value=layers[0], description="layer", layout={"width": "160px"}),
    }
    return explorer(partial(_typed, model, among), controls)


def _typed(model: Model, among: str | Sequence[int], text: str, layer: int) -> str:
    return hash_view(model, text, among=among, layer=layer)
