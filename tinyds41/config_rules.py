"""The rules a config keeps apart from its schedule: kinds of values, sizes, widths, rope, Engram, DSpark (spec 1)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tinyds41.config import Config

MHC_MODES = ("single_pass", "multi_pass", "residual")

LARGEST = 2**31 - 1
_POSITIVE = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim", "qk_rope_head_dim",
    "q_lora_rank", "o_groups", "o_lora_rank", "sliding_window", "index_n_heads", "index_head_dim", "index_topk",
    "moe_intermediate_size", "n_routed_experts", "num_experts_per_tok", "hc_mult", "hc_sinkhorn_iters",
    "max_position_embeddings", "routed_scaling_factor", "gate_temp", "swiglu_limit", "initializer_range",
)  # fmt: skip
_ENGRAM = ("engram_vocab_size", "engram_max_ngram_size", "engram_n_heads", "engram_head_dim",
           "engram_compressed_vocab_size")  # fmt: skip
_DSPARK = ("dspark_block_size", "dspark_markov_rank", "dspark_n_routed_experts", "dspark_num_experts_per_tok")
_ONLY = {"num_key_value_heads": 1, "n_shared_experts": 1, "scoring_func": "sqrtsoftplus", "norm_topk_prob": True}


def check_config(config: Config) -> None:
    """Every rule but those of the schedule (`plan.check_schedule`).

    Raises ValueError naming field and value.
    """
    _check_kinds(config)
    _check_sizes(config)
    _check_widths(config)
    _check_rope(config)
    _check_engram(config)
    _check_dspark(config)


def as_tuple(name: str, value: Any, kind: str = "int") -> tuple[Any, ...]:
    """The numbers of a list, whole ones unless `kind` is float; a list holds nothing else. Raises ValueError."""
    fits, wanted = (_is_number, "finite numbers") if kind == "float" else (_is_whole, "whole numbers")
    if not isinstance(value, list | tuple) or not all(fits(item) for item in value):
        raise ValueError(f"{name}={value!r}: a list of {wanted} is needed")
    return tuple(value)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)  # True is an int to Python, not a size


def _is_number(value: Any) -> bool:
    return _is_whole(value) or (isinstance(value, float) and math.isfinite(value))


_KINDS = {
    "int": (_is_whole, "a whole number"),
    "float": (_is_number, "a finite number"),
    "bool": (lambda value: isinstance(value, bool), "true or false"),
    "str": (lambda value: isinstance(value, str), "a text"),
    "Mapping[str, Any]": (lambda value: isinstance(value, Mapping), "an object of named values"),
}


def _check_kinds(config: Config) -> None:
    """Each value is what its field declares, so that no rule below stumbles over a text or None."""
    for field in dataclasses.fields(config):
        declared, _, optional = str(field.type).partition(" | ")
        value = getattr(config, field.name)
        if declared.startswith("tuple") or (optional and value is None):
            continue  # tuples went through as_tuple
        fits, wanted = _KINDS[declared]
        if not fits(value):
            raise ValueError(f"{field.name}={value!r}: {wanted} is needed")


def _check_positive(config: Config, names: tuple[str, ...]) -> None:
    for name in names:
        if getattr(config, name) <= 0:
            raise ValueError(f"{name}={getattr(config, name)}: a positive number is needed")


def _check_needed(config: Config, names: tuple[str, ...], why: str) -> None:
    for name in names:
        if getattr(config, name) in (None, ()):
            raise ValueError(f"{why} needs {name}")


def _check_at_most(config: Config, name: str, limit: str) -> None:
    if getattr(config, name) > getattr(config, limit):
        raise ValueError(f"{name}={getattr(config, name)} exceeds {limit}={getattr(config, limit)}")


def _check_sizes(config: Config) -> None:
    _check_positive(config, _POSITIVE)
    for name in _POSITIVE:
        if getattr(config, name) > LARGEST:
            raise ValueError(f"{name}={getattr(config, name)} is beyond what a tensor can have: at most {LARGEST}")
    if config.initializer_range > 1:
        raise ValueError(f"initializer_range={config.initializer_range}: a standard deviation of at most 1 is needed")
    _check_at_most(config, "num_experts_per_tok", "n_routed_experts")
    for name, only in _ONLY.items():
        if getattr(config, name) != only:
            raise ValueError(f"{name}={getattr(config, name)!r}: this architecture has {only!r}")
    for name in ("hc_eps", "rms_norm_eps", "num_nextn_predict_layers"):
        if getattr(config, name) < 0:
            raise ValueError(f"{name}={getattr(config, name)}: must not be negative")
    if config.mhc_mode not in MHC_MODES:
        raise ValueError(f"mhc_mode={config.mhc_mode!r}: one of {', '.join(MHC_MODES)}")


def _check_widths(config: Config) -> None:
    if config.num_attention_heads % config.o_groups:
        raise ValueError(f"o_groups={config.o_groups} does not divide num_attention_heads={config.num_attention_heads}")
    if config.qk_rope_head_dim % 2:
        raise ValueError(f"qk_rope_head_dim={config.qk_rope_head_dim} is odd: channels rotate in pairs")
    _check_at_most(config, "qk_rope_head_dim", "head_dim")
    _check_at_most(config, "qk_rope_head_dim", "index_head_dim")
    # Blocks of spec 3: 32 for windows, index keys and Engram rows; the 16 of compressed KV divides wherever 32 does.
    rows = [("head_dim", 32), ("index_head_dim", 32)] if config.quantize_cache else []
    if config.engram_layer_ids and config.quantize_engram:
        rows.append(("engram_head_dim", 32))
    for name, block in rows:
        if (getattr(config, name) or 0) % block:
            raise ValueError(f"{name}={getattr(config, name)} is not a multiple of the quantisation block {block}")


def _check_rope(config: Config) -> None:
    for name in ("rope_theta", "compress_rope_theta"):
        if getattr(config, name) <= 1:
            raise ValueError(f"{name}={getattr(config, name)}: a base above 1 is needed")
    scaling = config.rope_scaling
    if scaling is None:
        return
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind != "yarn":
        raise ValueError(f"rope_scaling: rope_type={kind!r}, only 'yarn' is known")
    for name in ("factor", "beta_fast", "beta_slow", "original_max_position_embeddings"):
        if name not in scaling:
            raise ValueError(f"rope_scaling lacks {name}")
        if not _is_number(scaling[name]) or scaling[name] <= 0:
            raise ValueError(f"rope_scaling: {name}={scaling[name]!r}: a positive number is needed")
    if scaling["beta_fast"] < scaling["beta_slow"]:
        raise ValueError(
            f"rope_scaling: beta_fast={scaling['beta_fast']} is below beta_slow={scaling['beta_slow']}: "
            "the ramp would fall")


def _check_engram(config: Config) -> None:
    layers, rows = config.engram_layer_ids, config.engram_num_embeddings
    if not layers:
        return  # Engram switched off: its other fields may stay in the file
    _check_needed(config, (*_ENGRAM, "engram_pad_token_id"), f"engram_layer_ids={list(layers)}")
    _check_positive(config, _ENGRAM)
    if len(rows) != len(layers):
        raise ValueError(f"engram_num_embeddings has {len(rows)} entries, engram_layer_ids has {len(layers)}")
    if min(rows) < 1:
        raise ValueError(f"engram_num_embeddings={list(rows)}: a table has at least one row")
    if config.engram_max_ngram_size == 1:
        raise ValueError("engram_max_ngram_size=1: an n-gram has at least 2 tokens")
    _check_at_most(config, "engram_compressed_vocab_size", "vocab_size")
    _check_token("engram_pad_token_id", config.engram_pad_token_id, config.vocab_size)


def _check_dspark(config: Config) -> None:
    if not config.num_nextn_predict_layers:
        return
    needed = (*_DSPARK, "dspark_noise_token_id", "dspark_target_layer_ids")
    _check_needed(config, needed, f"num_nextn_predict_layers={config.num_nextn_predict_layers}")
    _check_positive(config, _DSPARK)
    _check_at_most(config, "dspark_num_experts_per_tok", "dspark_n_routed_experts")
    for layer in config.dspark_target_layer_ids:
        if not 0 <= layer < config.num_hidden_layers:
            raise ValueError(
                f"dspark_target_layer_ids names layer {layer}: layers are 0..{config.num_hidden_layers - 1}")
    _check_token("dspark_noise_token_id", config.dspark_noise_token_id, config.vocab_size)
    _check_temperatures(config)


def _check_temperatures(config: Config) -> None:
    temperatures, n_positions = config.dspark_temperatures, config.dspark_block_size
    if len(temperatures) not in (0, n_positions):
        raise ValueError(f"dspark_temperatures has {len(temperatures)} entries, dspark_block_size={n_positions}: "
                         "one per draft position is needed, or none at all")  # fmt: skip
    if not all(0 < temperature <= LARGEST for temperature in temperatures):
        raise ValueError(
            f"dspark_temperatures={list(temperatures)}: positive numbers are needed, of at most {LARGEST}")


def _check_token(name: str, token: int | None, vocab_size: int) -> None:
    if token is None or not 0 <= token < vocab_size:
        raise ValueError(f"{name}={token} is not a token id: ids are 0..{vocab_size - 1}")
