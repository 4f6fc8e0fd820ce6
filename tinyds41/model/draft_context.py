"""What a draft block sees: the target rows before its anchor, and all of its own rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from tinyds41.config import Config
from tinyds41.formats import WINDOW, Rows
from tinyds41.model.context import Entries
from tinyds41.model.rope import Rope
from tinyds41.ops import Window
from tinyds41.trace import Counters, Trace


class DraftContext:
    """The `Context` of draft blocks: each batch row is one anchor, its columns are the block's slots.

    Every slot sees the last W target rows before the anchor, as far as there are any, and all slots of its block, also
    those behind it: nothing here is causal.

    past: rounded target rows per draft block, the newest one last. Shapes: past [B,P,C] each, P <= W; n_past [B] how
        many of them exist; start [B] the anchors' positions -> positions [B,k], k = dspark_block_size.
    Raises: ValueError where the rows do not fit the config.
    Source: spec 10.2.
    """

    def __init__(self, config: Config, past: Sequence[Tensor], n_past: Tensor, start: Tensor,
                 trace: Trace | None = None):  # fmt: skip
        n_blocks, size = config.num_nextn_predict_layers, config.dspark_block_size
        assert size
        if len(past) != n_blocks or any(rows.shape[1] > config.sliding_window for rows in past):
            raise ValueError(f"target rows {[tuple(rows.shape) for rows in past]}: expected those of {n_blocks} draft "
                             f"blocks, at most sliding_window={config.sliding_window} each")  # fmt: skip
        self.config, self.counters, self.trace, self._past = config, Counters(), trace, past
        self.positions = start.unsqueeze(1) + torch.arange(size, device=start.device)
        self.alive = torch.ones_like(self.positions, dtype=torch.bool)
        n_rows = past[0].shape[1]
        self._first = (n_rows - n_past).unsqueeze(1).expand(-1, size)
        self._last = torch.full_like(self.positions, n_rows + size - 1)
        self._rotations: dict[bool, Tensor] = {}

    @classmethod
    def at(
        cls, config: Config, rows: Sequence[Tensor], positions: Tensor, anchors: tuple[Tensor, Tensor],
        trace: Trace | None = None,
    ) -> DraftContext:  # fmt: skip
        """Blocks behind n anchors of whole sequences, with gradients: many anchors of a text as a batch of their own.

        rows: of `DSpark.target_rows`, not yet rounded. anchors: batch row and token number of each. Target rows before
        the anchor's document do not exist, which its position tells.

        Shapes: rows [B,S,C] per draft block, positions [B,S] within documents, anchors two of [n] -> a context of n.
        """
        batch, token = anchors
        back = torch.arange(-config.sliding_window, 0, device=token.device)
        start = positions[batch, token]
        index_nW = (batch * positions.shape[1] + token).unsqueeze(1) + back
        index_nW = index_nW.masked_fill(start.unsqueeze(1) + back < 0, -1)  # before the document
        rounded = (WINDOW.fake_quant(x) if config.quantize_cache else x for x in rows)
        past = [Rows(x.reshape(1, -1, x.shape[-1])).take(index_nW.unsqueeze(0))[0] for x in rounded]
        return cls(config, past, start.clamp(max=config.sliding_window), start, trace)

    def rotation(self, rope: Rope, dtype: torch.dtype) -> Tensor:
        if rope.compressed not in self._rotations:
            self._rotations[rope.compressed] = rope.rotation(self.positions, dtype)
        return self._rotations[rope.compressed]

    def add_window(self, layer: int, kv: Tensor) -> Window:
        kv = WINDOW.fake_quant(kv) if self.config.quantize_cache else kv
        rows = torch.cat([self._past[layer], kv], 1)
        return Window(Rows(rows), self._first, self.config.sliding_window + kv.shape[1], self._last)

    def groups(self, source: int, c: Tensor, z: Tensor | None) -> NoReturn:
        raise _never(f"groups of layer {source}")

    def add_entries(self, source: int, kv: Tensor, keys: Tensor) -> NoReturn:
        raise _never(f"entries of layer {source}")

    def entries(self, source: int | None) -> Entries:
        raise _never(f"entries of layer {source}")

    def look_back(self, ids: Tensor, n: int) -> Tensor:
        raise _never("look-back")

    def look_ahead(self, n: int) -> Any:
        return None


def _never(what: str) -> NotImplementedError:
    return NotImplementedError(f"{what}: a draft block sees target rows and its own slots, nothing else")
