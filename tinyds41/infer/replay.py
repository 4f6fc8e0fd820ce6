"""Going on from a stored prefix: global rows are read back, windows come from memory or from tokens run again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tinyds41.config import Config
from tinyds41.infer.padding import pieces
from tinyds41.infer.prefill_modes import decoder_tokens
from tinyds41.infer.prefix import Windows, n_exact, pack, restore
from tinyds41.infer.stores import ENDLESS
from tinyds41.infer.tiered_store import TieredStore
from tinyds41.infer.tokens import Tokens
from tinyds41.trace import Counters

if TYPE_CHECKING:
    from tinyds41.infer.cache import Cache
    from tinyds41.infer.session import Session

REPLAYS = ("bounded", "exact")


@dataclass(frozen=True)
class Resumed:
    """What `Session.resume` found and did. Units: tokens."""

    found: int  # global rows read back
    replayed: int  # of the found ones, those the encoder ran on again
    new: int  # behind the found ones
    windows: str  # "none" to restore, from the "pool", or by "replay"


class Replay(Tokens):
    """Tokens whose global entries are stored: windows and unfinished groups are made anew, entries only read."""

    def groups(self, source: int, c: Tensor, z: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor]:
        for recent, rows in zip(self.cache.sources[source].pending, (c, z), strict=False):
            assert rows is not None
            recent.append(rows, self.pads, 0)
        none = c.new_empty(c.shape[0], 0, self.plan[source].ratio, c.shape[-1])
        return none, None if z is None else none, torch.empty(c.shape[0], 0, dtype=torch.long, device=c.device)

    def add_entries(self, source: int, kv: Tensor, keys: Tensor) -> None:
        """Raises: ValueError for any entry."""
        if kv.shape[1]:
            raise ValueError(f"a replay adds {kv.shape[1]} entries to layer {source}: stored entries are only read")


def first_replayed(config: Config, found: int, needed: int, replay: str | int) -> int:
    """Where the encoder starts again, so that windows behind `found` tokens and the last `needed` outputs exist.

    bounded: W tokens back. exact: as far as the first needed output depends on windows, W - 1 tokens per layer.
    A number: so many tokens, to see what each of them is worth. At least what is needed.
    Source: spec 6.
    """
    plan, window = config.plan(), config.sliding_window
    if replay == "exact":
        back = needed + plan.n_encoder * (window - 1)
    else:
        back = max(needed, window if isinstance(replay, str) else replay)
    unfinished = max((found % layer.ratio for layer in plan if layer.writes_globals), default=0)
    return max(0, found - max(back, unfinished))


def resume(
    session: Session, ids: Tensor, store: TieredStore, replay: str | int, chunk: int, namespace: str
) -> Tensor:
    """See `Session.resume`."""
    if replay not in REPLAYS and (not isinstance(replay, int) or isinstance(replay, bool) or replay < 0):
        raise ValueError(f"replay={replay!r} is none of {', '.join(REPLAYS)}, and no number of tokens")
    if len(ids) != 1:
        raise ValueError(f"resume takes one row, ids have {len(ids)}: rows of a batch would be found at other lengths")
    _check(store, session, namespace)
    session.start()
    session.counters = Counters()
    text, session.resumed = ids[0].tolist(), None
    with session.writing() as cache:
        payloads = store.blocks.read(text, namespace)
        if replay == "exact":  # what a bounded replay left is read anew
            payloads = payloads[: n_exact(payloads)]
        found = len(payloads) * store.block_tokens
        mode = "exact" if replay == "exact" or not found else "bounded"
        n_tokens, share = len(text), decoder_tokens(cache.config, mode)
        # A model without a decoder has a last token nevertheless, and its drafter a window.
        least = min(n_tokens, cache.config.sliding_window) if cache.drafts else 1
        n_last = least if cache.plan.boundary is None else n_tokens if share is None else min(share, n_tokens)
        restore(cache, text[:found], payloads, store.block_tokens)
        start, windows = _windows(cache, store, text[:found], max(0, n_last - (n_tokens - found)), replay, namespace)
        if cache.exact[0] < found or cache.exact_windows[0] > found:  # then so is all that comes behind them
            cache.exact, cache.exact_windows = [min(cache.exact[0], found)], [ENDLESS]
        steps = chain(
            again(session, cache, ids[:, start:found], start, chunk),
            _remembered(session, cache, store, ids[:, found:], chunk, namespace))  # fmt: skip
        logits = session.read(cache, steps, n_last, [n_tokens])
    session.resumed = Resumed(found, found - start, n_tokens - found, windows)
    return logits


def _windows(
    cache: Cache, store: TieredStore, text: list[int], needed: int, replay: str | int, namespace: str
) -> tuple[int, str]:
    """Restores windows from the pool if it has enough rows; from which token on the encoder runs again."""
    found = len(text)
    if not found:
        return 0, "none"
    windows = store.windows.get(store.blocks.keys(text, namespace)[-1])
    held = isinstance(windows, Windows) and windows.reaches(cache, found - needed)
    if isinstance(windows, Windows) and held and (windows.exact or replay != "exact"):
        windows.restore(cache, text, found - needed)
        return found - needed, "pool"
    start = first_replayed(cache.config, found, needed, replay)
    cache.remember(text[:start])
    # The windows of each layer are cut at the start, so what reads those of all layers is exact so much later.
    exact = start + cache.plan.n_encoder * (cache.config.sliding_window - 1) if start else 0
    cache.exact_windows = [exact if exact <= found else ENDLESS]
    return start, "replay"


def again(session: Session, cache: Cache, ids: Tensor, start: int, chunk: int) -> Iterator[tuple[Tensor, Tokens]]:
    """The found tokens from `start` on, for the encoder to make their windows anew."""
    for part, _ in pieces(ids, None, chunk) if ids.shape[1] else ():
        yield part, Replay(cache, [start], part.shape[1], None, session.counters, None)
        start += part.shape[1]


def _remembered(
    session: Session, cache: Cache, store: TieredStore, ids: Tensor, chunk: int, namespace: str
) -> Iterator[tuple[Tensor, Tokens]]:
    """The new tokens; where the text's last whole block ends, the encoder's windows go to the pool.

    Behind a bounded replay these are the windows that this session goes on with, so a later hit continues it.
    """
    whole = (cache.lengths[0] + ids.shape[1]) // store.block_tokens * store.block_tokens
    first = max(0, whole - cache.lengths[0])
    if first:
        yield from session.chunks(cache, ids[:, :first], None, chunk)
    keep_windows(cache, store, namespace)
    if first < ids.shape[1]:
        yield from session.chunks(cache, ids[:, first:], None, chunk)


def keep_windows(cache: Cache, store: TieredStore, namespace: str, b: int = 0) -> None:
    """Puts the encoder's windows where the text's last whole block ends into the pool, if all their rows remain."""
    text = cache.texts[b].tolist()
    whole = len(text) // store.block_tokens * store.block_tokens
    windows = Windows.of(cache, b, whole)
    if whole and windows.reaches(cache, whole):
        store.windows.put(store.blocks.keys(text, namespace)[-1], windows.n_bytes, windows)


def _check(store: TieredStore, session: Session, namespace: str) -> None:
    if not isinstance(store, TieredStore) or not isinstance(namespace, str):
        found = f"{type(store).__name__} and {type(namespace).__name__}"
        raise TypeError(f"store and namespace are {found}, expected TieredStore and str")
    store.check(session.model)


def save(session: Session, store: TieredStore, namespace: str) -> int:
    """See `Session.save`."""
    cache, written = session.cache, 0
    _check(store, session, namespace)
    if cache.filled:
        raise ValueError("the session was filled with random rows: a store would give them to who reads that text")
    for b, text in enumerate(cache.texts):
        written += store.blocks.write(text.tolist(), partial(pack, cache, b), namespace)
        keep_windows(cache, store, namespace, b)
    return written
