"""New tokens that meet a cache: the `Context` of prefill, decode and replay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tinyds41.formats import WINDOW, Rows
from tinyds41.model.context import Entries
from tinyds41.model.rope import Rope
from tinyds41.ops import Window
from tinyds41.trace import Counters, Trace

if TYPE_CHECKING:
    from tinyds41.infer.cache import Cache


class Tokens:
    """New tokens that read and extend a cache: the `Context` of prefill, decode and replay.

    first[b] is the position of column 0 in batch row b; columns before pads[b] are padding. Shapes: positions [B,S].
    following: the ids [B,S'] that will come after these and how many of them are padding, where that is known.
    """

    def __init__(self, cache: Cache, first: list[int], n_new: int, pads: list[int] | None, counters: Counters,
                 trace: Trace | None, following: tuple[Tensor, list[int] | None] | None = None):  # fmt: skip
        self.cache, self.config, self.plan = cache, cache.config, cache.plan
        self.counters, self.trace, self.pads = counters, trace, pads
        self.n_new, self.device, self.following = n_new, cache.device, following
        column = torch.arange(n_new, device=self.device)
        start = torch.tensor(first, device=self.device).unsqueeze(1)
        if pads is None:
            # One row of positions where all texts are equally long: turned once for the whole batch.
            same = len(set(first)) == 1
            self.positions = (column + first[0]).expand(len(first), -1) if same else column + start
            self.alive = torch.ones(len(first), n_new, dtype=torch.bool, device=self.device)
        else:
            self.alive = column >= torch.tensor(pads, device=self.device).unsqueeze(1)
            self.positions = (column + start).masked_fill(~self.alive, 0)
        self._first = [position + (pads[b] if pads else 0) for b, position in enumerate(first)]
        self._rotations: dict[bool, Tensor] = {}
        self._seen: dict[tuple[int, ...], Tensor] = {}
        self._visible: dict[int, Tensor] = {}
        self._counts: dict[int, list[int]] = {}

    @property
    def new(self) -> list[int]:
        """New tokens of each batch row."""
        return [self.n_new - (self.pads[b] if self.pads else 0) for b in range(self.cache.batch)]

    def rotation(self, rope: Rope, dtype: torch.dtype) -> Tensor:
        if rope.compressed not in self._rotations:
            self._rotations[rope.compressed] = rope.rotation(self.positions, dtype)
        return self._rotations[rope.compressed]

    def add_window(self, layer: int, kv: Tensor) -> Window:
        size, cache = self.config.sliding_window, self.cache
        form = WINDOW if self.config.quantize_cache else None
        data, start = cache.windows[layer].append(kv if form is None else form.encode(kv), self.pads, size - 1)
        return Window(Rows(data, form, kv.shape[-1], cache.dtype), self._window_first(data.shape[1], start), size)

    def add_target_rows(self, rows: Sequence[Tensor]) -> None:
        """Takes what the draft blocks see of the present tokens, [B,S,C] per block. Source: spec 10.2."""
        for recent, kv in zip(self.cache.drafts, rows, strict=True):
            recent.append(WINDOW.encode(kv) if self.config.quantize_cache else kv, self.pads, 0)

    def _window_first(self, n_rows: int, start: list[int]) -> Tensor:
        """The first row each query sees: not before its text begins, not W rows back."""
        key = (n_rows, *start)
        if key not in self._seen:
            row = torch.arange(n_rows - self.n_new, n_rows, device=self.device) - self.config.sliding_window + 1
            self._seen[key] = torch.maximum(row, torch.tensor(start, device=self.device).unsqueeze(1))
        return self._seen[key]

    def groups(self, source: int, c: Tensor, z: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor]:
        ratio, new = self.plan[source].ratio, self.new
        waiting = [position % ratio for position in self._first]
        self._counts[source] = [(w + n) // ratio for w, n in zip(waiting, new, strict=True)]
        n_groups = max(self._counts[source])
        group = torch.arange(n_groups, device=self.device) * ratio
        start = [position - w for position, w in zip(self._first, waiting, strict=True)]
        positions_BG = torch.tensor(start, device=self.device).unsqueeze(1) + group
        pending = self.cache.sources[source].pending
        if not pending:  # every token is a group
            return self._first_groups(c, n_groups), None, positions_BG
        assert z is not None
        c, z = (recent.append(x, self.pads, ratio - 1)[0] for recent, x in zip(pending, (c, z), strict=True))
        return self._pool(c, waiting, n_groups, ratio), self._pool(z, waiting, n_groups, ratio), positions_BG

    def _first_groups(self, c_BSC: Tensor, n_groups: int) -> Tensor:
        """Groups of one token, those of padding moved behind the others."""
        if self.pads is not None:
            column = torch.arange(n_groups, device=self.device) + torch.tensor(self.pads, device=self.device)[:, None]
            c_BSC = c_BSC.gather(1, column.clamp_(max=self.n_new - 1).unsqueeze(-1).expand(-1, -1, c_BSC.shape[-1]))
        return c_BSC.unsqueeze(2)

    def _pool(self, rows_BTC: Tensor, waiting: list[int], n_groups: int, ratio: int) -> Tensor:
        """[B,T,C], whose last rows are the new ones, to groups [B,G,m,C]; a batch row with fewer groups repeats."""
        begin = [rows_BTC.shape[1] - n - w for n, w in zip(self.new, waiting, strict=True)]
        if len(set(begin)) == 1:
            return rows_BTC[:, begin[0] : begin[0] + n_groups * ratio].unflatten(1, (n_groups, ratio))
        column = torch.arange(n_groups * ratio, device=self.device)
        index = (torch.tensor(begin, device=self.device).unsqueeze(1) + column).clamp_(0, rows_BTC.shape[1] - 1)
        flat = rows_BTC.gather(1, index.unsqueeze(-1).expand(-1, -1, rows_BTC.shape[-1]))
        return flat.unflatten(1, (n_groups, ratio))

    def add_entries(self, source: int, kv: Tensor, keys: Tensor) -> None:
        store = self.cache.sources[source]
        store.kv.append(kv, self._counts[source])
        store.keys.append(keys, self._counts[source])

    def entries(self, source: int | None) -> Entries:
        assert source is not None
        store, ratio = self.cache.sources[source], self.plan[source].ratio
        if ratio not in self._visible:
            last = (self.positions + 1) // ratio
            self._visible[ratio] = last if self.pads is None else last.masked_fill(~self.alive, 0)
        last = self._visible[ratio]
        return Entries(store.kv.rows(), store.keys.rows(), torch.zeros_like(last), last)

    def look_back(self, ids: Tensor, n: int) -> Tensor:
        ids = ids.masked_fill(~self.alive, -1) if self.pads is not None else ids
        rows, start = self.cache.history.append(ids, self.pads, n - 1)
        absent = torch.arange(rows.shape[1], device=self.device) < torch.tensor(start, device=self.device).unsqueeze(1)
        rows = torch.cat([rows.new_full((rows.shape[0], n - 1), -1), rows.masked_fill(absent, -1)], 1)
        return rows.unfold(1, n, 1)[:, -self.n_new :].flip(-1)

    def look_ahead(self, n: int) -> Tensor | None:
        """As `look_back` of `following`, once `look_back` has been asked for the present tokens."""
        if self.following is None:
            return None
        ids, pads = self.following
        rows = torch.cat([ids.new_full((ids.shape[0], n - 1), -1), ids], 1)
        for b, pad in enumerate(pads or [0] * len(rows)):
            begin = n - 1 + pad  # the past ends where the row's own tokens begin
            past = self.cache.history.latest(b, begin)
            rows[b, :begin] = -1
            rows[b, begin - len(past) : begin] = past
        return rows.unfold(1, n, 1).flip(-1)
