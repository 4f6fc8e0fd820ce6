"""What the cache of a model costs, measured on rows that its formats really encoded."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any

import torch

from tinyds41.config import Config
from tinyds41.cost.limits import check_context
from tinyds41.formats import GLOBAL, INDEX, WINDOW, Format
from tinyds41.tables import aligned

STORES = ("global KV", "index keys", "window")


@dataclass(frozen=True)
class StoreBytes:
    """One store of one layer: `row_bytes` per `tokens_per_row` tokens, up to `max_rows` rows."""

    store: str  # one of STORES
    layer: int
    row_bytes: int
    tokens_per_row: int
    max_rows: int | None = None  # None: grows with the context

    @property
    def grows(self) -> bool:
        return self.max_rows is None

    @property
    def bytes_per_token(self) -> Fraction:
        """Growth per token of context; 0 for a window.

        A Fraction, for half an entry may be an odd number of bytes.
        """
        return Fraction(self.row_bytes, self.tokens_per_row) if self.grows else Fraction(0)

    def bytes_at(self, context: int) -> int:
        """Bytes held at a context of that many tokens; an unfinished group has no row yet."""
        return self.row_bytes * self.rows_at(context)

    def rows_at(self, context: int) -> int:
        rows = context // self.tokens_per_row
        return rows if self.max_rows is None else min(rows, self.max_rows)


@dataclass(frozen=True)
class KVBytes:
    """All stores of one model; `print(kv_bytes(config))` shows the table.

    Not in it: tokens of an unfinished compression group (at most m - 1 per Full layer) and the windows of DSpark's
    draft blocks.
    """

    rows: tuple[StoreBytes, ...]
    max_position_embeddings: int

    def of(self, store: str) -> tuple[StoreBytes, ...]:
        """The rows of one store. Raises: ValueError for a store that does not exist."""
        if store not in STORES:
            raise ValueError(f"unknown store {store!r}: the stores are {', '.join(STORES)}")
        return tuple(row for row in self.rows if row.store == store)

    @property
    def bytes_per_token(self) -> Fraction:
        """Global KV and index keys of all layers: what a longer context costs per token."""
        return sum((row.bytes_per_token for row in self.rows), Fraction(0))

    @property
    def window_bytes(self) -> int:
        """All windows of one sequence once they are full; constant from there on."""
        return sum(row.row_bytes * (row.max_rows or 0) for row in self.of("window"))

    def bytes_at(self, context: int) -> int:
        """Bytes of one sequence. Raises: ValueError for a context that the model cannot have."""
        check_context(context, self.max_position_embeddings)
        return sum(row.bytes_at(context) for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """For JSON; row bytes are raw counts, bytes per token a number (exact where it is whole)."""
        rows = [{**asdict(row), "bytes_per_token": plain_number(row.bytes_per_token)} for row in self.rows]
        return {"bytes_per_token": plain_number(self.bytes_per_token), "window_bytes": self.window_bytes, "rows": rows}

    def __str__(self) -> str:
        return "\n".join(_table(self))

    __repr__ = __str__


def kv_bytes(config: Config, dtype: torch.dtype = torch.float32) -> KVBytes:
    """Encodes one row per kind of store and lays it out over the layers of the plan.

    dtype: of the rows of a config with quantize_cache=False, whose cache holds plain floats.
    Source: spec 3; per layer, because a Reuse or Reindex layer keeps no global rows of its own.
    """
    rows = []
    for layer in config.plan():
        if layer.writes_globals:
            main = _measure(GLOBAL, config.head_dim, config, dtype)
            key = _measure(INDEX, config.index_head_dim, config, dtype)
            rows.append(StoreBytes("global KV", layer.layer, main, layer.ratio))
            rows.append(StoreBytes("index keys", layer.layer, key, layer.ratio))
        window = _measure(WINDOW, config.head_dim, config, dtype)
        rows.append(StoreBytes("window", layer.layer, window, 1, config.sliding_window))
    return KVBytes(tuple(rows), config.max_position_embeddings)


def unshared_bytes_per_token(config: Config, dtype: torch.dtype = torch.float32) -> Fraction:
    """Global KV alone, per token, if every layer that attends to it kept rows of its own: what sharing saves."""
    row = _measure(GLOBAL, config.head_dim, config, dtype)
    return sum((Fraction(row, layer.ratio) for layer in config.plan() if layer.ratio), Fraction(0))


def _measure(form: Format, width: int, config: Config, dtype: torch.dtype) -> int:
    """Bytes of one row as the cache holds it."""
    row = torch.zeros(1, width, dtype=dtype)
    stored = form.encode(row) if config.quantize_cache else row
    return stored.nbytes


def plain_number(value: Fraction) -> int | float:
    """A whole number as such, any other as a float."""
    return value.numerator if value.denominator == 1 else float(value)


def _shown(value: Fraction) -> str:
    return f"{plain_number(value):,}"


def _table(cache: KVBytes) -> list[str]:
    head = ("layer", "store", "bytes per row", "tokens per row", "bytes per token")
    rows = [
        (str(row.layer), row.store, f"{row.row_bytes:,}", str(row.tokens_per_row), _shown(row.bytes_per_token))
        for row in cache.rows
        if row.grows
    ]
    rows.append(("all", "", "", "", _shown(cache.bytes_per_token)))
    lines = aligned(head, rows, left=(0, 1))
    windows = cache.of("window")
    if not windows:
        return [*lines, "no windows: nothing is constant per sequence"]
    size = f"{len(windows)} layers x {windows[0].max_rows} rows x {windows[0].row_bytes} bytes"
    return [*lines, f"windows, constant: {size} = {cache.window_bytes:,} bytes per sequence"]
