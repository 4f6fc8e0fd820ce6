"""Blocks on disk: what was saved is found, what is not this model's is refused, and nobody sees what is another's."""

from __future__ import annotations

import hashlib
import json
import random
import sqlite3
import struct
import sys
import threading

import pytest
from store_texts import BLOCK, MODEL, held, opened, payload, payloads, rows, text, write

from tinyds41.infer.store import Store
from tinyds41.infer.store_file import APPLICATION, VERSION


@pytest.fixture
def path(tmp_path):
    return tmp_path / "store.db"


# ---- keys ----


def test_a_key_is_the_hash_of_the_key_before_it_and_of_the_blocks_tokens(path):
    """Spelled out once, so that a change of the format cannot pass unseen: it needs another VERSION."""
    ids = [5, 0, 129_279, 7, 1, 2, 3, 2**40]
    key = hashlib.sha256(json.dumps([1, MODEL, 4, "me"]).encode()).digest()
    expected = []
    for block in (ids[:4], ids[4:]):
        key = hashlib.sha256(key + b"".join(struct.pack("<q", token) for token in block)).digest()
        expected.append(key)
    assert VERSION == 1
    assert opened(path).keys(ids, "me") == expected


@pytest.mark.parametrize("n", range(3 * BLOCK + 2))
def test_whole_blocks_alone_have_keys(path, n):
    ids = text(0, 4)
    assert opened(path).keys(ids[:n]) == opened(path).keys(ids)[: n // BLOCK]


def test_a_token_changes_the_keys_from_its_block_on(path):
    ids = text(0, 4)
    before = opened(path).keys(ids)
    for place in range(len(ids)):
        changed = [*ids[:place], ids[place] + 1, *ids[place + 1 :]]
        assert [a == b for a, b in zip(before, opened(path).keys(changed), strict=True)] == [
            block < place // BLOCK for block in range(4)]  # fmt: skip


def test_model_block_size_and_namespace_enter_every_key(tmp_path):
    """Also where one's end could be read as the other's beginning."""
    cases = [("a", 4, ""), ("b", 4, ""), ("a", 2, ""), ("a", 4, "b"), ("ab", 4, ""), ("", 4, "ab"), ("a", 4, "4b"),
             ("a4", 4, "b"), ("a", 44, "b"), ('a", 4, "b', 4, "")]  # fmt: skip
    ids, keys = text(0, 11), []
    for number, (model, tokens, namespace) in enumerate(cases):
        with Store(tmp_path / f"{number}.db", model, block_tokens=tokens) as store:
            keys += store.keys(ids, namespace)
    assert len(set(keys)) == len(keys) == 8 * 11 + 22 + 1


@pytest.mark.parametrize("token", [1.0, "1", None, 2**63])
def test_ids_that_cannot_be_hashed_are_refused(path, token):
    with pytest.raises(ValueError, match=r"ids 4\.\.7 cannot be hashed"):
        opened(path).keys([1, 2, 3, 4, 5, token, 7, 8])


# ---- saving and finding ----


@pytest.mark.parametrize("n", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 3 * BLOCK - 1, 3 * BLOCK + 2])
def test_what_was_saved_is_found_up_to_the_last_whole_block(path, n):
    ids, store = text(1, 5), opened(path)
    assert write(store, ids[:n]) == 50 * (n // BLOCK) == store.bytes_stored()
    for end in range(len(ids)):
        n_blocks = min(n, end) // BLOCK
        assert store.find(ids[:end]) == n_blocks * BLOCK
        assert store.read(ids[:end]) == payloads(ids[: n_blocks * BLOCK])
    assert store.find(text(2, 5)) == 0 and store.read(text(2, 5)) == []


def test_only_blocks_that_are_missing_are_asked_for(path):
    store, ids, asked = opened(path), text(1, 5), []

    def payload_of(start: int, end: int) -> bytes:
        asked.append((start, end))
        return payload(ids[:end])

    assert store.write(ids[: 2 * BLOCK + 1], payload_of) == 100
    assert asked == [(0, 4), (4, 8)]
    assert store.write(ids, payload_of) == 150
    assert asked[2:] == [(8, 12), (12, 16), (16, 20)]
    other = [*ids[: 3 * BLOCK], *text(2, 2)]
    assert store.write(other, lambda start, end: payload(other[:end])) == 100
    assert store.read(other) == payloads(other)
    assert store.write(ids, payload_of) == 0 and len(asked) == 5
    assert (store.counters.blocks_written, store.counters.bytes_written) == (7, 350)


def test_a_block_in_the_middle_is_saved_again(path):
    """Its successors are still right: they have the same keys."""
    store, ids = opened(path), text(1, 5)
    write(store, ids)
    with sqlite3.connect(path) as connection:
        connection.execute("DELETE FROM blocks WHERE key = ?", (store.keys(ids)[2],))
    connection.close()
    assert held(store, 1, 5) == 2
    assert write(store, ids) == 50
    assert held(store, 1, 5) == 5


def test_payloads_may_be_empty_or_large(path):
    store, ids = opened(path), text(1, 2)
    contents = {0: b"", 4: bytes(range(256)) * 4000}
    assert store.write(ids, lambda start, end: contents[start]) == 1_024_000
    store.close()
    assert opened(path).read(ids) == [*contents.values()]
    assert len(rows(path)) == 2


def test_a_file_opened_again_holds_what_was_saved(path):
    with opened(path) as store:
        write(store, text(1, 3))
    with opened(path) as store:
        assert held(store, 1, 3) == 3 and store.bytes_stored() == 150


def test_hits_and_misses_count_whole_blocks(path):
    store, ids = opened(path), text(1, 5, rest=3)
    write(store, ids[: 3 * BLOCK])
    store.find(ids)
    assert (store.counters.hits, store.counters.misses) == (0, 0)
    store.read(ids)
    store.read(text(2, 2))
    assert (store.counters.hits, store.counters.misses, store.counters.damaged) == (3, 2 + 2, 0)


def test_payloads_are_bytes(path):
    store, ids = opened(path), text(1, 2)
    with pytest.raises(TypeError, match="payload of block 1 has to be bytes, got str"):
        store.write(ids, lambda start, end: "text" if start else b"bytes")
    assert store.read(ids) == [b"bytes"]


def test_an_error_of_the_caller_passes_and_what_was_saved_stays(path):
    store, ids = opened(path), text(1, 3)

    def payload_of(start: int, end: int) -> bytes:
        if start == 8:
            raise LookupError("mine")
        return payload(ids[:end])

    with pytest.raises(LookupError, match="mine"):
        store.write(ids, payload_of)
    assert held(store, 1, 3) == 2 and len(rows(path)) == 2


@pytest.mark.parametrize("call", [
    lambda store: store.find([]), lambda store: store.read([1] * 4), lambda store: write(store, [1] * 4),
    lambda store: store.bytes_stored(),
])  # fmt: skip
def test_a_closed_store_says_so(path, call):
    store = opened(path)
    store.close()
    store.close()
    with pytest.raises(ValueError, match=r"store\.db is closed"):
        call(store)


# ---- refusals ----


@pytest.mark.parametrize("sizes", [
    {"block_tokens": 0}, {"block_tokens": -4}, {"budget_bytes": -1}, {"lifetime_s": 0}, {"lifetime_s": float("nan")},
])  # fmt: skip
def test_sizes_that_cannot_be_are_refused(path, sizes):
    [(name, value)] = sizes.items()
    with pytest.raises(ValueError, match=f"{name}={value}"):
        opened(path, **sizes)
    assert not path.exists()


def test_a_folder_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"is a folder: a store is a file"):
        Store(tmp_path, MODEL)


@pytest.mark.parametrize(("statement", "asked", "message"), [
    (None, {"model_key": "other weights"},
     "model_key='config and weights', asked for model_key='other weights'"),
    (None, {"block_tokens": 8}, "block_tokens='4', asked for block_tokens='8'"),
    (f"PRAGMA user_version = {VERSION + 1}", {}, f"version {VERSION + 1} of the store's format, this is version 1"),
    ("PRAGMA application_id = 7", {}, f"application 0x7, not {APPLICATION:#x}"),
    ("DELETE FROM identity WHERE name = 'model_key'", {}, f"model_key=None, asked for model_key='{MODEL}'"),
])  # fmt: skip
def test_a_file_of_another_model_size_version_or_program_is_refused_and_left(path, statement, asked, message):
    with opened(path) as store:
        write(store, text(1, 3))
    if statement:
        with sqlite3.connect(path) as connection:
            connection.execute(statement)
        connection.close()
    path.chmod(0o644)
    before = path.read_bytes()
    with pytest.raises(ValueError, match=message):
        opened(path, **asked)
    assert path.read_bytes() == before and path.stat().st_mode & 0o777 == 0o644


def test_a_database_of_another_program_is_refused_and_left(path):
    """It may not know application ids; nor is its journal changed."""
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE mine (x)")
    connection.close()
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r"store\.db is a database of application 0x0"):
        opened(path)
    assert path.read_bytes() == before


