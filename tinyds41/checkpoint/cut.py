"""The config of a model's first layers."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index

from tinyds41.config import Config


def first_layers(config: Config, layers: Sequence[int]) -> Config:
    """The config of `range(0, n)`: its sources and Engram tables alone.

    Draft blocks stay only where all of their target layers do.

    Raises: ValueError naming the source layer that is missing, or the layers when they are not the first ones.
    """
    n_all = config.num_hidden_layers
    try:
        wanted = [index(layer) for layer in layers]
    except TypeError as error:
        raise ValueError(f"layers={layers!r} are no layer numbers: range(0, n) names the first n") from error
    if not wanted:
        raise ValueError(f"layers={layers} names no layer: layers are 0..{n_all - 1}")
    outside = [layer for layer in wanted if not 0 <= layer < n_all]
    if outside:
        raise ValueError(f"layers={layers} names layer {outside[0]}: layers are 0..{n_all - 1}")
    if wanted != list(range(len(wanted))):
        reason = _missing_source(config, wanted) or "a layer continues the streams of the one before"
        raise ValueError(f"layers={layers}: {reason}; only the first layers, range(0, n), make a model")
    return config if len(wanted) == n_all else _cut(config, len(wanted))


def _missing_source(config: Config, wanted: list[int]) -> str | None:
    for layer in wanted:
        plan = config.plan()[layer]
        for source, what in ((plan.kv_source, "global KV"), (plan.index_source, "selection")):
            if source is not None and source not in wanted:
                return f"layer {layer} reads the {what} of its source layer {source}, which is missing"
    return None


def _cut(config: Config, n: int) -> Config:
    tables = [(layer, rows) for layer, rows in zip(config.engram_layer_ids, config.engram_num_embeddings, strict=True)
              if layer < n]  # fmt: skip
    candidate = config.candidate_source_layer_id
    drafts = not missing_targets(config, n)
    return config.replace(
        num_hidden_layers=n,
        compress_ratios=config.compress_ratios[:n],
        kv_source_layer_ids=[layer for layer in config.kv_source_layer_ids if layer < n],
        index_source_layer_ids=[layer for layer in config.index_source_layer_ids if layer < n],
        candidate_source_layer_id=candidate if candidate is not None and candidate < n else None,
        engram_layer_ids=[layer for layer, _ in tables],
        engram_num_embeddings=[rows for _, rows in tables],
        num_nextn_predict_layers=config.num_nextn_predict_layers if drafts else 0,
        dspark_target_layer_ids=config.dspark_target_layer_ids if drafts else (),
    )


def missing_targets(config: Config, n: int) -> list[int]:
    """The target layers of the draft blocks that are not among the first n layers."""
    return [layer for layer in config.dspark_target_layer_ids if layer >= n]
