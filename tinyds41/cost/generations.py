"""The DeepSeek generations side by side: what each keeps per token, and what one more token costs it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from tinyds41.config import Config
from tinyds41.cost.flops import ACCOUNTINGS, DecodeCurve, DecodeWork, Rates, decode_cost, weighted_rates
from tinyds41.cost.kv_bytes import KVBytes, StoreBytes, kv_bytes
from tinyds41.cost.layouts import (
    BF16_LATENT,
    BILLION,
    FP4_INDEX_KEY,
    FP8_INDEX_KEY,
    FP8_LATENT,
    FP8_SHARED_KV,
    GROUPED_KV,
    Layout,
)
from tinyds41.cost.limits import check_context

NEWEST = "V4.1-Flash"


@dataclass(frozen=True, kw_only=True)
class Indexer:
    """The sparse indexer of an earlier generation."""

    n_heads: int
    width: int
    top_k: int
    ratio: int  # layers of this compression ratio have one
    key: Layout
    precision: str  # of the scores, one of PRECISIONS


@dataclass(frozen=True, kw_only=True)
class Generation:
    """An earlier generation by its published sizes; every byte and FLOP below follows from them.

    Units: n_heads are query heads; key_width and value_width the channels that a head's score and sum take of each
        attended row (latent attention works on the latent itself); active_parameters a count per generated token.
    Differs: contexts up to that of V4.1-Flash are allowed to all, whatever each was trained for.
    Source: the generations' reports.
    """

    name: str
    ratios: tuple[int, ...]  # per layer: tokens per entry, 0 = window only
    n_heads: int
    key_width: int
    value_width: int
    entry: Layout
    active_parameters: int
    window: int = 0  # tokens that every layer sees exactly, held in rows of the same layout
    indexer: Indexer | None = None
    window_saves_per_turn: int = 0  # times its windows go to the persistent cache in one turn
    assumed: str = ""  # what is not published

    def kv_bytes(self) -> KVBytes:
        """All stores, layer by layer."""
        rows = []
        for layer, ratio in enumerate(self.ratios):
            if ratio:
                rows.append(StoreBytes("global KV", layer, self.entry.row_bytes, ratio))
            if self.indexer and ratio == self.indexer.ratio:
                rows.append(StoreBytes("index keys", layer, self.indexer.key.row_bytes, ratio))
            if self.window:
                rows.append(StoreBytes("window", layer, self.entry.row_bytes, 1, self.window))
        return KVBytes(tuple(rows), max_context())

    def decode_cost(self) -> DecodeCurve:
        return GenerationCost(self)

    def scored_entries(self, context: int) -> dict[int, int]:
        """Index rows that one token scores, by layer."""
        check_context(context, max_context())
        indexer = self.indexer
        return {} if indexer is None else {
            layer: context // ratio for layer, ratio in enumerate(self.ratios) if ratio == indexer.ratio
        }  # fmt: skip

    def global_rows(self, context: int) -> dict[int, int]:
        """Rows of global KV that one token attends to, by layer: its selection, or everything visible."""
        check_context(context, max_context())
        rows = {layer: context // ratio for layer, ratio in enumerate(self.ratios) if ratio}
        if self.indexer is not None:
            chosen = self.scored_entries(context)
            rows |= {layer: min(visible, self.indexer.top_k) for layer, visible in chosen.items()}
        return rows

    def window_rows(self, context: int) -> dict[int, int]:
        """Window rows that one token attends to, by layer."""
        check_context(context, max_context())
        return dict.fromkeys(range(len(self.ratios)), min(self.window, context)) if self.window else {}


@dataclass(frozen=True)
class GenerationCost(DecodeCurve):
    """Decode work of an earlier generation.

    Differs: linear work is 2 FLOPs per active parameter, of which reports give two digits.
    """

    generation: Generation

    @property
    def name(self) -> str:
        return self.generation.name

    @property
    def rates(self) -> dict[str, Rates]:
        indexer = self.generation.indexer
        return ACCOUNTINGS if indexer is None else {**ACCOUNTINGS, "weighted": weighted_rates(indexer.precision)}

    def raw(self, context: int) -> DecodeWork:
        model, indexer = self.generation, self.generation.indexer
        rows = sum(model.global_rows(context).values()) + sum(model.window_rows(context).values())
        per_entry = 2 * indexer.n_heads * indexer.width if indexer else 0
        return DecodeWork(
            model.name, context, "raw",
            linear=2 * model.active_parameters,
            index_full=per_entry * sum(model.scored_entries(context).values()),
            index_pool=0,
            # Per row and head: key_width multiply-adds for the score, value_width for the weighted sum.
            attention=2 * model.n_heads * (model.key_width + model.value_width) * rows,
        )  # fmt: skip


@dataclass(frozen=True)
class ConfigGeneration:
    """The newest generation: all of it follows from a preset, whose rows are encoded and matrices counted."""

    name: str
    preset: str
    window_saves_per_turn: int = 0  # its windows are recomputed (spec 6)
    assumed: str = ""

    @property
    def config(self) -> Config:
        return Config.preset(self.preset)

    def kv_bytes(self) -> KVBytes:
        return kv_bytes(self.config)

    def decode_cost(self) -> DecodeCurve:
        return decode_cost(self.config, self.name)


@cache
def max_context() -> int:
    """The context up to which generations are compared."""
    return Config.preset("flash").max_position_embeddings


def generation(name: str) -> Generation | ConfigGeneration:
    """Raises: ValueError for an unknown generation, naming the known."""
    if name not in GENERATIONS:
        raise ValueError(f"unknown generation {name!r}: the generations are {', '.join(GENERATIONS)}")
    return GENERATIONS[name]


_V4 = Generation(
    name="V4-Flash", ratios=(0, 0, *(4, 128) * 20, 4), n_heads=64, key_width=512, value_width=512,
    entry=FP8_SHARED_KV, window=128, active_parameters=13 * BILLION, window_saves_per_turn=2,
    indexer=Indexer(n_heads=64, width=128, top_k=512, ratio=4, key=FP4_INDEX_KEY, precision="FP4"),
)  # fmt: skip
_ALL: tuple[Generation | ConfigGeneration, ...] = (
    Generation(name="V1", ratios=(1,) * 95, n_heads=64, key_width=128, value_width=128,
               entry=GROUPED_KV, active_parameters=67 * BILLION),
    Generation(name="V2", ratios=(1,) * 60, n_heads=128, key_width=576, value_width=512,
               entry=BF16_LATENT, active_parameters=21 * BILLION),
    Generation(name="V3", ratios=(1,) * 61, n_heads=128, key_width=576, value_width=512,
               entry=BF16_LATENT, active_parameters=37 * BILLION),
    Generation(name="V3.2", ratios=(1,) * 61, n_heads=128, key_width=576, value_width=512,
               entry=FP8_LATENT, active_parameters=37 * BILLION,
               indexer=Indexer(n_heads=64, width=128, top_k=2048, ratio=1, key=FP8_INDEX_KEY, precision="FP8")),
    _V4,
    replace(_V4, name="V4-Pro", ratios=(*(128, 4) * 30, 128), n_heads=128, active_parameters=49 * BILLION,
            indexer=Indexer(n_heads=64, width=128, top_k=1024, ratio=4, key=FP4_INDEX_KEY, precision="FP4"),
            assumed="30 layers of ratio 4 and 31 of ratio 128"),
    ConfigGeneration(NEWEST, "flash"),
)  # fmt: skip
# Oldest first.
GENERATIONS = {model.name: model for model in _ALL}