# ---- users apart ----


def test_a_namespace_finds_nothing_of_another(path):
    store, ids = opened(path), text(1, 3)
    write(store, ids, "alice")
    for namespace in ("", "bob", "alic", "alice ", "Alice"):
        assert store.find(ids, namespace) == 0 and store.read(ids, namespace) == []
    assert store.write(ids, lambda start, end: b"bob's", "bob") == 15  # all asked for, all saved
    assert store.read(ids, "alice") == payloads(ids) and store.read(ids, "bob") == [b"bob's"] * 3
    assert len(rows(path)) == 6


def test_a_guessed_prefix_takes_the_work_of_a_miss(path):
    """Counted in steps of SQLite's machine: what another namespace holds, and how much, changes none of them."""
    store, steps = opened(path), []
    write(store, text(1, 3), "alice")
    write(store, text(1, 6), "bob")
    assert store._blocks is not None
    store._blocks._connection.set_progress_handler(lambda: steps.append(1), 1)

    def work(number: int, namespace: str) -> list[int]:
        counts, ids = [], text(number, 3)
        for call in (store.find, store.read, lambda ids, namespace: write(store, ids, namespace), store.read):
            steps.clear()
            call(ids, namespace)
            counts.append(len(steps))
        return counts

    assert work(1, "alice") != work(1, "eve")  # a hit shows in the count
    assert work(1, "mallory") == work(2, "trudy") == work(3, "oscar")


