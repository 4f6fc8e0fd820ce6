"""Running texts for the tests: one layer of each kind, rows that need no model, and memory full of NaN."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from models import NANO
from torch import Tensor

from tinyds41.config import Config
from tinyds41.infer.cache import Cache
from tinyds41.infer.session import Session
from tinyds41.infer.tokens import Tokens
from tinyds41.model.transformer import Model
from tinyds41.ops import Window

# Rounding of sums in another order, in float64; logits spread over 10.
TOLERANCE = 1e-12

# Window only, Full of ratio 2 behind Engram; decoder: Full that forms a pool, Reuse, Reindex inside the pool. W = 4,
# so `exact` runs the decoder on 4 + 2 * 3 = 10 tokens. Nano's sizes, but half of its time.
SHORT = NANO.replace(
    num_hidden_layers=5, compress_ratios=[0, 2, 1, 1, 1], kv_source_layer_ids=[1, 2], index_source_layer_ids=[1, 2, 4],
    candidate_source_layer_id=2, engram_layer_ids=[1], engram_num_embeddings=[156], num_nextn_predict_layers=0,
    dspark_target_layer_ids=[], hc_mult=2, hc_sinkhorn_iters=2)  # fmt: skip
# Its drafter: two blocks that read an encoder layer behind Engram, a Reuse and the last layer.
DRAFTING = SHORT.replace(num_nextn_predict_layers=2, dspark_target_layer_ids=[1, 3, 4])
EXACT, BOUNDED = 10, 4  # tokens of a prompt that SHORT's decoder runs on


def assert_close(found: Tensor, expected: Tensor) -> None:
    """Equal up to the order of sums."""
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)


def ratio(m: int, **changes) -> Config:
    """SHORT with another compression ratio in its encoder."""
    return SHORT.replace(compress_ratios=[0, m, 1, 1, 1], **changes)


def without_engram(config: Config = SHORT) -> Config:
    return config.replace(engram_layer_ids=[], engram_num_embeddings=[])


def without_decoder(config: Config = SHORT) -> Config:
    """All of it is encoder: nothing is skipped in a prefill."""
    return config.replace(
        compress_ratios=[0, 2, 2, 2, 2], kv_source_layer_ids=[1], index_source_layer_ids=[1, 4],
        candidate_source_layer_id=None)  # fmt: skip


def feed(cache: Cache, ids: Tensor, pads: list[int] | None = None) -> tuple[Tokens, dict[int, Window]]:
    """New tokens whose rows follow from their ids alone: what is stored is the same however they are cut."""
    config, windows = cache.config, {}
    ctx = cache.tokens(ids.shape[1], pads)
    if config.engram_layer_ids:
        ctx.look_back(ids, config.engram_max_ngram_size or 1)
    for layer in cache.plan:
        tables = _rows_of_ids(layer.layer, config.vocab_size, config.head_dim)
        rows, others = (table[ids].to(cache.dtype) for table in tables)
        if layer.writes_globals:
            c, z, _ = ctx.groups(layer.layer, rows, others if layer.ratio > 1 else None)
            latent = c[:, :, 0] if z is None else c[:, :, 0] + z[:, :, -1]
            ctx.add_entries(layer.layer, latent, -latent)
        windows[layer.layer] = ctx.add_window(layer.layer, rows)
    cache.advance(ids, pads)
    return ctx, windows


@functools.cache
def _rows_of_ids(layer: int, n_ids: int, width: int) -> Tensor:
    """Two rows for each id. Shapes: [2,V,C]."""
    generator = torch.Generator().manual_seed(layer)
    return torch.randn(2, n_ids, width, generator=generator, dtype=torch.float64)


def fed(config: Config, ids: Tensor, sizes: list[int] | None = None, **options) -> Cache:
    """A cache that has read ids in pieces of these sizes, or in one."""
    cache = Cache(config, batch=ids.shape[0], **options)
    for part in ids.split(sizes or max(1, ids.shape[1]), 1) if ids.shape[1] else ():
        feed(cache, part)
    return cache


def fed_session(model: Model, ids: Tensor, **options) -> Session:
    """A session that has read ids at once, through all layers."""
    session = Session(model, **options)
    session.prefill(ids, mode="full", chunk=ids.shape[1])
    return session


def alone(cache: Cache | Session, b: int) -> str:
    """The fingerprint of one batch row, as if it were a session of its own."""
    twin = cache.fork()
    twin.reorder([b])
    return twin.fingerprint()


@contextmanager
def memory_full_of_nan() -> Iterator[None]:
    """Memory that nobody has written holds NaN; bytes hold 255, which is NaN as an E4M3 value or scale."""
    torch.set_deterministic_debug_mode("error")  # unlike use_deterministic_algorithms it imports no compiler
    try:
        assert torch.empty(3).isnan().all() and (torch.empty(3, dtype=torch.uint8) == 255).all()
        yield
    finally:
        torch.set_deterministic_debug_mode("default")
