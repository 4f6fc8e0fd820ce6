"""The drafter as the spec defines it, one anchor position at a time: the slow definition of `model/dspark.py`.

Style and weights as in `reference`, whose record of a text gives the features.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from tinyds41 import formats
from tinyds41.config import Config
from tinyds41.plan import SWA, LayerPlan
from tinyds41.reference import Get, Record, cached, mixture, sub_layer
from tinyds41.reference_formulas import attend, inv_freq, project_out, read_streams, rms_norm, rotate


def target_features(config: Config, weights: Mapping[str, Tensor], record: Record) -> Tensor:
    """main_norm(main_proj(...)) of the means over streams that enter the target layers' attention (spec 10.1).

    record: of `reference.forward`, whose streams stand behind Engram. Shapes: -> [B,S,D].
    """
    means = [record[f"layers.{layer}.streams"].mean(-2) for layer in config.dspark_target_layer_ids]
    projected = torch.cat(means, -1) @ weights["mtp.0.main_proj.weight"].T
    return rms_norm(projected, weights["mtp.0.main_norm.weight"], config.rms_norm_eps)


def draft_attention(config: Config, x: Tensor, features: Tensor, position: int, w: Get) -> Tensor:
    """Every slot sees the last W features before `position` and all slots of its block (spec 10.2)."""
    eps, freq = config.rms_norm_eps, inv_freq(config, 0)
    own = position + torch.arange(x.shape[1], device=x.device)
    past = torch.arange(max(0, position - config.sliding_window), position, device=x.device)

    def rows(of: Tensor, positions: Tensor) -> Tensor:
        kv = rms_norm(of @ w("attn.wkv.weight").T, w("attn.kv_norm.weight"), eps)
        return cached(config, formats.WINDOW, rotate(kv, positions, freq))

    latent_BSQ = rms_norm(x @ w("attn.wq_a.weight").T, w("attn.q_norm.weight"), eps)
    q_BSHC = rotate((latent_BSQ @ w("attn.wq_b.weight").T).unflatten(-1, (-1, config.head_dim)), own, freq)
    kv_BTC = torch.cat((rows(features[:, past], past), rows(x, own)), 1)
    everything_BST = torch.ones(*x.shape[:2], kv_BTC.shape[1], dtype=torch.bool, device=x.device)
    o_BSHC = rotate(attend(q_BSHC, kv_BTC, everything_BST, w("attn.attn_sink")), own, freq, inverse=True)
    return project_out(o_BSHC, w("attn.wo_a.weight"), w("attn.wo_b.weight"), config.o_groups)


def draft(
    config: Config, weights: Mapping[str, Tensor], features: Tensor, anchor: Tensor, position: int
) -> tuple[Tensor, Tensor]:
    """The state of each slot before the norm, and its base logits, behind an anchor token at `position`.

    Shapes: features [B,S,D] of `target_features`, of which those before `position` are used, anchor ids [B] ->
        [B,k,D], [B,k,V].
    """
    experts = config.replace(n_routed_experts=config.dspark_n_routed_experts,
                             num_experts_per_tok=config.dspark_num_experts_per_tok)  # fmt: skip
    noise = torch.full((len(anchor), (config.dspark_block_size or 0) - 1), config.dspark_noise_token_id or 0)
    ids = torch.cat((anchor[:, None], noise.to(anchor)), 1)
    streams = weights["embed.weight"][ids][..., None, :].expand(-1, -1, config.hc_mult, -1)
    mix = torch.eye(config.hc_mult, dtype=streams.dtype, device=ids.device)[0].expand(*ids.shape, -1)
    for block in range(config.num_nextn_predict_layers):
        w = partial(block_weight, weights, block)
        plan = LayerPlan(layer=block, half="decoder", mode=SWA, ratio=0, kv_source=None, index_source=None,
                         forms_pool=False, pooled=False, engram=None)  # fmt: skip
        attention = partial(draft_attention, config, features=features, position=position, w=w)
        streams, mix = sub_layer(config, streams, mix, w, "attn", attention)
        streams, mix = sub_layer(config, streams, mix, w, "ffn", partial(mixture, experts, plan, w=w, record={}))
    hidden = read_streams(streams, mix)
    normed = rms_norm(hidden, last_weight(config, weights, "norm.weight"), config.rms_norm_eps)
    return hidden, normed @ weights["head.weight"].T


def markov_bias(config: Config, weights: Mapping[str, Tensor], previous: Tensor) -> Tensor:
    """E[prev] W: [...] -> [..., V]."""
    embedded = last_weight(config, weights, "markov_head.embed.weight")[previous]
    return embedded @ last_weight(config, weights, "markov_head.head.weight").T


def confidence(config: Config, weights: Mapping[str, Tensor], hidden: Tensor, previous: Tensor) -> Tensor:
    """The logit w·[h ; E[prev]], h before the norm: [..., D], [...] -> [...]."""
    embedded = last_weight(config, weights, "markov_head.embed.weight")[previous]
    return (torch.cat((hidden, embedded), -1) @ last_weight(config, weights, "confidence_head.proj.weight").T)[..., 0]


def greedy_chain(config: Config, weights: Mapping[str, Tensor], base: Tensor, anchor: Tensor) -> Tensor:
    """The likeliest tokens left to right, each biased by the one before it: [B,k,V], [B] -> [B,k]."""
    chain = [anchor]
    for slot in range(base.shape[1]):
        chain.append((base[:, slot] + markov_bias(config, weights, chain[-1])).argmax(-1))
    return torch.stack(chain[1:], 1)


def block_weight(weights: Mapping[str, Tensor], block: int, name: str) -> Tensor:
    return weights[f"mtp.{block}.{name}"]


def last_weight(config: Config, weights: Mapping[str, Tensor], name: str) -> Tensor:
    return block_weight(weights, config.num_nextn_predict_layers - 1, name)
