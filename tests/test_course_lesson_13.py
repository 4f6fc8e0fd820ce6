"""Each check of lesson 13 accepts what is right and refuses the mistakes that readers make."""

from exercise_checks import three_tests

from tinyds41.course.lesson_13 import check_attended, check_crossover, check_flatter

TWO_FULL = {"kv_source_layer_ids": [2, 20], "index_source_layer_ids": [2, 20, 24, 28, 32, 36]}
THREE_FULL = {"kv_source_layer_ids": [2, 8, 20], "index_source_layer_ids": [2, 8, 20, 24, 28, 32, 36]}


def attended(n):
    return 40 * min(n, 128) + 18 * min(n // 2, 512) + 20 * min(n, 512)


# By hand: (24,576 rows attended to x 16 - 65,536 pooled) / 2.5 scanned rows per token.
RIGHT = [
    (check_crossover, 131_072), (check_attended, attended), (check_flatter, TWO_FULL)]  # fmt: skip
WRONG = [
    (check_crossover, 131_073, "but so they are at 131,072"),
    (check_crossover, 131_071, "attention is still more work"),
    (check_crossover, 157_287, "but so they are at"),  # the pool forgotten
    (check_crossover, 0, "cannot be used: ValueError: context=0"),
    (check_attended, lambda n: 38 * 640 + 2 * 128, "context 1: "),
    (check_attended, lambda n: 40 * min(n, 128) + 38 * min(n, 512), "is wrong"),  # an entry per token everywhere
    (check_attended, lambda n: 40 * min(n, 128) + 19 * min(n // 2, 512) + 19 * min(n, 512), "is wrong"),
    (check_attended, lambda n: 40 * 128 + 18 * min(n // 2, 512) + 20 * min(n, 512), "context 1: "),
    (check_flatter, {}, "the work still grows 1.281 times"),
    (check_flatter, THREE_FULL, "the work still grows 1.226 times"),
    (check_flatter, {"compress_ratios": [0] * 40}, "compress_ratios has to stay as it is"),
    (check_flatter, {"max_position_embeddings": 4096}, "max_position_embeddings has to stay as it is"),
    (check_flatter, {"kv_source_layer_ids": [2, 24]}, "cannot be used: ValueError"),
]  # fmt: skip

(test_a_right_answer_is_accepted, test_an_open_exercise_is_neither_right_nor_wrong,
 test_a_wrong_answer_is_refused_with_a_reason) = three_tests(RIGHT, WRONG)  # fmt: skip
