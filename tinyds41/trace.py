"""Looking inside a run: `Trace` keeps intermediates by name, `Counters` counts the work done."""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase

import torch
from torch import Tensor


class Trace(Mapping[str, Tensor]):
    """Keeps the intermediates whose names match; everything else is never materialised.

    `trace = Trace("layers.4.indexer.*"); model(ids, trace=trace); trace["layers.4.indexer.scores"]`.
    Names are module paths; docs/trace.md lists them with shapes.

    Shapes: as in docs/trace.md; with `queries`, the query axis S keeps only those positions.
    Raises: ValueError without a pattern; KeyError for a name that was not kept, or, when the run ends, for a
        pattern that matched nothing.
    """

    def __init__(self, *patterns: str, queries: list[int] | Tensor | None = None, detach: bool = True):
        if not patterns:
            raise ValueError("a Trace needs at least one name or pattern, such as 'layers.4.indexer.*'")
        self.patterns = patterns
        self.queries = None if queries is None else _positions(queries)
        self.detach = detach
        self._kept: dict[str, Tensor] = {}
        self._offered: set[str] = set()

    def begin(self, length: int) -> None:
        """Called when a run of `length` tokens begins: it forgets the one before.

        Raises: ValueError for a query outside the run.
        """
        self._kept.clear()
        self._offered.clear()
        outside = [] if self.queries is None else [p for p in self.queries.tolist() if not 0 <= p < length]
        if outside:
            raise ValueError(f"queries name position {outside[0]}: positions are 0..{length - 1}")

    def wants(self, name: str) -> bool:
        """Whether to materialise `name`; asked before any work is done for it."""
        self._offered.add(name)
        return any(fnmatchcase(name, pattern) for pattern in self.patterns)

    def keep(self, name: str, value: Tensor, *, by_query: bool = True) -> None:
        """Stores a wanted value; `by_query` says that axis 1 is the query axis."""
        if by_query and self.queries is not None:
            value = value.index_select(1, self.queries.to(value.device))
        self._kept[name] = value.detach() if self.detach else value

    def copy_kept(self) -> None:
        """Takes what is kept out of buffers that are written again, as those of a cache are."""
        self._kept = {name: value.clone() for name, value in self._kept.items()}

    def finish(self) -> None:
        """Called when a run ends. Raises KeyError for a pattern that matched no name of the run."""
        for pattern in self.patterns:
            if not any(fnmatchcase(name, pattern) for name in self._offered):
                raise KeyError(f"no intermediate is called {pattern!r}{_nearest(pattern, self._offered)}")

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._kept:
            raise KeyError(f"{name!r} was not kept by Trace{self.patterns}{_nearest(name, self._kept)}")
        return self._kept[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._kept)

    def __len__(self) -> int:
        return len(self._kept)


def _positions(queries: list[int] | Tensor) -> Tensor:
    positions = torch.as_tensor(queries)
    if positions.ndim > 1 or (positions.numel() and positions.dtype not in (torch.int64, torch.int32)):
        raise ValueError(f"queries={queries}: a list of positions is needed")
    return positions.long().reshape(-1)


def _nearest(name: str, names) -> str:
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.4)
    return f"; close names are {', '.join(close)}" if close else ""


def see(trace: Trace | None, name: str, value: Tensor | Callable[[], Tensor], *, by_query: bool = True) -> None:
    """Offers an intermediate to the trace.

    A callable is evaluated only when its value is wanted.
    """
    if trace is not None and trace.wants(name):
        trace.keep(name, value() if callable(value) else value, by_query=by_query)


# Tokens that attention ran on; tokens whose global entries the boundary layer projected; index scores computed;
# rows of global KV gathered, charged to the layer that gathered them first.
COUNTS = ("tokens_run", "boundary_projections", "entries_scored", "rows_decoded")


class Counters:
    """Work done per layer, taken from the shapes of the tensors that did it.

    Units: counts summed over the batch. A count that nothing was added to reads as {}.
    Raises: AttributeError, KeyError for a name that is none of `COUNTS`.
    """

    def __init__(self) -> None:
        self._counts: dict[str, dict[int, int]] = {name: defaultdict(int) for name in COUNTS}

    def add(self, name: str, layer: int, amount: int) -> None:
        self._counts[name][layer] += amount

    def __getattr__(self, name: str) -> dict[int, int]:
        if name not in COUNTS:
            raise AttributeError(f"no count is called {name!r}: the counts are {', '.join(COUNTS)}")
        return dict(self._counts[name])

    def reset(self) -> None:
        for counts in self._counts.values():
            counts.clear()
