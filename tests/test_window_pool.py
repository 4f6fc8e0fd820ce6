"""Windows in memory: kept for minutes, within a budget, least recently used first."""

from __future__ import annotations

import gc
import random
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import pytest
from store_texts import Clock

from tinyds41 import memory
from tinyds41.infer import window_pool
from tinyds41.infer.window_pool import WindowPool


def pool_of(budget: int, clock: Clock | None = None, lifetime: float = 60.0) -> WindowPool:
    return WindowPool(budget_bytes=budget, lifetime_s=lifetime, clock=clock or Clock())


def test_a_value_is_handed_out_as_it_was_put():
    pool, value = pool_of(100), [1, 2]
    pool.put(b"a", 40, value)
    assert pool.get(b"a") is value and pool.get(b"b") is None
    assert len(pool) == 1 and pool.bytes_held == 40
    assert (pool.counters.hits, pool.counters.misses) == (1, 1)


def test_a_value_takes_the_place_of_the_one_before():
    pool = pool_of(100)
    pool.put(b"a", 90, "old")
    pool.put(b"b", 10, "other")
    pool.put(b"a", 70, "new")  # with the old one it would not fit
    assert pool.get(b"a") == "new" and pool.get(b"b") == "other"
    assert pool.bytes_held == 80 and pool.counters.evicted_early == 0


def test_what_was_used_least_recently_goes_first():
    pool = pool_of(100)
    for key in (b"a", b"b", b"c"):
        pool.put(key, 30, key)
    pool.get(b"a")
    pool.put(b"b", 30, b"b")
    pool.put(b"d", 30, b"d")
    assert pool.get(b"c") is None
    pool.put(b"e", 60, b"e")
    assert [pool.get(key) for key in (b"a", b"b", b"d", b"e")] == [None, None, b"d", b"e"]
    assert pool.counters.evicted_early == 3 and pool.counters.expired == 0


def test_a_value_larger_than_the_budget_is_not_kept_and_drives_out_nothing():
    pool = pool_of(100)
    pool.put(b"a", 100, "all of it")
    pool.put(b"b", 101, "too large")
    assert pool.get(b"a") == "all of it" and pool.get(b"b") is None
    assert (pool.counters.too_large, pool.counters.evicted_early) == (1, 0)
    pool.put(b"a", 101, "a newer a")
    assert pool.get(b"a") is None and pool.bytes_held == 0  # the old one would be a wrong answer


def test_a_value_not_used_for_its_lifetime_is_gone_and_its_memory_free():
    class Value:
        pass

    clock = Clock()
    pool = pool_of(100, clock, lifetime=60)
    values = {key: Value() for key in (b"a", b"b", b"c")}
    memory_of = {key: weakref.ref(value) for key, value in values.items()}
    for key in (b"a", b"b", b"c"):
        pool.put(key, 10, values.pop(key))
    clock.now += 60
    assert pool.get(b"b") is not None and pool.bytes_held == 30
    clock.now += 1
    assert len(pool) == 1 and pool.bytes_held == 10 and pool.counters.expired == 2
    gc.collect()
    assert [memory_of[key]() is None for key in (b"a", b"b", b"c")] == [True, False, True]
    assert pool.get(b"a") is None
    clock.now += 61
    assert pool.bytes_held == 0
    pool.put(b"a", 10, "again")
    clock.now += 61
    assert pool.get(b"a") is None and pool.counters.expired == 4 and pool.counters.evicted_early == 0


@pytest.mark.parametrize("seed", range(3))
def test_random_use_follows_the_rules(seed):
    """Against a list in order of use."""
    draw, clock = random.Random(seed), Clock()
    pool, expected = pool_of(200, clock, lifetime=20), []  # (key, size, last use)
    for number in range(500):
        clock.now += draw.choice((0, 0, 1, 4))
        key, size = bytes([draw.randrange(12)]), draw.choice((0, 10, 50, 90, 201))
        expected = [held for held in expected if held[2] >= clock.now - 20]
        held = [each for each in expected if each[0] == key]
        if draw.random() < 0.5:
            value = pool.get(key)
            assert value == (held[0][3] if held else None)
            if held:
                expected.remove(held[0])
                expected.append((key, held[0][1], clock.now, value))
        else:
            pool.put(key, size, number)
            expected = [each for each in expected if each[0] != key]
            if size <= 200:
                while sum(each[1] for each in expected) + size > 200:
                    expected.pop(0)
                expected.append((key, size, clock.now, number))
        assert len(pool) == len(expected)
        assert pool.bytes_held == sum(each[1] for each in expected) <= 200
    counts = pool.counters
    assert min(counts.hits, counts.misses, counts.expired, counts.evicted_early, counts.too_large) > 10


