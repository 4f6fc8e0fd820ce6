"""From a trace to plain rows: what an indexer scored, whose choices agree, and where attention's mass went."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tinyds41.config import Config
from tinyds41.formats import Rows
from tinyds41.model.block import Block
from tinyds41.model.transformer import Model
from tinyds41.ops import attention_mass
from tinyds41.plan import LayerPlan
from tinyds41.show.observations import place_of
from tinyds41.trace import Trace

CANDIDATE_NAMES = ("layers.*.indexer.scores", "layers.*.indexer.selection", "layers.*.indexer.pool")
OVERLAP_NAMES = ("layers.*.indexer.selection", "layers.*.attn.window_first")
MASS_NAMES = (
    "layers.*.attn.q", "layers.*.attn.window_kv", "layers.*.attn.window_first", "layers.*.compressor.global_kv",
    "layers.*.indexer.selection",
)  # fmt: skip


@dataclass(frozen=True)
class Candidate:
    """One visible entry as an index source saw it for one query.

    first, last: the tokens it stands for, both included. score: None where it was not computed, outside the pool.
    newest: whether it lies in the newest visible block, which is in the pool whatever its score.
    """

    layer: int
    query: int
    entry: int
    first: int
    last: int
    block: int
    score: float | None
    in_pool: bool
    newest: bool
    selected: bool


@dataclass(frozen=True)
class Overlap:
    """How far two index sources chose the same tokens.

    shared: tokens that both chose over tokens that either chose (Jaccard), the mean over queries; None when neither
        ever chose.
    """

    layer: int
    other: int
    shared: float | None


@dataclass(frozen=True)
class AttentionShare:
    """Where a layer's attention went: means over queries and heads, together 1."""

    layer: int
    mode: str
    window: float
    selected: float
    sink: float


def candidates(trace: Trace, config: Config, query: int, layer: int | None = None, row: int = 0) -> list[Candidate]:
    """Every entry that `query` sees, of one document per row, with its score and its fate.

    trace: kept with `Trace(*CANDIDATE_NAMES)`. layer: the pool source, or one that chooses inside the pool.
    Raises: ValueError for a config without a pool, a layer outside it, or a query that the trace does not hold.
    """
    source = config.candidate_source_layer_id
    if source is None:
        raise ValueError("no layer forms a candidate pool: candidate_source_layer_id is None")
    plan = config.plan()
    layer = source if layer is None else layer
    known = [one.layer for one in plan if one.forms_pool or one.pooled]
    if layer not in known:
        raise ValueError(f"layer={layer} neither forms the candidate pool nor chooses inside it: one of {known}")
    at = (row, place_of(trace, query, "indexer.selection"))
    scores = trace[f"layers.{layer}.indexer.scores"][at].tolist()
    chosen = set(trace[f"layers.{layer}.indexer.selection"][at].tolist())
    pool = set(trace[f"layers.{source}.indexer.pool"][at].tolist())
    ratio, size = plan[layer].ratio, config.candidate_block_size
    visible = (query + 1) // ratio
    found = []
    for entry in range(visible):
        block = entry // size
        score = scores[entry] if scores[entry] > -torch.inf else None
        newest = block == (visible - 1) // size
        found.append(Candidate(layer, query, entry, entry * ratio, (entry + 1) * ratio - 1, block, score,
                               block in pool, newest, entry in chosen))  # fmt: skip
    return found


def selection_overlaps(trace: Trace, config: Config, queries: Sequence[int]) -> list[Overlap]:
    """Every index source against every other, over all rows of the trace.

    Tokens are compared, not entries: entry 5 is another stretch of text in a layer of another ratio.

    trace: kept with `Trace(*OVERLAP_NAMES)`.
    Raises: ValueError for no queries, or one that the trace does not hold.
    """
    places = _places(trace, queries)
    masks = {layer.layer: _chosen_tokens(trace, layer, places, max(queries) + 1)
             for layer in config.plan() if layer.selects}  # fmt: skip
    found = []
    for layer, mine in masks.items():
        for other, its in masks.items():
            both, either = (mine & its).sum(-1), (mine | its).sum(-1)
            counted = either > 0
            shared = float((both[counted] / either[counted]).mean()) if counted.any() else None
            found.append(Overlap(layer, other, shared))
    return found


