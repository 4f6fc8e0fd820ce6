"""What a model folder holds, from its config and headers alone: no weight is read, torch is not loaded."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tinyds41.checkpoint.headers import ModelFolder, Stored
from tinyds41.checkpoint.layout import format_on_disk, scale_name
from tinyds41.checkpoint.names import COMPONENTS, DRAFT_BLOCK, component
from tinyds41.config import Config
from tinyds41.tables import aligned


@dataclass(frozen=True)
class Group:
    """Tensors of one name, shape and format in all layers and experts.

    A scale counts with its weight.

    Units: n_bytes on disk, scales included; n_parameters of the weights, a packed byte being two.
    """

    component: str
    name: str  # numbers replaced by *
    count: int
    shape: tuple[int, ...]  # of one tensor's values, as the model has it
    format: str  # "F32", "fp8 tiles", ...
    n_bytes: int
    n_parameters: int


@dataclass(frozen=True)
class Report:
    """The content of a folder; `print(report)` shows it as tables, `to_dict` as JSON."""

    folder: str
    config: Config
    groups: tuple[Group, ...]
    shards: dict[str, int]  # bytes of each file
    n_draft_blocks: int  # stored; the config only says how many the released model has

    @property
    def n_bytes(self) -> int:
        """Bytes of all tensors, without headers."""
        return sum(group.n_bytes for group in self.groups)

    @property
    def n_parameters(self) -> int:
        return sum(group.n_parameters for group in self.groups)

    def components(self) -> dict[str, tuple[int, int]]:
        """(parameters, bytes) of each component."""
        totals: dict[str, tuple[int, int]] = {}
        for group in self.groups:
            parameters, n_bytes = totals.get(group.component, (0, 0))
            totals[group.component] = (parameters + group.n_parameters, n_bytes + group.n_bytes)
        return totals

    def to_dict(self) -> dict[str, Any]:
        components = {name: {"parameters": p, "bytes": b} for name, (p, b) in self.components().items()}
        return {
            "folder": self.folder, "parameters": self.n_parameters, "bytes": self.n_bytes, "components": components,
            "draft_blocks": self.n_draft_blocks, "tensors": [asdict(group) for group in self.groups],
            "shards": self.shards, "config": self.config.to_dict(),
        }  # fmt: skip

    def __str__(self) -> str:
        components = [(name, f"{p:,}", f"{b:,}") for name, (p, b) in self.components().items()]
        total = ("total", f"{self.n_parameters:,}", f"{self.n_bytes:,}")
        tensors = [
            (g.name, f"{g.count:,}", " x ".join(map(str, g.shape)), g.format, f"{g.n_parameters:,}", f"{g.n_bytes:,}")
            for g in self.groups
        ]
        return "\n\n".join([
            _summary(self.config, self.n_draft_blocks),
            *("\n".join(table) for table in (
                aligned(("component", "parameters", "bytes"), [*components, total]),
                aligned(("tensor", "count", "shape", "format", "parameters", "bytes"), tensors, left=(0, 2, 3)),
                aligned(("shard", "bytes"), [(name, f"{size:,}") for name, size in self.shards.items()]),
            )),
        ])  # fmt: skip


def inspect(folder: str | Path) -> Report:
    """Reads the headers of a model folder.

    Raises: what `ModelFolder` raises; missing tensors are no error here.
    """
    files = ModelFolder(folder)
    stored = files.headers(files.shard_of)
    shards = {shard: (files.path / shard).stat().st_size for shard in sorted(set(files.shard_of.values()))}
    draft_blocks = {match[1] for match in map(DRAFT_BLOCK.match, stored) if match}
    return Report(str(folder), files.config, tuple(_groups(stored)), shards, len(draft_blocks))


def _groups(stored: dict[str, Stored]) -> list[Group]:
    # Layer and expert numbers in the order of numbers, not of digits.
    order = sorted(stored, key=lambda name: [part.zfill(9) if part.isdigit() else part for part in name.split(".")])
    scales = {scale_name(name) for name in stored if format_on_disk(name, stored[name].dtype)}
    members: dict[tuple, list[Group]] = {}
    for name in order:
        if name not in scales:
            group = _group(stored[name], stored.get(scale_name(name)))
            members.setdefault((group.component, group.name, group.shape, group.format), []).append(group)
    return sorted((_sum(group) for group in members.values()), key=lambda group: COMPONENTS.index(group.component))


def _group(tensor: Stored, scale: Stored | None) -> Group:
    form = format_on_disk(tensor.name, tensor.dtype)
    shape = tensor.shape
    if form is not None and shape:
        shape = (*shape[:-1], shape[-1] * form.packing)
    n_bytes = tensor.n_bytes + (scale.n_bytes if form and scale else 0)
    # Codes without scales have no values: shown as they are stored.
    shown = tensor.dtype if form is None else form.name if scale else f"{tensor.dtype} without scale"
    pattern = re.sub(r"(?<=\.)\d+(?=\.)", "*", tensor.name)
    return Group(component(tensor.name), pattern, 1, shape, shown, n_bytes, math.prod(shape))


def _sum(group: list[Group]) -> Group:
    one = group[0]
    return Group(one.component, one.name, len(group), one.shape, one.format,
                 sum(g.n_bytes for g in group), sum(g.n_parameters for g in group))  # fmt: skip


def _summary(config: Config, n_draft_blocks: int) -> str:
    plan = config.plan()
    modes = Counter(layer.mode for layer in plan)
    lines = [
        f"{len(plan)} layers: {plan.n_encoder} encoder, {plan.n_decoder} decoder; "
        + ", ".join(f"{count} {mode}" for mode, count in modes.items()),
        f"hidden {config.hidden_size}, {config.num_attention_heads} heads of {config.head_dim}, "
        f"window {config.sliding_window}, top-{config.index_topk}, vocabulary {config.vocab_size:,}",
        f"{config.n_routed_experts} experts of {config.moe_intermediate_size}, {config.num_experts_per_tok} per token; "
        f"Engram before layers {list(config.engram_layer_ids)}; "
        f"{n_draft_blocks} of {config.num_nextn_predict_layers} draft blocks stored",
    ]
    return "\n".join(lines)
