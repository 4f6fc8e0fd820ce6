"""Each check of lesson 00 accepts what is right and refuses the mistakes that readers make."""

import pytest
from exercise_checks import three_tests

from tinyds41.config import Config
from tinyds41.course.exercises import WrongAnswer, judge
from tinyds41.course.lesson_00 import BUDGET, check_bytes, check_cheaper, check_visible

TOY = Config.preset("toy")


def ratios(encoder, decoder=1):
    return TOY.replace(compress_ratios=[0, 0, *[encoder] * 2, *[decoder] * 4, 0, 0, 0])


RIGHT = [
    (check_bytes, 623), (check_bytes, (3 / 4 + 1) * 356), (check_visible, lambda position, m: (position + 1) // m),
    (check_cheaper, ratios(4)), (check_cheaper, ratios(8)),
    (check_cheaper, ratios(4).replace(engram_compressed_vocab_size=783)),
]  # fmt: skip
WRONG = [
    (check_bytes, 890, "890 is not what"),
    (check_bytes, 445, "445 is not what"),
    (check_bytes, None, "None is not what"),
    (check_visible, lambda position, m: position // m, "position 0, ratio 1: 0 entries is wrong"),
    (check_visible, lambda position, m: -(-(position + 1) // m), "position 0, ratio 2: 1 entries is wrong"),
    (check_visible, lambda position, m: (position + 1) / m, "position 0, ratio 2: 0.5 entries is wrong"),
    (check_visible, 3, "cannot be used: TypeError"),
    (check_cheaper, TOY, f"52.5 bytes per token, fewer than {BUDGET} are wanted"),
    (check_cheaper, ratios(3), "46.6667 bytes per token"),
    (check_cheaper, ratios(4).replace(sliding_window=8), "another field differs"),
    (check_cheaper, TOY.replace(compress_ratios=[0, 0, 2, 2, 1, 1, 1, 0, 0, 0, 0]), "became one without"),
    (check_cheaper, 44, "cannot be used: AttributeError"),
]  # fmt: skip

(test_a_right_answer_is_accepted, test_an_open_exercise_is_neither_right_nor_wrong,
 test_a_wrong_answer_is_refused_with_a_reason) = three_tests(RIGHT, WRONG)  # fmt: skip


def test_a_check_that_complains_of_nothing_accepts():
    judge(1, lambda answer: None)
    with pytest.raises(WrongAnswer, match="no"):
        judge(1, lambda answer: "no")
