"""Parameter names of this library and of released files, both ways (spec 13), and what each belongs to."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # `tinyds41 inspect` reads names and headers only, without seconds of loading torch
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

LAYER = re.compile(r"^layers\.(\d+)\.")
DRAFT_BLOCK = re.compile(r"^mtp\.(\d+)\.")
DRAFT = "mtp."
# Parts of released files beside the language model's backbone; draft blocks only where the model has none.
SKIPPED = (DRAFT, "vision.", "aligner.", "image_")
# May be absent: the router's second bias, which only image tokens use (spec 8).
OPTIONAL = re.compile(r"\.ffn\.gate\.bias_vl$")
# In the order of the model.
_COMPONENTS = tuple((component, re.compile(pattern)) for component, pattern in (
    ("token embedding", r"^embed\."),
    ("Engram rows", r"^layers\.\d+\.engram\.embed\."),
    ("Engram projections", r"^layers\.\d+\.engram\.(?!embed\.)"),
    ("attention", r"^layers\.\d+\.attn\.(?!compressor\.|indexer\.)"),
    ("compressor", r"^layers\.\d+\.attn\.compressor\."),
    ("indexer", r"^layers\.\d+\.attn\.indexer\."),
    ("router", r"^layers\.\d+\.ffn\.gate\."),
    ("routed experts", r"^layers\.\d+\.ffn\.experts\."),
    ("shared expert", r"^layers\.\d+\.ffn\.shared_experts\."),
    ("hyper-connections", r"^layers\.\d+\.hc_(attn|ffn)_"),
    ("norms", r"^(norm|layers\.\d+\.(attn|ffn)_norm)\."),
    ("output head", r"^head\."),
    ("draft blocks", r"^mtp\."),
    ("vision", r"^(vision|aligner)\.|^image_"),
))  # fmt: skip
COMPONENTS = (*(component for component, _ in _COMPONENTS), "other")


def component(name: str) -> str:
    """What a released tensor belongs to.

    Norms inside attention, compressor and indexer count there.
    """
    return next((component for component, pattern in _COMPONENTS if pattern.search(name)), "other")


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
    """A state dict under released names.

    Stacks become one tensor per expert (views, nothing is copied).
    """
    released: dict[str, Tensor] = {}
    for name, tensor in state.items():
        match = STACKED.match(name)
        if not match:
            released[released_name(name)] = tensor
            continue
        for expert, matrix in enumerate(tensor.unbind(0)):
            released[f"{match['layer']}.{expert}.{match['matrix']}.weight"] = matrix
    return released
