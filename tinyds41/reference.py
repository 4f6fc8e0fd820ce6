"""The model as the spec defines it: explicit masks, no cache, nothing clever. Every fast path is compared with this.

The formulas are in `reference_formulas`; here they are strung together with the weights, down to `forward`. Weights
carry the released names (spec 13). All steps run in the dtype of the weights, float32 or float64; only the cache
formats look at values rounded to float32 (spec 15).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tinyds41 import formats
from tinyds41.config import Config
from tinyds41.plan import LayerPlan
from tinyds41.reference_formulas import (
    attend,
    chosen,
    compress,
    engram_gate,
    engram_hash,
    engram_multipliers,
    engram_primes,
    expert,
    hyper_coefficients,
    hyper_update,
    index_scores,
    inv_freq,
    plain_residual,
    pool_blocks,
    project_out,
    read_streams,
    rms_norm,
    rotate,
    route,
    select_top,
)

Get = Callable[[str], Tensor]  # a weight of one layer by its name behind "layers.N."
Record = dict[Any, Any]  # every intermediate by name


def attention(config: Config, plan: LayerPlan, x: Tensor, w: Get, record: Record) -> Tensor:
    """Softmax over the window and the selected global entries of the layer's source.

    x [B,S,D], already normed.
    """
    eps, batch, n = config.rms_norm_eps, *x.shape[:2]
    positions, freq = torch.arange(n, device=x.device), inv_freq(config, plan.ratio)
    latent_BSQ = rms_norm(x @ w("attn.wq_a.weight").T, w("attn.q_norm.weight"), eps)
    q_BSHC = rotate((latent_BSQ @ w("attn.wq_b.weight").T).unflatten(-1, (-1, config.head_dim)), positions, freq)
    kv_BTC = rotate(rms_norm(x @ w("attn.wkv.weight").T, w("attn.kv_norm.weight"), eps), positions, freq)
    kv_BTC = cached(config, formats.WINDOW, kv_BTC)
    age_ST = positions[:, None] - positions
    allowed_BST = ((age_ST >= 0) & (age_ST < config.sliding_window)).expand(batch, -1, -1)
    cut = record.get(f"layers.{plan.layer}.window_start", 0)
    # Queries from the cut on see no row before it.
    allowed_BST = allowed_BST & ((positions[:, None] < cut) | (positions >= cut))
    if plan.writes_globals:
        write_globals(config, plan, x, w, record)
    if plan.selects:
        select_entries(config, plan, x, latent_BSQ, w, record)
    if plan.ratio:  # window and global entries side by side: a token may be seen through both
        entries_BTC = record[f"layers.{plan.kv_source}.entries"]
        selected_BST = chosen(record[f"layers.{plan.index_source}.selection"], entries_BTC.shape[1])
        kv_BTC, allowed_BST = torch.cat((kv_BTC, entries_BTC), 1), torch.cat((allowed_BST, selected_BST), -1)
    o_BSHC = rotate(attend(q_BSHC, kv_BTC, allowed_BST, w("attn.attn_sink")), positions, freq, inverse=True)
    return project_out(o_BSHC, w("attn.wo_a.weight"), w("attn.wo_b.weight"), config.o_groups)


def write_globals(config: Config, plan: LayerPlan, x: Tensor, w: Get, record: Record) -> None:
    """A FULL layer's compressed entries and index keys, one per finished group.

    Both stand at the group's first position.
    """
    eps, ratio, freq = config.rms_norm_eps, plan.ratio, inv_freq(config, plan.ratio)
    c_BSC = x @ w("attn.compressor.wkv.weight").T
    z_BSC = x @ w("attn.compressor.wgate.weight").T if ratio > 1 else None
    latent_BTC = compress(c_BSC, z_BSC, w("attn.compressor.norm.weight"), ratio, eps)
    first = torch.arange(latent_BTC.shape[1], device=x.device) * ratio
    # The key is taken from the latent before its rotation, then rotates itself.
    key_BTJ = rms_norm(latent_BTC @ w("attn.indexer.wk.weight").T, w("attn.indexer.k_norm.weight"), eps)
    made = {"entries": cached(config, formats.GLOBAL, rotate(latent_BTC, first, freq)),
            "keys": cached(config, formats.INDEX, rotate(key_BTJ, first, freq))}  # fmt: skip
    for name, rows in made.items():
        stored = record.get(f"layers.{plan.layer}.stored_{name}", rows[:, :0])
        record[f"layers.{plan.layer}.{name}"] = torch.cat((stored, rows[:, stored.shape[1] :]), 1)


def select_entries(config: Config, plan: LayerPlan, x: Tensor, latent: Tensor, w: Get, record: Record) -> None:
    """A FULL or REINDEX layer's choice among the visible entries of its source, or of its pool."""
    name, keys = f"layers.{plan.layer}", record[f"layers.{plan.kv_source}.keys"]
    positions, freq = torch.arange(x.shape[1], device=x.device), inv_freq(config, plan.ratio)
    q_BSIJ = (latent @ w("attn.indexer.wq_b.weight").T).unflatten(-1, (-1, config.index_head_dim))
    q_BSIJ = cached(config, formats.INDEX, rotate(q_BSIJ, positions, freq))
    scores_BST = index_scores(q_BSIJ, x @ w("attn.indexer.weights_proj.weight").T, keys)
    entry = torch.arange(keys.shape[1], device=x.device)
    visible_ST = entry < (positions[:, None] + 1) // plan.ratio  # the group's last token has arrived
    scores_BST = scores_BST.masked_fill(~visible_ST, -math.inf)
    if plan.pooled:
        pool_BSP = record[f"layers.{config.candidate_source_layer_id}.pool"]
        scores_BST = scores_BST.masked_fill(~pool_BSP[..., entry // config.candidate_block_size], -math.inf)
    if plan.forms_pool:
        record[f"{name}.pool"] = pool_blocks(scores_BST, config.candidate_block_size, config.candidate_topk_blocks)
    record |= {f"{name}.index_scores": scores_BST, f"{name}.selection": select_top(scores_BST, config.index_topk)}


def cached(config: Config, form: formats.Format, x: Tensor) -> Tensor:
    """x as its cache row would give it back."""
    return form.fake_quant(x) if config.quantize_cache else x


def experts(config: Config, x: Tensor, index: Tensor, weight: Tensor, w: Get) -> Tensor:
    """Σ weight · expert(x) over the chosen experts, one expert after the other.

    x [B,S,D], index and weight [B,S,A].
    """
    total = torch.zeros_like(x)
    for e in range(config.n_routed_experts):
        row, position, slot = (index == e).nonzero(as_tuple=True)
        w1, w2, w3 = (w(f"ffn.experts.{e}.{matrix}.weight") for matrix in ("w1", "w2", "w3"))
        y = expert(x[row, position], w1, w2, w3, config.swiglu_limit)
        total = total.index_put((row, position), weight[row, position, slot, None] * y, accumulate=True)
    return total


def mixture(config: Config, plan: LayerPlan, x: Tensor, w: Get, record: Record) -> Tensor:
    """The MoE sub-layer: routed experts plus the shared one, unscaled."""
    name = f"layers.{plan.layer}"
    index, weight, scores = route(config, x, w("ffn.gate.weight"), w("ffn.gate.bias"))
    record |= {f"{name}.experts": index, f"{name}.expert_weights": weight, f"{name}.router_scores": scores}
    w1, w2, w3 = (w(f"ffn.shared_experts.{matrix}.weight") for matrix in ("w1", "w2", "w3"))
    return experts(config, x, index, weight, w) + expert(x, w1, w2, w3, config.swiglu_limit)


def engram_rows(config: Config, ids: Tensor, dead: Tensor, token_map: Tensor | None) -> Record:
    """The table rows that every Engram layer will read: they follow from the ids alone."""
    compressed = torch.arange(config.vocab_size, device=ids.device) if token_map is None else token_map.to(ids.device)
    pad = int(compressed[config.engram_pad_token_id or 0])
    rows = {}
    for layer, primes in zip(config.engram_layer_ids, engram_primes(config), strict=True):
        multipliers = engram_multipliers(config, layer)
        rows[f"layers.{layer}.engram_rows"] = engram_hash(compressed[ids], multipliers, primes, pad, dead)
    return rows


def engram(config: Config, streams: Tensor, rows: Tensor, dead: Tensor, w: Get) -> Tensor:
    """X_i += g_i · value, keys and value read from the table rows of each token's n-grams.

    Dead tokens read nothing.
    """
    table_BSGC = w("engram.embed.weight")[rows]  # G: one row per order and head
    if config.quantize_engram:
        table_BSGC = formats.ENGRAM.fake_quant(table_BSGC)
    n, d = streams.shape[-2:]
    read_BSX = table_BSGC.flatten(-2) @ w("engram.wkv.weight").T
    keys_BSND, value_BSD = read_BSX[..., : n * d].unflatten(-1, (n, d)), read_BSX[..., n * d :]
    gate_BSN = engram_gate(config, streams, keys_BSND, w("engram.q_weight"), w("engram.k_weight"))
    gate_BSN = gate_BSN.masked_fill(dead[..., None], 0)
    return streams + gate_BSN[..., None] * value_BSD[..., None, :]


def sub_layer(
    config: Config, streams: Tensor, mix: Tensor, w: Get, site: str, f: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Reads the streams with the previous sub-layer's mix, applies f, writes back.

    Returns the new streams and mix (spec 7).
    """
    if config.mhc_mode == "residual":
        pre, post, comb = plain_residual(streams)
    else:
        fn, base, scale = (w(f"hc_{site}_{part}") for part in ("fn", "base", "scale"))
        pre, post, comb = hyper_coefficients(config, streams, fn, base, scale)
    u = read_streams(streams, pre if config.mhc_mode == "multi_pass" else mix)
    y = f(rms_norm(u, w(f"{site}_norm.weight"), config.rms_norm_eps))
    return hyper_update(streams, y, post, comb), pre


def forward(
    config: Config,
    weights: Mapping[str, Tensor],
    ids: Tensor,
    *,
    documents: Tensor | None = None,
    token_map: Tensor | None = None,
    record: Record | None = None,
) -> Tensor:
    """Logits of every position by the definition.

    `weights`: released names, float32 or float64. `documents`: a run of equal ids in a row is one document, a negative
    id is padding; None = each row is one. `token_map`: token id to compressed id, None = identity (spec 9.1).
    `record` may name what bounded replay (spec 6) puts into a layer, `layers.N.` + window_start, a position from which
    on no query looks behind it, stored_entries and stored_keys, which stand for the first ones; without `documents`.
    It is filled with intermediates: `layers.N.` + streams (behind Engram), entries, keys, index_scores,
    selection, pool, experts, expert_weights, router_scores, engram_rows; streams and mix behind the last layer. With
    `documents` it maps (row, first position) to the record of that run.
    mhc_mode "multi_pass" reads each sub-layer with its own pre, and the head with the last one's. "residual" is one
    plain residual carried in all streams alike: u = X_0, X_k += y.
    Shapes: ids and documents int64 [B,S] -> [B,S,V].
    Raises: ValueError on weights of another dtype, arguments of another shape, ids outside the vocabulary, and an
    identity map where the config compresses its vocabulary.
    """
    check_inputs(config, weights, ids, documents)
    check_token_map(config, token_map)
    record = {} if record is None else record
    if documents is None:
        return one_document(config, weights, ids, torch.zeros_like(ids, dtype=torch.bool), token_map, record)
    rows = []
    for row in range(len(ids)):  # a packed document equals the document alone: so run it alone (spec 4.8)
        pieces = []
        for run in document_runs(documents[row]):
            part, record[row, run.start] = (slice(row, row + 1), run), {}
            own = record[row, run.start]
            pieces.append(one_document(config, weights, ids[part], documents[part] < 0, token_map, own))
        rows.append(torch.cat(pieces, 1))
    return torch.cat(rows)


def check_inputs(config: Config, weights: Mapping[str, Tensor], ids: Tensor, documents: Tensor | None) -> None:
    dtype = weights["embed.weight"].dtype
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(f"the reference runs in float32 or float64, embed.weight is {dtype}")
    if ids.dim() != 2 or not ids.numel():
        raise ValueError(f"expected ids [B,S] with at least one token, got {tuple(ids.shape)}")
    if documents is not None and documents.shape != ids.shape:
        raise ValueError(f"expected documents of the shape of ids {tuple(ids.shape)}, got {tuple(documents.shape)}")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= config.vocab_size:  # a negative one would silently index from the end
        raise ValueError(f"token ids {low}..{high} leave the vocabulary 0..{config.vocab_size - 1}")


def check_token_map(config: Config, token_map: Tensor | None) -> None:
    if not config.engram_layer_ids:
        return
    if token_map is None and config.engram_compressed_vocab_size != config.vocab_size:
        raise ValueError(
            f"engram_compressed_vocab_size={config.engram_compressed_vocab_size} differs from "
            f"vocab_size={config.vocab_size}: a token_map is needed")
    if token_map is not None and token_map.shape != (config.vocab_size,):
        raise ValueError(f"expected a token_map of {config.vocab_size} ids, got {tuple(token_map.shape)}")


def document_runs(documents: Tensor) -> list[slice]:
    """The runs of equal ids in one row [S]."""
    starts = [p for p in range(len(documents)) if p == 0 or documents[p] != documents[p - 1]]
    return [slice(a, b) for a, b in zip(starts, [*starts[1:], len(documents)], strict=True)]


def layer_weight(weights: Mapping[str, Tensor], layer: int, name: str) -> Tensor:
    return weights[f"layers.{layer}.{name}"]


def one_document(
    config: Config,
    weights: Mapping[str, Tensor],
    ids: Tensor,
    padding: Tensor,
    token_map: Tensor | None,
    record: Record,
) -> Tensor:
    """Logits of B documents of equal length from position 0: embedding, the layers, the head."""
    streams = weights["embed.weight"][ids][..., None, :].expand(-1, -1, config.hc_mult, -1)
    mix = torch.eye(config.hc_mult, dtype=streams.dtype, device=ids.device)[0].expand(*ids.shape, -1)  # (1,0,0,0)
    dead = padding | (ids == (-1 if config.engram_pad_token_id is None else config.engram_pad_token_id))
    record |= engram_rows(config, ids, dead, token_map)
    for plan in config.plan():
        w = partial(layer_weight, weights, plan.layer)
        if plan.engram is not None:
            streams = engram(config, streams, record[f"layers.{plan.layer}.engram_rows"], dead, w)
        record[f"layers.{plan.layer}.streams"] = streams
        streams, mix = sub_layer(config, streams, mix, w, "attn", partial(attention, config, plan, w=w, record=record))
        streams, mix = sub_layer(config, streams, mix, w, "ffn", partial(mixture, config, plan, w=w, record=record))
    record |= {"streams": streams, "mix": mix}
    last = rms_norm(read_streams(streams, mix), weights["norm.weight"], config.rms_norm_eps)
    return last @ weights["head.weight"].T
