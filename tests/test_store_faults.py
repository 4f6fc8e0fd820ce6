"""What a store survives: kills, changed bytes, a full disk, a read-only folder, others at work; never a wrong byte."""

from __future__ import annotations

import json
import os
import random
import shutil
import sqlite3
import stat
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import pytest
from store_texts import BLOCK, opened, payload, payloads, rows, text, write

import tinyds41
from tinyds41.infer import store_file

N_BYTES = 5000  # a payload that takes more than one page of the file


@pytest.fixture
def path(tmp_path):
    return tmp_path / "store.db"


@pytest.fixture
def saved(path):
    """A closed file with two texts of three blocks."""
    with opened(path) as store:
        for number in (1, 2):
            write(store, text(number, 3), n_bytes=N_BYTES)
    return path


@pytest.fixture
def memory_folder():
    """A folder in memory, where the system has that: nothing in it waits for a disk."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if os.access(shared, os.W_OK) else None) as folder:
        yield Path(folder)


def in_child(scenario: str, folder: Path) -> dict:
    """What a scenario of store_child.py reports."""
    script = Path(__file__).with_name("store_child.py")
    paths = [str(Path(tinyds41.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, str(script), scenario, str(folder)], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return json.loads(done.stdout)


def change(path: Path, statement: str, values: tuple = ()) -> None:
    connection = sqlite3.connect(path)
    with connection:
        connection.execute(statement, values)
    connection.close()


def mode(file: Path) -> int:
    return stat.S_IMODE(file.stat().st_mode)


def check_off(path: Path, match: str) -> None:
    """The file is left as it is; a caller notices one warning, and nothing found or saved."""
    path.chmod(0o644)
    before = path.read_bytes()
    with pytest.warns(RuntimeWarning, match=match) as seen:
        store = opened(path)
        for number in (1, 2):
            assert write(store, text(number, 3)) == 0
            assert store.find(text(number, 3)) == 0 and store.read(text(number, 3)) == []
        assert store.bytes_stored() == 0
        store.close()
    assert len(seen) == 1 and str(path) in str(seen[0].message)
    assert (store.counters.failed_writes, store.counters.hits, store.counters.misses) == (2, 0, 6)
    assert path.read_bytes() == before and mode(path) == 0o644


# ---- kill -9 ----


def test_two_hundred_kills_at_random_moments_lose_nothing_that_was_saved(memory_folder):
    """After each the file opens, every block verifies or is absent, and every text has its beginning without a hole."""
    report = in_child("killed", memory_folder)
    assert report["warnings"] == [] and report["torch"] is False
    moments = report["result"]["moments"]
    assert report["result"]["kills"] == sum(moments.values()) == 200
    assert moments["INSERT"] > 5 and moments["COMMIT"] > 5  # the kills did come while blocks were written
    assert report["result"]["hits"] > 200


def test_a_log_that_was_cut_or_changed_anywhere_gives_a_beginning_of_what_was_saved(path, tmp_path):
    """As a power cut leaves it: the newest commits are lost, in order."""
    store = opened(path)
    write(store, text(1, 12), n_bytes=N_BYTES)
    log = Path(f"{path}-wal").read_bytes()
    draw, found = random.Random(0), set()
    for number in range(40):
        place = draw.randrange(len(log))
        other = tmp_path / f"{number}.db"
        shutil.copy(path, other)
        rest = b"" if number % 2 else bytes([log[place] ^ 255]) + log[place + 1 :]
        Path(f"{other}-wal").write_bytes(log[:place] + rest)
        with opened(other) as cut:
            n = cut.find(text(1, 12)) // BLOCK
            assert cut.read(text(1, 12)) == payloads(text(1, 12), N_BYTES)[:n]
            assert cut.counters.damaged == 0
            found.add(n)
            assert write(cut, text(1, 12), n_bytes=N_BYTES) == (12 - n) * N_BYTES
        assert len(rows(other)) == 12
    store.close()
    assert len(found) > 5


# ---- changed bytes ----


def test_a_flipped_byte_is_a_miss_counted_and_healed(saved):
    """In the first, a middle and the last byte of each payload, in the file itself."""
    content, ids, n_damaged = saved.read_bytes(), text(1, 3), 0
    for number, expected in enumerate(payloads(ids, N_BYTES)):
        place = content.index(expected[:100])
        last = content.index(expected[-100:]) + 99
        for byte in (place, place + 50, last):
            saved.write_bytes(content[:byte] + bytes([content[byte] ^ 1]) + content[byte + 1 :])
            with opened(saved) as store:
                assert store.find(ids) == 3 * BLOCK
                assert store.read(ids) == payloads(ids, N_BYTES)[:number]
                assert (store.counters.damaged, store.counters.hits, store.counters.misses) == (1, number, 3 - number)
                assert store.find(ids) == number * BLOCK and store.bytes_stored() == 5 * N_BYTES
                assert store.read(text(2, 3)) == payloads(text(2, 3), N_BYTES)
                assert write(store, ids, n_bytes=N_BYTES) == N_BYTES
                assert store.read(ids) == payloads(ids, N_BYTES)
                n_damaged += store.counters.damaged
    assert n_damaged == 9


@pytest.mark.parametrize("statement", [
    "UPDATE payloads SET payload = substr(payload, 1, 4999) WHERE id = 2",
    "UPDATE payloads SET payload = payload || x'00' WHERE id = 2",
    "UPDATE payloads SET payload = 'a text' WHERE id = 2",
    "DELETE FROM payloads WHERE id = 2",
    "UPDATE blocks SET checksum = zeroblob(32) WHERE id = 2",
    "UPDATE blocks SET checksum = 7 WHERE id = 2",
    # Sound blocks under each other's keys.
    "UPDATE payloads SET id = CASE id WHEN 2 THEN -5 ELSE -2 END WHERE id IN (2, 5)",
], ids=["cut", "longer", "text", "no payload", "checksum", "no checksum", "swapped"])  # fmt: skip
def test_a_block_that_is_not_what_was_saved_ends_the_hit(saved, statement):
    change(saved, statement)
    change(saved, "UPDATE payloads SET id = -id WHERE id < 0")
    with opened(saved) as store:
        assert store.read(text(1, 3)) == payloads(text(1, 3), N_BYTES)[:1]
        assert store.counters.damaged == 1
        assert store.find(text(1, 3)) == BLOCK


def test_blocks_with_payload_and_checksum_swapped_are_damaged_too(saved):
    """The checksum is over the key as well."""
    change(saved, "UPDATE blocks SET key = CASE id WHEN 2 THEN x'00' ELSE x'01' END WHERE id IN (2, 5)")
    with opened(saved) as store:
        keys = {b"\0": store.keys(text(2, 3))[1], b"\1": store.keys(text(1, 3))[1]}
    for short, key in keys.items():
        change(saved, "UPDATE blocks SET key = ? WHERE key = ?", (key, short))
    with opened(saved) as store:
        for number in (1, 2):
            assert store.read(text(number, 3)) == payloads(text(number, 3), N_BYTES)[:1]
        assert store.counters.damaged == 2


@pytest.mark.parametrize("statement", [
    "UPDATE blocks SET n_bytes = 'x'", "DELETE FROM total", "UPDATE total SET bytes = 'x'",
    "UPDATE blocks SET used = 'x', depth = 'y'",
])  # fmt: skip
def test_a_number_that_is_none_any_more_stops_nobody(path, statement):
    """Sizes and times decide what is removed, never what is read."""
    with opened(path, budget_bytes=300) as store:
        write(store, text(1, 3))
        change(path, statement)
        write(store, text(2, 4))
        assert store.read(text(2, 4)) == payloads(text(2, 4))[: store.find(text(2, 4)) // BLOCK]
        assert isinstance(store.bytes_stored(), int)
    with opened(path, budget_bytes=300) as store:
        assert isinstance(store.bytes_stored(), int)


def test_a_complaint_with_bytes_of_the_file_is_damage(saved):
    """It names an index whose name is no text any more, which Python's module cannot decode."""
    saved.write_bytes(saved.read_bytes().replace(b"sqlite_autoindex_identity", b"sqlite_autoindex_iden\xacity"))
    check_off(saved, "malformed database schema")