def _chosen_tokens(trace: Trace, layer: LayerPlan, places: list[int], n_tokens: int) -> Tensor:
    """Which tokens the chosen entries stand for. Shapes: -> bool [B,n,S]."""
    index_BnK = trace[f"layers.{layer.layer}.indexer.selection"][:, places]
    n_entries = n_tokens // layer.ratio
    tokens_BnS = _chosen(index_BnK, n_entries).repeat_interleave(layer.ratio, -1)
    return F.pad(tokens_BnS, (0, n_tokens - tokens_BnS.shape[-1]))


def _places(trace: Trace, queries: Sequence[int]) -> list[int]:
    if not len(queries):
        raise ValueError("queries is empty: at least one position is needed")
    return [place_of(trace, query, "window_first") for query in queries]


@torch.no_grad()
def attention_shares(trace: Trace, model: Model, queries: Sequence[int]) -> list[AttentionShare]:
    """The weights of `ops.attend` in every layer, summed over window and selected entries; the sink has the rest.

    Means over heads, the given queries, and all rows of the trace. trace: kept with `Trace(*MASS_NAMES)`.
    Raises: ValueError for no queries, or one that the trace does not hold. Source: spec 4.7.
    """
    places = _places(trace, queries)
    found = []
    for layer in model.plan:
        near_BnHW, far_BnHT = _weights(trace, model, layer, list(queries), places)
        window, selected = float(near_BnHW.sum(-1).mean()), float(far_BnHT.sum(-1).mean())
        found.append(AttentionShare(layer.layer, layer.mode, window, selected, 1 - window - selected))
    return found


def _weights(
    trace: Trace, model: Model, layer: LayerPlan, queries: list[int], places: list[int]
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Weights on window rows and on entries, 0 where a query does not look. Shapes: -> [B,n,H,W], [B,n,H,T]."""
    path = f"layers.{layer.layer}.attn"
    q_BnHC, first_Bn = trace[f"{path}.q"][:, places], trace[f"{path}.window_first"][:, places]
    rows = Rows(trace[f"{path}.window_kv"])
    query_n = torch.tensor(queries, device=first_Bn.device)
    row_nW = query_n.unsqueeze(-1) + torch.arange(1 - model.config.sliding_window, 1, device=first_Bn.device)
    absent_BnW = row_nW < first_Bn.unsqueeze(-1)
    near_BnWC = rows.take(row_nW.expand_as(absent_BnW).masked_fill(absent_BnW, -1))
    if layer.kv_source is None:
        entries_BTC, chosen_BnT = rows.all()[:, :0], absent_BnW[..., :0]
    else:
        entries_BTC = trace[f"layers.{layer.kv_source}.compressor.global_kv"]
        chosen_BnT = _chosen(trace[f"layers.{layer.index_source}.indexer.selection"][:, places], entries_BTC.shape[1])
    block = model.layers[layer.layer]
    assert isinstance(block, Block)
    return attention_mass(q_BnHC, near_BnWC, absent_BnW, entries_BTC, ~chosen_BnT, block.attn.attn_sink)


def _chosen(index_BnK: Tensor, n_entries: int) -> Tensor:
    """A selection as a mask over all entries. Shapes: [B,n,K], -1 = none -> bool [B,n,T]."""
    mask_BnT = torch.zeros(*index_BnK.shape[:2], n_entries + 1, dtype=torch.bool, device=index_BnK.device)
    # What is not there goes into a slot behind the last entry.
    return mask_BnT.scatter_(-1, index_BnK.masked_fill(index_BnK < 0, n_entries), True)[..., :n_entries]
