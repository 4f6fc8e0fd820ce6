"""What a conversation leaves in the persistent cache, and why dropping windows halves it (spec 6)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from tinyds41.cost.generations import generation

ASSUMPTIONS = (
    "global rows and index keys of every token are stored once, whatever the number of turns",
    "V4 stores all its windows twice a turn, at the end of the prompt and of the output, and keeps each copy",
    "V4.1 stores no window: the last tokens run again; generations before V4 have none",
    "no tokens of unfinished groups, no metadata, no second copy",
)


@dataclass(frozen=True)
class PersistentBytes:
    """Bytes of one conversation in the persistent cache, under `ASSUMPTIONS`."""

    model: str
    tokens: int  # of the whole conversation
    turns: int  # prompts with their outputs
    window_saves: int
    global_bytes: int
    window_bytes: int  # of all saves

    @property
    def total(self) -> int:
        return self.global_bytes + self.window_bytes

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "total": self.total, "assumptions": list(ASSUMPTIONS)}


def persistent_bytes(name: str, tokens: int, turns: int) -> PersistentBytes:
    """Bytes that a conversation of so many tokens and turns leaves in one generation's persistent cache.

    Raises: ValueError for an unknown generation, tokens that it cannot have, or turns that do not fit them.
    Source: TR 3.2, which reports about 1/8 of V4-Flash and not what it assumes.
    """
    model = generation(name)
    cache = model.kv_bytes()
    held = cache.bytes_at(tokens)  # refuses what cannot be
    if not isinstance(turns, int) or isinstance(turns, bool) or not 1 <= turns <= tokens:
        raise ValueError(f"turns={turns!r}: a whole number from 1 to tokens={tokens} is needed")
    windows = sum(row.bytes_at(tokens) for row in cache.of("window"))
    saves = model.window_saves_per_turn * turns
    return PersistentBytes(name, tokens, turns, saves, held - windows, saves * windows)


def tokens_per_save_at_par(name: str) -> float:
    """Tokens between two saves of all windows at which windows and global rows take the same bytes.

    Raises: ValueError for a generation that saves no windows.
    """
    model = generation(name)
    if not model.window_saves_per_turn:
        raise ValueError(f"{name} saves no windows")
    cache = model.kv_bytes()
    return float(cache.window_bytes / cache.bytes_per_token)
