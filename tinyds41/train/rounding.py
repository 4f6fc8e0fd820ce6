"""A trained model whose cache rows are rounded in another way: what that does to its loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tinyds41.config import Config
from tinyds41.formats import GLOBAL, INDEX, WINDOW
from tinyds41.mixing import at_least_fp32
from tinyds41.model.context import Sequence
from tinyds41.model.transformer import Model
from tinyds41.ops import Window
from tinyds41.trace import Trace

Rounding = Callable[[Tensor], Tensor]  # rows [B,T,width] -> rows of the same shape: the values after storage


# The levels with the least squared error for normal values of unit size: by bits, those above zero (Lloyd, Max).
LEVELS = {1: (0.7979,), 2: (0.4528, 1.5104), 3: (0.2451, 0.7560, 1.3439, 2.1520)}


def few_bits(bits: int, block: int = 16) -> Rounding:
    """Rows of 1, 2 or 3 bits per number, with an unrounded size per block: what comes below FP4.

    Raises: ValueError for other numbers of bits.
    """
    if bits not in LEVELS:
        raise ValueError(f"bits={bits}: there are levels for {', '.join(map(str, LEVELS))}")

    def rounded(x: Tensor) -> Tensor:
        blocks = x.unflatten(-1, (-1, block))
        size = blocks.pow(2).mean(-1, keepdim=True).sqrt().clamp_(min=1e-30)
        levels = x.new_tensor(LEVELS[bits])
        borders = (levels[1:] + levels[:-1]) / 2
        return (levels[torch.bucketize(blocks.abs() / size, borders)] * size).copysign(blocks).flatten(-2)

    return rounded


@dataclass(frozen=True)
class Roundings:
    """What each kind of cache row goes through; the released formats unless said otherwise.

    Rows arrive rotated, as everywhere (spec 3).
    """

    window: Rounding = WINDOW.fake_quant
    entries: Rounding = GLOBAL.fake_quant
    keys: Rounding = INDEX.fake_quant


class Rounded(Sequence):
    """The one-shot context with other roundings.

    Index queries are rounded by the indexer itself, as the model's config says.
    """

    def __init__(self, config: Config, ids: Tensor, roundings: Roundings, trace: Trace | None = None):
        super().__init__(config.replace(quantize_cache=False), ids, trace=trace)
        self.roundings = roundings

    def add_window(self, layer: int, kv: Tensor) -> Window:
        return super().add_window(layer, self.roundings.window(kv))

    def add_entries(self, source: int, kv: Tensor, keys: Tensor) -> None:
        super().add_entries(source, self.roundings.entries(kv), self.roundings.keys(keys))


@torch.no_grad()
def rounded_logits(model: Model, ids: Tensor, roundings: Roundings, trace: Trace | None = None) -> Tensor:
    """`model(ids)` with other roundings of the cache rows. Shapes: ids [B,S] -> [B,S,V].

    Raises: ValueError as `Model.forward`.
    """
    model.check(ids)
    if trace is not None:
        trace.begin(ids.shape[1])
    ctx = Rounded(model.config, ids, roundings, trace)
    logits = model.logits(model.decode(model.encode(ids, ctx), ctx))
    if trace is not None:
        trace.finish()
    return logits


def token_losses(model: Model, ids: Tensor, roundings: Roundings) -> Tensor:
    """Nats of each next token. Shapes: ids [B,S+1] -> [B,S].

    Per token, because two roundings are compared on the same tokens: their difference varies far less than the loss.
    """
    logits = rounded_logits(model, ids[:, :-1], roundings)
    return F.cross_entropy(at_least_fp32(logits).mT, ids[:, 1:], reduction="none")
