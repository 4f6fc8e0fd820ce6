"""A running text: prefill, decode, extend, take back, fork."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from tinyds41.infer.cache import ROLLBACK, Cache
from tinyds41.infer.padding import as_ids, check_chunk, left_padded, pieces
from tinyds41.infer.prefill_modes import decoder_tokens
from tinyds41.infer.replay import Resumed, resume, save
from tinyds41.infer.report import CacheReport
from tinyds41.infer.tiered_store import TieredStore
from tinyds41.infer.tokens import Tokens
from tinyds41.model.block import Carry
from tinyds41.model.transformer import Model
from tinyds41.trace import Counters, Trace, see

CHUNK = 1024  # prompt tokens that pass the encoder at a time: as many share their gathered rows, see SHARED


class Session:
    """A model and the packed cache of the texts it reads; all layers see the past through that cache alone.

    `prefill` a prompt, then `decode` token by token, or `extend` by several. `counters` are those of the last call.
    rollback: how many tokens can be taken back at least, see `truncate`.

    Source: spec 5. Lessons: 01, 03.
    """

    def __init__(self, model: Model, *, rollback: int = ROLLBACK):
        if not isinstance(model, Model):
            raise TypeError(f"a session needs a Model, not a {type(model).__name__}")
        self.model, self.rollback = model, operator.index(rollback)
        self.counters = Counters()
        self.resumed: Resumed | None = None
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
                            rollback=self.rollback, draft=self.model.mtp is not None)  # fmt: skip
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
        chunk = check_chunk(chunk)
        n_last = decoder_tokens(self.model.config, mode)
        ids = self.checked(ids)
        ids, pads = (ids, None) if mask is None else left_padded(ids, mask)
        cache = self._begin(ids, pads)
        cache.reserve(max(cache.lengths) + ids.shape[1])
        whole = n_last is None or n_last >= ids.shape[1]
        new = [ids.shape[1] - (pads[b] if pads else 0) for b in range(cache.batch)]
        with self.writing() as cache:
            return self.read(cache, self.chunks(cache, ids, pads, chunk), None if whole else n_last, new)

    @torch.no_grad()
    def resume(
        self, ids: Tensor | Sequence[int], store: TieredStore, *, replay: str | int = "bounded", chunk: int = CHUNK,
        namespace: str = "",
    ) -> Tensor:  # fmt: skip
        """Begins with a prompt whose first tokens `store` may know; their global rows are read back, not computed.

        The windows of the found tokens come from the store's pool; where they are no longer there, the encoder runs
        again on the last of these tokens. What happened is in `resumed`. Nothing found: an exact `prefill`.

        replay: "bounded" runs again on the last W found tokens, with windows that begin there, and lets the decoder
            run on the last W tokens of the prompt. That approximates. "exact" goes back as far as any window
            reaches, some W tokens per layer, to what `prefill` would give; what came after a bounded replay is no hit
            for it. A number: as "bounded", with so many tokens instead of W, or as many as the decoder wants.

        Shapes: ids [S] or [1,S] -> logits [1,V] of the last token.
        Raises: ValueError for a session that holds text, several rows, another replay, ids as in `check_ids`, a store
            of another model.
        Source: spec 6. Lesson: 07.
        """
        return resume(self, self.checked(ids), store, replay, check_chunk(chunk), namespace)

    def save(self, store: TieredStore, *, namespace: str = "") -> int:
        """Writes the text's whole blocks that `store` does not have yet. Units: -> bytes written.

        What came after a bounded replay is marked: it is no hit for an exact one.

        Raises: ValueError before the first prefill, for a store of another model, for a cache of random rows.
        """
        return save(self, store, namespace)

    def chunks(
        self, cache: Cache, ids: Tensor, pads: list[int] | None, chunk: int
    ) -> Iterator[tuple[Tensor, Tokens]]:
        """New columns, piece by piece; the cache counts them once the encoder has seen them."""
        parts = list(pieces(ids, pads, chunk))
        for (part, part_pads), following in zip(parts, [*parts[1:], None], strict=True):
            yield part, cache.tokens(part.shape[1], part_pads, counters=self.counters, following=following)
            cache.advance(part, part_pads)

    def read(
        self, cache: Cache, steps: Iterable[tuple[Tensor, Tokens]], n_last: int | None, new: list[int]
    ) -> Tensor:
        """Encoder step by step, decoder on the last n_last columns of new[b] tokens, or on all as they come (None)."""
        carry: Carry | None = None
        for part, ctx in steps:
            encoded = self.model.encode(part, ctx)
            if n_last is None:
                carry = self._decoded(encoded, ctx).last(1)
            else:
                carry = (encoded if carry is None else carry.join(encoded)).last(n_last)
        assert carry is not None
        if n_last is not None:
            carry = self._decoded(carry, cache.segment(n_last, new, counters=self.counters))
        return self.model.logits(carry.last(1))[:, 0]

    def _decoded(self, carry: Carry, ctx: Tokens) -> Carry:
        """The decoder; what its tokens leave to the draft blocks goes into the cache."""
        carry = self.model.decode(carry, ctx)
        if ctx.cache.drafts:
            ctx.add_target_rows(self.model.target_rows(carry, ctx))
        return carry

    @contextmanager
    def writing(self) -> Iterator[Cache]:
        """A call that fails in here has written to some stores and not to others: the text is lost, not wrong."""
        try:
            yield self.cache
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
        ids = as_ids(ids, self.model.device).to(self.model.device)
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
            if not isinstance(trace, Trace):
                raise TypeError(f"trace is a {type(trace).__name__}, expected a Trace")
            trace.begin(ids.shape[1])
        cache = self._begin(ids, None)
        ctx = cache.tokens(ids.shape[1], counters=self.counters, trace=trace)
        with self.writing():
            logits = self.model.logits(self._decoded(self.model.encode(ids, ctx), ctx))
            cache.advance(ids)
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
        self.cache.reorder([operator.index(row) for row in rows])

    def fingerprint(self) -> str:
        """A hash of every store: equal sessions continue equally. See `Cache.fingerprint`."""
        return self.cache.fingerprint()

    def report(self) -> CacheReport:
        """The cache's bytes by store."""
        return self.cache.report()

    def checked(self, ids: Tensor | Sequence[int]) -> Tensor:
        """Ids as a tensor [B,S] of this model. Raises: ValueError as `check_ids`."""
        ids = as_ids(ids, self.model.device)
        ids = ids.unsqueeze(0) if ids.ndim == 1 else ids
        self.model.check(ids)
        return ids

    def _begin(self, ids: Tensor, pads: list[int] | None) -> Cache:
        """The cache for these new ids, made at the first ones; a refused call changes nothing."""
        self._check_whole()
        if self._cache is not None and self._cache.dtype != self.model.dtype:
            raise ValueError(f"the session holds rows of {self._cache.dtype}, the model is {self.model.dtype} now")
        if self._cache is not None and bool(self._cache.drafts) != (self.model.mtp is not None):
            raise ValueError("the model got or lost its drafter since the session began: it needs a new session")
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
