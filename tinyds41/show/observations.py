"""From a trace to plain rows: what each layer selected for a query, and how busy each expert was."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tinyds41.config import Config
from tinyds41.plan import LayerPlan
from tinyds41.trace import Trace

SELECTION_NAMES = ("layers.*.indexer.selection", "layers.*.indexer.pool", "layers.*.attn.window_first")
LOAD_NAMES = ("layers.*.ffn.experts",)


@dataclass(frozen=True)
class Span:
    """A stretch of tokens that a layer saw, chose or could choose from, for one query.

    Both ends included.

    kind: "visible" (all global entries in reach), "pool", "window" or "selected".
    source: the layer that made the choice; its own number unless the layer reuses another one's.
    """

    layer: int
    mode: str
    kind: str
    source: int
    first: int
    last: int


@dataclass(frozen=True)
class ExpertLoad:
    """How often a layer's routed expert was visited. Units: tokens."""

    layer: int
    expert: int
    tokens: int


def selection_spans(trace: Trace, config: Config, query: int, row: int = 0) -> list[Span]:
    """What every layer saw and chose for the token at position `query`, of one document per row.

    trace: kept with `Trace(*SELECTION_NAMES)`, with or without `queries`.
    Raises: ValueError for a query that the trace does not hold; KeyError for a name it does not hold.
    """
    at = place_of(trace, query, "window_first")
    spans: list[Span] = []
    for layer in config.plan():
        first = int(trace[f"layers.{layer.layer}.attn.window_first"][row, at])
        spans += _global_spans(trace, config, layer, query, (row, at))
        spans.append(Span(layer.layer, layer.mode, "window", layer.layer, first, query))
    return spans


def place_of(trace: Trace, query: int, counted: str) -> int:
    """Where a position lies on the query axis of a trace.

    counted: the end of a kept name with that axis, which tells how long it is.
    Raises: ValueError for a query that the trace does not hold.
    """
    if trace.queries is None:
        kept = next((value.shape[1] for name, value in trace.items() if name.endswith(counted)), 0)
        positions = list(range(kept))
    else:
        positions = trace.queries.tolist()
    if query not in positions:
        raise ValueError(f"query={query} is not in the trace, which holds {_few(positions)}")
    return positions.index(query)


def _few(positions: list[int]) -> str:
    return f"{len(positions)} queries, {min(positions)}..{max(positions)}" if positions else "no queries"


def _global_spans(
    trace: Trace, config: Config, layer: LayerPlan, query: int, at: tuple[int, int]
) -> Iterator[Span]:  # fmt: skip
    source = layer.index_source
    if source is None:
        return
    ratio, visible = layer.ratio, (query + 1) // layer.ratio
    if not visible:
        return

    def span(kind: str, entry: int, n_entries: int = 1) -> Span:
        last_token = min(entry + n_entries, visible) * ratio - 1
        return Span(layer.layer, layer.mode, kind, source, entry * ratio, last_token)

    yield span("visible", 0, visible)
    if config.plan()[source].pooled:
        size = config.candidate_block_size
        for block in _present(trace[f"layers.{config.candidate_source_layer_id}.indexer.pool"], at):
            yield span("pool", block * size, size)
    for entry in _present(trace[f"layers.{source}.indexer.selection"], at):
        yield span("selected", entry)


def _present(index: Tensor, at: tuple[int, int]) -> list[int]:
    chosen = index[at]
    return chosen[chosen >= 0].tolist()


def expert_loads(trace: Trace, config: Config, alive: Tensor | None = None) -> list[ExpertLoad]:
    """Visits of each routed expert in each layer. trace: kept with `Trace(*LOAD_NAMES)`.

    alive: bool [B,S], False at padding, which counts nowhere.
    """
    loads = []
    for layer in range(config.num_hidden_layers):
        chosen_BSA = trace[f"layers.{layer}.ffn.experts"]
        if alive is not None:
            chosen_BSA = chosen_BSA[alive]
        counts = torch.bincount(chosen_BSA.flatten(), minlength=config.n_routed_experts).tolist()
        loads += [ExpertLoad(layer, expert, tokens) for expert, tokens in enumerate(counts)]
    return loads
