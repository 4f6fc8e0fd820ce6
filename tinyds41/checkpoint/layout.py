"""The files of a model folder and the formats of its quantised weights (spec 3, 13), without torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"  # all weights in one file, without an index
TOKENIZER = "tokenizer.json"
_SHARD = re.compile(r"^model-\d{5}-of-\d{5}\.safetensors$")


def shard_name(number: int, count: int) -> str:
    """The file of one of `count` shards, numbered from 1."""
    return f"model-{number:05d}-of-{count:05d}.safetensors"


def is_model_file(name: str) -> bool:
    """Whether `save` may have written this file, so that it may replace it."""
    return name in (CONFIG, INDEX, SINGLE, TOKENIZER) or _SHARD.match(name) is not None


def is_model_folder(path: Path) -> bool:
    """A config and weights; whether they are sound shows when they are read."""
    return (path / CONFIG).is_file() and ((path / INDEX).is_file() or (path / SINGLE).is_file())


@dataclass(frozen=True)
class Quantised:
    """One released weight format: codes in `X.weight`, UE8M0 scales in `X.scale`.

    Units: `scale_rows` x `SCALE_COLUMNS` values share a scale, `packing` values share a byte.
    """

    name: str
    dtype: str  # of the codes, as safetensors writes it
    scale_rows: int
    packing: int = 1

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether a matrix can have this format.

        Only a tile may be cut at the edge, a block of a row may not.
        """
        return len(shape) == 2 and (self.scale_rows > 1 or shape[1] % SCALE_COLUMNS == 0)

    def code_shape(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Shape of the codes of a matrix."""
        rows, columns = shape
        return rows, columns // self.packing

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Shape of the scales of a matrix; a block at the edge may be smaller."""
        rows, columns = shape
        return -(-rows // self.scale_rows), -(-columns // SCALE_COLUMNS)


SCALE_COLUMNS = 32
SCALE_DTYPE = "F8_E8M0"
TILES = Quantised("fp8 tiles", "F8_E4M3", scale_rows=32)
FP4 = Quantised("packed fp4", "I8", scale_rows=1, packing=2)
ROWS = Quantised("fp8 rows", "F8_E4M3", scale_rows=1)
PLAIN = ("F64", "F32", "F16", "BF16")

_ENGRAM_TABLE = re.compile(r"\.engram\.embed\.weight$")
_ROUTED = re.compile(r"\.ffn\.experts\.\d+\.w[123]\.weight$")
# Dense matrices that a token is multiplied with. Embedding, head, norms, gates, sinks, biases, hyper-connections and
# Engram's q_weight, k_weight stay in the model's dtype: they are few values, and the choices of a gate are fragile.
_DENSE = re.compile(
    r"\.(attn\.(wq_a|wq_b|wkv|wo_a|wo_b|compressor\.(wkv|wgate)|indexer\.(wq_b|wk|weights_proj))"
    r"|ffn\.shared_experts\.w[123]|engram\.wkv)\.weight$")  # fmt: skip


def format_to_write(name: str) -> Quantised | None:
    """The format in which `save(quantize=True)` writes a tensor; None for the model's dtype.

    Source: spec 3, 13.
    """
    if _ENGRAM_TABLE.search(name):
        return ROWS
    if _ROUTED.search(name):
        return FP4
    return TILES if _DENSE.search(name) else None


def format_on_disk(name: str, dtype: str) -> Quantised | None:
    """The format of a stored tensor, from its dtype.

    Only Engram's rows have their scales row by row.
    """
    if dtype == TILES.dtype:
        return ROWS if _ENGRAM_TABLE.search(name) else TILES
    return FP4 if dtype == FP4.dtype else None


def scale_name(name: str) -> str:
    """`X.scale` for `X.weight`."""
    return name.removesuffix(".weight") + ".scale"
