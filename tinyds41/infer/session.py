"""A running text: prefill, decode, extend, take back, fork."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from tinyds41.config import Config
from tinyds41.infer.cache import ROLLBACK, Cache
from tinyds41.infer.report import CacheReport
from tinyds41.model.block import Carry
from tinyds41.model.transformer import Model
from tinyds41.trace import Counters, Trace, see

MODES = ("exact", "bounded", "full")
CHUNK = 1024  # prompt tokens that pass the encoder at a time: as many share their gathered rows, see SHARED


def decoder_tokens(config: Config, mode: str) -> int | None:
    """On how many of a prompt's last tokens the decoder runs; None for all of them.

    exact: W + (n_dec - 1)(W - 1), as far back as decoder windows reach through the layers, so later tokens see what
        they would see after `full`. bounded: W, with windows that begin there: an approximation, the choice of the
        released system. full: all.

    Raises: ValueError for another mode. Source: spec 5.
    """
    if mode not in MODES:
        raise ValueError(f"mode={mode!r} is none of {', '.join(MODES)}")
    plan, window = config.plan(), config.sliding_window
    if mode == "full" or plan.boundary is None:
        return None
    return window if mode == "bounded" else window + (plan.n_decoder - 1) * (window - 1)


class Session:
    """A model and the packed cache of the texts it reads; all layers see the past through that cache alone.

    `prefill` a prompt, then `decode` token by token, or `extend` by several. `counters` are those of the last call.
    rollback: how many tokens can be taken back at least, see `truncate`.

    Source: spec 5. Lessons: 01, 03.
    """

    def __init__(self, model: Model, *, rollback: int = ROLLBACK):
        self.model, self.rollback = model, rollback
        self.counters = Counters()
        self._cache: Cache | None = None
        self._broken: str | None = None
        if rollback < 0:
            raise ValueError(f"rollback={rollback} is negative")

    @property
    def cache(self) -> Cache:
        """Raises: ValueError while the session holds nothing, and after a call that failed halfway."""
        self._check_whole()
        if self._cache is None:
            raise ValueError("the session holds no text yet: prefill comes first")
        return self._cache

    def start(self, batch: int = 1) -> Cache:
        """An empty cache for so many rows, to fill it by other means than a prefill (`Cache.fill`).

        Raises: ValueError for a session that holds text.
        """
        if any(self.lengths):
            raise ValueError(f"the session holds texts of {self.lengths} tokens already")
        self._broken = None
        self._cache = Cache(self.model.config, batch=batch, dtype=self.model.dtype, device=self.model.device,
                            rollback=self.rollback)  # fmt: skip
        return self._cache

    @property
    def lengths(self) -> list[int]:
        """Tokens of each batch row; empty before the first prefill."""
        return [] if self._cache is None else list(self._cache.lengths)

    @torch.no_grad()
    def prefill(
        self, ids: Tensor | Sequence[int], *, mode: str = "exact", chunk: int = CHUNK, mask: Tensor | None = None
    ) -> Tensor:
        """Reads a prompt: the encoder on all of it in chunks, the decoder on its end, see `decoder_tokens`.

        mask: which ids are tokens, where rows differ in length; padding may be on either side. In a session that
        already holds text the prompt goes on from there; one no longer than the decoder's share sees the live decoder
        windows, of a longer one the decoder's windows begin anew.

        Shapes: ids [B,S] or [S], mask [B,S] bool -> logits [B,V] of each row's last token.
        Raises: ValueError for ids as in `check_ids`, another mode, chunk below 1, a mask of another shape or with
            holes, another number of rows than the session has, more tokens than max_position_embeddings.
        """
        chunk = operator.index(chunk)
        if chunk < 1:
            raise ValueError(f"chunk={chunk}: at least one token is needed")
        n_last = decoder_tokens(self.model.config, mode)
        ids = self.checked(ids)
        ids, pads = (ids, None) if mask is None else left_padded(ids, mask)
        cache = self._begin(ids, pads)
        cache.reserve(max(cache.lengths) + ids.shape[1])
        whole = n_last is None or n_last >= ids.shape[1]
        with self._writing():
            carry = self._read(cache, ids, pads, chunk, ids.shape[1] if whole else n_last)
            return self.model.logits(carry)[:, 0]

    def _read(self, cache: Cache, ids: Tensor, pads: list[int] | None, chunk: int, n_last: int | None) -> Carry:
        """Encoder chunk by chunk, decoder on the last n_last columns; returns the state of the very last."""
        assert n_last is not None
        carry: Carry | None = None
        parts = list(pieces(ids, pads, chunk))
        for (part, part_pads), following in zip(parts, [*parts[1:], None], strict=True):
            ctx = cache.tokens(part.shape[1], part_pads, counters=self.counters, following=following)
            encoded = self.model.encode(part, ctx)
            cache.advance(part.shape[1], part_pads)
            if n_last == ids.shape[1]:
                carry = self.model.decode(encoded, ctx).last(1)
            else:
                carry = (encoded if carry is None else carry.join(encoded)).last(n_last)
        assert carry is not None
        if n_last < ids.shape[1]:
            new = [ids.shape[1] - (pads[b] if pads else 0) for b in range(cache.batch)]
            carry = self.model.decode(carry, cache.segment(n_last, new, counters=self.counters))
        return carry.last(1)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """A call that fails in here has written to some stores and not to others: the text is lost, not wrong."""
        try:
            yield
        except BaseException as error:
            self._cache, self._broken = None, f"{type(error).__name__}: {error}"
            raise

    def _check_whole(self) -> None:
        if self._broken is not None:
            raise ValueError(f"an earlier call failed halfway ({self._broken}): the session's text is lost, "
                             "start() begins anew")  # fmt: skip

    def decode(self, ids: Tensor | Sequence[int] | int, *, trace: Trace | None = None) -> Tensor:
        """One more token per row. Shapes: an id, or ids [B] -> logits [B,V].

        Raises: ValueError before the first prefill, and as `extend`.
        """
        self.cache  # noqa: B018 - refuses an empty session
        ids = torch.as_tensor(ids, device=self.model.device)
        return self.extend(ids.reshape(-1, 1), trace=trace)[:, 0]

    @torch.no_grad()
    def extend(self, ids: Tensor | Sequence[int], *, trace: Trace | None = None) -> Tensor:
        """Several more tokens per row, through all layers at once.

        Shapes: ids [B,S] or [S] -> logits [B,S,V].
        Raises: ValueError as `prefill`, and for a query of the trace outside the new tokens; KeyError for a pattern of
            the trace that matches nothing, which is known at the end: the tokens have been read.
        """
        ids = self.checked(ids)
        if trace is not None:
            trace.begin(ids.shape[1])
        cache = self._begin(ids, None)
        ctx = cache.tokens(ids.shape[1], counters=self.counters, trace=trace)
        with self._writing():
            logits = self.model.logits(self.model.decode(self.model.encode(ids, ctx), ctx))
            cache.advance(ids.shape[1])
        if trace is not None:
            see(trace, "logits", logits)
            if not self.model.config.quantize_cache:  # packed rows are decoded, which is a copy
                trace.copy_kept()
            trace.finish()
        return logits

    def truncate(self, length: int | Sequence[int] | Tensor) -> None:
        """Takes tokens back: all stores are as if the text had ended after `length` tokens, in every bit.

        length: of every row, or one per row. The last `rollback` tokens can be taken back, and everything (0).

        Raises: ValueError where a row has fewer tokens, and where that cannot be exact: rows of its window are gone,
            or the decoder never ran there (`prefill`); TypeError for what is no whole number.
        """
        one = not isinstance(length, Sequence) and getattr(length, "ndim", 0) == 0
        wished: list = [length] * self.cache.batch if one else list(length)  # type: ignore[arg-type]
        lengths = [int(operator.index(n)) for n in wished]
        if len(lengths) != self.cache.batch:
            raise ValueError(f"truncate to {lengths}: the session has {self.cache.batch} rows")
        self.cache.truncate(lengths)

    def fork(self) -> Session:
        """A second session that goes on from here; neither sees what the other reads."""
        twin = Session(self.model, rollback=self.rollback)
        self._check_whole()
        twin._cache = None if self._cache is None else self._cache.fork()
        return twin

    def reorder(self, rows: Sequence[int]) -> None:
        """Row i becomes what rows[i] was: to leave rows out, repeat or permute them.

        Raises: ValueError for a row that is not there.
        """
        self.cache.reorder(list(rows))

    def fingerprint(self) -> str:
        """A hash of every store: equal sessions continue equally. See `Cache.fingerprint`."""
        return self.cache.fingerprint()

    def report(self) -> CacheReport:
        """The cache's bytes by store."""
        return self.cache.report()

    def checked(self, ids: Tensor | Sequence[int]) -> Tensor:
        """Ids as a tensor [B,S] of this model. Raises: ValueError as `check_ids`."""
        ids = torch.as_tensor(ids, device=None if isinstance(ids, Tensor) else self.model.device)
        ids = ids if ids.numel() else ids.long()  # an empty list has no type
        ids = ids.unsqueeze(0) if ids.ndim == 1 else ids
        self.model.check(ids)
        return ids

    def _begin(self, ids: Tensor, pads: list[int] | None) -> Cache:
        """The cache for these new ids, made at the first ones; a refused call changes nothing."""
        self._check_whole()
        if self._cache is not None and self._cache.dtype != self.model.dtype:
            raise ValueError(f"the session holds rows of {self._cache.dtype}, the model is {self.model.dtype} now")
        held = self.lengths or [0] * ids.shape[0]
        if len(held) != ids.shape[0]:
            raise ValueError(f"ids have {ids.shape[0]} rows, the session has {len(held)}")
        for b, n in enumerate(held):
            new = ids.shape[1] - (pads[b] if pads else 0)
            if n + new > self.model.config.max_position_embeddings:
                raise ValueError(
                    f"row {b}: {n} tokens and {new} more exceed max_position_embeddings="
                    f"{self.model.config.max_position_embeddings}")  # fmt: skip
        self.counters = Counters()
        return self.start(ids.shape[0]) if self._cache is None else self._cache