def test_tables_that_are_not_ours_turn_the_store_off(saved):
    """A sound database, says SQLite."""
    saved.write_bytes(saved.read_bytes().replace(b"blocks", b"clocks"))
    match = "nothing is found or saved from here on: no such table: blocks"
    with pytest.warns(RuntimeWarning, match=match) as seen, opened(saved) as store:
        assert write(store, text(1, 3)) == 0 and store.read(text(1, 3)) == [] and store.bytes_stored() == 0
    assert len(seen) == 1


def test_any_byte_of_the_file_may_change(saved, memory_folder):
    """Never a wrong payload, never an error but the refusal at opening; three bytes a time, everywhere in turn."""
    content, draw, seen = saved.read_bytes(), random.Random(0), {"refused": 0, "warned": 0, "shorter": 0, "whole": 0}
    saved = memory_folder / "store.db"
    for number in range(200):
        changed = bytearray(content)
        for _ in range(3):
            # The tables' first pages and headers hold little, and matter most.
            changed[draw.randrange(len(content) if number % 2 else 100 if number % 4 else 16_384)] = draw.randrange(256)
        saved.write_bytes(changed)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            try:
                store = opened(saved)
            except ValueError as error:
                assert str(saved) in str(error)
                seen["refused"] += 1
                continue
            n = 0
            for ids in (text(1, 3), text(2, 3)):
                found = store.read(ids)
                assert found == payloads(ids, N_BYTES)[: len(found)]
                assert store.find(ids) <= 3 * BLOCK
                n += len(found)
            write(store, text(3, 3), n_bytes=N_BYTES)
            found = store.read(text(3, 3))
            assert found == payloads(text(3, 3), N_BYTES)[: len(found)]
            store.bytes_stored()
            store.close()
        assert len(warned) <= 1
        seen["warned" if warned else "whole" if n == 6 else "shorter"] += 1
        for suffix in ("-wal", "-shm"):
            Path(f"{saved}{suffix}").unlink(missing_ok=True)
    assert min(seen.values()) > 3, seen


