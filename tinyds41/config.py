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

from tinyds41.config_rules import as_tuple, check_config
from tinyds41.plan import Plan, derive_plan
from tinyds41.whole_file import write_whole


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
    initializer_range: float = 0.02  # standard deviation of initial matrices; narrow models learn faster with more
    dspark_temperatures: tuple[float, ...] = ()  # of the confidence at each draft position; none: 1 everywhere
    # Fields of the file that we do not use: {"text": inside text_config, "outer": around it}; written back.
    extra: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        for name, kind in _tuple_fields().items():
            object.__setattr__(self, name, as_tuple(name, getattr(self, name), kind))
        check_config(self)
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
        """A preset: nano (tests), toy (lessons), small (benchmarks) or flash (as released).

        Raises: ValueError naming the presets, or a field of `changes`.
        """
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
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} is not a JSON file in UTF-8: {error}") from error
        try:
            return cls.from_dict(content)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Config:
        """A config from released fields, nested in `text_config` or flat.

        What we do not use is kept.
        """
        if not isinstance(content, Mapping):
            raise ValueError(f"a config is a JSON object, got {type(content).__name__}")
        nested = isinstance(content.get("text_config"), Mapping)
        text = dict(content["text_config"] if nested else content)
        known: dict[str, Any] = {name: text.pop(name) for name in _fields() if name in text}
        required = _required()
        missing = [name for name in required if name not in known]
        if missing:
            raise ValueError(f"not a config of this architecture: missing {', '.join(missing)}")
        outer = {name: value for name, value in content.items() if name != "text_config"} if nested else None
        extra = {"text": text, "outer": outer} if text or nested else {}
        # A null stands for an absent field, as released files write "no pool".
        known = {name: value for name, value in known.items() if value is not None or name in required}
        return cls(**known, extra=extra)

    def to_dict(self) -> dict[str, Any]:
        """The file content this config came from, with our fields.

        `from_dict` of it gives an equal config.
        """
        text = {name: _plain(getattr(self, name)) for name in _fields()}
        text |= self.extra.get("text", {})
        outer = self.extra.get("outer")
        return text if outer is None else {**outer, "text_config": text}

    def to_json(self, path: str | Path) -> None:
        """Raises: OSError where the file cannot be written; one that was there stays."""
        write_whole(Path(path), json.dumps(self.to_dict(), indent=1) + "\n")


def preset_names() -> list[str]:
    """The presets by growing size."""
    return ["nano", "toy", "small", "flash"]


def _fields() -> list[str]:
    return [f.name for f in dataclasses.fields(Config) if f.name != "extra"]


def _required() -> list[str]:
    return [f.name for f in dataclasses.fields(Config) if f.default is f.default_factory]  # both MISSING


def _tuple_fields() -> dict[str, str]:
    """What each list holds: int or float."""
    declared = {f.name: str(f.type) for f in dataclasses.fields(Config)}
    return {name: kind[len("tuple[") :].split(",")[0] for name, kind in declared.items() if kind.startswith("tuple")}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    return dict(value) if isinstance(value, Mapping) else value


def _refuse_unknown(changes: Mapping[str, Any]) -> None:
    unknown = sorted(set(changes) - set(_fields()) - {"extra"})
    if unknown:
        raise ValueError(f"unknown config field {unknown[0]!r}: the fields are {', '.join(_fields())}")
