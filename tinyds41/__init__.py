"""tinyds41: the DeepSeek-V4.1-Flash architecture, complete and small enough to read."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # editors and type checkers see the names at once
    from tinyds41.config import Config, preset_names
    from tinyds41.plan import LayerPlan, Plan

# Public name -> module that defines it. Imported at first use: `tinyds41 --help` and a plan need no torch.
_HOMES = {
    "Config": "tinyds41.config",
    "LayerPlan": "tinyds41.plan",
    "Plan": "tinyds41.plan",
    "preset_names": "tinyds41.config",
}

__all__ = ["Config", "LayerPlan", "Plan", "preset_names"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value  # the next access does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