def test_threads_share_a_pool():
    pool, errors = WindowPool(budget_bytes=500), []
    interval = sys.getswitchinterval()

    def work(seed: int) -> None:
        draw = random.Random(seed)
        try:
            for _ in range(2000):
                key = bytes([draw.randrange(30)])
                pool.put(key, 50, key)
                assert pool.get(bytes([draw.randrange(30)])) in (None, *(bytes([n]) for n in range(30)))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert errors == []
    assert pool.counters.hits + pool.counters.misses == 8000
    assert len(pool) == 10 and pool.bytes_held == 500


def test_a_thread_waits_while_another_uses_the_pool():
    """The clock is read in the middle of every call."""
    waited: list[bool] = []

    def clock() -> float:
        if threading.current_thread() is threading.main_thread() and not waited:
            other.start()
            other.join(0.1)
            waited.append(other.is_alive())
        return 0.0

    pool = WindowPool(budget_bytes=100, clock=clock)
    other = threading.Thread(target=lambda: pool.put(b"b", 10, "b"), daemon=True)
    pool.put(b"a", 10, "a")
    other.join(10)
    assert waited == [True]
    assert pool.get(b"a") == "a" and pool.get(b"b") == "b" and pool.bytes_held == 20


def test_the_default_is_a_tenth_of_the_memory_for_five_minutes(monkeypatch, tmp_path):
    """Of the machine's, or of the container's where that is less."""
    monkeypatch.setattr(memory, "CONTROL_GROUP", tmp_path)
    machine = memory.total_bytes()
    assert machine is not None and machine > 2**28
    pool = WindowPool()
    assert pool.budget_bytes == machine // 10 and pool.lifetime_s == 300
    (tmp_path / "memory.max").write_text("max\n")
    assert WindowPool().budget_bytes == machine // 10
    (tmp_path / "memory.max").write_text("123456789\n")
    assert WindowPool().budget_bytes == 12_345_678


def test_without_a_known_memory_a_budget_is_needed(monkeypatch):
    monkeypatch.setattr(window_pool, "total_bytes", lambda: None)
    with pytest.raises(ValueError, match="budget_bytes is needed"):
        WindowPool()


@pytest.mark.parametrize(("sizes", "message"), [
    ({"budget_bytes": -1}, "budget_bytes=-1"), ({"lifetime_s": 0}, "lifetime_s=0"),
    ({"lifetime_s": float("nan")}, "lifetime_s=nan"),
])  # fmt: skip
def test_sizes_that_cannot_be_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        WindowPool(**{"budget_bytes": 10} | sizes)


def test_a_negative_size_is_refused_and_changes_nothing():
    pool = pool_of(100)
    pool.put(b"a", 10, "a")
    with pytest.raises(ValueError, match="n_bytes=-1"):
        pool.put(b"a", -1, "b")
    assert pool.get(b"a") == "a" and pool.bytes_held == 10


def test_pool_and_store_start_without_torch():
    """A process that only serves or saves blocks is cheap."""
    code = ("import sys, tinyds41.infer.store, tinyds41.infer.window_pool as pool; pool.WindowPool(); "
            "sys.exit('torch' in sys.modules or 'pickle' in sys.modules)")  # fmt: skip
    root = Path(window_pool.__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0


def test_a_cleared_pool_holds_nothing_and_takes_new_values():
    pool = WindowPool(budget_bytes=10)
    pool.put(b"a", 10, "windows")
    pool.clear()
    assert (len(pool), pool.bytes_held, pool.get(b"a")) == (0, 0, None)
    pool.put(b"b", 10, "windows")
    assert pool.get(b"b") == "windows" and pool.counters.evicted_early == 0
