"""Decode work from what a running session counted, at the cost per row of another model's sizes."""

from __future__ import annotations

from tinyds41.config import Config
from tinyds41.cost.flops import ACCOUNTINGS, DecodeWork, flops_per_row, known_accounting
from tinyds41.infer.session import Session
from tinyds41.trace import Counters

# Widths that do not change which rows a token touches. Blocks of 32 and pairs of rotary channels have to fit.
NARROW = {
    "vocab_size": 64, "hidden_size": 32, "num_attention_heads": 2, "head_dim": 32, "qk_rope_head_dim": 16,
    "q_lora_rank": 16, "o_groups": 2, "o_lora_rank": 8, "index_n_heads": 1, "index_head_dim": 32,
    "moe_intermediate_size": 16, "n_routed_experts": 2, "num_experts_per_tok": 1, "engram_layer_ids": [],
    "engram_num_embeddings": [], "num_nextn_predict_layers": 0, "dspark_target_layer_ids": [],
}  # fmt: skip


def narrowed(config: Config) -> Config:
    """The same plan, window, selection and pool with channels so few that a million tokens run on a laptop."""
    return config.replace(**NARROW)


def one_step(session: Session, context: int) -> Counters:
    """What decoding the last of `context` tokens counts, on top of random rows for the others.

    Raises: ValueError for a session that holds text, or a context below 2.
    """
    if context < 2:
        raise ValueError(f"context={context}: one token to decode and one before it are needed")
    session.start().fill(context - 1)
    session.decode(0)
    return session.counters


def counted_work(
    config: Config, linear: float, counters: Counters, context: int, accounting: str = "raw"
) -> DecodeWork:
    """Counted rows times the cost of a row at `config`'s sizes, plus its `linear` work (`linear_flops`).

    A layer attends to its window and to the rows that its index source gathered.

    Units: FLOPs under the accounting. Source: spec 4; the accounting as in `flops`.
    """
    plan, rates = config.plan(), known_accounting(accounting, ACCOUNTINGS)
    per_entry, per_row = flops_per_row(config)
    scored, gathered = counters.entries_scored, counters.rows_decoded
    pool = sum(n for layer, n in scored.items() if plan[layer].pooled)
    full = sum(scored.values()) - pool
    attended = sum(gathered.get(layer.index_source, 0) for layer in plan if layer.index_source is not None)
    attended += len(plan) * min(context, config.sliding_window)
    return DecodeWork(
        "counted", context, accounting, rates.linear * linear, rates.index * per_entry * full,
        rates.index * per_entry * pool, rates.attention * per_row * attended, rates.meaning)  # fmt: skip
