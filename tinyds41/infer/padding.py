"""Prompts of different length in one batch, cut into chunks."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor


def pieces(ids: Tensor, pads: list[int] | None, chunk: int) -> Iterator[tuple[Tensor, list[int] | None]]:
    """A prompt cut into chunks, and how much of each row's chunk is padding."""
    start = 0
    for part in ids.split(chunk, 1):
        width = part.shape[1]
        yield part, None if pads is None else [min(max(n - start, 0), width) for n in pads]
        start += width


def as_ids(ids: Tensor | Sequence[int] | int | None, device: torch.device) -> Tensor:
    """Ids as a tensor, a given one as it is. Raises: ValueError naming what is no array of whole numbers."""
    if isinstance(ids, Tensor):
        return ids
    try:
        found = torch.as_tensor(ids, device=device)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        shown = repr(ids) if len(repr(ids)) < 60 else f"a {type(ids).__name__}"
        raise ValueError(f"ids are {shown}: expected whole numbers in rows of equal length") from error
    return found if found.numel() else found.long()  # an empty list has no type


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


def check_chunk(chunk: int) -> int:
    """Raises: ValueError for a chunk without a token, TypeError for what is no whole number."""
    chunk = operator.index(chunk)
    if chunk < 1:
        raise ValueError(f"chunk={chunk}: at least one token is needed")
    return chunk
