"""The layer plan: what every layer is, whose KV it reads and whose indices it follows (spec 1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tinyds41.tables import aligned

if TYPE_CHECKING:
    from tinyds41.config import Config

SWA, FULL, REINDEX, REUSE = "SWA", "FULL", "REINDEX", "REUSE"


@dataclass(frozen=True, kw_only=True)
class LayerPlan:
    """What one layer does. Source: TR 2.2-2.3, spec 1."""

    layer: int  # zero-based
    half: str  # "encoder" or "decoder"
    mode: str  # SWA, FULL, REINDEX or REUSE
    ratio: int  # compression ratio m, 0 = window only
    kv_source: int | None  # layer whose global KV is read
    index_source: int | None  # layer whose selection is followed
    forms_pool: bool  # this layer fills the candidate pool
    pooled: bool  # this layer may choose only inside the candidate pool
    engram: int | None  # number of the Engram table added before this layer

    @property
    def writes_globals(self) -> bool:
        return self.mode == FULL

    @property
    def selects(self) -> bool:
        return self.mode in (FULL, REINDEX)


@dataclass(frozen=True)
class Plan(Sequence):
    """All layers in order; `print(plan)` shows the table of spec 1."""

    layers: tuple[LayerPlan, ...]
    boundary: int | None  # first decoder layer, None when nothing can be skipped in prefill

    def __getitem__(self, index):
        return self.layers[index]

    def __len__(self) -> int:
        return len(self.layers)

    @property
    def n_encoder(self) -> int:
        return len(self.layers) if self.boundary is None else self.boundary

    @property
    def n_decoder(self) -> int:
        return len(self.layers) - self.n_encoder

    def __str__(self) -> str:
        head = ("layer", "half", "mode", "ratio", "KV from", "indices from", "pool", "Engram")
        return "\n".join(aligned(head, (self._row(layer) for layer in self.layers), left=range(len(head))))

    __repr__ = __str__

    @staticmethod
    def _row(layer: LayerPlan) -> tuple[str, ...]:
        def show(value: int | None) -> str:
            return "-" if value is None else str(value)

        pool = "forms" if layer.forms_pool else "inside" if layer.pooled else "-"
        return (
            str(layer.layer), layer.half, layer.mode, show(layer.ratio or None), show(layer.kv_source),
            show(layer.index_source), pool, show(layer.engram),
        )  # fmt: skip


def derive_plan(config: Config) -> Plan:
    """The plan of a checked config.

    Raises ValueError where the schedule contradicts itself (`check_schedule`).
    """
    check_schedule(config)
    boundary = _boundary(config)
    layers = tuple(_derive_layer(config, layer, boundary) for layer in range(config.num_hidden_layers))
    return Plan(layers, boundary)


def _derive_layer(config: Config, layer: int, boundary: int | None) -> LayerPlan:
    ratio = config.compress_ratios[layer]
    kv_source = _kv_source(config, layer)
    selects = layer in config.index_source_layer_ids
    writes = layer in config.kv_source_layer_ids
    candidate = config.candidate_source_layer_id
    return LayerPlan(
        layer=layer,
        half="encoder" if boundary is None or layer < boundary else "decoder",
        mode=FULL if writes else REINDEX if selects else REUSE if ratio else SWA,
        ratio=ratio,
        kv_source=kv_source,
        index_source=_index_source(config, layer, kv_source),
        forms_pool=candidate == layer,
        pooled=candidate is not None and selects and layer > candidate and kv_source == candidate,
        engram=config.engram_layer_ids.index(layer) if layer in config.engram_layer_ids else None,
    )


def _kv_source(config: Config, layer: int) -> int | None:
    ratio = config.compress_ratios[layer]
    same = [s for s in config.kv_source_layer_ids if s <= layer and config.compress_ratios[s] == ratio]
    return max(same, default=None) if ratio else None


def _index_source(config: Config, layer: int, kv_source: int | None) -> int | None:
    """The newest selection made against this layer's own kv source (spec 4.6)."""
    if kv_source is None:
        return None
    return max(s for s in config.index_source_layer_ids if s <= layer and _kv_source(config, s) == kv_source)


def _boundary(config: Config) -> int | None:
    """The last kv source of ratio 1.

    Its entries come from the encoder's output for every token (spec 5).
    """
    return max((s for s in config.kv_source_layer_ids if config.compress_ratios[s] == 1), default=None)


def check_schedule(config: Config) -> None:
    """Raises ValueError naming the field, the layer and the broken rule (spec 1)."""
    n_layers = config.num_hidden_layers
    if len(config.compress_ratios) < n_layers:
        raise ValueError(
            f"compress_ratios has {len(config.compress_ratios)} entries for num_hidden_layers={n_layers}: "
            "every layer needs one")
    if any(ratio < 0 for ratio in config.compress_ratios):
        raise ValueError(f"compress_ratios={list(config.compress_ratios)}: a ratio is 0 (window only) or positive")
    for name in ("kv_source_layer_ids", "index_source_layer_ids", "engram_layer_ids"):
        _check_layer_ids(name, getattr(config, name), n_layers)
    _check_sources(config)
    _check_candidate(config)


def _check_layer_ids(name: str, ids: tuple[int, ...], n_layers: int) -> None:
    for layer in ids:
        if not 0 <= layer < n_layers:
            raise ValueError(f"{name} names layer {layer}: layers are 0..{n_layers - 1}")
    if list(ids) != sorted(set(ids)):
        raise ValueError(f"{name}={list(ids)}: layers must ascend without repeats")


def _check_sources(config: Config) -> None:
    for name in ("kv_source_layer_ids", "index_source_layer_ids"):
        for layer in getattr(config, name):
            if config.compress_ratios[layer] == 0:
                raise ValueError(f"{name} names layer {layer}: a source needs a ratio > 0, compress_ratios gives 0")
    for layer in config.kv_source_layer_ids:
        if layer not in config.index_source_layer_ids:
            raise ValueError(
                f"kv_source_layer_ids names layer {layer}, index_source_layer_ids does not: "
                "every kv source is an index source")
    for layer in range(config.num_hidden_layers):
        ratio = config.compress_ratios[layer]
        if ratio and _kv_source(config, layer) is None:
            raise ValueError(
                f"compress_ratios gives layer {layer} ratio {ratio}: kv_source_layer_ids="
                f"{list(config.kv_source_layer_ids)} has no source of ratio {ratio} at or before it")
    boundary = _boundary(config)
    late = [s for s in config.kv_source_layer_ids if boundary is not None and s > boundary]
    if late:
        raise ValueError(
            f"kv_source_layer_ids names layer {late[0]} behind the decoder's first layer {boundary}: "
            "a decoder layer sees only the last tokens of a prompt and cannot write global KV for all")


def _check_candidate(config: Config) -> None:
    candidate = config.candidate_source_layer_id
    if candidate is None:
        return
    if candidate not in config.kv_source_layer_ids:
        raise ValueError(
            f"candidate_source_layer_id={candidate} is not in kv_source_layer_ids="
            f"{list(config.kv_source_layer_ids)}: the candidate source is a kv source")
    for name in ("candidate_topk_blocks", "candidate_block_size"):
        if getattr(config, name) < 1:
            raise ValueError(f"{name}={getattr(config, name)}: a pool needs at least one block of one entry")
