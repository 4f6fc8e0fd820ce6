"""The SQLite file behind a `Store`: private from its first moment, refused where it is not this model's."""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

APPLICATION = 0x74643431  # in the header of every file of ours
VERSION = 1  # of the tables below and of what a key is made of
BUSY_S = 2.0  # seconds that another process may keep a writer waiting

DAMAGE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR)  # the last: not our tables

# Payloads lie apart from the rest, so that looking for a block or marking its use touches none of them. The triggers
# keep the sum of bytes and the payloads in step with the blocks in whichever process a block comes or goes.
SCHEMA = (
    "CREATE TABLE identity (name TEXT PRIMARY KEY, value TEXT NOT NULL)",
    "CREATE TABLE total (bytes INTEGER NOT NULL)",
    "INSERT INTO total VALUES (0)",
    "CREATE TABLE blocks (id INTEGER PRIMARY KEY, key BLOB NOT NULL UNIQUE, depth INTEGER NOT NULL, "
    "used REAL NOT NULL, n_bytes INTEGER NOT NULL, checksum BLOB NOT NULL)",
    "CREATE INDEX by_use ON blocks (used, depth DESC)",
    "CREATE TABLE payloads (id INTEGER PRIMARY KEY, payload BLOB NOT NULL)",
    "CREATE TRIGGER come AFTER INSERT ON blocks BEGIN UPDATE total SET bytes = bytes + new.n_bytes; END",
    "CREATE TRIGGER gone AFTER DELETE ON blocks BEGIN UPDATE total SET bytes = bytes - old.n_bytes; "
    "DELETE FROM payloads WHERE id = old.id; END",
)


class UnreadableError(sqlite3.DatabaseError):
    """SQLite's complaint about a damaged file holds bytes of that file, which Python's module cannot decode."""


def is_damage(error: Exception) -> bool:
    """Whether SQLite says that the file's structure is broken, that it is no database, or that tables are missing."""
    return isinstance(error, UnreadableError) or _code(error) in DAMAGE


def _code(error: Exception) -> int:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


class StoreFile:
    """One open file, for all threads of one process. A new one, its log and its index of the log have mode 0600.

    `writable` is False where the folder, the file or another owner's mode allow reading only; `why` then says which.

    WAL: readers go on while a process writes, and a commit is one append. synchronous=NORMAL: a killed process loses
    nothing that it committed; a power cut may take the newest commits, in order, and what is lost is computed again.
    FULL would wait for the disk at every block.

    Raises: ValueError for a file of another program, version, model or block size; OSError, sqlite3.Error where it
    cannot be opened even for reading, or is damaged.
    """

    def __init__(self, path: Path, identity: Mapping[str, str]):
        self.path = path
        self.why: Exception | None = None
        self._lock = threading.RLock()
        _create_private(path)
        self._connection = self._open(identity)

    @property
    def writable(self) -> bool:
        return self.why is None

    def _open(self, identity: Mapping[str, str]) -> sqlite3.Connection:
        """The first way that works: a log beside the file cannot always be made, and then is not read."""
        for way in ("mode=rw", "mode=ro", "mode=ro&immutable=1"):
            try:
                return _connect(self.path, way, identity)
            except sqlite3.OperationalError as error:
                self.why = self.why or error
        assert self.why is not None
        raise self.why

    def select(self, statement: str, values: Sequence[Any] = ()) -> list[Any]:
        with self._lock, _complaints():
            return self._connection.execute(statement, values).fetchall()

    @contextmanager
    def transaction(self, *, wait: bool = True) -> Iterator[sqlite3.Connection]:
        """All of the block is written or, where it raises, none. Without `wait` a busy file raises at once."""
        with self._lock, _complaints():
            self._connection.execute(f"PRAGMA busy_timeout = {round(1000 * BUSY_S) if wait else 0}")
            with _within(self._connection, "BEGIN IMMEDIATE"):
                yield self._connection

    def close(self) -> None:
        with self._lock:
            self._connection.close()


