"""The formulas of the spec, one plain function each: the definitions that `reference.forward` strings together.

Everything runs in the dtype of its arguments, float32 or float64. Axis letters are those of docs/glossary.md; here
also G groups of M tokens, and P blocks of the candidate pool.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tinyds41.config import Config

QUERY_CHUNK = 256  # queries whose dense scores exist at one time: bounds memory, changes no result


# ---- Primitives (spec 2) ----


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """y = w · x / sqrt(mean(x²) + eps)."""
    return weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def inv_freq(config: Config, ratio: int) -> Tensor:
    """Rotation per position of each channel pair, float64 [R/2].

    YaRN only where the layer compresses.
    """
    base, rotary = config.compress_rope_theta if ratio else config.rope_theta, config.qk_rope_head_dim
    freq = base ** (-torch.arange(0, rotary, 2, dtype=torch.float64) / rotary)
    return yarn_inv_freq(freq, base, config.rope_scaling) if ratio and config.rope_scaling else freq


def yarn_inv_freq(freq: Tensor, base: float, scaling: Mapping[str, Any]) -> Tensor:
    """Slow pairs turn `factor` times slower, fast pairs stay as they are, a ramp between.

    [R/2] -> [R/2]
    """
    low, high = yarn_low_high(2 * len(freq), base, scaling)
    ramp = ((torch.arange(len(freq), dtype=torch.float64) - low) / (high - low or 0.001)).clamp(0, 1)
    return freq / scaling["factor"] * ramp + freq * (1 - ramp)


def yarn_low_high(rotary: int, base: float, scaling: Mapping[str, Any]) -> tuple[int, int]:
    """Pair numbers between which YaRN's ramp runs."""

    def dim(rotations: float) -> float:  # the pair that turns this often within the original context
        turns = scaling["original_max_position_embeddings"] / (2 * math.pi * rotations)
        return rotary * math.log(turns) / (2 * math.log(base))

    return max(math.floor(dim(scaling["beta_fast"])), 0), min(math.ceil(dim(scaling["beta_slow"])), rotary - 1)


def rotate(x: Tensor, positions: Tensor, freq: Tensor, *, inverse: bool = False) -> Tensor:
    """Turns adjacent pairs of the last R channels by position · freq; the other channels pass.

    Shapes: x [B,S,C] or [B,S,H,C]; positions int [S] or [B,S]; freq float64 [R/2].
    Raises: ValueError when x has fewer than R channels.
    """
    rotary = 2 * len(freq)
    if x.shape[-1] < rotary:
        raise ValueError(f"expected at least {rotary} channels to rotate, got {tuple(x.shape)}")
    angle = positions[..., None].double() * freq.to(positions.device)  # fp32 would be off by 0.06 near a million
    angle = angle.unsqueeze(-2) if x.dim() == 4 else angle  # all heads turn alike
    cos, sin = angle.cos().to(x.dtype), (-angle if inverse else angle).sin().to(x.dtype)
    kept, turned = x.split([x.shape[-1] - rotary, rotary], -1)
    even, odd = turned[..., 0::2], turned[..., 1::2]
    pairs = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1)
    return torch.cat((kept, pairs.flatten(-2)), -1)


# ---- Attention (spec 4) ----


def compress(c: Tensor, z: Tensor | None, weight: Tensor, ratio: int, eps: float) -> Tensor:
    """latent_j = RMSNorm(Σ_t softmax_t(z_t) ⊙ c_t) over the m tokens of group j (spec 4.2).

    The softmax is per channel.

    Shapes: c and z [B,S,C] -> [B, S // m, C]; an unfinished last group yields nothing. Ratio 1 has no gate (z None).
    """
    if z is None:
        return rms_norm(c, weight, eps)
    groups = c.shape[1] // ratio
    c_BGMC = c[:, : groups * ratio].unflatten(1, (groups, ratio))
    z_BGMC = z[:, : groups * ratio].unflatten(1, (groups, ratio))
    return rms_norm((z_BGMC.softmax(2) * c_BGMC).sum(2), weight, eps)


def index_scores(q: Tensor, w: Tensor, keys: Tensor) -> Tensor:
    """score(p, j) = Σ_i w_i · I^-½ · J^-½ · relu(qI_i · k_j), visible or not (spec 4.4).

    Shapes: q [B,S,I,J], w [B,S,I], keys [B,T,J] -> [B,S,T].
    """
    _, _, n_heads, width = q.shape
    scores = []
    for chunk in chunks(q.shape[1]):
        hits_BSIT = torch.einsum("bsij,btj->bsit", q[:, chunk], keys).relu()
        scores.append(torch.einsum("bsi,bsit->bst", w[:, chunk] * (n_heads * width) ** -0.5, hits_BSIT))
    return torch.cat(scores, 1)


def select_top(scores: Tensor, k: int) -> Tensor:
    """The k best by (score, lower index), ascending, -1 behind them; -inf is never selected.

    [..,T] -> [..,k]
    """
    n = scores.shape[-1]
    best, index = (scores + 0.0).sort(dim=-1, descending=True, stable=True)  # + 0.0: -0.0 ties with 0.0
    index = index.masked_fill(best == -math.inf, n)[..., :k].sort(-1).values
    return F.pad(index.masked_fill(index == n, -1), (0, k - index.shape[-1]), value=-1)