@pytest.mark.parametrize("content", [
    lambda whole: bytes(100) + whole[100:],
    lambda whole: b"SQLite format 4\0" + whole[16:],
    lambda whole: b"my notes, not a database " * 400,
    lambda whole: whole[: len(whole) // 2],
    lambda whole: whole[:4096] + bytes(len(whole) - 4096),
], ids=["no header", "another header", "a text", "half of it", "its first page"])  # fmt: skip
def test_a_file_that_is_no_sound_database_turns_the_store_off_and_is_left(saved, content):
    saved.write_bytes(content(saved.read_bytes()))
    check_off(saved, "nothing is found or saved from here on")


def test_a_structure_that_breaks_under_way_turns_the_store_off(saved):
    """One warning; later calls find and save nothing, and raise nothing."""
    store = opened(saved)
    assert store.find(text(1, 3)) == 3 * BLOCK
    with saved.open("r+b") as file:
        file.seek(4096)
        file.write(bytes([77]) * (saved.stat().st_size - 4096))
    with pytest.warns(RuntimeWarning, match="nothing is found or saved from here on") as seen:
        for _ in range(2):
            assert write(store, text(3, 20), n_bytes=N_BYTES) == 0
            assert store.read(text(1, 3)) == [] and store.find(text(1, 3)) == 0 and store.bytes_stored() == 0
    assert len(seen) == 1 and store.counters.failed_writes == 2
    store.close()


# ---- what the system refuses ----


def test_a_full_disk_ends_saving_until_there_is_room_again(tmp_path):
    """A real limit on the size of files; reading goes on, and what was saved stays whole."""
    report = in_child("full", tmp_path)
    result = report["result"]
    n_bytes = sum(result["bytes"])
    assert 0 < n_bytes < 40 * 9000 and result["found"] == n_bytes // 9000 * BLOCK
    assert result["read"] and result["others"] and result["failed"] == 2
    assert len(report["warnings"]) == 1 and "what cannot be saved is computed again" in report["warnings"][0]
    assert result["later"] == 40 * 9000 - n_bytes and result["all"] and result["sound"] == 43


def test_a_database_that_may_not_grow_is_a_full_disk(path):
    """The error that SQLite has for it, at each number of pages: in a payload, in a table, in the log."""
    store, ids = opened(path), text(1, 30)
    write(store, ids[:BLOCK], n_bytes=N_BYTES)
    assert store._blocks is not None
    pages = store._blocks.select("PRAGMA page_count")[0][0]
    with pytest.warns(RuntimeWarning, match="full") as seen:
        for number in range(8):
            store._blocks.select(f"PRAGMA max_page_count = {pages + number}")
            write(store, ids, n_bytes=N_BYTES)
            n = store.find(ids) // BLOCK
            assert store.read(ids) == payloads(ids, N_BYTES)[:n] and len(rows(path)) == n
    assert len(seen) == 1 and store.counters.failed_writes == 8
    store._blocks.select("PRAGMA max_page_count = 100000")
    write(store, ids, n_bytes=N_BYTES)
    assert store.read(ids) == payloads(ids, N_BYTES)
    store.close()


def test_a_disk_that_is_full_from_the_start_turns_the_store_off(tmp_path):
    result = in_child("full_from_the_start", tmp_path)["result"]
    assert result["found"] == result["bytes"] == 0 and result["written"] == [0, 0] and result["new"] == []
    assert len(result["warnings"]) == result["at_opening"] == 1 and "nothing is found" in result["warnings"][0]


def test_a_read_only_folder_is_read_and_saving_warns_once():
    """As a user without rights there: a file that exists serves hits; without one the store is empty and off."""
    folder = Path(tempfile.mkdtemp())  # root's own temporary folder would be closed to others
    try:
        with opened(folder / "kept.db") as store:
            write(store, text(1, 3))
        (folder / "open").mkdir()
        shutil.copy(folder / "kept.db", folder / "open" / "kept.db")
        (folder / "open" / "kept.db").chmod(0o400)  # the file alone is read-only
        if os.geteuid() == 0:
            for file in ("kept.db", "open", "open/kept.db"):
                os.chown(folder / file, 65534, 65534)
        folder.chmod(0o555)
        result = in_child("read_only", folder)["result"]
    finally:
        folder.chmod(0o755)
        shutil.rmtree(folder)
    for kept in (result["kept.db"], result["open/kept.db"]):
        assert kept["found"] == 3 * BLOCK and kept["read"] and kept["bytes"] == 150
        assert kept["at_opening"] == 0 and len(kept["warnings"]) == 1 and kept["failed"] == 2
    for empty in (result["new.db"], result["none/new.db"]):
        assert empty["found"] == empty["bytes"] == 0
        assert empty["at_opening"] == len(empty["warnings"]) == 1 and empty["failed"] == 2
    assert all(each["written"] == [0, 0] and each["new"] == [] for each in result.values())


def test_a_lock_that_is_not_released_costs_a_warning_and_no_hit(saved, monkeypatch):
    """Readers do not wait for it; once it is released, saving goes on."""
    monkeypatch.setattr(store_file, "BUSY_S", 0.05)
    store = opened(saved)
    other = sqlite3.connect(saved, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    monkeypatch.setattr(store_file, "BUSY_S", 5.0)
    begun = time.monotonic()
    assert store.read(text(1, 3)) == payloads(text(1, 3), N_BYTES)
    assert time.monotonic() - begun < 4
    monkeypatch.setattr(store_file, "BUSY_S", 0.05)
    with pytest.warns(RuntimeWarning, match="locked") as seen:
        assert write(store, text(3, 1)) == write(store, text(4, 1)) == 0
        with opened(saved) as another:
            assert another.read(text(1, 3)) == payloads(text(1, 3), N_BYTES)
    assert len(seen) == 1 and store.counters.failed_writes == 2
    other.execute("COMMIT")
    other.close()
    assert write(store, text(3, 1)) == 50
    store.close()


# ---- others at work ----


def test_two_processes_that_write_the_same_prefix_leave_one_of_each_block(memory_folder):
    """Twenty times, the file created by both as well."""
    report = in_child("together", memory_folder)
    assert report["warnings"] == []
    for each in report["result"]:
        assert each["blocks"] == 12 and sum(one["blocks_written"] for one in each["pair"]) == 12
        assert sum(one["n_bytes"] for one in each["pair"]) == 600
        assert all(one["read"] and one["failed_writes"] == 0 for one in each["pair"])
    assert len(report["result"]) == 20


@pytest.mark.parametrize("n_refusals", [2, 10**6])
def test_a_file_that_is_busy_when_it_is_opened_is_waited_for(path, monkeypatch, n_refusals):
    """One of a hundred openings of a new file by four processes at once met this; SQLite does not wait there."""
    create, calls = store_file._create, []

    def busy_at_first(*values) -> None:
        calls.append(1)
        if len(calls) <= n_refusals:
            error = sqlite3.OperationalError("database is locked")
            error.sqlite_errorcode = sqlite3.SQLITE_BUSY
            raise error
        create(*values)

    monkeypatch.setattr(store_file, "_create", busy_at_first)
    if n_refusals == 2:
        with opened(path) as store:
            assert write(store, text(1, 2)) == 100 and len(calls) == 3
    else:
        monkeypatch.setattr(store_file, "BUSY_S", 0.05)
        with pytest.warns(RuntimeWarning, match="nothing is found or saved from here on: database is locked"):
            assert write(opened(path), text(1, 2)) == 0


def test_a_block_that_another_process_saved_first_is_left_alone(path):
    ids, store, other = text(1, 3), opened(path), opened(path)

    def payload_of(start: int, end: int) -> bytes:
        write(other, ids[:end])
        return payload(ids[:end])

    assert store.write(ids, payload_of) == 0
    assert (store.counters.blocks_written, other.counters.blocks_written) == (0, 3)
    assert len(rows(path)) == 3 and store.read(ids) == payloads(ids)
    store.close()
    other.close()


def test_nothing_is_saved_behind_a_block_that_was_removed_meanwhile(path):
    ids, store = text(1, 4), opened(path)

    def payload_of(start: int, end: int) -> bytes:
        if start == 2 * BLOCK:
            change(path, "DELETE FROM blocks WHERE depth = 1")
        return payload(ids[:end])

    assert store.write(ids, payload_of) == 100
    assert len(rows(path)) == 1 and store.find(ids) == BLOCK
    assert store.counters.without_room == 1 and store.counters.failed_writes == 0
    assert write(store, ids) == 150
    store.close()


# ---- who may read the file ----


def test_the_file_and_its_log_are_private_from_the_first_moment(path, monkeypatch):
    """Also under a umask that forbids nothing; SQLite never meets a file that is not there."""
    connect, modes = sqlite3.connect, []

    def watched(*args, **kwargs) -> sqlite3.Connection:
        modes.append(mode(path))
        return connect(*args, **kwargs)

    monkeypatch.setattr(sqlite3, "connect", watched)
    before = os.umask(0)
    try:
        store = opened(path)
        write(store, text(1, 3))
        assert [mode(Path(f"{path}{suffix}")) for suffix in ("", "-wal", "-shm")] == [0o600] * 3
        assert modes == [0o600]
    finally:
        os.umask(before)
        store.close()


def test_a_file_that_others_could_read_is_closed_to_them(saved):
    log = Path(f"{saved}-wal")
    with opened(saved) as store:
        write(store, text(3, 1))
        shutil.copy(log, f"{log}.kept")
    shutil.move(f"{log}.kept", log)  # as after a kill
    for file in (saved, log):
        file.chmod(0o664)
    with opened(saved) as store:
        assert mode(saved) == mode(log) == 0o600
        assert store.find(text(3, 1)) == BLOCK


def test_a_file_that_stays_open_to_others_is_only_read(saved, monkeypatch):
    """One of another owner: his blocks are hits, but ours would be his to read."""
    saved.chmod(0o644)

    def refused(*args) -> None:
        raise PermissionError("not the owner")

    monkeypatch.setattr(Path, "chmod", refused)
    with opened(saved) as store:
        assert store.read(text(1, 3)) == payloads(text(1, 3), N_BYTES)
        with pytest.warns(RuntimeWarning, match=r"others may read .*store\.db, and its mode stays"):
            assert write(store, text(3, 1)) == 0
    assert len(rows(saved)) == 6


def test_a_folder_that_is_not_there_is_made(tmp_path):
    with opened(tmp_path / "a" / "b" / "store.db") as store:
        assert write(store, text(1, 2)) == 100


def test_a_path_may_hold_any_sign(tmp_path):
    """It goes to SQLite as a URI."""
    path = tmp_path / "a?mode=memory&b#c%20 é.db"
    with opened(path) as store:
        write(store, text(1, 2))
    assert len(rows(path)) == 2
