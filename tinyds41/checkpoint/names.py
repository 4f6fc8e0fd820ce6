"""Parameter names of this library and of released files, both ways (spec 13)."""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import Tensor

# Ours -> released. Modules that stand beside attention here live inside `attn` there.
_RULES = (
    (re.compile(r"^(layers\.\d+)\.(compressor|indexer)\."), r"\1.attn.\2."),
    (re.compile(r"\.hc_(attn|ffn)\.(fn|base|scale)$"), r".hc_\1_\2"),
)
_BACK = (
    (re.compile(r"^(layers\.\d+)\.attn\.(compressor|indexer)\."), r"\1.\2."),
    (re.compile(r"\.hc_(attn|ffn)_(fn|base|scale)$"), r".hc_\1.\2"),
)
STACKED = re.compile(r"^(?P<layer>(?:layers|mtp)\.\d+\.ffn\.experts)\.(?P<matrix>w[123])$")
ONE_EXPERT = re.compile(r"^(?P<layer>(?:layers|mtp)\.\d+\.ffn\.experts)\.(?P<expert>\d+)\.(?P<matrix>w[123])\.weight$")


def released_name(name: str) -> str:
    """The released name of one of our parameters (stacked experts: see `to_released`)."""
    for pattern, replacement in _RULES:
        name = pattern.sub(replacement, name)
    return name


def our_name(name: str) -> str:
    """Our name of a released tensor; an expert's matrix goes to its stack."""
    match = ONE_EXPERT.match(name)
    if match:
        return f"{match['layer']}.{match['matrix']}"
    for pattern, replacement in _BACK:
        name = pattern.sub(replacement, name)
    return name


def to_released(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state dict under released names; stacks become one tensor per expert (views, nothing is copied)."""
    released: dict[str, Tensor] = {}
    for name, tensor in state.items():
        match = STACKED.match(name)
        if not match:
            released[released_name(name)] = tensor
            continue
        for expert, matrix in enumerate(tensor.unbind(0)):
            released[f"{match['layer']}.{expert}.{match['matrix']}.weight"] = matrix
    return released
