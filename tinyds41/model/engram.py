"""Engram: a memory of n-grams. Row addresses follow from token ids alone, so rows can be fetched ahead."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tinyds41.config import Config
from tinyds41.formats import ENGRAM
from tinyds41.mixing import at_least_fp32
from tinyds41.model.context import Context
from tinyds41.model.engram_gate import gated_read
from tinyds41.model.linear import Linear
from tinyds41.model.width import check_width
from tinyds41.trace import see


def multipliers(layer: int, compressed_vocab_size: int, max_ngram_size: int) -> Tensor:
    """One odd multiplier per look-back step, int64 [n]. Source: spec 9.2.

    The bound keeps every product below 2^63, so the hash cannot overflow.
    """
    bound = max(1, (2**63 - 1) // compressed_vocab_size // 2)
    drawn = np.random.default_rng(10007 * layer).integers(0, bound, size=max_ngram_size, dtype=np.int64)
    return torch.from_numpy(drawn * 2 + 1)


def table_primes(config: Config) -> list[list[int]]:
    """For each Engram layer the table sizes of its columns, order-major then head.

    Source: spec 9.2.

    Every size is a prime of its own, so that two columns never collide in the same pattern.
    """
    assert config.engram_vocab_size and config.engram_max_ngram_size and config.engram_n_heads
    used: set[int] = set()
    tables = []
    for _ in config.engram_layer_ids:
        primes = []
        for _ in range(2, config.engram_max_ngram_size + 1):
            prime = config.engram_vocab_size - 1
            for _ in range(config.engram_n_heads):
                prime = _next_prime(prime, used)
                used.add(prime)
                primes.append(prime)
        tables.append(primes)
    return tables


def checked_primes(config: Config, table: int) -> list[int]:
    """The sizes of one table's columns. Raises: ValueError when they do not add up to engram_num_embeddings."""
    primes, n_rows = table_primes(config)[table], config.engram_num_embeddings[table]
    if sum(primes) != n_rows:
        raise ValueError(
            f"engram_num_embeddings[{table}]={n_rows}, but the primes from engram_vocab_size="
            f"{config.engram_vocab_size} add up to {sum(primes)}")  # fmt: skip
    return primes


def _next_prime(above: int, used: set[int]) -> int:
    candidate = above + 1
    while candidate in used or not _is_prime(candidate):
        candidate += 1
    return candidate


def _is_prime(number: int) -> bool:
    if number < 4:
        return number > 1
    return number % 2 == 1 and all(number % divisor for divisor in range(3, int(number**0.5) + 1, 2))


def hash_rows(lookback: Tensor, multiplier: Tensor, primes: Tensor, n_heads: int) -> Tensor:
    """Table rows of each token, order-major then head.

    x_0 = id(p) mult_0; x_i = x_{i-1} xor id(p-i) mult_i; row = x_i mod prime + offset.

    Shapes: lookback [..., n] compressed ids, multiplier [n], primes [(n-1)*heads] -> int64 [..., (n-1)*heads].
    Source: spec 9.2.
    """
    products = lookback * multiplier.to(lookback.device)
    mixed = [products[..., 0]]
    for step in range(1, lookback.shape[-1]):
        mixed.append(mixed[-1] ^ products[..., step])
    per_order = torch.stack(mixed[1:], -1).repeat_interleave(n_heads, -1)
    primes = primes.to(lookback.device)
    return per_order % primes + (primes.cumsum(0) - primes)


def compress_look_back(ids: Tensor, token_map: Tensor, dead: Tensor, pad_id: int) -> Tensor:
    """Token ids to compressed ids.

    From the first dead or missing token on, the compressed id of the pad.

    Shapes: ids and dead [..., n], nearest first, ids < 0 where there is no token. Source: spec 9.1, 9.2.
    """
    blocked = (dead | (ids < 0)).cummax(-1).values
    return token_map[ids.clamp(min=0)].masked_fill(blocked, pad_id)


