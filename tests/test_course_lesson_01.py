"""Each check of lesson 01 accepts what is right and refuses the mistakes that readers make."""

from exercise_checks import three_tests

from tinyds41.course.lesson_01 import check_fit, check_runs, check_take_back


def runs(prompt, new):
    return sum(range(prompt, prompt + new)), prompt + new - 1


def fit(memory, tokens):
    return memory // (356 * (3 * (tokens // 2) + tokens) + 40 * 528 * min(tokens, 128))


def take_back(cache, n):
    return [kept[: len(kept) - n] for kept in cache]


def take_back_in_place(cache, n):
    for kept in cache:
        del kept[len(kept) - n :]
    return cache


RIGHT = [(check_runs, runs), (check_fit, fit), (check_take_back, take_back)]
WRONG = [
    (check_runs, lambda p, n: (n * p + n * (n + 1) // 2, p + n - 1), r"a prompt of 1 tokens and 1 new: \(2, 1\) is"),
    (check_runs, lambda p, n: (n * p + n * (n - 1) // 2, p + n), r"\(1, 2\) is wrong"),
    (check_runs, lambda p, n: (n * p, p + n - 1), "a prompt of 1 tokens and 4 new"),
    (check_runs, lambda p, n: p + n - 1, "1 is wrong"),
    (check_fit, lambda memory, n: memory // (890 * n), "conversations of 131,072 tokens"),
    (check_fit, lambda memory, n: int(memory // (890 * n + 40 * 528 * min(n, 128))), "of 1 tokens"),
    (check_fit, lambda memory, n: memory // (356 * (3 * (n // 2) + n) + 40 * 528 * 128), "of 1 tokens"),
    (check_fit, lambda memory, n: memory / (356 * (3 * (n // 2) + n) + 40 * 528 * min(n, 128)), "is wrong"),
    (check_take_back, lambda cache, n: [kept[:-n] for kept in cache], "of 5 tokens 0 taken back: what is left"),
    (check_take_back, lambda cache, n: cache[: len(cache) - n], "of 5 tokens 1 taken back: what is left"),
    (check_take_back, lambda cache, n: [kept[n:] for kept in cache], "of 5 tokens 1 taken back: what is left"),
    (check_take_back, take_back_in_place, "of 5 tokens 1 taken back: the cache that was given changes"),
    (check_take_back, lambda cache, n: take_back(cache, n) if n else cache, "of 5 tokens 0 taken back: the cache"),
]  # fmt: skip

(test_a_right_answer_is_accepted, test_an_open_exercise_is_neither_right_nor_wrong,
 test_a_wrong_answer_is_refused_with_a_reason) = three_tests(RIGHT, WRONG)  # fmt: skip
