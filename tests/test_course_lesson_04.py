"""Each check of lesson 04 accepts what is right and refuses the mistakes that readers make."""

from exercise_checks import three_tests

from tinyds41.course.lesson_04 import check_follows, check_own_choice, check_rows

SOURCES = (2, 8, 14, 20, 24, 28, 32, 36)


def follows(layer):
    return max((source for source in SOURCES if source <= layer), default=None)


def rows(layer, context):
    return {2: context // 2, 8: context // 2, 14: context // 2, 20: context}.get(layer, 0)


def own(context):
    return 18 * (context // 2) + 20 * context


RIGHT = [(check_follows, follows), (check_rows, rows), (check_own_choice, own)]
WRONG = [
    (check_follows, lambda layer: max((s for s in SOURCES if s < layer), default=None), "layer 2: None is wrong"),
    (check_follows, lambda layer: max((s for s in (2, 8, 14, 20) if s <= layer), default=None), "layer 24: 20 is"),
    (check_follows, lambda layer: max((s for s in SOURCES if s <= layer), default=0), "layer 0: 0 is wrong"),
    (check_rows, lambda layer, n: n // 2 if layer in SOURCES else 0, "layer 20, context 1: 0 entries is wrong"),
    (check_rows, lambda layer, n: -(-n // 2) if layer in (2, 8, 14) else n * (layer == 20), "layer 2, context 1: 1 "),
    (check_rows, lambda layer, n: rows(layer, n) if layer != 24 else n, "layer 24, context 1: 1 entries is wrong"),
    (check_own_choice, lambda n: 29 * n, "context 1: 29 rows is wrong"),
    (check_own_choice, lambda n: 38 * n, "context 1: 38 rows is wrong"),
    (check_own_choice, lambda n: 18 * (n // 2) + 16 * n + 4 * min(n, 16_384), "is wrong"),
]  # fmt: skip

(test_a_right_answer_is_accepted, test_an_open_exercise_is_neither_right_nor_wrong,
 test_a_wrong_answer_is_refused_with_a_reason) = three_tests(RIGHT, WRONG)  # fmt: skip
