"""Each check of lesson 08 accepts what is right and refuses the mistakes that readers make."""

import math

import torch
from exercise_checks import three_tests

from tinyds41.course.lesson_08 import check_balanced, check_inputs, check_moved_bytes

MOVED = 80 * 18 * 5120 * 2


def rows_of(matrix):
    return [[value / sum(row) for value in row] for row in matrix]


def transposed(matrix):
    return [list(column) for column in zip(*matrix, strict=True)]


def columns_of(matrix):
    return transposed(rows_of(transposed(matrix)))


def exponentials(logits):
    return [[math.exp(value) for value in row] for row in logits]


def balanced(logits, rounds):
    matrix = exponentials(logits)
    for _ in range(rounds):
        matrix = columns_of(rows_of(matrix))
    return matrix


def one_round_more(logits, rounds):
    return balanced(logits, rounds + 1)


def columns_first(logits, rounds):
    return transposed(balanced(transposed(logits), rounds))


def rows_alone(logits, rounds):
    return rows_of(exponentials(logits))


def without_exponential(logits, rounds):
    return columns_of(rows_of([[abs(value) for value in row] for row in logits]))


def inputs(streams, pres):
    first = torch.eye(streams.shape[1])[:1].double()
    return torch.einsum("kn,knd->kd", torch.cat([first, pres]), streams)


def with_its_own(streams, pres):
    return torch.einsum("kn,knd->kd", torch.cat([pres, pres[-1:]]), streams)


def an_even_start(streams, pres):
    even = torch.full((1, streams.shape[1]), 1 / streams.shape[1]).double()
    return torch.einsum("kn,knd->kd", torch.cat([even, pres]), streams)


def of_old_streams(streams, pres):
    """The mix of the sub-layer before, on the streams before it as well."""
    return torch.cat([streams[:1, 0], torch.einsum("kn,knd->kd", pres, streams[:-1])])


RIGHT = [(check_moved_bytes, MOVED), (check_balanced, balanced), (check_inputs, inputs)]
WRONG = [
    (check_moved_bytes, 40 * 18 * 5120 * 2, "bytes is wrong"),
    (check_moved_bytes, 80 * 18 * 5120, "bytes is wrong"),
    (check_moved_bytes, 80 * 10 * 5120 * 2, "bytes is wrong"),
    (check_moved_bytes, 80 * 36 * 5120 * 2, "bytes is wrong"),
    (check_moved_bytes, None, "cannot be used: TypeError"),
    (check_balanced, one_round_more, "is wrong"),
    (check_balanced, columns_first, "is wrong"),
    (check_balanced, rows_alone, "is wrong"),
    (check_balanced, without_exponential, "is wrong"),
    (check_balanced, lambda logits, rounds: balanced(logits, 20), "is wrong"),
    (check_balanced, lambda logits, rounds: balanced(logits, rounds)[:-1], "cannot be used|is wrong"),
    (check_inputs, with_its_own, r"at \[0\] is wrong"),
    (check_inputs, an_even_start, r"at \[0\] is wrong"),
    (check_inputs, of_old_streams, r"at \[1\] is wrong"),
    (check_inputs, lambda streams, pres: inputs(streams, pres)[:-1], r"shape \[1, 3\], expected \[2, 3\]"),
]  # fmt: skip

(test_a_right_answer_is_accepted, test_an_open_exercise_is_neither_right_nor_wrong,
 test_a_wrong_answer_is_refused_with_a_reason) = three_tests(RIGHT, WRONG)  # fmt: skip
