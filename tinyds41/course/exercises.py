"""What every exercise shares: an open one is said to be open, a right one is praised, a wrong one raises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

OPEN = ...  # what stands in a cell before the student has answered


class WrongAnswer(AssertionError):
    """An answer that a check refuses.

    The message says what is wrong with it, not what would be right.
    """


def judge(answer: Any, complaint: Callable[[Any], str | None]) -> None:
    """Prints that an answer is right, or that there is none yet.

    complaint: says what is wrong with an answer, or None when nothing is.
    Raises: WrongAnswer for a wrong answer, also for one that makes the check itself fail.
    """
    if answer is OPEN:
        print("Not answered yet: replace the three dots.")
        return
    try:
        wrong = complaint(answer)
    except Exception as error:
        raise WrongAnswer(f"your answer cannot be used: {type(error).__name__}: {error}") from error
    if wrong is not None:
        raise WrongAnswer(wrong)
    print("Right.")


def refuses(check: Callable[[Any], None], answer: Any) -> bool:
    """Whether a check raises for this answer: how a lesson shows that its checks can fail."""
    try:
        check(answer)
    except WrongAnswer:
        return True
    return False