def _create_private(path: Path) -> None:
    """Makes an empty file where there is none, so that SQLite never does. Raises: OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))


def _close_to_others(path: Path) -> None:
    """Takes from others the right to read the file and, after a killed process, what it left beside it.

    Raises: sqlite3.OperationalError where that is not allowed: what is ours must not be written there.
    """
    for suffix in ("", "-wal", "-shm"):  # SQLite gives the last two the mode of the first when it creates them
        file = Path(f"{path}{suffix}")
        try:
            if file.stat().st_mode & 0o077:
                file.chmod(0o600)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise sqlite3.OperationalError(f"others may read {file}, and its mode stays: {error}") from error


def _connect(path: Path, way: str, identity: Mapping[str, str]) -> sqlite3.Connection:
    connection = sqlite3.connect(f"{path.absolute().as_uri()}?{way}", uri=True, timeout=BUSY_S, isolation_level=None,
                                 check_same_thread=False)  # fmt: skip
    connection.text_factory = lambda text: text.decode(errors="replace")  # a damaged text is no error, but another text
    try:
        with _complaints():
            _patiently(lambda: _prepare(connection, path, identity, may_create=way == "mode=rw"))
    except BaseException:
        connection.close()
        raise
    return connection


def _patiently(attempt: Callable[[], None]) -> None:
    """Two processes that open a new file at once meet in its change to WAL, where SQLite does not wait by itself."""
    deadline = time.monotonic() + BUSY_S
    while True:
        try:
            return attempt()
        except sqlite3.OperationalError as error:
            if _code(error) != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
            time.sleep(0.005)


def _prepare(connection: sqlite3.Connection, path: Path, identity: Mapping[str, str], may_create: bool) -> None:
    with _within(connection, "BEGIN"):  # one look at one state of the file
        ours = _is_ours(connection, path, identity)
    if not ours and not may_create:
        raise sqlite3.OperationalError(f"{path} holds no blocks yet and cannot be written")
    if may_create:
        _close_to_others(path)  # not before it is known to be ours
        for pragma in ("journal_mode = WAL", "synchronous = NORMAL", "temp_store = MEMORY"):
            connection.execute(f"PRAGMA {pragma}")
    if not ours:
        with _within(connection, "BEGIN IMMEDIATE"):
            if not _is_ours(connection, path, identity):  # another process may have been first
                _create(connection, identity)


def _is_ours(connection: sqlite3.Connection, path: Path, identity: Mapping[str, str]) -> bool:
    """False for an empty file. Raises: ValueError for one that is not this model's, naming both."""
    [(application,)] = connection.execute("PRAGMA application_id")
    [(version,)] = connection.execute("PRAGMA user_version")
    [(n_tables,)] = connection.execute("SELECT COUNT(*) FROM sqlite_master")
    if application == version == n_tables == 0:
        return False
    if application != APPLICATION:
        raise ValueError(f"{path} is a database of application {application:#x}, not {APPLICATION:#x}: left as it is")
    if version != VERSION:
        raise ValueError(f"{path} has version {version} of the store's format, this is version {VERSION}")
    found = dict(connection.execute("SELECT name, value FROM identity"))
    for name, value in identity.items():
        if found.get(name) != value:
            raise ValueError(f"{path} was written with {name}={found.get(name)!r}, asked for {name}={value!r}")
    return True


def _create(connection: sqlite3.Connection, identity: Mapping[str, str]) -> None:
    for statement in (*SCHEMA, f"PRAGMA application_id = {APPLICATION}", f"PRAGMA user_version = {VERSION}"):
        connection.execute(statement)
    connection.executemany("INSERT INTO identity VALUES (?, ?)", identity.items())


@contextmanager
def _complaints() -> Iterator[None]:
    try:
        yield
    except UnicodeDecodeError as error:
        raise UnreadableError(error.object.decode(errors="replace")) from error


@contextmanager
def _within(connection: sqlite3.Connection, begin: str) -> Iterator[None]:
    connection.execute(begin)
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:  # SQLite ends some failed transactions by itself
            connection.execute("ROLLBACK")
        raise
