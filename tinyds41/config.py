"""Model sizes under their released names; every inconsistent set of them is refused here."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any

from tinyds41.plan import Plan, derive_plan

MHC_MODES = ("single_pass", "multi_pass", "residual")


@dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes and schedule of one model, under the released field names.

    Units: rope and YaRN fields in tokens; every size a count.
    Raises: ValueError naming the field, its value and the broken rule.
    Source: spec 1. Axis letters in the comments are those of docs/glossary.md.
    """

    vocab_size: int  # V
    hidden_size: int  # D
    num_hidden_layers: int  # L
    num_attention_heads: int  # H
    head_dim: int  # C, one shared K=V head
    qk_rope_head_dim: int  # R, the last R channels rotate
    q_lora_rank: int  # Q
    o_groups: int
    o_lora_rank: int
    sliding_window: int  # W
    compress_ratios: tuple[int, ...]  # entries behind L belong to draft blocks
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    candidate_source_layer_id: int | None = None
    candidate_topk_blocks: int = 0
    candidate_block_size: int = 8
    index_n_heads: int  # I
    index_head_dim: int  # J
    index_topk: int  # K
    moe_intermediate_size: int  # F
    n_routed_experts: int  # E
    num_experts_per_tok: int  # A
    n_shared_experts: int = 1
    num_key_value_heads: int = 1
    scoring_func: str = "sqrtsoftplus"
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.5
    gate_temp: float = 1.0
    swiglu_limit: float = 10.0
    hc_mult: int = 4  # N
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    rms_norm_eps: float = 1e-20
    rope_theta: float = 1e4
    compress_rope_theta: float = 1.6e5
    rope_scaling: Mapping[str, Any] | None = None  # YaRN, compressed layers only
    max_position_embeddings: int
    engram_layer_ids: tuple[int, ...] = ()
    engram_vocab_size: int | None = None
    engram_max_ngram_size: int | None = None
    engram_n_heads: int | None = None
    engram_head_dim: int | None = None
    engram_num_embeddings: tuple[int, ...] = ()  # rows per table
    engram_compressed_vocab_size: int | None = None
    engram_pad_token_id: int | None = None
    num_nextn_predict_layers: int = 0  # DSpark blocks
    dspark_block_size: int | None = None
    dspark_target_layer_ids: tuple[int, ...] = ()
    dspark_noise_token_id: int | None = None
    dspark_markov_rank: int | None = None
    dspark_n_routed_experts: int | None = None
    dspark_num_experts_per_tok: int | None = None
    # Ours: switches for study, absent from a released file.
    quantize_cache: bool = True  # window, global KV and index rows see their cache format
    quantize_engram: bool = True  # Engram rows see FP8
    mhc_mode: str = "single_pass"  # "multi_pass" (V4) and "residual" are ablations
    # Fields of the file that we do not use: {"text": inside text_config, "outer": around it}; written back.
    extra: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        for name in _tuple_fields():
            object.__setattr__(self, name, tuple(getattr(self, name)))
        _check_sizes(self)
        _check_widths(self)
        _check_rope(self)
        _check_engram(self)
        _check_dspark(self)
        self._plan  # noqa: B018  (derives and checks the schedule once)

    @cached_property
    def _plan(self) -> Plan:
        return derive_plan(self)

    def plan(self) -> Plan:
        """The layer plan; `print(config.plan())` shows it as a table. Source: spec 1."""
        return self._plan

    def replace(self, **changes: Any) -> Config:
        """A checked copy with some fields changed."""
        _refuse_unknown(changes)
        return dataclasses.replace(self, **changes)

    @classmethod
    def preset(cls, name: str, **changes: Any) -> Config:
        """One of `preset_names()`: nano (tests), toy (lessons), small (benchmarks), flash (released)."""
        if name not in preset_names():
            raise ValueError(f"unknown preset {name!r}: the presets are {', '.join(preset_names())}")
        text = (resources.files("tinyds41") / "presets" / f"{name}.json").read_text(encoding="utf-8")
        config = cls.from_dict(json.loads(text))
        return config.replace(**changes) if changes else config

    @classmethod
    def from_json(cls, path: str | Path) -> Config:
        """Reads a released config.json (fields in `text_config`) or a flat one.

        Raises: OSError when unreadable; ValueError when it is not JSON, or not of this architecture.
        """
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} is not a JSON file in UTF-8: {error}") from error
        try:
            return cls.from_dict(content)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Config:
        """A config from released fields, nested in `text_config` or flat; what we do not use is kept."""
        if not isinstance(content, Mapping):
            raise ValueError(f"a config is a JSON object, got {type(content).__name__}")
        nested = isinstance(content.get("text_config"), Mapping)
        text = dict(content["text_config"] if nested else content)
        known = {name: text.pop(name) for name in _fields() if name in text}
        missing = [name for name in _required() if name not in known]
        if missing:
            raise ValueError(f"not a config of this architecture: missing {', '.join(missing)}")
        outer = {name: value for name, value in content.items() if name != "text_config"} if nested else None
        extra = {"text": text, "outer": outer} if text or nested else {}
        return cls(**known, extra=extra)

    def to_dict(self) -> dict[str, Any]:
        """The file content this config came from, with our fields; `from_dict` of it gives an equal config."""
        text = {name: _plain(getattr(self, name)) for name in _fields()}
        text |= self.extra.get("text", {})
        outer = self.extra.get("outer")
        return text if outer is None else {**outer, "text_config": text}

    def to_json(self, path: str | Path) -> None:
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")


def preset_names() -> list[str]:
    """The presets by growing size."""
    return ["nano", "toy", "small", "flash"]


