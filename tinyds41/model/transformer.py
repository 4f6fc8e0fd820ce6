"""The whole model: an encoder that every token passes, a decoder that only the last ones need."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tinyds41.config import Config
from tinyds41.memory import require_bytes, require_device
from tinyds41.model.block import Block, Carry
from tinyds41.model.context import Context, Sequence
from tinyds41.model.dspark import DSpark
from tinyds41.model.engram import Engram, check_token_map, identity_map
from tinyds41.model.init import initialise, initialise_draft
from tinyds41.model.linear import Linear
from tinyds41.model.norm import RMSNorm
from tinyds41.model.rope import Rope
from tinyds41.ops import Ops
from tinyds41.plan import Plan
from tinyds41.trace import Trace, see

if TYPE_CHECKING:
    from tinyds41.tokenizer import Tokenizer

# What weights may be; indices are chosen and sums are taken in at least float32.
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class Model(nn.Module):
    """DeepSeek-V4.1-Flash at any size.

    `model(ids)` gives logits; `encode` and `decode` are its two halves.

    tokenizer: needed for Engram unless engram_compressed_vocab_size equals vocab_size; kept as `model.tokenizer`.
    token_map: the tokenizer's compressed ids [V], where the tokenizer itself is not at hand.
    seed: of the initial weights, None leaves them unset for who fills all of them; the global random state is
        neither read nor changed.
    engram: by layer, what Engram reads its rows from in place of a table of the model's own (`infer/host_rows.py`).
    draft: with a drafter, `model.mtp`; `add_draft` gives one later. The backbone's weights are the same without it.

    Raises: MemoryError before allocating when the weights cannot fit; ValueError for a tokenizer of another model, a
        drafter where the config has no draft blocks, and as `Engram`.
    Source: spec 1-10.
    """

    def __init__(
        self, config: Config, *, tokenizer: Tokenizer | None = None, token_map: Tensor | None = None,
        ops: Ops | None = None, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu",
        seed: int | None = 0, engram: Mapping[int, nn.Module] | None = None, draft: bool = False,
    ):  # fmt: skip
        super().__init__()
        if dtype not in DTYPES:
            raise ValueError(f"dtype={dtype} is none of {', '.join(map(str, DTYPES))}")
        self.config, self.tokenizer, self.ops = config, tokenizer, ops or Ops.plain()
        if engram and set(engram) - set(config.engram_layer_ids):
            raise ValueError(f"engram={sorted(engram)}: the layers with Engram are {list(config.engram_layer_ids)}")
        if tokenizer is not None and tokenizer.vocab_size > config.vocab_size:
            raise ValueError(f"the tokenizer has {tokenizer.vocab_size} ids, vocab_size is {config.vocab_size}")
        device = require_device(device)
        with torch.device("meta"):
            self._build(config, self.ops, engram or {})
            self.mtp: DSpark | None = DSpark(config, self.ops) if draft else None
            self.to(dtype)
        if device.type != "meta":
            n_parameters = sum(parameter.numel() for parameter in self.parameters())
            require_bytes(n_parameters * dtype.itemsize, device, f"a model of {n_parameters:,} parameters in {dtype}")
            self.to_empty(device=device)
            self._set_token_map(token_map, device)
            if seed is not None:
                initialise(self, seed)
                initialise_draft(self, seed)

    def add_draft(self, draft: DSpark | None = None, *, seed: int = 0) -> DSpark:
        """Gives the model a drafter in place of the one it may have: a new one, or that of a model of the same sizes.

        A new one has the weights that `Model(config, draft=True, seed=seed)` has.

        Raises: ValueError for a config without draft blocks, and a drafter that fits another model, with the reason;
            MemoryError before allocating.
        """
        if draft is not None:
            draft.check_fits(self)
            self.mtp = draft
            return draft
        with torch.device("meta"):
            draft = DSpark(self.config, self.ops).to(self.dtype)
        if self.device.type != "meta":
            n = sum(parameter.numel() for parameter in draft.parameters())
            require_bytes(n * self.dtype.itemsize, self.device, f"a drafter of {n:,} parameters in {self.dtype}")
            draft.to_empty(device=self.device)
        self.mtp = draft
        if self.device.type != "meta":
            initialise_draft(self, seed)
        return draft

    def _build(self, config: Config, ops: Ops, outside: Mapping[int, nn.Module]) -> None:
        ropes = {compressed: Rope(config, compressed=compressed) for compressed in (False, True)}
        # Not nn.Embedding(...): its initialisation on the meta device imports the compiler, seconds for nothing.
        self.embed = nn.Embedding.from_pretrained(torch.empty(config.vocab_size, config.hidden_size), freeze=False)
        self.layers = nn.ModuleList()
        for layer in self.plan:
            engram = None if layer.engram is None else Engram(config, layer.engram, outside.get(layer.layer))
            self.layers.append(Block(config, layer, ops, ropes, engram))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.head = Linear(config.hidden_size, config.vocab_size)

    def _set_token_map(self, token_map: Tensor | None, device: torch.device) -> None:
        if not self.config.engram_layer_ids:
            return
        if token_map is None and self.tokenizer is not None:
            token_map = self.tokenizer.compressed_map()
            pad = self.config.engram_pad_token_id
            if pad is not None and pad >= token_map.shape[0]:
                raise ValueError(f"engram_pad_token_id={pad} is none of the tokenizer's {token_map.shape[0]} ids")
            # Ids that the tokenizer never produces share the pad's compressed id.
            missing = self.config.vocab_size - token_map.shape[0]
            token_map = F.pad(token_map, (0, missing), value=int(token_map[self.config.engram_pad_token_id]))
        token_map = identity_map(self.config) if token_map is None else check_token_map(self.config, token_map)
        for engram in self.engrams.values():
            engram.token_map = token_map.to(device)

    @property
    def plan(self) -> Plan:
        return self.config.plan()

    @property
    def engrams(self) -> dict[int, Engram]:
        """The Engram modules by layer."""
        blocks = ((layer, self.layers[layer]) for layer in self.config.engram_layer_ids)
        return {layer: block.engram for layer, block in blocks if isinstance(block, Block) and block.engram is not None}

    @property
    def device(self) -> torch.device:
        return self.head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.head.weight.dtype

    def forward(self, ids: Tensor, *, documents: Tensor | None = None, trace: Trace | None = None) -> Tensor:
        """Logits of whole sequences, with gradients.

        Shapes: ids [B,S] integers, documents [B,S] (see `Sequence`) -> [B,S,V].
        Raises: ValueError for ids out of range, an empty prompt, more tokens than max_position_embeddings, documents of
            another shape; KeyError for a pattern of the trace that matches nothing.
        """
        self.check(ids)
        ctx = Sequence(self.config, ids, documents, trace)
        if trace is not None:
            trace.begin(ids.shape[1])
        logits = self.logits(self.decode(self.encode(ids, ctx), ctx))
        if trace is not None:
            see(trace, "logits", logits)
            trace.finish()
        return logits

    def check(self, ids: Tensor) -> None:
        """Raises: ValueError for a model without weights, ids on another device, and as `check_ids`."""
        if self.device.type == "meta":
            raise ValueError("the model is on the meta device: it has no weights to run")
        if isinstance(ids, Tensor) and ids.device != self.device:
            raise ValueError(f"ids are on {ids.device}, the model is on {self.device}")
        check_ids(ids, self.config)

    def encode(self, ids: Tensor, ctx: Context, *, features: bool | None = None) -> Carry:
        """Encoder layers, then the boundary layer's global entries for every token.

        features: whether the carry collects what a drafter reads, by default where the model has one.
        Source: spec 5.
        """
        embedded = self.embed(ids)
        see(ctx.trace, "embed", embedded)
        lookback = None
        if self.config.engram_layer_ids:
            assert self.config.engram_max_ngram_size
            lookback = ctx.look_back(ids, self.config.engram_max_ngram_size)
            last = len(self.layers) if self.plan.boundary is None else self.plan.boundary + 1
            self._fetch(range(last), lookback)
            self._fetch(range(last), ctx.look_ahead(self.config.engram_max_ngram_size))
        features = self.mtp is not None if features is None else features
        carry = Carry.start(embedded, self.config.hc_mult, lookback, features=features)
        for block in self.layers[: self.plan.n_encoder]:
            carry = block(carry, ctx)
        return carry if self.plan.boundary is None else self._boundary.prepare(carry, ctx)

    def decode(self, carry: Carry, ctx: Context) -> Carry:
        """Decoder layers on the tokens in `carry`; the boundary layer's entries are already written."""
        if self.plan.boundary is None:
            return carry
        self._fetch(range(self.plan.boundary + 1, len(self.layers)), carry.lookback)
        carry = self._boundary.finish(carry, ctx)
        for block in self.layers[self.plan.boundary + 1 :]:
            carry = block(carry, ctx)
        return carry

    def _fetch(self, layers: range, lookback: Tensor | None) -> None:
        """Tells the tables of these layers which rows will be read, where they lie outside. Source: spec 9.4."""
        for layer, engram in self.engrams.items():
            if layer in layers and lookback is not None:
                engram.fetch(lookback)

    def logits(self, carry: Carry) -> Tensor:
        """W_head RMSNorm(sum_i mix_i X_i), with the last sub-layer's pre.

        Shapes: -> [B,S,V]. Source: spec 7.
        """
        return self.head(self.norm(carry.collapsed))

    def target_rows(self, carry: Carry, ctx: Context) -> list[Tensor]:
        """What the drafter's blocks see of the tokens in `carry`. Shapes: -> [B,S,C] per draft block, not yet rounded.

        Raises: ValueError for a model without a drafter, a carry without features.
        Source: spec 10.2.
        """
        if carry.features is None:
            raise ValueError("the carry holds no features: encode(..., features=True) collects them")
        draft = self.drafter
        return draft.target_rows(draft.project(carry.features), ctx)

    def draft(self, anchors: Tensor, ctx: Context) -> tuple[Tensor, Tensor]:
        """Runs the draft blocks behind anchors, one per batch row of `ctx`.

        Shapes: ids [B] -> the state of each slot before the norm [B,k,D], base logits [B,k,V] of the tokens at
            positions p + 1 to p + k, without the Markov bias.
        Raises: ValueError for a model without a drafter.
        Source: spec 10.2, 10.3.
        """
        draft = self.drafter
        hidden = draft(self.embed(draft.block_ids(anchors)), ctx)
        return hidden, draft.base_logits(hidden, self.head)

    @property
    def drafter(self) -> DSpark:
        """`mtp`. Raises: ValueError for a model without a drafter."""
        if self.mtp is None:
            raise ValueError("the model has no drafter: Model(config, draft=True), load(..., draft=True) or add_draft")
        return self.mtp

    @property
    def _boundary(self) -> Block:
        assert self.plan.boundary is not None
        block = self.layers[self.plan.boundary]
        assert isinstance(block, Block)
        return block


def check_ids(ids: Tensor, config: Config) -> None:
    """Raises: ValueError naming the shape, the id or the length that does not fit."""
    if not isinstance(ids, Tensor):
        raise ValueError(f"ids are a {type(ids).__name__}, expected a tensor [B, S]")
    if ids.ndim != 2:
        raise ValueError(f"ids have shape {tuple(ids.shape)}, expected [B, S]")
    if ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"ids are {ids.dtype}, expected int64 or int32")
    if ids.shape[1] == 0 or ids.shape[0] == 0:
        raise ValueError(f"an empty prompt: ids have shape {tuple(ids.shape)}")
    if ids.shape[1] > config.max_position_embeddings:
        raise ValueError(f"{ids.shape[1]} tokens exceed max_position_embeddings={config.max_position_embeddings}")
    low, high = (int(value) for value in ids.aminmax())
    if low < 0 or high >= config.vocab_size:
        raise ValueError(f"id {low if low < 0 else high} is out of range: ids are 0..{config.vocab_size - 1}")
