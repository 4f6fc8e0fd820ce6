"""Texts, payloads and a look into a store's file that does without the code under test. No torch: children use it."""

from __future__ import annotations

import hashlib
import random
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tinyds41.infer.store import Store

MODEL = "config and weights"
BLOCK = 4  # tokens


class Clock:
    """Stands still until it is set."""

    def __init__(self, now: float = 1000.0):
        self.now = now

    def __call__(self) -> float:
        return self.now


def text(number: int, n_blocks: int, rest: int = 0) -> list[int]:
    """Random ids, others for each number: n_blocks whole blocks and the rest of one."""
    draw = random.Random(number)
    return [draw.randrange(129_280) for _ in range(n_blocks * BLOCK + rest)]


def payload(ids: Sequence[int], n_bytes: int = 50) -> bytes:
    """n_bytes that depend on every id."""
    return hashlib.shake_256(repr(list(ids)).encode()).digest(n_bytes)


def payloads(ids: Sequence[int], n_bytes: int = 50) -> list[bytes]:
    """Of all whole blocks of a text."""
    return [payload(ids[:end], n_bytes) for end in range(BLOCK, len(ids) + 1, BLOCK)]


def write(store: Store, ids: Sequence[int], namespace: str = "", n_bytes: int = 50) -> int:
    """Saves the text's payloads."""
    return store.write(ids, lambda start, end: payload(ids[:end], n_bytes), namespace)


def opened(path: Path, **changes: Any) -> Store:
    """A store of `MODEL` with blocks of 4 tokens, unless the changes say otherwise."""
    return Store(path, **{"model_key": MODEL, "block_tokens": BLOCK} | changes)


def held(store: Store, number: int, n_blocks: int) -> int:
    """Blocks of a text that a store finds; `read` must agree. The clock may stand still."""
    ids = text(number, n_blocks)
    n = store.find(ids) // BLOCK
    assert store.read(ids) == payloads(ids)[:n]
    return n


def rows(path: Path) -> dict[bytes, bytes]:
    """Key to payload of every block in the file, each checked against its checksum and its stated size."""
    connection = sqlite3.connect(path)
    try:
        found = connection.execute("SELECT key, n_bytes, checksum, payload FROM blocks JOIN payloads USING (id)")
        blocks = {}
        for key, n_bytes, checksum, content in found:
            assert hashlib.sha256(key + content).digest() == checksum
            assert n_bytes == len(content)
            blocks[key] = content
        for table in ("blocks", "payloads"):
            assert connection.execute(f"SELECT COUNT(*) FROM {table}").fetchone() == (len(blocks),)
        assert connection.execute("SELECT bytes FROM total").fetchone() == (sum(map(len, blocks.values())),)
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    finally:
        connection.close()
    return blocks
