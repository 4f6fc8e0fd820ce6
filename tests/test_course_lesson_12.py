"""Each check of lesson 12 accepts what is right and refuses the mistakes that readers make."""

import math

import pytest
import torch
from exercise_checks import three_tests

from tinyds41.course.lesson_12 import check_by_heads, check_cubic, check_saved_bytes, update_rms
from tinyds41.train.muon import orthogonal

TABLES = 1_323_827_200 + 196_613_849_600  # embedding and head; Engram's


def one(matrix):
    return orthogonal(matrix[None])[0]


def by_heads(gradient, n_heads):
    return torch.cat([0.18 * math.sqrt(max(part.shape)) * one(part) for part in gradient.chunk(n_heads)])


def together(gradient, n_heads):
    return 0.18 * math.sqrt(max(gradient.shape)) * one(gradient)


def scale_of_all(gradient, n_heads):
    return torch.cat([0.18 * math.sqrt(max(gradient.shape)) * one(part) for part in gradient.chunk(n_heads)])


def by_columns(gradient, n_heads):
    parts = gradient.tensor_split(n_heads, dim=1)
    return torch.cat([0.18 * math.sqrt(max(part.shape)) * one(part) for part in parts], dim=1)


RIGHT = [(check_saved_bytes, 4 * TABLES), (check_by_heads, by_heads), (check_cubic, (1.5, -0.5))]
WRONG = [
    (check_saved_bytes, 8 * TABLES, "bytes is wrong"),
    (check_saved_bytes, 4 * 196_613_849_600, "bytes is wrong"),
    (check_by_heads, together, "12 x 5, 3 heads: an update whose heads have"),
    (check_by_heads, scale_of_all, r"3 heads: an update whose heads have the root mean squares \["),
    (check_by_heads, by_columns, "is wrong"),
    (check_by_heads, lambda gradient, n: by_heads(gradient, n) / 0.18, r"6 x 4, 1 heads"),
    (check_by_heads, lambda gradient, n: torch.stack([one(p) for p in gradient.chunk(n)]), "shape .* is wrong"),
    (check_cubic, (2.0, -1.0), "after 60 steps"),
    (check_cubic, (1.0, 0.0), "after 60 steps 0.01 has become 0.01"),
    (check_cubic, (1.4, -0.4), "it comes to 1, but slowly: 0.9 becomes 0.968"),
    (check_cubic, (9.0, -8.0), "after 60 steps"),
    (check_cubic, 1.5, "cannot be used"),
]  # fmt: skip

(test_a_right_answer_is_accepted, test_an_open_exercise_is_neither_right_nor_wrong,
 test_a_wrong_answer_is_refused_with_a_reason) = three_tests(RIGHT, WRONG)  # fmt: skip


def test_the_size_of_an_update_is_told_head_by_head_and_expert_by_expert():
    parts = torch.stack([torch.full((2, 3), 1.0), torch.full((2, 3), 2.0)])
    assert update_rms(parts, 1) == update_rms(parts.flatten(0, 1), 2) == pytest.approx([0.18, 0.36])
    assert update_rms(parts.flatten(0, 1), 1) == pytest.approx([0.285])