# ---- threads ----


def test_threads_share_a_store(path):
    """Four write and read overlapping texts; a budget removes some of them meanwhile."""
    store, errors = opened(path, budget_bytes=1500), []
    trunk = text(0, 4)

    def work(seed: int) -> None:
        draw = random.Random(seed)
        try:
            for _ in range(40):
                ids = [*trunk, *text(draw.randrange(1, 8), 4)]
                write(store, ids)
                found = store.read(ids)
                assert found == payloads(ids)[: len(found)]
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert errors == []
    stored = rows(path)
    assert 0 < len(stored) <= 30 and store.counters.failed_writes == 0
    assert len(stored) == store.counters.blocks_written - store.counters.evicted_early
    assert store.counters.bytes_written == 50 * store.counters.blocks_written


def test_a_thread_waits_while_another_is_in_a_transaction(path):
    """One connection has one transaction: without the lock the second would land in the first, or break it."""
    store = opened(path)
    writer = threading.Thread(target=lambda: write(store, text(1, 2)), daemon=True)
    assert store._blocks is not None
    with store._blocks.transaction():
        writer.start()
        writer.join(0.1)
        assert writer.is_alive()
    writer.join(10)
    assert held(store, 1, 2) == 2 and store.counters.failed_writes == 0


def test_readers_go_on_while_a_payload_is_made(path):
    store, ids, found = opened(path), text(1, 2), []
    write(store, ids[:BLOCK])

    def payload_of(start: int, end: int) -> bytes:
        reader = threading.Thread(target=lambda: found.extend(store.read(ids)), daemon=True)
        reader.start()
        reader.join(10)
        assert not reader.is_alive()
        return payload(ids[:end])

    store.write(ids, payload_of)
    assert found == payloads(ids[:BLOCK])
