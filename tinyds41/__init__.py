"""tinyds41: the DeepSeek-V4.1-Flash architecture, complete and small enough to read."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # editors and type checkers see the names at once
    from tinyds41.checkpoint.read import load
    from tinyds41.checkpoint.write import save
    from tinyds41.config import Config, preset_names
    from tinyds41.infer.cache import Cache
    from tinyds41.infer.engram_host import engram_to_host, load_on_host
    from tinyds41.infer.generate import generate
    from tinyds41.infer.ngram_drafter import NGramDrafter
    from tinyds41.infer.session import Session
    from tinyds41.infer.speculate import Speculation
    from tinyds41.infer.tiered_store import TieredStore
    from tinyds41.model.transformer import Model
    from tinyds41.model.variant import variant
    from tinyds41.ops import Ops
    from tinyds41.plan import LayerPlan, Plan
    from tinyds41.tokenizer import Tokenizer
    from tinyds41.trace import Trace
    from tinyds41.train.evaluate import evaluate
    from tinyds41.train.examples import example
    from tinyds41.train.train_draft import DraftConfig, train_draft
    from tinyds41.train.trainer import train

# Public name -> module that defines it. Imported at first use: `tinyds41 --help` and a plan need no torch.
_HOMES = {
    "Cache": "tinyds41.infer.cache",
    "Config": "tinyds41.config",
    "DraftConfig": "tinyds41.train.train_draft",
    "LayerPlan": "tinyds41.plan",
    "Model": "tinyds41.model.transformer",
    "NGramDrafter": "tinyds41.infer.ngram_drafter",
    "Ops": "tinyds41.ops",
    "Plan": "tinyds41.plan",
    "Session": "tinyds41.infer.session",
    "Speculation": "tinyds41.infer.speculate",
    "TieredStore": "tinyds41.infer.tiered_store",
    "Tokenizer": "tinyds41.tokenizer",
    "Trace": "tinyds41.trace",
    "engram_to_host": "tinyds41.infer.engram_host",
    "evaluate": "tinyds41.train.evaluate",
    "example": "tinyds41.train.examples",
    "generate": "tinyds41.infer.generate",
    "load": "tinyds41.checkpoint.read",
    "load_on_host": "tinyds41.infer.engram_host",
    "preset_names": "tinyds41.config",
    "save": "tinyds41.checkpoint.write",
    "train_draft": "tinyds41.train.train_draft",
    "variant": "tinyds41.model.variant",
}

__all__ = [
    "Cache",
    "Config",
    "DraftConfig",
    "LayerPlan",
    "Model",
    "NGramDrafter",
    "Ops",
    "Plan",
    "Session",
    "Speculation",
    "TieredStore",
    "Tokenizer",
    "Trace",
    "engram_to_host",
    "evaluate",
    "example",
    "generate",
    "load",
    "load_on_host",
    "preset_names",
    "save",
    "train",
    "train_draft",
    "variant",
]


def __getattr__(name: str) -> Any:
    if name == "train":  # package and function in one, see there
        return import_module("tinyds41.train")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value  # the next access does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
