"""A prefix outside its cache: global rows as bytes of token blocks, encoder windows as tensors."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tinyds41.infer.stores import ENDLESS, Growing, Recent

if TYPE_CHECKING:
    from tinyds41.infer.cache import Cache


def _stores(cache: Cache) -> Iterator[tuple[Growing, int]]:
    """Every store of global rows with the tokens one row stands for, in the order of a block's bytes."""
    for layer, source in sorted(cache.sources.items()):
        for store in (source.kv, source.keys):
            yield store, cache.plan[layer].ratio


def pack(cache: Cache, b: int, start: int, end: int) -> bytes:
    """The global rows and index keys of the groups that end in tokens start..end-1 of batch row b.

    The rows lie as in the cache, source after source, KV before keys, behind a byte that says whether they are those of
    reading the text anew or came after a bounded replay. Source: spec 6.
    """
    parts = (store.stored(b, start // ratio, end // ratio) for store, ratio in _stores(cache))
    mark = bytes([end <= cache.exact[b]])
    return mark + b"".join(rows.contiguous().view(torch.uint8).cpu().numpy().tobytes() for rows in parts)


def n_exact(blocks: Sequence[bytes]) -> int:
    """How many blocks come before the first with rows that came after a bounded replay."""
    return next((number for number, block in enumerate(blocks) if block[:1] != b"\1"), len(blocks))


def restore(cache: Cache, text: Sequence[int], blocks: Sequence[bytes], block_tokens: int) -> None:
    """Fills an empty cache with the global rows of `text`, whose blocks these are; windows stay empty.

    Raises: ValueError for a block of another size than the config's rows need.
    """
    n_tokens = len(blocks) * block_tokens
    cache.reserve(n_tokens)
    offsets = [1] * len(blocks)
    for store, ratio in _stores(cache):
        rows = []
        for number, block in enumerate(blocks):
            n_rows = (number + 1) * block_tokens // ratio - number * block_tokens // ratio
            n_bytes = n_rows * store.row_bytes
            rows.append(block[offsets[number] : offsets[number] + n_bytes])
            offsets[number] += n_bytes
        data = torch.frombuffer(bytearray(b"".join(rows)), dtype=torch.uint8) if any(rows) else torch.empty(0)
        if data.numel() != n_tokens // ratio * store.row_bytes:
            raise ValueError(f"blocks of {[len(block) for block in blocks]} bytes do not hold {n_tokens} tokens")
        if data.numel():
            store.append_packed(data.view(store.row[1]).view(1, -1, store.row[0]).to(store.device))
    for number, block in enumerate(blocks):
        if offsets[number] != len(block):
            raise ValueError(f"block {number} has {len(block)} bytes, its rows and their mark take {offsets[number]}")
    exact = n_exact(blocks)
    cache.exact = [ENDLESS if exact == len(blocks) else exact * block_tokens]
    cache.texts = [array("i", text)]
    cache.lengths = [n_tokens]


@dataclass(frozen=True)
class Windows:
    """The encoder's latest window rows and waiting group rows of a text, as they lie in a cache of one row."""

    length: int  # tokens of the text
    rows: tuple[Tensor, ...]
    exact: bool  # those of reading the text anew

    @classmethod
    def of(cls, cache: Cache, b: int = 0, length: int | None = None) -> Windows:
        """Those of batch row b when it had `length` tokens, as far as the rows are still there.

        Where any are those of reading anew, the ones before them, at the start of an exact replay, are left out.
        """
        length = cache.lengths[b] if length is None else length
        behind = cache.lengths[b] - length
        exact = cache.exact_windows[b] <= length
        most = length - cache.exact_windows[b] if exact else length
        kept = (recent.latest(b, recent.keep) for recent in _recents(cache))
        kept = (rows[: max(0, len(rows) - behind)] for rows in kept)
        return cls(length, tuple(rows[max(0, len(rows) - most) :].to("cpu", copy=True) for rows in kept), exact)

    @property
    def n_bytes(self) -> int:
        return sum(rows.numel() * rows.element_size() for rows in self.rows)

    def reaches(self, cache: Cache, length: int) -> bool:
        """Whether all that the token at position `length` reads would still be here."""
        reads = {id(recent): n for recent, n in cache.reaches(length)}
        return all(
            len(rows) - (self.length - length) >= min(length, reads[id(recent)])
            for recent, rows in zip(_recents(cache), self.rows, strict=True))  # fmt: skip

    def restore(self, cache: Cache, text: Sequence[int], length: int) -> None:
        """Into the empty windows of a cache, as they were after `length` tokens."""
        for recent, rows in zip(_recents(cache), self.rows, strict=True):
            kept = rows[: len(rows) - (self.length - length)]
            if len(kept):
                recent.append(kept.unsqueeze(0), None, 0)
        cache.exact_windows = [0 if self.exact else ENDLESS]
        cache.remember(text[:length])


def _recents(cache: Cache) -> list[Recent]:
    """What has to be there before the encoder can go on; decoder windows are never kept (spec 6)."""
    waiting = [recent for _, source in sorted(cache.sources.items()) for recent in source.pending]
    return [*cache.windows[: cache.plan.n_encoder], *waiting]
