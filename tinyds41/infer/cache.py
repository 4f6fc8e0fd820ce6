"""The packed cache of a running model."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tinyds41.config import Config
from tinyds41.formats import GLOBAL, INDEX, WINDOW, Format
from tinyds41.infer.fill import fill
from tinyds41.infer.report import CacheReport, StoreBytes
from tinyds41.infer.stores import ENDLESS, Growing, Recent
from tinyds41.infer.tokens import Tokens
from tinyds41.memory import require_device
from tinyds41.trace import Counters, Trace

ROLLBACK = 64  # tokens; a drafter takes back a handful


@dataclass
class _Source:
    """What one Full layer stores: global KV, index keys, and the c and z rows of groups that are not full."""

    kv: Growing
    keys: Growing
    pending: list[Recent] = field(default_factory=list)  # c, z; none where every token is a group


class Cache:
    """Packed rows of all layers for a batch of running texts; needs a config, no weights.

    Global KV and index keys grow with the text, in chunks that are never moved. Windows, unfinished groups and
    Engram's look-back keep their latest rows, and `rollback` more, so that as many tokens can be taken back.

    draft: with the latest rows that the draft blocks see of the text, one window per block.
    lengths, texts: tokens seen, and their ids, per batch row. Shapes: see `Format.row_bytes`. Source: spec 3, 5,
    10. Lessons: 01, 06.
    """

    def __init__(
        self, config: Config, *, batch: int = 1, dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu", rollback: int = ROLLBACK, draft: bool = False,
    ):  # fmt: skip
        if not isinstance(config, Config) or not dtype.is_floating_point:
            raise TypeError(f"a cache needs a Config and a floating dtype, not {type(config).__name__} and {dtype}")
        if batch < 1 or rollback < 0:
            raise ValueError(f"batch={batch}, rollback={rollback}: a row at least, and no negative rollback")
        self.config, self.plan, self.rollback = config, config.plan(), rollback
        self.dtype, self.device = dtype, require_device(device)
        self.lengths = [0] * batch
        self.texts = [array("i") for _ in range(batch)]
        # Below these lengths nothing can be cut exactly: the decoder ran on the end of a prompt only.
        self.floors = [0] * batch
        # How far global rows are those of reading anew, and from where on window rows are; see `replay`.
        self.exact, self.exact_windows = [ENDLESS] * batch, [0] * batch
        self.filled = False  # with random rows, which are nobody's text
        self.windows = [self._window(batch) for _ in self.plan]
        self.drafts = [self._window(batch) for _ in range(config.num_nextn_predict_layers if draft else 0)]
        self.sources = {layer.layer: self._source(batch, layer.ratio) for layer in self.plan if layer.writes_globals}
        back = (config.engram_max_ngram_size or 1) - 1
        self.history = Recent(batch, (), torch.int64, back + rollback, self.device)

    def _form(self, form: Format) -> Format | None:
        return form if self.config.quantize_cache else None

    def _window(self, batch: int) -> Recent:
        width, form = self.config.head_dim, self._form(WINDOW)
        row, dtype = (width, self.dtype) if form is None else (form.row_bytes(width), torch.uint8)
        return Recent(batch, (row,), dtype, self.config.sliding_window + self.rollback, self.device)

    def _source(self, batch: int, ratio: int) -> _Source:
        width = self.config.head_dim
        kv = Growing(batch, width, self._form(GLOBAL), self.dtype, self.device)
        keys = Growing(batch, self.config.index_head_dim, self._form(INDEX), self.dtype, self.device)
        waiting = [Recent(batch, (width,), self.dtype, ratio - 1 + self.rollback, self.device) for _ in range(2)]
        return _Source(kv, keys, waiting if ratio > 1 else [])

    @property
    def batch(self) -> int:
        return len(self.lengths)

    def reserve(self, n_tokens: int) -> None:
        """Makes room for texts of n_tokens, so that a long first prompt lies in one chunk."""
        for layer, source in self.sources.items():
            for store in (source.kv, source.keys):
                store.reserve(n_tokens // self.plan[layer].ratio)

    def tokens(self, n_new: int, pads: list[int] | None = None, *, counters: Counters | None = None,
               trace: Trace | None = None,
               following: tuple[Tensor, list[int] | None] | None = None) -> Tokens:  # fmt: skip
        """The context of the next n_new columns; pads[b] of them, the first, are padding in batch row b."""
        pads = pads if pads is not None and any(pads) else None
        first = [length - (pads[b] if pads else 0) for b, length in enumerate(self.lengths)]
        return Tokens(self, first, n_new, pads, counters or Counters(), trace, following)

    def segment(self, n_last: int, new: list[int], *, counters: Counters | None = None) -> Tokens:
        """The context in which the decoder runs on the last n_last columns of a prompt of new[b] tokens.

        Where the prompt is longer than that, windows are cut at the segment's start: what the decoder's windows held
        does not reach to it. Source: spec 5.
        """
        for b, length in enumerate(new):
            if length > n_last:
                for layer in self.plan[self.plan.n_encoder :]:
                    self.windows[layer.layer].forget(b)
                for recent in self.drafts:
                    recent.forget(b)
                self.floors[b] = self.lengths[b]
        pads = [max(0, n_last - length) for length in new]
        first = [length - n_last for length in self.lengths]
        return Tokens(self, first, n_last, pads if any(pads) else None, counters or Counters(), None)

    def advance(self, ids: Tensor, pads: list[int] | None = None) -> None:
        """The encoder has seen these columns [B,S]."""
        for b, row in enumerate(ids.tolist()):
            self.texts[b].extend(row[pads[b] :] if pads else row)
        self.lengths = [len(text) for text in self.texts]

    def remember(self, text: Sequence[int]) -> None:
        """These ids come before what is read next, for Engram's look-back."""
        if self.config.engram_layer_ids and len(text):
            ids = torch.tensor([list(text[-self.history.keep :])], device=self.device)
            self.history.append(ids, None, 0)

    def fill(self, n_tokens: int, seed: int = 0) -> None:
        """Random rows as if n_tokens had been read: to measure what a step costs, without a prefill.

        Raises: ValueError for a cache that holds tokens, for no token, or more than max_position_embeddings.
        """
        if any(self.lengths) or n_tokens < 1:
            raise ValueError(f"fill with {n_tokens} tokens a cache that holds {self.lengths}: it must be empty")
        if n_tokens > self.config.max_position_embeddings:
            raise ValueError(
                f"fill with {n_tokens} tokens: max_position_embeddings={self.config.max_position_embeddings}")
        fill(self, n_tokens, seed)
        self.filled = True

    def truncate(self, lengths: list[int]) -> None:
        """Takes back the tokens from lengths[b] on: as if they had never been.

        Raises: ValueError where a text is shorter than that, or where what earlier tokens need is no longer there.
        """
        for b, n in enumerate(lengths):
            self._check_cut(b, n)
        counts = [length - n for length, n in zip(self.lengths, lengths, strict=True)]
        for recent in self._recents():
            # An emptied row drops what it holds, which may be less than all its tokens.
            recent.drop([min(count, recent.held(b)) if lengths[b] == 0 else count for b, count in enumerate(counts)])
            for b, n in enumerate(lengths):
                if n == 0:
                    recent.forget(b)
        for layer, source in self.sources.items():
            for store in (source.kv, source.keys):
                store.lengths = [n // self.plan[layer].ratio for n in lengths]
        self.lengths = list(lengths)
        for text, n in zip(self.texts, lengths, strict=True):
            del text[n:]
        for b, n in enumerate(lengths):
            if n == 0:
                self.floors[b], self.exact[b], self.exact_windows[b] = 0, ENDLESS, 0
        self.filled = self.filled and any(lengths)

    def _check_cut(self, b: int, n: int) -> None:
        length = self.lengths[b]
        if not 0 <= n <= length:
            raise ValueError(f"truncate to {n} tokens: row {b} has {length}")
        if n in (0, length):
            return
        if n < self.floors[b]:
            raise ValueError(
                f"truncate to {n} tokens: row {b} had its decoder run on the end of its first {self.floors[b]} tokens "
                "only, so earlier decoder windows do not exist; prefill(..., mode='full') keeps them")  # fmt: skip
        # What the tokens before n still need of the latest rows.
        if any(recent.held(b) - (length - n) < min(n, reach) for recent, reach in self.reaches(n)):
            raise ValueError(
                f"truncate to {n} tokens: row {b} has {length}, and the windows before that are no longer there "
                f"(rollback={self.rollback} tokens)")  # fmt: skip

    def _recents(self) -> list[Recent]:
        """All stores of latest rows that are written; nobody looks back without Engram."""
        history = [self.history] if self.config.engram_layer_ids else []
        waiting = [recent for source in self.sources.values() for recent in source.pending]
        return [*self.windows, *self.drafts, *history, *waiting]

    def reaches(self, length: int) -> list[tuple[Recent, int]]:
        """Each `Recent` with how many of its rows the token at position `length` reads, or drafts behind it do."""
        reaches = [(window, self.config.sliding_window - 1) for window in self.windows]
        reaches += [(recent, self.config.sliding_window) for recent in self.drafts]
        if self.config.engram_layer_ids:
            reaches.append((self.history, (self.config.engram_max_ngram_size or 1) - 1))
        for layer, source in self.sources.items():
            reaches += [(recent, length % self.plan[layer].ratio) for recent in source.pending]
        return reaches

    def target_rows(self) -> tuple[list[Tensor], list[int]]:
        """What draft blocks behind the texts see of them: rows per block, and how many of these each text has.

        Shapes: -> [B,P,C] with P <= W, the newest row last; [B].
        """
        n, width, rows = self.config.sliding_window, self.config.head_dim, []
        for recent in self.drafts:
            packed = recent.buffer[:, max(0, recent.end - n) : recent.end]
            rows.append(WINDOW.decode(packed, width, self.dtype) if self.config.quantize_cache else packed)
        return rows, [min(n, self.drafts[0].held(b)) for b in range(self.batch)]

    def fork(self) -> Cache:
        """A second cache that goes on from here; both share the chunks they do not write to."""
        twin = Cache.__new__(Cache)
        twin.__dict__.update(self.__dict__)
        twin.lengths, twin.floors = list(self.lengths), list(self.floors)
        twin.exact, twin.exact_windows = list(self.exact), list(self.exact_windows)
        twin.texts = [text[:] for text in self.texts]
        twin.windows, twin.history = [window.fork() for window in self.windows], self.history.fork()
        twin.drafts = [recent.fork() for recent in self.drafts]
        twin.sources = {
            layer: _Source(source.kv.fork(), source.keys.fork(), [recent.fork() for recent in source.pending])
            for layer, source in self.sources.items()
        }
        return twin

    def reorder(self, rows: list[int]) -> None:
        """Batch row i becomes what rows[i] was; rows may be left out or repeated."""
        if not rows or not all(0 <= b < self.batch for b in rows):
            raise ValueError(f"reorder to rows {rows}: there are rows 0..{self.batch - 1}")
        for source in self.sources.values():
            for store in (source.kv, source.keys, *source.pending):
                store.reorder(rows)
        for recent in (*self.windows, *self.drafts, self.history):
            recent.reorder(rows)
        self.lengths, self.floors = ([values[b] for b in rows] for values in (self.lengths, self.floors))
        self.exact, self.exact_windows = ([values[b] for b in rows] for values in (self.exact, self.exact_windows))
        self.texts = [self.texts[b][:] for b in rows]

    def fingerprint(self) -> str:
        """A hash of all that later tokens can read: equal caches give equal continuations.

        Rows that are not packed, those of unfinished groups and all with quantize_cache=False, enter rounded to fp32.
        """
        digest = hashlib.sha256()
        for b, length in enumerate(self.lengths):
            digest.update(f"row {b}: {length}".encode())
            for tensor in self._state(b, length):
                tensor = tensor.float() if tensor.is_floating_point() else tensor
                digest.update(tensor.contiguous().cpu().numpy().tobytes())
        return digest.hexdigest()

    def _state(self, b: int, length: int):
        yield from (recent.latest(b, reach) for recent, reach in self.reaches(length))
        for source in self.sources.values():
            yield source.kv.stored(b)
            yield source.keys.stored(b)

    def report(self) -> CacheReport:
        """Bytes by store, from the buffers. Units: bytes."""
        stores = []
        for layer, source in self.sources.items():
            for kind, store in (("global_kv", source.kv), ("index_keys", source.keys)):
                stores.append(StoreBytes(f"layers.{layer}.{kind}", kind, sum(store.lengths), store.row_bytes))
            for kind, recent in zip(("c", "z"), source.pending, strict=False):
                waiting = sum(n % self.plan[layer].ratio for n in self.lengths)
                stores.append(StoreBytes(f"layers.{layer}.group.{kind}", "group", waiting, _row_bytes(recent)))
        for place, kind, windows in (("layers", "window", self.windows), ("mtp", "draft_window", self.drafts)):
            for layer, window in enumerate(windows):
                held = sum(min(window.held(b), self.config.sliding_window) for b in range(self.batch))
                stores.append(StoreBytes(f"{place}.{layer}.window", kind, held, _row_bytes(window)))
        allocated = sum(
            chunk.numel() * chunk.element_size() for source in self.sources.values()
            for store in (source.kv, source.keys) for chunk in store.chunks)  # fmt: skip
        recents = {*self._recents(), self.history}
        allocated += sum(recent.buffer.numel() * recent.buffer.element_size() for recent in recents)
        return CacheReport(sum(self.lengths), tuple(stores), allocated)


def _row_bytes(recent: Recent) -> int:
    return recent.buffer[0, 0].numel() * recent.buffer.element_size()
