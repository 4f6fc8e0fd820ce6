"""DSpark, the drafter: small blocks that read a text's target features and propose the next tokens at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from tinyds41.config import Config
from tinyds41.model.block import Block, Carry
from tinyds41.model.context import Context
from tinyds41.model.linear import Linear
from tinyds41.model.norm import RMSNorm
from tinyds41.model.rope import Rope
from tinyds41.model.width import check_width
from tinyds41.ops import Ops
from tinyds41.plan import SWA, LayerPlan

if TYPE_CHECKING:
    from tinyds41.model.transformer import Model

# What a drafter shares with the model it drafts for: the vocabulary, the features' width, the shapes of its blocks.
_SHARED = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim", "qk_rope_head_dim",
    "q_lora_rank", "o_groups", "o_lora_rank", "sliding_window", "moe_intermediate_size", "hc_mult", "rope_theta",
    "num_nextn_predict_layers", "dspark_block_size", "dspark_target_layer_ids", "dspark_noise_token_id",
    "dspark_markov_rank", "dspark_n_routed_experts", "dspark_num_experts_per_tok", "quantize_cache", "mhc_mode",
)  # fmt: skip


class MarkovHead(nn.Module):
    """bias(prev) = E[prev] W: what the token before says about the next one. Source: spec 10.3."""

    def __init__(self, config: Config):
        super().__init__()
        rank = config.dspark_markov_rank or 0
        # As in `Model`: nn.Embedding(...) would load the compiler for nothing.
        self.embed = nn.Embedding.from_pretrained(torch.empty(config.vocab_size, rank), freeze=False)
        self.head = Linear(rank, config.vocab_size)

    def forward(self, previous: Tensor) -> Tensor:
        """Shapes: ids [...] -> logits to add [..., V]."""
        return self.head(self.embed(previous))


class ConfidenceHead(nn.Module):
    """c = sigmoid(w [h ; E[prev]]), E of the Markov head; given is the logit. Source: spec 10.3."""

    def __init__(self, config: Config):
        super().__init__()
        self.proj = Linear(config.hidden_size + (config.dspark_markov_rank or 0), 1)

    def forward(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """Shapes: [..., D], [..., rank] -> [...]."""
        return self.proj(torch.cat([hidden, embedded], -1)).squeeze(-1)


class DraftBlock(Block):
    """A window-only layer with fewer experts; the first one also takes the features in, the last one has the heads."""

    def __init__(self, config: Config, number: int, ops: Ops, rope: Rope):
        sizes = config.replace(n_routed_experts=config.dspark_n_routed_experts,
                               num_experts_per_tok=config.dspark_num_experts_per_tok)  # fmt: skip
        plan = LayerPlan(layer=number, half="decoder", mode=SWA, ratio=0, kv_source=None, index_source=None,
                         forms_pool=False, pooled=False, engram=None)  # fmt: skip
        super().__init__(sizes, plan, ops, {False: rope}, None, "mtp")
        width, eps = config.hidden_size, config.rms_norm_eps
        if number == 0:
            self.main_proj = Linear(len(config.dspark_target_layer_ids) * width, width)
            self.main_norm = RMSNorm(width, eps)
        if number == config.num_nextn_predict_layers - 1:
            self.norm = RMSNorm(width, eps)
            self.markov_head = MarkovHead(config)
            self.confidence_head = ConfidenceHead(config)


class DSpark(nn.ModuleList):
    """The draft blocks of a model; token embedding and output head are the backbone's and come as arguments.

    `project` and `target_rows` turn features into what the blocks see of a text; `forward` runs the blocks behind
    anchors, `base_logits`, `markov` and `confidence` are the heads. Training and inference differ in the `Context`.

    Raises: ValueError for a config without draft blocks.
    Source: spec 10, TR 2.4.3.
    """

    def __init__(self, config: Config, ops: Ops):
        if not config.num_nextn_predict_layers:
            raise ValueError("num_nextn_predict_layers=0: this config has no draft blocks")
        rope = Rope(config, compressed=False)
        super().__init__(DraftBlock(config, number, ops, rope) for number in range(config.num_nextn_predict_layers))
        self.config = config

    @property
    def dtype(self) -> torch.dtype:
        return self.last.norm.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.last.norm.weight.device

    def check_fits(self, model: Model) -> None:
        """Raises: ValueError naming the sizes by which this drafter belongs to another model, dtype or device."""
        mine, config = self.config, model.config
        differ = [f"{name}={getattr(mine, name)} (the model's is {getattr(config, name)})" for name in _SHARED
                  if getattr(mine, name) != getattr(config, name)]  # fmt: skip
        if differ:
            raise ValueError(f"the drafter belongs to another model: {', '.join(differ)}")
        if (self.dtype, self.device) != (model.dtype, model.device):
            raise ValueError(
                f"the drafter is {self.dtype} on {self.device}, the model {model.dtype} on {model.device}")

    @property
    def blocks(self) -> Iterator[DraftBlock]:
        return (block for block in self if isinstance(block, DraftBlock))

    @property
    def last(self) -> DraftBlock:
        """The block with the heads."""
        return list(self.blocks)[-1]

    def project(self, features: Mapping[int, Tensor]) -> Tensor:
        """main_norm(main_proj([f_a ; f_b ; ...])), target layer after target layer.

        Shapes: [B,S,D] by target layer (`Carry.features`) -> [B,S,D].
        Raises: ValueError naming target layers whose features are missing.
        """
        layers, first = self.config.dspark_target_layer_ids, next(self.blocks)
        missing = [layer for layer in layers if layer not in features]
        if missing:
            raise ValueError(f"features of the target layers {missing} are missing, there are {list(features)}")
        joined_BSX = torch.cat([features[layer] for layer in layers], -1)
        check_width(joined_BSX, first.main_proj.in_features, "target features")
        return first.main_norm(first.main_proj(joined_BSX))

    def target_rows(self, projected: Tensor, ctx: Context) -> list[Tensor]:
        """What each block sees of the text: its own keys and values of the same features, not yet rounded.

        A block's attn_norm does not touch them; they turn by the positions of `ctx`, the text's.
        Shapes: [B,S,D] -> [B,S,C] per block.
        """
        return [block.attn.rows(projected, ctx.rotation(block.rope, projected.dtype)) for block in self.blocks]

    def block_ids(self, anchors: Tensor) -> Tensor:
        """The anchor, then noise: what a block begins from. Shapes: ids [B] -> [B,k]."""
        config = self.config
        noise = anchors.new_full((len(anchors), (config.dspark_block_size or 0) - 1), config.dspark_noise_token_id or 0)
        return torch.cat([anchors.unsqueeze(1), noise], 1)

    def forward(self, embedded: Tensor, ctx: Context) -> Tensor:
        """The collapsed state of each slot, before the norm: slot k speaks of the token k + 1 places behind its anchor.

        Shapes: embeddings of `block_ids` [B,k,D] -> [B,k,D].
        """
        check_width(embedded, self.config.hidden_size, "DSpark")
        carry = Carry.start(embedded, self.config.hc_mult)
        for block in self.blocks:
            carry = block(carry, ctx)
        return carry.collapsed

    def base_logits(self, hidden: Tensor, head: nn.Module) -> Tensor:
        """The output head's logits, without the Markov bias. Shapes: [B,k,D] -> [B,k,V]."""
        return head(self.last.norm(hidden))

    def markov(self, previous: Tensor) -> Tensor:
        """What is added to the base logits of a token behind `previous`. Shapes: ids [...] -> [..., V]."""
        return self.last.markov_head(previous)

    def confidence(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """Logits of the chance that a slot's token is accepted, once those before it are; not yet calibrated.

        h is the state before the norm, as in the release. Shapes: hidden [..., D], ids [...] -> [...].
        """
        last = self.last
        return last.confidence_head(hidden, last.markov_head.embed(previous))
