"""A model folder before any weight is read: its config, its index and the headers of its shards."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinyds41.checkpoint.layout import CONFIG, INDEX, SINGLE
from tinyds41.checkpoint.replace import left_by_an_interrupted_save
from tinyds41.config import Config

_BITS = {"F64": 64, "F32": 32, "F16": 16, "BF16": 16, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4,
         "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32, "U16": 16, "U8": 8, "BOOL": 8}  # fmt: skip
_LENGTH_BYTES = 8  # a shard starts with the length of its JSON header, little-endian
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclass(frozen=True)
class Stored:
    """One tensor as a shard's header describes it."""

    name: str
    dtype: str  # as safetensors writes it
    shape: tuple[int, ...]
    n_bytes: int
    shard: str


class ModelFolder:
    """Config and whereabouts of the tensors of one folder.

    Raises: FileNotFoundError naming the folder or file that is missing; ValueError naming the file that is not
        what it should be, pickles among them.
    """

    def __init__(self, path: str | Path):
        self.path = _existing(Path(path))
        if not (self.path / CONFIG).is_file():
            raise FileNotFoundError(f"{self.path} holds no {CONFIG}: it is not a model folder")
        self.config = Config.from_json(self.path / CONFIG)
        self.shard_of = _weight_map(self.path)

    def headers(self, names: Iterable[str]) -> dict[str, Stored]:
        """The stored tensors of every shard that holds one of `names`; no other shard is opened."""
        found: dict[str, Stored] = {}
        for shard in sorted({self.shard_of[name] for name in names}):
            stored = read_header(self.path / shard)
            self._compare(shard, stored)
            found |= stored
        return found

    def _compare(self, shard: str, stored: dict[str, Stored]) -> None:
        indexed = {name for name, home in self.shard_of.items() if home == shard}
        for names, what in ((indexed - set(stored), "it lacks"), (set(stored) - indexed, "only it has")):
            if names:
                raise ValueError(f"{self.path / shard} does not fit {INDEX}: {what} {some(names)}")


def _existing(path: Path) -> Path:
    if path.is_dir():
        return path
    # The moment between the two renames of a save: the old model is whole, under another name.
    previous = left_by_an_interrupted_save(path)
    if previous is None:
        raise FileNotFoundError(f"no folder {path}")
    return previous


def _weight_map(path: Path) -> dict[str, str]:
    """Tensor name to shard, from the index or from the only file."""
    if (path / INDEX).is_file():
        return _read_index(path / INDEX)
    if (path / SINGLE).is_file():
        return dict.fromkeys(read_header(path / SINGLE), SINGLE)
    pickles = sorted(file.name for pattern in _PICKLES for file in path.glob(pattern))
    if pickles:
        raise ValueError(
            f"{path} holds its weights as {pickles[0]}: a pickle can run any code when it is opened, "
            "so only safetensors are read")
    raise FileNotFoundError(f"{path} holds no weights: neither {INDEX} nor {SINGLE}")


def _read_index(file: Path) -> dict[str, str]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not a JSON file in UTF-8: {error}") from error
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{file} has no weight_map of tensor names to shards")
    for name, shard in weight_map.items():
        # A path would let an index read files outside the folder.
        if not isinstance(shard, str) or not shard.endswith(".safetensors") or Path(shard).name != shard:
            raise ValueError(f"{file}: weight_map puts {name} into {shard!r}, which is not a shard in its folder")
    return weight_map


def read_header(file: Path) -> dict[str, Stored]:
    """What a shard holds, checked against its length.

    Raises: FileNotFoundError, or ValueError naming the file and, where it is truncated, both lengths.
    """
    if not file.is_file():
        raise FileNotFoundError(f"shard {file} is missing")
    size = file.stat().st_size
    with file.open("rb") as handle:
        length = int.from_bytes(handle.read(_LENGTH_BYTES), "little")
        start = _LENGTH_BYTES + length
        if size < start:
            raise ValueError(f"{file} is truncated: {size:,} bytes, its header alone ends at {start:,}")
        text = handle.read(length)
    try:
        entries = json.loads(text)
        stored = {name: _stored(name, entry, file.name) for name, entry in entries.items() if name != "__metadata__"}
        end = start + max((entry["data_offsets"][1] for name, entry in entries.items() if name != "__metadata__"),
                          default=0)  # fmt: skip
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise ValueError(f"{file} has no valid safetensors header: {error}") from error
    if size != end:
        raise ValueError(f"{file} is {'truncated' if size < end else 'too long'}: {size:,} bytes, expected {end:,}")
    return stored


def _stored(name: str, entry: dict[str, Any], shard: str) -> Stored:
    shape = tuple(int(axis) for axis in entry["shape"])
    begin, end = entry["data_offsets"]
    dtype = entry["dtype"]
    if dtype in _BITS and math.prod(shape) * _BITS[dtype] != 8 * (end - begin):
        raise ValueError(f"{name} is {dtype} {shape} in {end - begin} bytes")
    return Stored(name, dtype, shape, end - begin, shard)


def some(names: Iterable[str], limit: int = 8) -> str:
    """The first names in order, and how many more there are.

    An error about 46,000 experts stays readable.
    """
    ordered = sorted(names)
    rest = f" and {len(ordered) - limit:,} more" if len(ordered) > limit else ""
    return ", ".join(ordered[:limit]) + rest
