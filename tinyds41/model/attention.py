"""CSA2 attention: a window of exact neighbours, a few selected global entries, one shared K = V head."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tinyds41.config import Config
from tinyds41.model.context import Context
from tinyds41.model.linear import Linear
from tinyds41.model.norm import RMSNorm
from tinyds41.model.rope import rotate
from tinyds41.model.width import check_width
from tinyds41.ops import Ops, Selection
from tinyds41.trace import see


class Attention(nn.Module):
    """softmax over window, selected entries and a sink, un-rotated, then the output projection.

    place: where the layer stands in the model, "layers" or, for a draft block, "mtp".

    Source: spec 4, TR 2.3. Lessons: 02, 04.
    """

    def __init__(self, config: Config, layer: int, ops: Ops, place: str = "layers"):
        super().__init__()
        self.config, self.layer, self.ops = config, layer, ops
        self.path = f"{place}.{layer}.attn"
        width, n_heads, groups = config.hidden_size, config.num_attention_heads, config.o_groups
        self.wq_a = Linear(width, config.q_lora_rank)
        self.q_norm = RMSNorm(config.q_lora_rank, config.rms_norm_eps)
        self.wq_b = Linear(config.q_lora_rank, n_heads * config.head_dim)
        self.wkv = Linear(width, config.head_dim)
        self.kv_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        # One matrix per group, stacked along the rows as in released files.
        self.wo_a = Linear(n_heads * config.head_dim // groups, groups * config.o_lora_rank)
        self.wo_b = Linear(groups * config.o_lora_rank, width)
        self.attn_sink = nn.Parameter(torch.zeros(n_heads))

    def query_latent(self, x: Tensor) -> Tensor:
        """r = RMSNorm(x W_qa), shared with the indexer. Shapes: [B,S,D] -> [B,S,Q]."""
        check_width(x, self.config.hidden_size, self.path)
        return self.q_norm(self.wq_a(x))

    def forward(
        self, x: Tensor, query_latent: Tensor, ctx: Context, rotation: Tensor, selection: Selection | None
    ) -> Tensor:
        """Shapes: x [B,S,D], query_latent [B,S,Q], rotation [B,S,R/2] -> [B,S,D]."""
        check_width(x, self.config.hidden_size, self.path)
        check_width(query_latent, self.config.q_lora_rank, f"{self.path} query_latent")
        turn = rotation.unsqueeze(-2)
        q_BSHC = rotate(self.wq_b(query_latent).unflatten(-1, (self.config.num_attention_heads, -1)), turn)
        window = ctx.add_window(self.layer, self.rows(x, rotation))
        out_BSHC = self.ops.attend(
            q_BSHC, window, selection, self.attn_sink, count=lambda n: ctx.counters.add("rows_decoded", self.layer, n))
        ctx.counters.add("tokens_run", self.layer, x.shape[0] * x.shape[1])

        see(ctx.trace, f"{self.path}.input", x)
        see(ctx.trace, f"{self.path}.query_latent", query_latent)
        see(ctx.trace, f"{self.path}.q", q_BSHC)
        see(ctx.trace, f"{self.path}.window_kv", window.rows.all, by_query=False)
        see(ctx.trace, f"{self.path}.window_first", window.first)
        # Keys and values are one rotated vector: turning back leaves values relative to the query.
        out_BSHC = rotate(out_BSHC, turn.conj())
        see(ctx.trace, f"{self.path}.heads", out_BSHC)
        return self.project(out_BSHC)

    def rows(self, x: Tensor, rotation: Tensor) -> Tensor:
        """Keys and values in one, not yet rounded. Shapes: x [B,S,D], rotation [B,S,R/2] -> [B,S,C]."""
        return rotate(self.kv_norm(self.wkv(x)), rotation)

    def project(self, heads_BSHC: Tensor) -> Tensor:
        """Each group of heads through its own low-rank matrix, then all through one. Source: spec 2."""
        groups, rank = self.config.o_groups, self.config.o_lora_rank
        heads_GnX = heads_BSHC.reshape(heads_BSHC.shape[:2].numel(), groups, -1).transpose(0, 1)
        wo_a_GrX = self.wo_a.weight.view(groups, rank, -1)
        mixed_nGr = torch.bmm(heads_GnX, wo_a_GrX.mT).transpose(0, 1)
        return self.wo_b(mixed_nGr.reshape(*heads_BSHC.shape[:2], groups * rank))
