"""Random weights of any config under the released names of spec 13, made so that a wrong formula shows."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tinyds41.config import Config


def random_weights(config: Config, dtype: torch.dtype = torch.float64, seed: int = 0) -> dict[str, torch.Tensor]:
    """Matrices keep the scale of their input; norms scatter around 1; sinks, biases and bases are not zero."""
    generator = torch.Generator().manual_seed(seed)

    def draw(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        if "norm" in name or name.endswith(("q_weight", "k_weight", "scale")):
            return (1 + 0.2 * x).to(dtype)
        return (x * (0.5 if len(shape) == 1 else shape[-1] ** -0.5)).to(dtype)

    return {name: draw(name, shape) for name, shape in released_shapes(config)}


def released_shapes(config: Config) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the backbone, layer by layer."""
    vocab, hidden = config.vocab_size, config.hidden_size
    yield from [("embed.weight", (vocab, hidden)), ("head.weight", (vocab, hidden)), ("norm.weight", (hidden,))]
    for plan in config.plan():
        parts = [*_attention(config, plan), *_experts(config), *_streams(config)]
        if plan.engram is not None:
            parts += _engram(config, config.engram_num_embeddings[plan.engram])
        yield from ((f"layers.{plan.layer}.{name}", shape) for name, shape in parts)


def _attention(config: Config, plan) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, width, rank = config.hidden_size, config.head_dim, config.q_lora_rank
    heads, low = config.num_attention_heads, config.o_groups * config.o_lora_rank
    yield from [
        ("attn.wq_a.weight", (rank, hidden)), ("attn.q_norm.weight", (rank,)),
        ("attn.wq_b.weight", (heads * width, rank)), ("attn.wkv.weight", (width, hidden)),
        ("attn.kv_norm.weight", (width,)), ("attn.attn_sink", (heads,)),
        ("attn.wo_a.weight", (low, heads * width // config.o_groups)), ("attn.wo_b.weight", (hidden, low)),
        ("attn_norm.weight", (hidden,)), ("ffn_norm.weight", (hidden,)),
    ]  # fmt: skip
    if plan.writes_globals:
        gate = [("attn.compressor.wgate.weight", (width, hidden))] if plan.ratio > 1 else []
        key = config.index_head_dim
        yield from [("attn.compressor.wkv.weight", (width, hidden)), ("attn.compressor.norm.weight", (width,)), *gate]
        yield from [("attn.indexer.wk.weight", (key, width)), ("attn.indexer.k_norm.weight", (key,))]
    if plan.selects:
        yield "attn.indexer.wq_b.weight", (config.index_n_heads * config.index_head_dim, rank)
        yield "attn.indexer.weights_proj.weight", (config.index_n_heads, hidden)


def _experts(config: Config) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner = config.hidden_size, config.moe_intermediate_size
    yield from [("ffn.gate.weight", (config.n_routed_experts, hidden)), ("ffn.gate.bias", (config.n_routed_experts,))]
    for name in ["ffn.shared_experts", *(f"ffn.experts.{e}" for e in range(config.n_routed_experts))]:
        yield f"{name}.w1.weight", (inner, hidden)
        yield f"{name}.w2.weight", (hidden, inner)
        yield f"{name}.w3.weight", (inner, hidden)


def _streams(config: Config) -> Iterator[tuple[str, tuple[int, ...]]]:
    n = config.hc_mult
    for site in ("attn", "ffn"):
        yield f"hc_{site}_fn", ((2 + n) * n, n * config.hidden_size)
        yield f"hc_{site}_base", ((2 + n) * n,)
        yield f"hc_{site}_scale", (3,)


def _engram(config: Config, n_rows: int) -> list[tuple[str, tuple[int, ...]]]:
    assert config.engram_n_heads and config.engram_max_ngram_size and config.engram_head_dim
    n, hidden = config.hc_mult, config.hidden_size
    read = (config.engram_max_ngram_size - 1) * config.engram_n_heads * config.engram_head_dim
    return [
        ("engram.embed.weight", (n_rows, config.engram_head_dim)), ("engram.wkv.weight", ((n + 1) * hidden, read)),
        ("engram.q_weight", (n, hidden)), ("engram.k_weight", (n, hidden)),
    ]  # fmt: skip