def pieces(ids: Tensor, pads: list[int] | None, chunk: int) -> Iterator[tuple[Tensor, list[int] | None]]:
    """A prompt cut into chunks, and how much of each row's chunk is padding."""
    start = 0
    for part in ids.split(chunk, 1):
        width = part.shape[1]
        yield part, None if pads is None else [min(max(n - start, 0), width) for n in pads]
        start += width


def left_padded(ids: Tensor, mask: Tensor) -> tuple[Tensor, list[int]]:
    """All rows moved to end in the last column, and how much padding each has before it.

    Raises: ValueError for a mask of another shape or type, a row without tokens, padding between tokens.
    """
    if not isinstance(mask, Tensor) or mask.shape != ids.shape or mask.dtype != torch.bool:
        found = f"{tuple(mask.shape)} of {mask.dtype}" if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(f"mask is {found}, expected {tuple(ids.shape)} of torch.bool")
    rows = []
    for b, (row, keep) in enumerate(zip(ids, mask, strict=True)):
        place = keep.nonzero().flatten()
        if len(place) == 0:
            raise ValueError(f"mask: row {b} has no token")
        if int(place[-1]) - int(place[0]) + 1 != len(place):
            raise ValueError(f"mask: row {b} has padding between its tokens {int(place[0])} and {int(place[-1])}")
        rows.append(row[place])
    longest = max(len(row) for row in rows)
    pads = [longest - len(row) for row in rows]
    return torch.stack([torch.cat([row.new_zeros(n), row]) for n, row in zip(pads, rows, strict=True)]), pads
