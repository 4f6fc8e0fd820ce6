"""From a trace to plain rows: how sub-layers mix the residual streams, and how far Engram's gates open."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tinyds41.config import Config
from tinyds41.show.observations import place_of
from tinyds41.trace import Trace

MIX_NAMES = ("layers.*.hc_attn.*", "layers.*.hc_ffn.*")
GATE_NAMES = ("layers.*.engram.gate",)
SUBLAYERS = {"attention": "hc_attn", "experts": "hc_ffn"}


@dataclass(frozen=True)
class StreamMix:
    """The coefficients of one sub-layer, of one token or as a mean.

    pre: part of each stream in what is read with it: by the next sub-layer, in V4's mode by this one.
    post: how much of the output each stream receives. comb: rows are sources, columns targets.
    """

    layer: int
    sublayer: str  # one of SUBLAYERS
    pre: tuple[float, ...]
    post: tuple[float, ...]
    comb: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class TokenGate:
    """How far an Engram layer's gates opened at one token, 0..1, one per stream."""

    layer: int
    position: int
    text: str
    gates: tuple[float, ...]


def stream_mixes(
    trace: Trace, config: Config, layers: Sequence[int] | None = None, *, query: int | None = None, row: int = 0,
    alive: Tensor | None = None,
) -> list[StreamMix]:  # fmt: skip
    """Both sub-layers of the given layers (default: all), for one token or as a mean over all that the trace holds.

    trace: kept with `Trace(*MIX_NAMES)`.
    alive: bool [B,S], False at padding, which counts nowhere; a mean over some tokens.
    Raises: ValueError for a query that the trace does not hold, a layer that the model does not have, or a mask that is
        no bool or empty.
    """
    if alive is not None and (alive.dtype != torch.bool or not alive.any()):
        raise ValueError(f"alive is {alive.dtype} with {int(alive.sum())} tokens: a bool mask of at least 1 is needed")
    at = None if query is None else (row, place_of(trace, query, "hc_attn.pre"))
    found = []
    for layer in range(config.num_hidden_layers) if layers is None else layers:
        if not 0 <= layer < config.num_hidden_layers:
            raise ValueError(f"layer={layer}: layers are 0..{config.num_hidden_layers - 1}")
        for sublayer, module in SUBLAYERS.items():
            kept = (trace[f"layers.{layer}.{module}.{name}"] for name in ("pre", "post", "comb"))
            pre, post, comb = (value[at] if at else _mean(value, alive) for value in kept)
            rows = tuple(tuple(source) for source in comb.tolist())
            found.append(StreamMix(layer, sublayer, tuple(pre.tolist()), tuple(post.tolist()), rows))
    return found


def _mean(value: Tensor, alive: Tensor | None) -> Tensor:
    return (value.flatten(0, 1) if alive is None else value[alive]).mean(0)


def token_gates(trace: Trace, config: Config, texts: Sequence[str], row: int = 0) -> list[TokenGate]:
    """The gates of every Engram layer at every token of a row.

    trace: kept whole with `Trace(*GATE_NAMES)`. texts: the text of each token.
    Raises: ValueError when texts and tokens differ in number.
    """
    found = []
    for layer in config.engram_layer_ids:
        gate_SN = trace[f"layers.{layer}.engram.gate"][row]
        if len(texts) != len(gate_SN):
            raise ValueError(f"{len(texts)} texts for {len(gate_SN)} tokens: each token needs its own")
        found += [TokenGate(layer, position, text, tuple(gates))
                  for position, (text, gates) in enumerate(zip(texts, gate_SN.tolist(), strict=True))]  # fmt: skip
    return found
