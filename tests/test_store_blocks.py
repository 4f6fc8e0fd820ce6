"""Which blocks stay: what was used lately, and a prefix longer than what continues it. The budget wins."""

from __future__ import annotations

import random
import sqlite3

import pytest
from store_texts import BLOCK, Clock, held, opened, rows, text, write

from tinyds41.infer import store_blocks
from tinyds41.infer.store import Store


@pytest.fixture
def path(tmp_path):
    return tmp_path / "store.db"


# ---- what goes first ----


def test_the_end_of_a_text_goes_before_its_beginning(path):
    """W7: a hit gets shorter block by block, it does not vanish; nothing stays that is not led to."""
    clock = Clock()
    store = opened(path, budget_bytes=400, clock=clock)
    write(store, text(1, 4))
    for number in range(2, 6):
        clock.now += 1
        write(store, text(number, 2))
        gone = max(0, 4 + 2 * (number - 1) - 8)
        assert store.find(text(1, 4)) == BLOCK * (4 - gone)
        assert store.counters.evicted_early == gone and len(rows(path)) == 2 + 2 * number - gone
    assert gone == 4 and held(store, 5, 2) == 2


@pytest.mark.parametrize("use", ["read", "write"])
def test_what_was_used_lately_stays(path, use):
    clock = Clock()
    store = opened(path, budget_bytes=300, clock=clock)
    for number in (1, 2, 3):
        write(store, text(number, 2))
        clock.now += 1
    if use == "read":
        store.read(text(1, 2))
    else:
        write(store, text(1, 2))
    clock.now += 1
    write(store, text(4, 2))
    assert [store.find(text(number, 2)) // BLOCK for number in (1, 2, 3, 4)] == [2, 0, 2, 2]


def test_looking_for_a_text_is_no_use_of_it(path):
    clock = Clock()
    store = opened(path, budget_bytes=100, clock=clock)
    for number in (1, 2):
        write(store, text(number, 1))
        clock.now += 1
    store.find(text(1, 1))
    write(store, text(3, 1))
    assert [store.find(text(number, 1)) for number in (1, 2, 3)] == [0, BLOCK, BLOCK]


def test_a_clock_that_is_set_back_leaves_no_block_without_its_prefix(path):
    """Both texts begin alike; the first was used later by the clock, earlier in truth."""
    clock, ids = Clock(1000.0), text(1, 4)
    store = opened(path, budget_bytes=300, clock=clock)
    write(store, ids)
    clock.now = 10.0
    store.read(ids[: 2 * BLOCK])
    write(store, text(2, 4))
    assert held(store, 1, 4) == 2 and held(store, 2, 4) == 4


def test_the_budget_wins_over_the_lifetime_and_says_so(path):
    """Never exceeded, though every block is young."""
    clock = Clock()
    store = opened(path, budget_bytes=175, clock=clock)
    for number in range(1, 20):
        write(store, text(number, 1 + number % 3), n_bytes=25 + number)
        clock.now += 1
        assert sum(map(len, rows(path).values())) == store.bytes_stored() <= 175
    assert store.counters.evicted_early == store.counters.blocks_written - len(rows(path)) > 20
    assert store.counters.expired == 0
    assert "BUDGET WINS" in str(Store.__doc__)


def test_a_text_larger_than_the_budget_keeps_its_beginning(path):
    """Its end drives out neither its own beginning nor, in vain, what others have."""
    clock = Clock()
    store = opened(path, budget_bytes=120, clock=clock)
    write(store, text(2, 1), n_bytes=20)
    clock.now += 1
    assert write(store, text(1, 4), n_bytes=50) == 100
    assert store.find(text(1, 4)) == 2 * BLOCK and store.find(text(2, 1)) == BLOCK
    assert (store.counters.without_room, store.counters.evicted_early) == (1, 0)
    assert write(store, text(3, 1), n_bytes=121) == 0
    assert len(rows(path)) == 3


def test_a_budget_of_nothing_saves_nothing(path):
    store = opened(path, budget_bytes=0)
    assert write(store, text(1, 2)) == 0 and store.bytes_stored() == 0
    assert store.counters.without_room == 1


def test_a_smaller_budget_is_kept_from_opening_on(path, monkeypatch):
    """In rounds; and a sum that was damaged is corrected."""
    monkeypatch.setattr(store_blocks, "ROUND", 2)
    clock = Clock()
    with opened(path, clock=clock) as store:
        for number in range(1, 6):
            write(store, text(number, 3))
            clock.now += 1
        assert store.bytes_stored() == 750
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE total SET bytes = 1")
    connection.close()
    store = opened(path, budget_bytes=349, clock=clock)
    assert store.bytes_stored() == 300 and store.counters.evicted_early == 9
    assert [held(store, number, 3) for number in range(1, 6)] == [0, 0, 0, 3, 3]
    assert len(rows(path)) == 6


def test_a_block_not_used_for_its_lifetime_is_gone(path):
    clock = Clock()
    store = opened(path, lifetime_s=100, clock=clock)
    write(store, text(1, 3))
    write(store, text(2, 3))
    clock.now += 100
    assert store.find(text(1, 3)) == 3 * BLOCK
    store.read(text(2, 2))  # its third block is not used
    clock.now += 1
    assert store.find(text(1, 3)) == 0 and store.read(text(1, 3)) == []
    assert store.find(text(2, 3)) == 2 * BLOCK
    assert len(rows(path)) == 6
    assert write(store, text(1, 3)) == 150  # saved anew, and what has expired is removed
    assert len(rows(path)) == 5 and store.find(text(2, 3)) == 2 * BLOCK
    assert (store.counters.expired, store.counters.evicted_early) == (4, 0)
    store.close()
    clock.now += 101
    assert opened(path, lifetime_s=100, clock=clock).counters.expired == 5 and rows(path) == {}


def test_many_blocks_expire_in_rounds(path):
    clock = Clock()
    store = opened(path, lifetime_s=1, clock=clock)
    write(store, text(1, 2 * store_blocks.ROUND + 3))
    clock.now += 2
    write(store, text(2, 1))
    assert store.counters.expired == 2 * store_blocks.ROUND + 3 and len(rows(path)) == 1


def test_the_place_of_removed_blocks_is_used_again(path):
    """Thirty times the budget goes through the file."""
    store = opened(path, budget_bytes=200_000)
    for number in range(60):
        write(store, text(number, 5), n_bytes=20_000)
    store.close()
    assert 200_000 <= path.stat().st_size < 1.3 * 200_000


# ---- against a model of the rules ----


class Rules:
    """The same rules over a plain dict: key to (last use, depth, bytes)."""

    def __init__(self, budget: int, lifetime: float):
        self.budget, self.lifetime = budget, lifetime
        self.blocks: dict[bytes, tuple[float, int, int]] = {}

    def hit(self, keys: list[bytes], now: float) -> list[bytes]:
        n = 0
        while n < len(keys) and keys[n] in self.blocks and self.blocks[keys[n]][0] >= now - self.lifetime:
            n += 1
        return keys[:n]

    def use(self, keys: list[bytes], now: float) -> None:
        for key in keys:
            if key in self.blocks:
                used, depth, size = self.blocks[key]
                self.blocks[key] = (max(used, now), depth, size)

    def write(self, keys: list[bytes], size: int, now: float) -> None:
        if not keys:
            return
        self.blocks = {key: block for key, block in self.blocks.items() if block[0] >= now - self.lifetime}
        self.use(keys, now)
        for depth, key in enumerate(keys):
            if key not in self.blocks:
                others = sorted((used, -deep, other) for other, (used, deep, _) in self.blocks.items()
                                if other not in keys[:depth])  # fmt: skip
                left = dict(self.blocks)
                while others and self.total(left) + size > self.budget:
                    del left[others.pop(0)[2]]
                if self.total(left) + size > self.budget:
                    return
                self.blocks = {**left, key: (now, depth, size)}

    @staticmethod
    def total(blocks: dict[bytes, tuple[float, int, int]]) -> int:
        return sum(size for _, _, size in blocks.values())


@pytest.mark.parametrize("seed", range(3))
def test_random_use_follows_the_rules(path, seed):
    """Texts that branch, reads and writes of any length, a clock that runs, stands and steps back, two openings.

    After every step: the blocks that the rules keep, none without its prefix, none beyond the budget.
    """
    draw, clock, rules = random.Random(seed), Clock(), Rules(budget=900, lifetime=40)
    sizes = {"budget_bytes": rules.budget, "lifetime_s": rules.lifetime, "clock": clock}
    stores = [opened(path, **sizes), opened(path, **sizes)]
    trunk = text(0, 3)
    texts = [[*trunk[: BLOCK * draw.randrange(4)], *text(number, draw.randrange(1, 6))] for number in range(1, 9)]
    parents = {key: before for ids in texts for keys in [stores[0].keys(ids)]
               for before, key in zip([None, *keys], keys, strict=False)}  # fmt: skip
    removed = 0
    for _ in range(200):
        store, ids = draw.choice(stores), draw.choice(texts)
        ids = ids[: draw.randrange(len(ids) + 1)]
        keys, size = store.keys(ids), draw.choice((30, 50, 120))
        before = set(rules.blocks)
        if draw.random() < 0.5:
            write(store, ids, n_bytes=size)
            rules.write(keys, size, clock.now)
        else:
            hit = rules.hit(keys, clock.now)
            assert store.find(ids) == len(hit) * BLOCK and len(store.read(ids)) == len(hit)
            rules.use(hit, clock.now)
        stored = rows(path)
        assert set(stored) == set(rules.blocks)
        assert sum(map(len, stored.values())) == rules.total(rules.blocks) <= rules.budget
        assert all(parents[key] is None or parents[key] in stored for key in stored)
        removed += len(before - set(stored))
        clock.now += draw.choice((0, 0, 1, 5, 30, -3))
    assert removed > 50
