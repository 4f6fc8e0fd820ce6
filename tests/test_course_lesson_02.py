"""Each check of lesson 02 accepts what is right and refuses the mistakes that readers make."""

import math

import pytest
from exercise_checks import three_tests

from tinyds41.course.lesson_02 import check_border, check_bytes, check_sink, reach
from tinyds41.train.note import Note, note_config
from tinyds41.train.tasks import needle_config

TASK = Note()


def share_of_sink(scores, sink):
    top = max([sink, *scores])
    return math.exp(sink - top) / (math.exp(sink - top) + sum(math.exp(score - top) for score in scores))


def without_the_sink_below(scores, sink):
    return math.exp(sink) / sum(math.exp(score) for score in scores) if scores else 1.0


def overflows(scores, sink):
    return math.exp(sink) / (math.exp(sink) + sum(math.exp(score) for score in scores))


def held(n):
    return 40 * 528 * min(n, 128)


RIGHT = [
    (check_border, note_config(TASK, layers=6, sliding_window=6)),
    (check_border, note_config(TASK, layers=10, sliding_window=4)), (check_bytes, held), (check_sink, share_of_sink),
]  # fmt: skip
WRONG = [
    (check_border, note_config(TASK, layers=6, sliding_window=5), "up to distance 24"),
    (check_border, note_config(TASK, layers=5, sliding_window=6), "up to distance 25"),
    (check_border, note_config(TASK, layers=3, sliding_window=11), "3 layers are fewer than five"),
    (check_border, needle_config(TASK), "some layer sees more than its window"),
    (check_border, 30, "cannot be used: AttributeError"),
    (check_bytes, lambda n: 40 * 528 * 128, "after 1 tokens: 2,703,360 bytes is wrong"),
    (check_bytes, lambda n: 528 * min(n, 128), "after 1 tokens: 528 bytes is wrong"),
    (check_bytes, lambda n: 40 * 528 * n, "after 129 tokens"),
    (check_bytes, lambda n: 40 * 528 * min(n, 127), "after 128 tokens"),
    (check_sink, without_the_sink_below, "is wrong"),
    (check_sink, overflows, "cannot be used: OverflowError"),
    (check_sink, lambda scores, sink: 1 - share_of_sink(scores, sink), "is wrong"),
    (check_sink, lambda scores, sink: share_of_sink(scores, 0.0), "is wrong"),
]  # fmt: skip

(test_a_right_answer_is_accepted, test_an_open_exercise_is_neither_right_nor_wrong,
 test_a_wrong_answer_is_refused_with_a_reason) = three_tests(RIGHT, WRONG)  # fmt: skip


@pytest.mark.parametrize(("layers", "window"), [(1, 4), (4, 1), (3, 5)])
def test_layers_of_windows_reach_exactly_as_far_as_their_steps_add_up(layers, window):
    assert reach(note_config(TASK, layers=layers, sliding_window=window)) == layers * (window - 1)
