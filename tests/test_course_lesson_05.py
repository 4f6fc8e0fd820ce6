"""Each check of lesson 05 accepts what is right and refuses the mistakes that readers make."""

import math

from exercise_checks import three_tests

from tinyds41.course.lesson_05 import check_binds, check_pool, check_scored


def by_sum(scores, size, n_blocks):
    sums = [sum(scores[start : start + size]) for start in range(0, len(scores), size)]
    sums[-1] = math.inf
    return sorted(sorted(range(len(sums)), key=lambda block: (-sums[block], block))[:n_blocks])


def without_newest(scores, size, n_blocks):
    sums = [sum(scores[start : start + size]) for start in range(0, len(scores), size)]
    return sorted(sorted(range(len(sums)), key=lambda block: (-sums[block], block))[:n_blocks])


def ties_to_the_newer(scores, size, n_blocks):
    sums = [sum(scores[start : start + size]) for start in range(0, len(scores), size)]
    sums[-1] = math.inf
    return sorted(sorted(range(len(sums)), key=lambda block: (sums[block], block))[-n_blocks:])


def by_the_best(scores, size, n_blocks):
    best = [max(scores[start : start + size]) for start in range(0, len(scores), size)]
    best[-1] = math.inf
    return sorted(sorted(range(len(best)), key=lambda block: (-best[block], block))[:n_blocks])


def scored(context):
    return 3 * (context // 2) + context + 4 * 8 * min(2048, -(-context // 8))


RIGHT = [(check_binds, 14_400), (check_pool, by_sum), (check_scored, scored)]
WRONG = [
    (check_binds, 900, "but so it does at 901"),
    (check_binds, 16_384, "the pool leaves entries out"),
    (check_binds, 0, "cannot be used: ValueError: context=0"),
    (check_pool, without_newest, "is wrong"),
    (check_pool, ties_to_the_newer, "is wrong"),
    (check_pool, by_the_best, "is wrong"),
    (check_pool, lambda scores, size, n: list(reversed(by_sum(scores, size, n))), "is wrong"),
    (check_pool, lambda scores, size, n: set(by_sum(scores, size, n)), "is wrong"),
    (check_scored, lambda n: 3 * n // 2 + n + 4 * min(n, 16_384), "context 1: "),
    (check_scored, lambda n: 8 * n, "context 1: 8 rows is wrong"),
    (check_scored, lambda n: 3 * (n // 2) + n + min(n, 16_384), "is wrong"),
]  # fmt: skip

(test_a_right_answer_is_accepted, test_an_open_exercise_is_neither_right_nor_wrong,
 test_a_wrong_answer_is_refused_with_a_reason) = three_tests(RIGHT, WRONG)  # fmt: skip
