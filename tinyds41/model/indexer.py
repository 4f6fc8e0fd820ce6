"""The sparse indexer: cheap scores decide which global entries a query attends to."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tinyds41.config import Config
from tinyds41.formats import INDEX
from tinyds41.mixing import at_least_fp32
from tinyds41.model.context import Context, Entries
from tinyds41.model.linear import Linear
from tinyds41.model.norm import RMSNorm
from tinyds41.model.rope import rotate
from tinyds41.model.width import check_width
from tinyds41.ops import Ops, Selection, index_scores
from tinyds41.plan import LayerPlan
from tinyds41.trace import see


class Indexer(nn.Module):
    """Index queries of a Full or Reindex layer, and the index keys of a Full one.

    Its inputs are detached from the model and its choice passes no gradient: it learns by imitation alone
    (spec 12). Source: spec 4.3-4.5. Lesson: 05.
    """

    def __init__(self, config: Config, layer: LayerPlan, ops: Ops):
        super().__init__()
        self.config, self.layer, self.ops = config, layer, ops
        self.path = f"layers.{layer.layer}.indexer"
        n_heads, width = config.index_n_heads, config.index_head_dim
        self.wq_b = Linear(config.q_lora_rank, n_heads * width)
        self.weights_proj = Linear(config.hidden_size, n_heads)
        self.wk = Linear(config.head_dim, width) if layer.writes_globals else None
        self.k_norm = RMSNorm(width, config.rms_norm_eps) if layer.writes_globals else None

    def keys(self, latent: Tensor, rotation: Tensor) -> Tensor:
        """rope(RMSNorm(latent_j W_ik), jm), from the latent before RoPE; the context rounds it to FP4.

        Shapes: [B,G,C] -> [B,G,J].
        """
        assert self.wk is not None and self.k_norm is not None
        check_width(latent, self.config.head_dim, f"{self.path} latent")
        return rotate(self.k_norm(self.wk(latent.detach())), rotation)

    def queries(self, x: Tensor, query_latent: Tensor, rotation: Tensor) -> tuple[Tensor, Tensor]:
        """qI = fp4(rope(r W_iq, p)) and w = x W_iw.

        Shapes: x [B,S,D], r [B,S,Q] -> [B,S,I,J], [B,S,I].
        """
        check_width(x, self.config.hidden_size, self.path)
        check_width(query_latent, self.config.q_lora_rank, f"{self.path} query_latent")
        q_BSIJ = self.wq_b(query_latent.detach()).unflatten(-1, (self.config.index_n_heads, -1))
        q_BSIJ = rotate(q_BSIJ, rotation.unsqueeze(-2))
        return INDEX.fake_quant(q_BSIJ) if self.config.quantize_cache else q_BSIJ, self.weights_proj(x.detach())

    def forward(
        self, x: Tensor, query_latent: Tensor, ctx: Context, rotation: Tensor, pool: Tensor | None
    ) -> Selection:
        """Chooses the entries of each query; a candidate source also forms the pool.

        Source: spec 4.4, 4.5.
        """
        entries = ctx.entries(self.layer.kv_source)
        with torch.no_grad():
            q_BSIJ, weight_BSI = self.queries(x, query_latent, rotation)
            index, formed = self.ops.score_and_select(
                q_BSIJ, weight_BSI, entries.keys, entries.first, entries.last, self.config.index_topk,
                block_size=self.config.candidate_block_size, pool=pool if self.layer.pooled else None,
                form_blocks=self.config.candidate_topk_blocks if self.layer.forms_pool else 0,
                count=lambda n: ctx.counters.add("entries_scored", self.layer.layer, n),
            )  # fmt: skip
        trace = ctx.trace
        see(trace, f"{self.path}.queries", q_BSIJ)
        see(trace, f"{self.path}.weights", weight_BSI)
        see(trace, f"{self.path}.keys", entries.keys.all, by_query=False)
        see(trace, f"{self.path}.selection", index)
        if formed is not None:
            see(trace, f"{self.path}.pool", formed)
        see(trace, f"{self.path}.scores", lambda: self._scores(q_BSIJ, weight_BSI, entries, pool))
        return Selection(index, entries.kv, formed)

    def _scores(self, q_BSIJ: Tensor, weight_BSI: Tensor, entries: Entries, pool: Tensor | None) -> Tensor:
        """All scores with -inf where a query may not choose.

        Only for a trace: the run itself never holds them.
        """
        with torch.no_grad():
            scores_BST = at_least_fp32(index_scores(q_BSIJ, weight_BSI, entries.keys.all()))
            entry = torch.arange(scores_BST.shape[-1], device=scores_BST.device)
            allowed_BST = (entry >= entries.first.unsqueeze(-1)) & (entry < entries.last.unsqueeze(-1))
            if self.layer.pooled and pool is not None:
                block = entry // self.config.candidate_block_size
                allowed_BST &= (block[:, None] == pool.unsqueeze(-2)).any(-1)
            return scores_BST.masked_fill(~allowed_BST, -torch.inf)
