"""Each check of lesson 10 accepts what is right and refuses the mistakes that readers make."""

import math
from collections import Counter
from itertools import pairwise

from exercise_checks import three_tests

from tinyds41.course.lesson_10 import check_bytes, check_opening, check_shared


def row_of(pair, multipliers, prime):
    before, now = pair
    return ((now * multipliers[0]) ^ (before * multipliers[1])) % prime


def shared(ids, multipliers, prime):
    rows = [row_of(pair, multipliers, prime) for pair in {*pairwise(ids)}]
    return sum(Counter(rows)[row] > 1 for row in rows)


def repeats_too(ids, multipliers, prime):
    rows = [row_of(pair, multipliers, prime) for pair in pairwise(ids)]
    return sum(Counter(rows)[row] > 1 for row in rows)


def rows_instead_of_pairs(ids, multipliers, prime):
    rows = [row_of(pair, multipliers, prime) for pair in {*pairwise(ids)}]
    return sum(count > 1 for count in Counter(rows).values())


def multipliers_swapped(ids, multipliers, prime):
    return shared(ids, multipliers[::-1], prime)


def opening(gate):
    root = math.log(gate / (1 - gate))
    return math.copysign(root**2, root)


RIGHT = [(check_bytes, 8_448), (check_shared, shared), (check_opening, opening)]
WRONG = [
    (check_bytes, 12_672, "12,672 bytes is wrong"),  # as released
    (check_bytes, 8_192, "is wrong"),  # without scales
    (check_bytes, 10_560, "is wrong"),  # order 1 counted
    (check_bytes, 4_224, "is wrong"),  # one layer
    (check_bytes, "8448", "cannot be used"),
    (check_shared, repeats_too, "is wrong"),
    (check_shared, rows_instead_of_pairs, "is wrong"),
    (check_shared, multipliers_swapped, "is wrong"),
    (check_shared, lambda ids, multipliers, prime: 0, "is wrong"),
    (check_opening, lambda gate: math.log(gate / (1 - gate)), "your t is"),  # not squared
    (check_opening, lambda gate: math.log(gate / (1 - gate)) ** 2, "for a gate of 0.05"),  # sign lost
    (check_opening, lambda gate: "wide", "cannot be used"),
]  # fmt: skip

(test_a_right_answer_is_accepted, test_an_open_exercise_is_neither_right_nor_wrong,
 test_a_wrong_answer_is_refused_with_a_reason) = three_tests(RIGHT, WRONG)  # fmt: skip
