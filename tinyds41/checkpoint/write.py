"""Writes a model as a folder in the released layout: config, sharded safetensors with their index, tokenizer."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from tinyds41 import weight_formats
from tinyds41.checkpoint.layout import (
    CONFIG,
    FP4,
    INDEX,
    ROWS,
    TILES,
    Quantised,
    format_to_write,
    scale_name,
    shard_name,
)
from tinyds41.checkpoint.names import DRAFT, to_released
from tinyds41.checkpoint.replace import replacing
from tinyds41.model.transformer import Model

MAX_SHARD_BYTES = 5_000_000_000

_ENCODERS = {
    TILES: (weight_formats.encode_tiles, weight_formats.decode_tiles),
    FP4: (weight_formats.encode_fp4_weight, weight_formats.decode_fp4_weight),
    ROWS: (weight_formats.encode_fp8_rows, weight_formats.decode_fp8_rows),
}


def save(
    model: Model, folder: str | Path, *, quantize: bool = False, max_shard_bytes: int = MAX_SHARD_BYTES
) -> Path:  # fmt: skip
    """Writes config.json, safetensors shards with their index, and the tokenizer if any.

    quantize: dense matrices as FP8 tiles, routed experts as packed FP4, Engram tables as FP8 rows; embedding, head,
        norms, gates, sinks, biases and hyper-connections stay in the model's dtype. Without it all of them do.
    max_shard_bytes: of one shard's tensors; a larger tensor has a shard of its own.

    A model already in the folder is replaced as a whole or not at all (`replacing`).
    Raises: FileExistsError for a folder with anything else in it; ValueError for a matrix that its format's blocks
        do not divide, or a model without weights; OSError when the place cannot be written.
    Source: spec 3, 13.
    """
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes={max_shard_bytes}: a positive number is needed")
    if model.device.type == "meta":
        raise ValueError("the model is on the meta device: it has no weights to save")
    folder = Path(folder).resolve()  # a link keeps pointing at the model
    with replacing(folder) as partial:
        model.config.to_json(partial / CONFIG)
        if model.tokenizer is not None:
            model.tokenizer.save(partial)
        _write_shards(_stored_tensors(model, quantize), partial, max_shard_bytes)
    return folder


def save_draft(model: Model, folder: str | Path) -> Path:
    """Writes the drafter alone, bit for bit, with the model's config: `load_draft` adds it to the backbone again.

    Raises: ValueError for a model without a drafter or weights; FileExistsError and OSError as `save`.
    """
    if model.drafter.device.type == "meta":
        raise ValueError("the model is on the meta device: it has no weights to save")
    folder = Path(folder).resolve()
    own = {name: tensor for name, tensor in to_released(model.state_dict()).items() if name.startswith(DRAFT)}
    with replacing(folder) as partial:
        model.config.to_json(partial / CONFIG)
        _write_shards(({name: tensor.cpu().contiguous()} for name, tensor in own.items()), partial, MAX_SHARD_BYTES)
    return folder


def _write_shards(stored: Iterator[dict[str, Tensor]], folder: Path, max_shard_bytes: int) -> None:
    """Shards under provisional names, as their number is known only at the end; then the index."""
    shards: list[list[str]] = []
    total_bytes = 0
    for tensors in _shards(stored, max_shard_bytes):
        shards.append(list(tensors))
        total_bytes += sum(tensor.nbytes for tensor in tensors.values())
        save_file(tensors, folder / f"{len(shards)}", metadata={"format": "pt"})
    weight_map = {}
    for number, names in enumerate(shards, 1):
        file = folder / shard_name(number, len(shards))
        (folder / f"{number}").rename(file)
        # safetensors makes files that only their owner may read; the config got the usual rights.
        os.chmod(file, (folder / CONFIG).stat().st_mode)
        weight_map |= dict.fromkeys(names, file.name)
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


def _shards(groups: Iterator[dict[str, Tensor]], max_bytes: int) -> Iterator[dict[str, Tensor]]:
    """Fills shards in order; a weight and its scale stay together.

    At most one shard is in memory.
    """
    shard: dict[str, Tensor] = {}
    filled = 0
    for group in groups:
        size = sum(tensor.nbytes for tensor in group.values())
        if shard and filled + size > max_bytes:
            yield shard
            shard, filled = {}, 0
        shard |= group
        filled += size
    yield shard


def _weights(model: Model) -> Iterator[tuple[str, Tensor]]:
    """All weights under released names; a table that lies in a file is read when its turn comes."""
    yield from to_released(model.state_dict()).items()
    for layer, engram in model.engrams.items():
        if not engram.owns_table:
            yield f"layers.{layer}.engram.embed.weight", engram.table()


def _stored_tensors(model: Model, quantize: bool) -> Iterator[dict[str, Tensor]]:
    """What is stored for each parameter: itself, or codes and scales."""
    for name, tensor in _weights(model):
        form = format_to_write(name) if quantize else None
        if form is None:
            yield {name: tensor.cpu().contiguous()}
        else:
            codes, scale = _encode(form, name, tensor.cpu())
            yield {name: codes.contiguous(), scale_name(name): scale.contiguous()}


def _encode(form: Quantised, name: str, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales that stay the same when they are loaded and saved again.

    The largest value of a block may round down to half of the range; the scale of the rounded block is then half as
    large. Both codes mean the same values, and the second is the one that repeats.
    """
    encode, decode = _ENCODERS[form]
    try:
        with torch.no_grad():
            return encode(decode(*encode(weight)))
    except ValueError as error:
        raise ValueError(f"{name} cannot be written as {form.name}: {error}") from error
