"""The checks of lesson 04. What they expect is the library's own plan, rows and index work."""

from __future__ import annotations

from collections.abc import Callable

from tinyds41.config import Config
from tinyds41.cost.rows import scored_entries
from tinyds41.course.exercises import judge

CONTEXTS = (1, 2, 3, 1_000, 4_095, 1_048_576)


def check_follows(answer: Callable[[int], int | None]) -> None:
    """Exercise 1: whose choice each layer of flash follows, None for a layer with a window only."""

    def complaint(answer: Callable[[int], int | None]) -> str | None:
        for layer in Config.preset("flash").plan():
            found = answer(layer.layer)
            if found != layer.index_source or isinstance(found, bool):
                return f"layer {layer.layer}: {found} is wrong"
        return None

    judge(answer, complaint)


def check_rows(answer: Callable[[int, int], int]) -> None:
    """Exercise 2: how many entries a layer of flash has written after so many tokens."""

    def complaint(answer: Callable[[int, int], int]) -> str | None:
        for layer in Config.preset("flash").plan():
            for context in CONTEXTS:
                expected = context // layer.ratio if layer.writes_globals else 0
                found = answer(layer.layer, context)
                if found != expected or isinstance(found, bool):
                    return f"layer {layer.layer}, context {context:,}: {found} entries is wrong"
        return None

    judge(answer, complaint)


def check_own_choice(answer: Callable[[int], int]) -> None:
    """Exercise 3: index rows scored for a token, if every layer of flash that reads entries chose freely itself."""

    def complaint(answer: Callable[[int], int]) -> str | None:
        flash = Config.preset("flash")
        readers = [layer.layer for layer in flash.plan() if layer.ratio]
        free = flash.replace(index_source_layer_ids=readers, candidate_source_layer_id=None, candidate_topk_blocks=0)
        for context in CONTEXTS:
            expected = sum(sum(rows.values()) for rows in scored_entries(free, context))
            found = answer(context)
            if found != expected or isinstance(found, bool):
                return f"context {context:,}: {found:,} rows is wrong"
        return None

    judge(answer, complaint)