def chosen(index: Tensor, n: int) -> Tensor:
    """The explicit mask of a selection: [..,K] entry numbers (-1 = none) -> bool [..,n]."""
    mask = torch.zeros(*index.shape[:-1], n + 1, dtype=torch.bool, device=index.device)
    return mask.scatter(-1, index.masked_fill(index < 0, n), True)[..., :n]


def pool_blocks(scores: Tensor, block_size: int, topk_blocks: int) -> Tensor:
    """Which blocks of entries each query's candidate pool holds: bool [B,S,blocks] (spec 4.5).

    Shapes: scores [B,S,T], -inf where invisible; the visible entries of a query are its first ones.
    """
    n = scores.shape[-1]
    n_blocks = -(-n // block_size)
    padded = F.pad(scores, (0, n_blocks * block_size - n), value=-math.inf)
    best_BSP = padded.unflatten(-1, (n_blocks, block_size)).amax(-1)
    newest_BS1 = ((scores > -math.inf).sum(-1, keepdim=True) - 1) // block_size  # -1 where nothing is visible
    is_newest_BSP = torch.arange(n_blocks, device=scores.device) == newest_BS1
    # The newest block is always kept, even partly full and with the lowest score, and takes one of the places.
    return chosen(select_top(best_BSP.masked_fill(is_newest_BSP, math.inf), topk_blocks), n_blocks)


def attend(q: Tensor, entries: Tensor, allowed: Tensor, sink: Tensor) -> Tensor:
    """o_h = Σ_i e^{s_i} v_i / (e^{sink_h} + Σ_i e^{s_i}), s_i = q_h · v_i / sqrt(C) (spec 4.7).

    The sink only enlarges the denominator, so a query that is allowed nothing gets zeros.
    Shapes: q [B,S,H,C], entries [B,T,C] (key = value), allowed bool [B,S,T], sink [H] -> [B,S,H,C].
    """
    outputs = []
    for chunk in chunks(q.shape[1]):
        seen = allowed[:, chunk].any(0).any(0)  # what no query of the chunk may see has no mass: leave it out
        allowed_BST, entries_BTC = allowed[:, chunk, seen], entries[:, seen]
        scores_BSHT = torch.einsum("bshc,btc->bsht", q[:, chunk], entries_BTC) * q.shape[-1] ** -0.5
        scores_BSHT = scores_BSHT.masked_fill(~allowed_BST[:, :, None], -math.inf)
        sinks_BSH1 = sink[:, None].expand(*scores_BSHT.shape[:3], 1)
        mass_BSHT = torch.cat((scores_BSHT, sinks_BSH1), -1).softmax(-1)[..., :-1]
        outputs.append(torch.einsum("bsht,btc->bshc", mass_BSHT, entries_BTC))
    return torch.cat(outputs, 1)


def project_out(o: Tensor, wo_a: Tensor, wo_b: Tensor, groups: int) -> Tensor:
    """Heads in groups, each through its own low-rank matrix, joined by wo_b (spec 2).

    Shapes: [B,S,H,C] -> [B,S,D].
    """
    o_BSGX = o.flatten(-2).unflatten(-1, (groups, -1))
    low_BSGO = torch.einsum("bsgx,gox->bsgo", o_BSGX, wo_a.unflatten(0, (groups, -1)))
    return low_BSGO.flatten(-2) @ wo_b.T


def chunks(n: int) -> Iterator[slice]:
    for start in range(0, n, QUERY_CHUNK):
        yield slice(start, start + QUERY_CHUNK)


# ---- Hyper-connections (spec 7) ----


def hyper_coefficients(
    config: Config, streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """How a sub-layer reads (pre), writes (post) and mixes (comb), from the streams before it.

    Shapes: streams [B,S,N,D] -> pre [B,S,N], post [B,S,N], comb [B,S,N,N], first index of comb = source stream.
    """
    n, eps = streams.shape[-2], config.hc_eps
    flat = streams.flatten(-2)
    h = flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + config.rms_norm_eps)
    t_pre, t_post, t_comb = (h @ fn.T).split([n, n, n * n], -1)
    b_pre, b_post, b_comb = base.split([n, n, n * n])
    pre = torch.sigmoid(t_pre * scale[0] + b_pre) + eps
    post = 2 * torch.sigmoid(t_post * scale[1] + b_post)
    comb_BSJK = (t_comb * scale[2] + b_comb).unflatten(-1, (n, n)).softmax(-1) + eps  # J source, K target stream
    comb_BSJK = comb_BSJK / (comb_BSJK.sum(-2, keepdim=True) + eps)
    for _ in range(config.hc_sinkhorn_iters - 1):
        comb_BSJK = comb_BSJK / (comb_BSJK.sum(-1, keepdim=True) + eps)
        comb_BSJK = comb_BSJK / (comb_BSJK.sum(-2, keepdim=True) + eps)
    return pre, post, comb_BSJK


def read_streams(streams: Tensor, mix: Tensor) -> Tensor:
    """u = Σ_i mix_i X_i: [B,S,N,D], [B,S,N] -> [B,S,D]."""
    return torch.einsum("bsn,bsnd->bsd", mix, streams)


def hyper_update(streams: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """X_k = post_k y + Σ_j comb[j,k] X_j."""
    return post[..., None] * y[..., None, :] + torch.einsum("bsjk,bsjd->bskd", comb, streams)


def plain_residual(streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The coefficients of mhc_mode "residual": read X_0, X_k += y, no mixing."""
    n = streams.shape[-2]
    eye = torch.eye(n, dtype=streams.dtype, device=streams.device).expand(*streams.shape[:-2], n, n)
    return eye[..., 0, :], torch.ones_like(eye[..., 0, :]), eye


# ---- Mixture of experts (spec 8) ----


def route(config: Config, x: Tensor, gate: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Chosen experts, their weights, and all scores; the bias only steers the choice.

    Shapes: -> [B,S,A] (ascending), [B,S,A], [B,S,E].
    """
    scores_BSE = F.softplus(x @ gate.T / config.gate_temp).sqrt()
    index_BSA = select_top(scores_BSE + bias, config.num_experts_per_tok)
    weight_BSA = scores_BSE.gather(-1, index_BSA)
    weight_BSA = weight_BSA / (weight_BSA.sum(-1, keepdim=True) + 1e-20) * config.routed_scaling_factor
    return index_BSA, weight_BSA, scores_BSE


def expert(x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, limit: float) -> Tensor:
    """w2( silu(min(w1 x, c)) · clamp(w3 x, -c, c) ): the gate is limited above only (spec 2)."""
    return (F.silu((x @ w1.T).clamp(max=limit)) * (x @ w3.T).clamp(-limit, limit)) @ w2.T


# ---- Engram (spec 9) ----


def engram_primes(config: Config) -> list[list[int]]:
    """Rows of each sub-table per Engram layer, order-major then head.

    All are primes, none used twice anywhere.

    Every order starts its search anew at engram_vocab_size and skips what is used: so the sub-tables of all orders
    and layers take one prime after the other.
    """
    per_layer = ((config.engram_max_ngram_size or 0) - 1) * (config.engram_n_heads or 0)
    candidates = filter(is_prime, itertools.count(config.engram_vocab_size or 0))
    return [list(itertools.islice(candidates, per_layer)) for _ in config.engram_layer_ids]


def is_prime(n: int) -> bool:
    return n > 1 and all(n % d for d in range(2, math.isqrt(n) + 1))


def engram_multipliers(config: Config, layer: int) -> Tensor:
    """One odd multiplier per look-back, int64; the bound keeps id · multiplier below 2^63."""
    bound = max(1, (2**63 - 1) // (config.engram_compressed_vocab_size or 1) // 2)
    drawn = np.random.default_rng(10007 * layer).integers(0, bound, size=config.engram_max_ngram_size, dtype=np.int64)
    return torch.from_numpy(2 * drawn + 1)


def engram_hash(ids: Tensor, multipliers: Tensor, primes: list[int], pad: int, dead: Tensor) -> Tensor:
    """Table rows of the n-grams that end at each token (spec 9.2).

    Shapes: [B,S] -> int64 [B,S, orders · heads].

    `ids` and `pad` are compressed ids of one document per row; `dead` tokens break every n-gram that holds them.
    """
    ids, n, heads = ids.long(), ids.shape[1], len(primes) // (len(multipliers) - 1)
    alive_BS = ~dead
    x_BS = torch.where(alive_BS, ids, pad) * multipliers[0]
    rows, offset = [], 0
    for back in range(1, len(multipliers)):
        # Nothing lies before the start: dead from there on, as behind a dead token.
        alive_BS = alive_BS & ~F.pad(dead, (back, 0), value=True)[:, :n]
        past_BS = F.pad(ids, (back, 0))[:, :n]
        x_BS = x_BS ^ (torch.where(alive_BS, past_BS, pad) * multipliers[back])
        for prime in primes[(back - 1) * heads : back * heads]:
            rows.append(x_BS % prime + offset)
            offset += prime
    return torch.stack(rows, -1)


def engram_gate(config: Config, streams: Tensor, keys: Tensor, q_weight: Tensor, k_weight: Tensor) -> Tensor:
    """g_i = σ(sgn(t) sqrt(max(|t|, 1e-6))), t the scaled product of the normed stream and key.

    Shapes: streams and keys [B,S,N,D] -> [B,S,N].
    """
    norm_x, norm_key = (torch.rsqrt(x.square().mean(-1) + config.rms_norm_eps) for x in (streams, keys))
    t_BSN = (streams * q_weight * k_weight * keys).sum(-1) * norm_x * norm_key * streams.shape[-1] ** -0.5
    return torch.sigmoid(torch.where(t_BSN < 0, -1.0, 1.0) * t_BSN.abs().clamp(min=1e-6).sqrt())