class Engram(nn.Module):
    """X_i += g_i * value: a gate per stream, the value from the rows of a table.

    A token reads one row per order and head (24 in `flash`).

    embed: what the rows are read from in place of a table of the model's own: a module that turns addresses
        [B,S,columns] into rows [B,S,columns,head_dim] that are rounded already, with `num_embeddings` and
        `embedding_dim`. Where it has `wants(n)` and `fetch(addresses)`, it is told n addresses ahead of their use.

    Source: spec 9. Lesson: 10.

    Raises: ValueError when the primes do not add up to engram_num_embeddings, the token map does not fit, or `embed` is
        of another size or stands in a model that reads its rows unrounded.
    """

    def __init__(self, config: Config, table: int, embed: nn.Module | None = None):
        super().__init__()
        self.config = config
        self.path = f"layers.{config.engram_layer_ids[table]}.engram"
        primes = checked_primes(config, table)
        assert config.engram_compressed_vocab_size and config.engram_max_ngram_size and config.engram_head_dim
        layer = config.engram_layer_ids[table]
        self.multipliers = multipliers(layer, config.engram_compressed_vocab_size, config.engram_max_ngram_size)
        # On the CPU also while the model is built on the meta device: these are addresses, not weights.
        self.primes = torch.tensor(primes, device="cpu")
        # Set by the model: the tokenizer's compressed id of each token. Derived, so never saved.
        self.register_buffer("token_map", torch.empty(config.vocab_size, dtype=torch.long), persistent=False)
        width, n_streams = config.hidden_size, config.hc_mult
        self._table_shape = config.engram_num_embeddings[table], config.engram_head_dim
        self.embed: nn.Module
        if embed is None:  # without an initialisation of its own, as in `Model`
            self.embed = nn.Embedding.from_pretrained(torch.empty(self._table_shape), freeze=False)
        else:
            self.read_from(embed)
        self.wkv = Linear(len(primes) * config.engram_head_dim, (n_streams + 1) * width)
        self.q_weight = nn.Parameter(torch.ones(n_streams, width))
        self.k_weight = nn.Parameter(torch.ones(n_streams, width))

    def read_from(self, embed: nn.Module) -> None:
        """Puts `embed` in the place of the table, which is freed. Raises: ValueError as the constructor."""
        shape = embed.num_embeddings, embed.embedding_dim
        if shape != self._table_shape:
            raise ValueError(f"{self.path}: a table of shape {shape}, the config's is {self._table_shape}")
        if not self.config.quantize_engram:
            raise ValueError(f"{self.path}: quantize_engram=False reads rows unrounded, those given are rounded")
        self.embed = embed

    @property
    def owns_table(self) -> bool:
        """Whether the table is among the model's parameters."""
        return isinstance(self.embed, nn.Embedding)

    def table(self) -> Tensor:
        """The whole table, in the dtype of the model. Shapes: [rows, head_dim]."""
        weight = self.embed.weight
        assert isinstance(weight, Tensor)
        return weight.to(self.wkv.weight.dtype)

    def fetch(self, lookback: Tensor) -> None:
        """Tells a table outside the model, if it listens, which rows will be read. Shapes: [B,S,n] token ids."""
        ahead: Any = self.embed
        if hasattr(ahead, "fetch") and ahead.wants(lookback[..., 0].numel() * len(self.primes)):
            ahead.fetch(self.rows(lookback))

    def rows(self, lookback: Tensor) -> Tensor:
        """Addresses in the table, from token ids alone. Shapes: [B,S,n] -> int64 [B,S,columns]."""
        check_width(lookback, len(self.multipliers), f"{self.path} lookback")
        dead = lookback == self.config.engram_pad_token_id
        assert isinstance(self.token_map, Tensor)
        pad_id = int(self.token_map[self.config.engram_pad_token_id])
        compressed = compress_look_back(lookback, self.token_map, dead, pad_id)
        return hash_rows(compressed, self.multipliers, self.primes, self.config.engram_n_heads or 1)

    def forward(self, streams: Tensor, lookback: Tensor, ctx: Context) -> Tensor:
        """The streams with what was read.

        Shapes: streams [B,S,N,D], lookback [B,S,n] token ids -> [B,S,N,D].
        """
        rows_BSX = self.rows(lookback)
        memory = self.embed(rows_BSX)
        if not self.owns_table:
            memory = memory.to(self.wkv.weight)  # which gives device and dtype
        elif self.config.quantize_engram:
            memory = ENGRAM.fake_quant(memory)
        alive = ctx.alive & (lookback[..., 0] != self.config.engram_pad_token_id)
        new_BSND, gate_BSN, value_BSD = self.read(streams, memory.flatten(2), alive)
        see(ctx.trace, f"{self.path}.rows", rows_BSX)
        see(ctx.trace, f"{self.path}.gate", gate_BSN)
        see(ctx.trace, f"{self.path}.value", value_BSD)
        return new_BSND

    def read(self, streams: Tensor, memory: Tensor, alive: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and value from the table rows, then `gated_read`.

        Shapes: streams [B,S,N,D], memory [B,S,columns*head_dim], alive [B,S] -> streams, gate [B,S,N], value [B,S,D].
        """
        n_streams, width = self.q_weight.shape
        check_width(streams, width, f"{self.path} streams")
        check_width(memory, self.wkv.in_features, f"{self.path} memory")
        read_BSX = self.wkv(memory)
        weight = at_least_fp32(self.q_weight) * at_least_fp32(self.k_weight)
        flat_nND, read_nX = (at_least_fp32(x).flatten(0, 1) for x in (streams, read_BSX))
        new_nND, gate_nN = gated_read(flat_nND, read_nX, weight, alive.flatten(), self.config.rms_norm_eps)
        new_BSND = new_nND.view(streams.shape).to(streams.dtype)
        return new_BSND, gate_nN.view(streams.shape[:3]), read_BSX[..., n_streams * width :]


def identity_map(config: Config) -> Tensor:
    """The token map of a model without a tokenizer.

    Raises: ValueError when the config needs one. Source: spec 9.1.
    """
    if config.engram_compressed_vocab_size != config.vocab_size:
        raise ValueError(
            f"engram_compressed_vocab_size={config.engram_compressed_vocab_size} differs from vocab_size="
            f"{config.vocab_size}: such a model needs its tokenizer (token_map)"
        )
    return torch.arange(config.vocab_size)


def check_token_map(config: Config, token_map: Tensor) -> Tensor:
    """Returns the token map if it is that of the model's tokenizer.

    Raises: ValueError for another number of tokens or of compressed ids.
    """
    if not isinstance(token_map, Tensor) or token_map.dtype not in (torch.int64, torch.int32):
        found = token_map.dtype if isinstance(token_map, Tensor) else type(token_map).__name__
        raise ValueError(f"token_map is {found}, expected a tensor of int64 or int32")
    if token_map.shape != (config.vocab_size,):
        raise ValueError(f"token_map has shape {tuple(token_map.shape)}, vocab_size is {config.vocab_size}")
    found = int(token_map.max()) + 1
    if found != config.engram_compressed_vocab_size:
        raise ValueError(
            f"the tokenizer compresses to {found} ids, engram_compressed_vocab_size is "
            f"{config.engram_compressed_vocab_size}: it is not this model's tokenizer"
        )
    return token_map
