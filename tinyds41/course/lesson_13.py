"""The checks of lesson 13. What they expect is computed by the library's cost model and row counts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tinyds41.config import Config
from tinyds41.cost.flops import decode_cost
from tinyds41.cost.rows import attended_rows
from tinyds41.course.exercises import judge

CONTEXTS = (1, 2, 3, 127, 511, 513, 1_023, 1_025, 1_048_576)
FLATTER = 1.2  # exercise 3: largest growth from 4,096 tokens to a million, weighted
MAY_CHANGE = ("kv_source_layer_ids", "index_source_layer_ids")


def check_crossover(answer: int) -> None:
    """Exercise 1: the first context at which index scores are as much raw work as attention, in flash."""

    def complaint(answer: int) -> str | None:
        cost = decode_cost(Config.preset("flash"))

        def index_leads(context: int) -> bool:
            work = cost.at(context)
            return work.index_full + work.index_pool >= work.attention

        if not index_leads(answer):
            return f"at a context of {answer:,} attention is still more work than index scores"
        if index_leads(answer - 1):
            return f"at {answer:,} index scores are as much work, but so they are at {answer - 1:,}"
        return None

    judge(answer, complaint)


def check_attended(answer: Callable[[int], int]) -> None:
    """Exercise 2: rows that all layers of flash together attend to, for one token at a context."""

    def complaint(answer: Callable[[int], int]) -> str | None:
        flash = Config.preset("flash")
        for context in CONTEXTS:
            found = answer(context)
            if found != sum(attended_rows(flash, context).values()) or isinstance(found, bool):
                return f"context {context:,}: {found:,} rows is wrong"
        return None

    judge(answer, complaint)


def check_flatter(answer: Mapping[str, Any]) -> None:
    """Exercise 3: other sources for flash, with which its weighted work grows less than 1.2 times."""

    def complaint(answer: Mapping[str, Any]) -> str | None:
        if strangers := sorted(set(answer) - set(MAY_CHANGE)):
            return f"{', '.join(strangers)} has to stay as it is: change {' and '.join(MAY_CHANGE)} only"
        growth = decode_cost(Config.preset("flash", **answer)).growth(2**12, 2**20, "weighted")
        return None if growth < FLATTER else f"the work still grows {growth:.3f} times"

    judge(answer, complaint)
