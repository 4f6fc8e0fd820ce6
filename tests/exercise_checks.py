"""What the checks of every lesson keep: right answers pass, open ones are told apart, wrong ones are told why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tinyds41.course.exercises import OPEN, WrongAnswer, refuses

Check = Callable[[Any], None]


def three_tests(right: Sequence[tuple[Check, Any]], wrong: Sequence[tuple[Check, Any, str]]) -> tuple[Callable, ...]:
    """Three tests for one lesson: of right answers, of open exercises, of wrong answers and what is said of them.

    right: check and answer; every check of the lesson has one. wrong: check, answer and a pattern of the message.
    """
    checks = list(dict.fromkeys(check for check, _ in right))
    assert {check for check, *_ in wrong} == set(checks), "every check needs a right and a wrong answer"

    @pytest.mark.parametrize(("check", "answer"), right)
    def accepts(check, answer, capsys):
        check(answer)
        assert capsys.readouterr().out == "Right.\n"
        assert not refuses(check, answer)

    @pytest.mark.parametrize("check", checks)
    def leaves_open(check, capsys):
        check(OPEN)
        assert capsys.readouterr().out == "Not answered yet: replace the three dots.\n"

    @pytest.mark.parametrize(("check", "answer", "message"), wrong)
    def tells_why(check, answer, message):
        with pytest.raises(WrongAnswer, match=message):
            check(answer)
        assert refuses(check, answer)

    return accepts, leaves_open, tells_why
