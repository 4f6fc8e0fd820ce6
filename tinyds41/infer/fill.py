"""Random rows in a cache, to measure what a step costs at a length without reading a text of that length."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tinyds41.formats import WINDOW
from tinyds41.infer.stores import Growing

if TYPE_CHECKING:
    from tinyds41.infer.cache import Cache

FILL_ROWS = 1 << 16  # rows made at a time


def fill(cache: Cache, n_tokens: int, seed: int) -> None:
    """What an empty cache would hold after n_tokens, with random values. See `Cache.fill`."""
    config, generator = cache.config, torch.Generator(cache.device).manual_seed(seed)
    cache.reserve(n_tokens)
    for layer, source in cache.sources.items():
        ratio = cache.plan[layer].ratio
        for store in (source.kv, source.keys):
            for start in range(0, n_tokens // ratio, FILL_ROWS):
                n_rows = min(FILL_ROWS, n_tokens // ratio - start)
                store.append_packed(_random(cache, store, n_rows, generator))
        for recent in source.pending:
            recent.append(_normal(cache, min(n_tokens, recent.keep), config.head_dim, generator), None, 0)
    for window in (*cache.windows, *cache.drafts):
        rows = _normal(cache, min(n_tokens, window.keep), config.head_dim, generator)
        window.append(WINDOW.encode(rows) if config.quantize_cache else rows, None, 0)
    ids = torch.randint(config.vocab_size, (cache.batch, n_tokens), generator=generator, device=cache.device)
    if config.engram_layer_ids:
        cache.history.append(ids[:, -cache.history.keep :], None, 0)
    cache.texts = [array("i", row) for row in ids.tolist()]
    cache.lengths = [n_tokens] * cache.batch


def _normal(cache: Cache, n_rows: int, width: int, generator: torch.Generator) -> Tensor:
    return torch.randn(cache.batch, n_rows, width, generator=generator, device=cache.device).to(cache.dtype)


def _random(cache: Cache, store: Growing, n_rows: int, generator: torch.Generator) -> Tensor:
    """Random codes with the scales of normal values; every code of E2M1 is a number."""
    if store.format is None:
        return _normal(cache, n_rows, store.width, generator)
    codes, scales = store.format.to_codes(_normal(cache, 64, store.width, generator))
    shape = (cache.batch, n_rows, codes.shape[-1])
    codes = torch.randint(256, shape, generator=generator, device=cache.device, dtype=torch.uint8)
    drawn = torch.randint(scales.shape[1], (n_rows,), generator=generator, device=cache.device)
    return torch.cat([codes, scales[:, drawn]], -1)
