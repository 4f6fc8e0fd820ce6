"""What each parameter is to its optimiser: one role by its name, one optimiser by its role."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from tinyds41.config import Config
from tinyds41.model.transformer import Model
from tinyds41.tables import aligned

DECAY = 0.1
ENGRAM_FACTOR = 5.0  # rows of n-grams are read more seldom than those of tokens
BLOCK = r"(?:layers|mtp)\.\d+\."


@dataclass(frozen=True)
class Role:
    """How parameters of one role are trained.

    Units: weight_decay per step and learning rate; lr_factor times the schedule's rate.
    """

    optimizer: str  # "Muon", "balanced momentum", "AdamW", or "load": moved by the experts' load, without a gradient
    alone: str  # what is orthogonalised or balanced by itself
    weight_decay: float
    lr_factor: float
    pattern: re.Pattern[str]


def _role(optimizer: str, alone: str, weight_decay: float, lr_factor: float, pattern: str) -> Role:
    return Role(optimizer, alone, weight_decay, lr_factor, re.compile(pattern))


# In the order of the printed table. Norms and matrices decay; tables, scales, sinks and biases do not.
ROLES = {
    "matrix": _role("Muon", "matrix", DECAY, 1.0, BLOCK + r"(?:attn\.(?:wq_a|wkv|wo_a|wo_b)\.weight"
        r"|compressor\.(?:wkv|wgate)\.weight|indexer\.(?:weights_proj|wk)\.weight|engram\.wkv\.weight"
        r"|ffn\.gate\.weight|ffn\.shared_experts\.w[123]\.weight|hc_(?:attn|ffn)\.fn"
        r"|main_proj\.weight|confidence_head\.proj\.weight)"),
    "heads": _role("Muon", "head", DECAY, 1.0, BLOCK + r"attn\.wq_b\.weight"),
    "index heads": _role("Muon", "head", DECAY, 1.0, BLOCK + r"indexer\.wq_b\.weight"),
    "experts": _role("Muon", "expert", DECAY, 1.0, BLOCK + r"ffn\.experts\.w[123]"),
    "table": _role("balanced momentum", "table", 0.0, 1.0,
        rf"(?:embed|head|{BLOCK}markov_head\.(?:embed|head))\.weight"),
    "engram table": _role("balanced momentum", "table", 0.0, ENGRAM_FACTOR, BLOCK + r"engram\.embed\.weight"),
    "norm": _role("AdamW", "number", DECAY, 1.0, rf"(?:{BLOCK})?(?:(?:attn_|ffn_|main_)?norm|attn\.(?:q|kv)_norm"
        r"|compressor\.norm|indexer\.k_norm)\.weight"),
    "scale": _role("AdamW", "number", 0.0, 1.0, BLOCK + r"(?:attn\.attn_sink|hc_(?:attn|ffn)\.(?:base|scale)"
        r"|engram\.[qk]_weight)"),
    "gate bias": _role("load", "number", 0.0, 0.0, BLOCK + r"ffn\.gate\.bias(?:_vl)?"),
}  # fmt: skip


def role(name: str) -> str:
    """The role of a parameter, a key of `ROLES`.

    "scale" are sinks, scales and bases of the hyper-connections, and Engram's gate weights. Draft blocks have their
    released names; that their Markov tables are tables is ours, the report does not say.

    Raises: ValueError naming a parameter that has none.
    Source: spec 11.
    """
    for found, rule in ROLES.items():
        if rule.pattern.fullmatch(name):
            return found
    raise ValueError(f"no role is known for the parameter {name!r}: roles are {', '.join(ROLES)}")


def n_matrices(role: str, config: Config) -> int:
    """How many matrices lie one below the other in a parameter of this role: its heads, or 1."""
    return {"heads": config.num_attention_heads, "index heads": config.index_n_heads}.get(role, 1)


def by_role(model: Model) -> dict[str, dict[str, nn.Parameter]]:
    """The model's parameters by role and name, in the order of `ROLES`; only roles that it has.

    Raises: ValueError naming a parameter without a role.
    """
    found: dict[str, dict[str, nn.Parameter]] = {name: {} for name in ROLES}
    for name, parameter in model.named_parameters():
        found[role(name)][name] = parameter
    return {name: parameters for name, parameters in found.items() if parameters}


@dataclass(frozen=True)
class RoleRow:
    """One line of the table. Units: `numbers` counts single weights."""

    role: str
    optimizer: str
    alone: str
    names: tuple[str, ...]
    numbers: int
    weight_decay: float
    lr_factor: float


class ParameterRoles(tuple[RoleRow, ...]):
    """The rows, in the order of `ROLES`; `print` shows them as a table."""

    def __str__(self) -> str:
        head = ("role", "optimiser", "each alone", "parameters", "numbers", "weight decay", "lr factor")
        rows = [(row.role, row.optimizer, row.alone, f"{len(row.names):,}", f"{row.numbers:,}",
                 f"{row.weight_decay:g}", f"{row.lr_factor:g}") for row in self]  # fmt: skip
        return "\n".join(aligned(head, rows, left=(0, 1, 2)))


def parameter_roles(model: Model) -> ParameterRoles:
    """Role, optimiser, count and size of all parameters, each in exactly one row; works on the meta device.

    Raises: ValueError naming a parameter without a role.
    Source: spec 11. Lesson: 12.
    """
    return ParameterRoles(_rows(model))


def _rows(model: Model) -> Iterator[RoleRow]:
    for name, parameters in by_role(model).items():
        rule = ROLES[name]
        numbers = sum(parameter.numel() for parameter in parameters.values())
        yield RoleRow(name, rule.optimizer, rule.alone, tuple(parameters), numbers, rule.weight_decay, rule.lr_factor)
