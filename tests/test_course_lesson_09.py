"""Each check of lesson 09 accepts what is right and refuses the mistakes that readers make."""

from collections import Counter

from exercise_checks import three_tests

from tinyds41.course.lesson_09 import check_dropped, check_expert_bytes, check_moved

WEIGHTS = 40 * 6 * 3 * 5120 * 2304


def dropped(chosen, room):
    return sum(max(0, visits - room) for visits in Counter(expert for row in chosen for expert in row).values())


def tokens_that_lose_one(chosen, room):
    seen, lost = Counter(), 0
    for row in chosen:
        seen.update(row)
        lost += any(seen[expert] > room for expert in row)
    return lost


def full_experts(chosen, room):
    return sum(visits > room for visits in Counter(expert for row in chosen for expert in row).values())


def moved(bias, loads, rate):
    mean = sum(loads) / len(loads)
    return [b + rate * ((load < mean) - (load > mean)) for b, load in zip(bias, loads, strict=True)]


def by_the_distance(bias, loads, rate):
    mean = sum(loads) / len(loads)
    return [b + rate * (mean - load) for b, load in zip(bias, loads, strict=True)]


def the_other_way(bias, loads, rate):
    return moved(bias, loads, -rate)


def without_rest(bias, loads, rate):
    mean = sum(loads) / len(loads)
    return [b + (rate if load < mean else -rate) for b, load in zip(bias, loads, strict=True)]


RIGHT = [(check_expert_bytes, WEIGHTS * 17 // 32), (check_dropped, dropped), (check_moved, moved)]
WRONG = [
    (check_expert_bytes, WEIGHTS // 2, "bytes is wrong"),
    (check_expert_bytes, WEIGHTS * 2, "bytes is wrong"),
    (check_expert_bytes, WEIGHTS * 17 // 32 // 6 * 7, "bytes is wrong"),
    (check_expert_bytes, None, "cannot be used: TypeError"),
    (check_dropped, tokens_that_lose_one, "is wrong"),
    (check_dropped, full_experts, "is wrong"),
    (check_dropped, lambda chosen, room: max(0, sum(map(len, chosen)) - room), "is wrong"),
    (check_moved, by_the_distance, "is wrong"),
    (check_moved, the_other_way, "is wrong"),
    (check_moved, without_rest, "is wrong"),
    (check_moved, lambda bias, loads, rate: bias[:-1], "is wrong"),
]  # fmt: skip

(test_a_right_answer_is_accepted, test_an_open_exercise_is_neither_right_nor_wrong,
 test_a_wrong_answer_is_refused_with_a_reason) = three_tests(RIGHT, WRONG)  # fmt: skip
