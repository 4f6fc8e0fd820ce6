"""What a cache holds, in bytes by store."""

from __future__ import annotations

from dataclasses import dataclass

from tinyds41.tables import aligned


@dataclass(frozen=True)
class StoreBytes:
    """One store: its rows and what one of them takes."""

    name: str
    kind: str  # global_kv, index_keys, window, group or draft_window
    rows: int
    row_bytes: int

    @property
    def bytes(self) -> int:
        return self.rows * self.row_bytes


@dataclass(frozen=True)
class CacheReport:
    """Bytes by store. `print(report)` shows a table.

    tokens: of all batch rows together. allocated_bytes: the buffers as they are, with room to grow and the rows kept
    for truncation.
    """

    tokens: int
    stores: tuple[StoreBytes, ...]
    allocated_bytes: int

    def bytes(self, *kinds: str) -> int:
        """Bytes of all stores of these kinds."""
        return sum(store.bytes for store in self.stores if store.kind in kinds)

    @property
    def growing_bytes(self) -> int:
        """Global KV and index keys: what grows with the text."""
        return self.bytes("global_kv", "index_keys")

    @property
    def window_bytes(self) -> int:
        return self.bytes("window")

    @property
    def total_bytes(self) -> int:
        return sum(store.bytes for store in self.stores)

    @property
    def bytes_per_token(self) -> float:
        """Of what grows with the text; 0 for an empty cache."""
        return self.growing_bytes / self.tokens if self.tokens else 0.0

    def __str__(self) -> str:
        rows = [(store.name, f"{store.rows:,}", str(store.row_bytes), f"{store.bytes:,}") for store in self.stores]
        table = aligned(("store", "rows", "bytes a row", "bytes"), rows, left=(0,))
        return "\n".join([*table, f"{self.bytes_per_token:,.2f} bytes per token of {self.tokens:,} grow with the text; "
                          f"windows {self.window_bytes:,} bytes; allocated {self.allocated_bytes:,} bytes"])
