"""What one generated token reads from memory: weights, rows of the cache, and Engram rows."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property
from math import prod
from typing import Any

import torch

from tinyds41.checkpoint.layout import FP4, Quantised, format_to_write
from tinyds41.checkpoint.names import STACKED, released_name
from tinyds41.config import Config
from tinyds41.cost.generations import ConfigGeneration, Generation
from tinyds41.cost.kv_bytes import KVBytes, kv_bytes
from tinyds41.cost.limits import check_context
from tinyds41.cost.parameters import Share, shares
from tinyds41.cost.rows import attended_rows, gathered_rows, near, scored_entries
from tinyds41.formats import ENGRAM
from tinyds41.model.transformer import Model


@dataclass(frozen=True)
class DecodeBytes:
    """Bytes read for one generated token at one context, by what they are.

    weights: every matrix and vector that the token meets, its experts included, and its row of the embedding; None
    where a generation's weights are not described. window_rows, global_rows: rows attended to. index_keys: scanned.
    """

    model: str
    context: int
    weights: int | None
    window_rows: int
    global_rows: int
    index_keys: int
    engram_rows: int

    @property
    def cache(self) -> int:
        return self.window_rows + self.global_rows + self.index_keys

    @property
    def total(self) -> int | None:
        """None without weights."""
        return None if self.weights is None else self.weights + self.cache + self.engram_rows

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "cache": self.cache, "total": self.total}


@dataclass(frozen=True)
class DecodeTraffic:
    """Bytes read per generated token of one model, a batch of one.

    released: weights in the formats of released files; without it all weights have `dtype`, as the rows of a cache
        that is not quantised always have.
    shared: rows of a selection are read once for all layers that follow it, as this library gathers them; without it
        each layer reads its own, as a kernel per layer does.

    Differs: what a token writes (a row per store) and its activations are left out; `mixing_traffic` counts the
        streams. In a batch, weights are read once for all its tokens, cache rows for each.
    """

    config: Config
    name: str = "model"
    dtype: torch.dtype = torch.bfloat16
    released: bool = True
    shared: bool = False

    def at(self, context: int) -> DecodeBytes:
        """Raises: ValueError for a context that the model cannot have."""
        config, row = self.config, row_bytes(self.cache)
        full, pool = scored_entries(config, context)
        window = int(near(config, torch.tensor(context)))
        attended = attended_rows(config, context)
        n_global = sum(n - window for n in attended.values())
        if self.shared:
            n_global = sum(gathered_rows(config, context).values())
        return DecodeBytes(
            self.name, context, self._weight_bytes,
            window_rows=row["window"] * window * len(attended),
            global_rows=row["global KV"] * n_global,
            index_keys=row["index keys"] * (sum(full.values()) + sum(pool.values())),
            engram_rows=self._engram_bytes,
        )  # fmt: skip

    @cached_property
    def cache(self) -> KVBytes:
        """The stores that are read."""
        return kv_bytes(self.config, self.dtype)

    @cached_property
    def _weight_bytes(self) -> int:
        model = Model(self.config, device="meta")
        embedding = self.config.hidden_size * self.dtype.itemsize
        return embedding + sum(self._share_bytes(share) for share in shares(model) if share.decode)

    def _share_bytes(self, share: Share) -> int:
        form = stored_format(share) if self.released else None
        if form is None:
            return share.decode * self.dtype.itemsize
        matrix = share.shape[-2:]
        # Of a stack of experts a token meets some; each lies in a matrix of its own.
        return share.decode // prod(matrix) * matrix_bytes(form, *matrix)

    @property
    def _engram_bytes(self) -> int:
        """The rows of one token: a row per order and head in each table."""
        config = self.config
        if not config.engram_layer_ids:
            return 0
        assert config.engram_head_dim and config.engram_max_ngram_size and config.engram_n_heads
        plain = config.engram_head_dim * self.dtype.itemsize
        row = ENGRAM.row_bytes(config.engram_head_dim) if self.released else plain
        return row * len(config.engram_layer_ids) * (config.engram_max_ngram_size - 1) * config.engram_n_heads


def stored_format(share: Share) -> Quantised | None:
    """The released format of one of our parameters; None for the model's dtype.

    A matrix whose rows the format's block does not divide keeps the dtype too; released sizes have none.
    """
    if STACKED.match(share.name):
        return FP4 if FP4.fits(share.shape[-2:]) else None
    form = format_to_write(released_name(share.name))
    return form if form is not None and form.fits(share.shape) else None


def matrix_bytes(form: Quantised, rows: int, columns: int) -> int:
    """Codes and scales of one matrix, a byte each."""
    return prod(form.code_shape((rows, columns))) + prod(form.scale_shape((rows, columns)))


def row_bytes(cache: KVBytes) -> dict[str, int]:
    """Bytes of one row of each store; 0 where a model has no such store."""
    found = dict.fromkeys(("global KV", "index keys", "window"), 0)
    return found | {row.store: row.row_bytes for row in cache.rows}


def generation_bytes(model: Generation | ConfigGeneration, context: int) -> DecodeBytes:
    """What one generated token of a generation reads; of earlier ones the cache alone.

    Their reports give layouts of cache rows, not of all weights.
    """
    if isinstance(model, ConfigGeneration):
        return DecodeTraffic(model.config, model.name).at(context)
    cache = model.kv_bytes()
    check_context(context, cache.max_position_embeddings)
    row = row_bytes(cache)
    return DecodeBytes(
        model.name, context, None,
        window_rows=row["window"] * sum(model.window_rows(context).values()),
        global_rows=row["global KV"] * sum(model.global_rows(context).values()),
        index_keys=row["index keys"] * sum(model.scored_entries(context).values()),
        engram_rows=0,
    )  # fmt: skip
