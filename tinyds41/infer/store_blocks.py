"""Rows of a store's file: blocks come, are used, and go; a prefix never before what continues it."""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Sequence

from tinyds41.infer.store_file import StoreFile

ROUND = 64  # blocks that are removed at a time, so that other processes get their turn

FIND = "SELECT 1 FROM blocks WHERE key = ? AND used >= ?"
READ = "SELECT checksum, payload FROM blocks LEFT JOIN payloads USING (id) WHERE key = ? AND used >= ?"
# Never earlier than it was: a clock that is set back must not make a prefix older than what continues it.
TOUCH = "UPDATE blocks SET used = MAX(used, ?) WHERE key = ?"
ADD = "INSERT OR IGNORE INTO blocks (key, depth, used, n_bytes, checksum) VALUES (?, ?, ?, ?, ?)"
ADD_PAYLOAD = "INSERT OR REPLACE INTO payloads VALUES (?, ?)"
EXPIRE = f"DELETE FROM blocks WHERE id IN (SELECT id FROM blocks WHERE used < ? LIMIT {ROUND})"
# A prefix and what continues it may have been used at the same moment: then the end goes first.
OLDEST_FIRST = "SELECT id, key, IFNULL(CAST(n_bytes AS INTEGER), 0) FROM blocks ORDER BY used, depth DESC, key"
N_BYTES = "SELECT CAST(TOTAL(bytes) AS INTEGER) FROM total"  # a number, whatever damage left there


class NoRoomError(Exception):
    """A block and what leads to it exceed the byte budget, or what leads to it has been removed meanwhile."""


class DamagedBlockError(Exception):
    """A payload does not fit its checksum, or is missing."""


class StoreBlocks(StoreFile):
    """The statements behind `Store`; each method is one transaction. Raises: sqlite3.Error besides what is said.

    Units: `used`, `now` and `oldest` in seconds of the store's clock.
    """

    def has(self, key: bytes, oldest: float) -> bool:
        return bool(self.select(FIND, (key, oldest)))

    def payload(self, key: bytes, oldest: float) -> bytes | None:
        """The block's bytes, None where it is not stored or was not used since `oldest`. Raises: DamagedBlockError."""
        for digest, payload in self.select(READ, (key, oldest)):
            if not isinstance(payload, bytes) or digest != checksum(key, payload):
                raise DamagedBlockError
            return payload
        return None

    def delete(self, key: bytes) -> None:
        with self.transaction() as connection:
            connection.execute("DELETE FROM blocks WHERE key = ?", (key,))

    def touch(self, keys: Sequence[bytes], now: float, *, wait: bool = True) -> set[bytes]:
        """Marks the blocks as used now, and says which of them there are."""
        with self.transaction(wait=wait) as connection:
            return {key for key in keys if connection.execute(TOUCH, (now, key)).rowcount}

    def add(self, keys: Sequence[bytes], payload: bytes, now: float, budget: int | None) -> tuple[bool, int]:
        """Adds the block of the last key behind those of the others, and makes room for it.

        Returns whether it was added (another process may have been first) and how many blocks made room.
        Raises: NoRoomError, and then nothing has changed.
        """
        key, depth = keys[-1], len(keys) - 1
        row = (key, depth, now, len(payload), checksum(key, payload))
        with self.transaction() as connection:
            if depth and not connection.execute(FIND, (keys[-2], float("-inf"))).fetchone():
                raise NoRoomError
            added = connection.execute(ADD, row)
            if not added.rowcount:
                return False, 0
            connection.execute(ADD_PAYLOAD, (added.lastrowid, payload))
            victims, excess = _oldest(connection, budget, keep=keys)
            if excess > 0:
                raise NoRoomError
            _remove(connection, victims)
            return True, len(victims)

    def expire(self, oldest: float) -> int:
        """Removes blocks not used since `oldest`, at most `ROUND`; returns how many."""
        if not self.select("SELECT 1 FROM blocks WHERE used < ? LIMIT 1", (oldest,)):
            return 0  # the usual case waits for no other writer
        with self.transaction() as connection:
            return connection.execute(EXPIRE, (oldest,)).rowcount

    def shrink(self, budget: int | None) -> int:
        """Removes the oldest blocks beyond the budget, at most `ROUND`; returns how many."""
        with self.transaction() as connection:
            victims, _ = _oldest(connection, budget, most=ROUND)
            _remove(connection, victims)
            return len(victims)

    def count_bytes(self) -> None:
        """Sums up the payloads anew: the file may have been damaged."""
        with self.transaction() as connection:
            connection.execute("UPDATE total SET bytes = (SELECT CAST(TOTAL(n_bytes) AS INTEGER) FROM blocks)")

    def n_bytes(self) -> int:
        return self.select(N_BYTES)[0][0]


def checksum(key: bytes, payload: bytes) -> bytes:
    """SHA-256 over both: a sound payload under another's key is as wrong as a changed one."""
    digest = hashlib.sha256(key)
    digest.update(payload)
    return digest.digest()


def _oldest(connection: sqlite3.Connection, budget: int | None, *, keep: Sequence[bytes] = (),
            most: float = float("inf")) -> tuple[list[tuple[int]], int]:  # fmt: skip
    """Ids of the blocks to remove, `most` at most and none of `keep`, and the bytes that still exceed the budget."""
    [(total,)] = connection.execute(N_BYTES)
    excess, victims = total - budget if budget is not None else 0, []
    if excess > 0:
        kept = set(keep)
        for number, key, n_bytes in connection.execute(OLDEST_FIRST):
            if excess <= 0 or len(victims) >= most:
                break
            if key not in kept:
                victims.append((number,))
                excess -= n_bytes
    return victims, excess


def _remove(connection: sqlite3.Connection, numbers: list[tuple[int]]) -> None:
    connection.executemany("DELETE FROM blocks WHERE id = ?", numbers)
