"""The checks of lesson 01. What they expect is counted by a running session and by the library's cost model."""

from __future__ import annotations

from collections.abc import Callable

from tinyds41.config import Config
from tinyds41.cost.kv_bytes import kv_bytes
from tinyds41.course.exercises import judge
from tinyds41.infer.session import Session
from tinyds41.model.transformer import Model

TEXTS = ((1, 1), (5, 1), (1, 4), (7, 3))  # exercise 1: tokens of the prompt, new tokens
ROOMS = ((64 * 10**9, 131_072), (64 * 10**9, 100_001), (10**9, 1), (10**9, 127), (10**8, 4_095), (10**6, 4_096))

Row = tuple[int, int]


def check_runs(answer: Callable[[int, int], tuple[int, int]]) -> None:
    """Exercise 1: tokens that a layer runs on in all, to write n tokens after a prompt: without a cache, with it."""

    def complaint(answer: Callable[[int, int], tuple[int, int]]) -> str | None:
        model = Model(Config.preset("nano"))
        for prompt, new in TEXTS:
            expected = (_runs(model, prompt, new, cached=False), _runs(model, prompt, new, cached=True))
            found = answer(prompt, new)
            if not isinstance(found, tuple) or found != expected:
                return f"a prompt of {prompt} tokens and {new} new: {found} is wrong"
        return None

    judge(answer, complaint)


def _runs(model: Model, prompt: int, new: int, *, cached: bool) -> int:
    """Counted while it runs; which tokens are written makes no difference to the count."""
    ids, session, total = [1] * prompt, Session(model), 0
    for i in range(new):
        if cached and i:
            session.decode(ids[-1])
        else:
            session = Session(model)
            session.prefill(ids, mode="full")
        total += session.counters.tokens_run[0]
        ids.append(1)
    return total


def check_fit(answer: Callable[[int, int], int]) -> None:
    """Exercise 2: how many conversations of flash, windows included, fit into so many bytes."""

    def complaint(answer: Callable[[int, int], int]) -> str | None:
        cache = kv_bytes(Config.preset("flash"))
        for memory, tokens in ROOMS:
            if answer(memory, tokens) != memory // cache.bytes_at(tokens):
                return f"{memory:,} bytes, conversations of {tokens:,} tokens: {answer(memory, tokens)} is wrong"
        return None

    judge(answer, complaint)


def check_take_back(answer: Callable[[list[list[Row]], int], list[list[Row]]]) -> None:
    """Exercise 3: a naive cache without its last n tokens, as a new one that shares no list with the first."""

    def complaint(answer: Callable[[list[list[Row]], int], list[list[Row]]]) -> str | None:
        for taken in (1, 2, 0, 5):
            cache = _cache(5)
            found = answer(cache, taken)
            if found != _cache(5 - taken):
                return f"of 5 tokens {taken} taken back: what is left is wrong"
            for rows in found:
                rows.append((-1, -1))
            if cache != _cache(5):
                return f"of 5 tokens {taken} taken back: the cache that was given changes with the new one"
        return None

    judge(answer, complaint)


def _cache(tokens: int) -> list[list[Row]]:
    """Three layers, a key and a value per token."""
    return [[(100 * layer + token, 10_000 + 100 * layer + token) for token in range(tokens)] for layer in range(3)]
