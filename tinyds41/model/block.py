"""One layer, in two steps: `prepare` works for every token, `finish` only for those that go on."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from tinyds41.config import Config
from tinyds41.mixing import at_least_fp32, collapse
from tinyds41.model.attention import Attention
from tinyds41.model.compressor import Compressor
from tinyds41.model.context import Context
from tinyds41.model.engram import Engram
from tinyds41.model.hyper_connections import HyperConnection
from tinyds41.model.indexer import Indexer
from tinyds41.model.moe import MoE
from tinyds41.model.norm import RMSNorm
from tinyds41.model.rope import Rope, rotate
from tinyds41.ops import Ops, Selection
from tinyds41.plan import SWA, LayerPlan
from tinyds41.trace import see


@dataclass(frozen=True)
class Carry:
    """What travels between layers.

    Shapes: streams [B,S,N,D], mix [B,S,N], collapsed [B,S,D] = mix over streams.

    selections: by index source; lookback feeds the Engram layers. features: the means over streams that a drafter
    reads, by target layer, of the layers passed; None where nobody wants them.
    """

    streams: Tensor
    mix: Tensor
    collapsed: Tensor
    lookback: Tensor | None = None  # [B,S,n] token ids, -1 = none
    selections: dict[int, Selection] = field(default_factory=dict)
    features: dict[int, Tensor] | None = None  # [B,S,D] each

    @classmethod
    def start(
        cls, embedded: Tensor, n_streams: int, lookback: Tensor | None = None, *, features: bool = False
    ) -> Carry:
        """Every stream is the embedding, mix = (1, 0, ..., 0). Source: spec 7."""
        streams = embedded.unsqueeze(2).expand(-1, -1, n_streams, -1)
        mix = torch.zeros(*embedded.shape[:2], n_streams, device=embedded.device,
                          dtype=torch.promote_types(embedded.dtype, torch.float32))  # fmt: skip
        mix[..., 0] = 1
        return cls(streams, mix, embedded, lookback, features={} if features else None)

    def last(self, n: int) -> Carry:
        """The state of the last n tokens, for a decoder that runs on no more."""
        selections = {source: selection.last(n) for source, selection in self.selections.items()}
        lookback = None if self.lookback is None else self.lookback[:, -n:]
        features = None if self.features is None else {layer: x[:, -n:] for layer, x in self.features.items()}
        return Carry(self.streams[:, -n:], self.mix[:, -n:], self.collapsed[:, -n:], lookback, selections, features)

    def join(self, later: Carry) -> Carry:
        """The state of these tokens and of the ones behind them."""
        def both(mine: Tensor, theirs: Tensor) -> Tensor:
            return torch.cat([mine, theirs], 1)

        lookback = None if self.lookback is None or later.lookback is None else both(self.lookback, later.lookback)
        selections = {source: mine.join(later.selections[source]) for source, mine in self.selections.items()}
        features = None
        if self.features is not None and later.features is not None:
            features = {layer: both(mine, later.features[layer]) for layer, mine in self.features.items()}
        return Carry(both(self.streams, later.streams), both(self.mix, later.mix),
                     both(self.collapsed, later.collapsed), lookback, selections, features)  # fmt: skip


class Block(nn.Module):
    """Engram, then attention and mixture of experts, each inside its hyper-connection.

    place: as of `Attention`.
    Source: spec 4-9.
    """

    def __init__(
        self, config: Config, layer: LayerPlan, ops: Ops, ropes: dict[bool, Rope], engram: Engram | None,
        place: str = "layers",
    ):  # fmt: skip
        super().__init__()
        self.config, self.layer, self.ops = config, layer, ops
        self.path = f"{place}.{layer.layer}"
        self.rope = ropes[layer.mode != SWA]
        self.engram = engram
        self.attn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attn = Attention(config, layer.layer, ops, place)
        self.compressor = Compressor(config, layer.ratio) if layer.writes_globals else None
        self.indexer = Indexer(config, layer, ops) if layer.selects else None
        self.ffn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.ffn = MoE(config, layer.layer, ops, place)
        self.hc_attn = HyperConnection(config, ops)
        self.hc_ffn = HyperConnection(config, ops)

    def forward(self, carry: Carry, ctx: Context) -> Carry:
        return self.finish(self.prepare(carry, ctx), ctx)

    def prepare(self, carry: Carry, ctx: Context) -> Carry:
        """Adds Engram to the streams and, in a Full layer, writes the global entries of every token.

        Of a drafter's target layer the mean of the streams is kept as it is now: behind Engram, before attention.
        Source: spec 10.1.
        """
        if self.engram is not None:
            assert carry.lookback is not None
            streams = self.engram(carry.streams, carry.lookback, ctx)
            carry = replace(carry, streams=streams, collapsed=collapse(streams, carry.mix))
        see(ctx.trace, f"{self.path}.streams", carry.streams)
        if carry.features is not None and self.layer.layer in self.config.dspark_target_layer_ids:
            feature_BSD = at_least_fp32(carry.streams).mean(2).to(carry.streams.dtype)
            carry = replace(carry, features={**carry.features, self.layer.layer: feature_BSD})
        if self.layer.writes_globals:
            self._write_globals(self.attn_norm(self._attention_input(carry)), ctx)
        return carry

    def finish(self, carry: Carry, ctx: Context) -> Carry:
        """Attention, then experts."""
        pre, post, comb, streams = self.hc_attn(carry.streams)
        x = self.attn_norm(self.hc_attn.input(streams, carry.collapsed, pre))
        self._see_mixing("hc_attn", ctx, pre, post, comb)
        y, selections = self._attend(x, carry.selections, ctx)
        streams, collapsed = self.ops.hyper_step(streams, y, post, comb, pre)

        pre, post, comb, streams = self.hc_ffn(streams)
        x = self.ffn_norm(self.hc_ffn.input(streams, collapsed, pre))
        self._see_mixing("hc_ffn", ctx, pre, post, comb)
        streams, collapsed = self.ops.hyper_step(streams, self.ffn(x, ctx), post, comb, pre)
        return Carry(streams, pre, collapsed, carry.lookback, selections, carry.features)

    def _attention_input(self, carry: Carry) -> Tensor:
        if self.config.mhc_mode != "multi_pass":
            return carry.collapsed
        return self.hc_attn.input(carry.streams, carry.collapsed, self.hc_attn(carry.streams)[0])

    def _attend(self, x: Tensor, selections: dict[int, Selection], ctx: Context) -> tuple[Tensor, dict]:
        rotation = ctx.rotation(self.rope, x.dtype)
        query_latent = self.attn.query_latent(x)
        if self.indexer is not None:
            pool = self._pool(selections)
            chosen = self.indexer(x, query_latent, ctx, rotation, pool)
            selections = {**selections, self.layer.layer: chosen}
        selection = None if self.layer.index_source is None else selections[self.layer.index_source]
        return self.attn(x, query_latent, ctx, rotation, selection), selections

    def _pool(self, selections: dict[int, Selection]) -> Tensor | None:
        source = self.config.candidate_source_layer_id
        return selections[source].pool if self.layer.pooled and source is not None else None

    def _write_globals(self, x: Tensor, ctx: Context) -> None:
        """Pools full groups into global KV rows and index keys. Source: spec 4.2, 4.3."""
        assert self.compressor is not None and self.indexer is not None
        layer = self.layer.layer
        c, z, positions = ctx.groups(layer, *self.compressor.project(x))
        if self.layer.half == "decoder":
            ctx.counters.add("boundary_projections", layer, x.shape[0] * x.shape[1])
        latent_BGC = self.compressor.latent(c, z)
        rotation = self.rope.rotation(positions, x.dtype)
        kv_BGC = rotate(latent_BGC, rotation)
        with torch.no_grad():
            keys_BGJ = self.indexer.keys(latent_BGC, rotation)
        see(ctx.trace, f"{self.path}.compressor.latent", latent_BGC, by_query=False)
        see(ctx.trace, f"{self.path}.compressor.positions", positions, by_query=False)
        ctx.add_entries(layer, kv_BGC, keys_BGJ)
        see(ctx.trace, f"{self.path}.compressor.global_kv", lambda: ctx.entries(layer).kv.all(), by_query=False)

    def _see_mixing(self, name: str, ctx: Context, pre: Tensor, post: Tensor, comb: Tensor) -> None:
        see(ctx.trace, f"{self.path}.{name}.pre", pre)
        see(ctx.trace, f"{self.path}.{name}.post", post)
        see(ctx.trace, f"{self.path}.{name}.comb", comb)