def _fields() -> list[str]:
    return [f.name for f in dataclasses.fields(Config) if f.name != "extra"]


def _required() -> list[str]:
    return [f.name for f in dataclasses.fields(Config) if f.default is f.default_factory]  # both MISSING


def _tuple_fields() -> list[str]:
    return [f.name for f in dataclasses.fields(Config) if str(f.type).startswith("tuple")]


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    return dict(value) if isinstance(value, Mapping) else value


def _refuse_unknown(changes: Mapping[str, Any]) -> None:
    unknown = sorted(set(changes) - set(_fields()) - {"extra"})
    if unknown:
        raise ValueError(f"unknown config field {unknown[0]!r}: the fields are {', '.join(_fields())}")


_POSITIVE = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim", "qk_rope_head_dim",
    "q_lora_rank", "o_groups", "o_lora_rank", "sliding_window", "index_n_heads", "index_head_dim", "index_topk",
    "moe_intermediate_size", "n_routed_experts", "num_experts_per_tok", "hc_mult", "hc_sinkhorn_iters",
    "max_position_embeddings",
)  # fmt: skip


def _check_sizes(config: Config) -> None:
    for name in _POSITIVE:
        value = getattr(config, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name}={value!r}: a positive whole number is needed")
    if config.num_experts_per_tok > config.n_routed_experts:
        raise ValueError(
            f"num_experts_per_tok={config.num_experts_per_tok} exceeds n_routed_experts={config.n_routed_experts}")
    fixed = {"num_key_value_heads": 1, "n_shared_experts": 1, "scoring_func": "sqrtsoftplus", "norm_topk_prob": True}
    for name, only in fixed.items():
        if getattr(config, name) != only:
            raise ValueError(f"{name}={getattr(config, name)!r}: this architecture has {only!r}")
    if config.mhc_mode not in MHC_MODES:
        raise ValueError(f"mhc_mode={config.mhc_mode!r}: one of {', '.join(MHC_MODES)}")


def _check_widths(config: Config) -> None:
    if config.num_attention_heads % config.o_groups:
        raise ValueError(f"o_groups={config.o_groups} does not divide num_attention_heads={config.num_attention_heads}")
    rotary, limit = config.qk_rope_head_dim, min(config.head_dim, config.index_head_dim)
    if rotary % 2:
        raise ValueError(f"qk_rope_head_dim={rotary} is odd: channels rotate in pairs")
    if rotary > limit:
        raise ValueError(
            f"qk_rope_head_dim={rotary} exceeds {limit}, the smaller of head_dim={config.head_dim} "
            f"and index_head_dim={config.index_head_dim}")
    # Blocks of spec 3: 32 for windows, index keys and Engram rows, 16 for compressed KV.
    rows = [("head_dim", 32), ("index_head_dim", 32)] if config.quantize_cache else []
    if config.engram_layer_ids and config.quantize_engram:
        rows.append(("engram_head_dim", 32))
    for name, block in rows:
        if (getattr(config, name) or 0) % block:
            raise ValueError(f"{name}={getattr(config, name)} is not a multiple of the quantisation block {block}")


def _check_rope(config: Config) -> None:
    if config.rope_scaling is None:
        return
    kind = config.rope_scaling.get("rope_type", config.rope_scaling.get("type"))
    if kind != "yarn":
        raise ValueError(f"rope_scaling: rope_type={kind!r}, only 'yarn' is known")
    for name in ("factor", "beta_fast", "beta_slow", "original_max_position_embeddings"):
        if name not in config.rope_scaling:
            raise ValueError(f"rope_scaling lacks {name}")


def _check_engram(config: Config) -> None:
    n_tables = len(config.engram_layer_ids)
    if not n_tables:
        return
    for name in ("engram_vocab_size", "engram_max_ngram_size", "engram_n_heads", "engram_head_dim",
                 "engram_compressed_vocab_size", "engram_pad_token_id"):  # fmt: skip
        if getattr(config, name) is None:
            raise ValueError(f"engram_layer_ids={list(config.engram_layer_ids)} needs {name}")
    if len(config.engram_num_embeddings) != n_tables:
        raise ValueError(
            f"engram_num_embeddings has {len(config.engram_num_embeddings)} entries, engram_layer_ids has {n_tables}")
    if not config.engram_max_ngram_size >= 2:  # type: ignore[operator]
        raise ValueError(f"engram_max_ngram_size={config.engram_max_ngram_size}: n-grams have at least 2 tokens")
    _check_token("engram_pad_token_id", config.engram_pad_token_id, config.vocab_size)


def _check_dspark(config: Config) -> None:
    if not config.num_nextn_predict_layers:
        return
    for name in ("dspark_block_size", "dspark_noise_token_id", "dspark_markov_rank", "dspark_n_routed_experts",
                 "dspark_num_experts_per_tok"):  # fmt: skip
        if getattr(config, name) is None:
            raise ValueError(f"num_nextn_predict_layers={config.num_nextn_predict_layers} needs {name}")
    for layer in config.dspark_target_layer_ids:
        if not 0 <= layer < config.num_hidden_layers:
            raise ValueError(
                f"dspark_target_layer_ids names layer {layer}: layers are 0..{config.num_hidden_layers - 1}")
    _check_token("dspark_noise_token_id", config.dspark_noise_token_id, config.vocab_size)


def _check_token(name: str, token: int | None, vocab_size: int) -> None:
    if token is None or not 0 <= token < vocab_size:
        raise ValueError(f"{name}={token} is not a token id: ids are 0..{vocab_size - 1}")
