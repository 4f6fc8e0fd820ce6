"""The checks of lesson 00. What they expect is computed by the library, so it cannot go stale."""

from __future__ import annotations

from collections.abc import Callable

from tinyds41.config import Config
from tinyds41.cost.kv_bytes import kv_bytes
from tinyds41.course.exercises import judge

BUDGET = 45  # bytes per token of context, a little above what ratio 4 in the toy's encoder gives


def check_bytes(answer: float) -> None:
    """Exercise 1: bytes per token of flash, had its encoder one entry for four tokens."""

    def complaint(answer: float) -> str | None:
        flash = Config.preset("flash")
        ratios = [4 if ratio == 2 else ratio for ratio in flash.compress_ratios]
        expected = kv_bytes(flash.replace(compress_ratios=ratios)).bytes_per_token
        return None if answer == expected else f"{answer} is not what the encoded rows of such a model take"

    judge(answer, complaint)


def check_visible(answer: Callable[[int, int], int]) -> None:
    """Exercise 2: how many entries of ratio m the query at a position may see."""

    def complaint(answer: Callable[[int, int], int]) -> str | None:
        for ratio in (1, 2, 4):
            for position in range(12):
                # An entry is visible once the last token of its group is; that may be the query itself.
                expected = sum(last <= position for last in range(ratio - 1, 12, ratio))
                found = answer(position, ratio)
                if found != expected or isinstance(found, bool):
                    return f"position {position}, ratio {ratio}: {found} entries is wrong"
        return None

    judge(answer, complaint)


def check_cheaper(answer: Config) -> None:
    """Exercise 3: a toy within BUDGET, with other compress_ratios and nothing else changed."""

    def complaint(answer: Config) -> str | None:
        toy = Config.preset("toy")
        # The tokenizer at hand decides one size of the lesson's toy.
        same = {"compress_ratios": toy.compress_ratios,
                "engram_compressed_vocab_size": toy.engram_compressed_vocab_size}  # fmt: skip
        if answer.replace(**same) != toy:
            return "change compress_ratios alone: another field differs from the toy's"
        if any((mine == 0) != (theirs == 0) for mine, theirs in zip(answer.compress_ratios, toy.compress_ratios,
                                                                    strict=True)):  # fmt: skip
            return "a layer with entries became one without, or the other way round"
        found = kv_bytes(answer).bytes_per_token
        return None if found < BUDGET else f"{float(found):g} bytes per token, fewer than {BUDGET} are wanted"

    judge(answer, complaint)
