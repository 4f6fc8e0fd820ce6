"""Each check of lesson 11 accepts what is right and refuses the mistakes that readers make; its measurements hold."""

import itertools

import pytest
import torch
from exercise_checks import three_tests
from models import NANO, scattered
from sessions import DRAFTING

import tinyds41 as ds
from tinyds41.checkpoint.layout import FP4
from tinyds41.cost.traffic import DecodeTraffic, matrix_bytes
from tinyds41.course.lesson_11 import (
    WeightBytes,
    check_correction,
    check_depth,
    check_tokens,
    chi_square,
    cost_ratios,
)


def on_average(confidence):
    return 1 + sum(itertools.accumulate(confidence, lambda a, c: a * c))


def correction(p, q):
    rest = (p - q).clamp(min=0)
    return rest / rest.sum()


def best_depth(acceptance, draft, steps):
    speed = [on_average([acceptance] * n) / (cost + draft * (n > 0)) for n, cost in enumerate(steps)]
    return speed.index(max(speed))


def without_drafts_cost(acceptance, draft, steps):
    return best_depth(acceptance, 0, steps)


def always_drafting(acceptance, draft, steps):
    return 1 + best_depth_from_one(acceptance, draft, steps)


def best_depth_from_one(acceptance, draft, steps):
    speed = [on_average([acceptance] * n) / (cost + draft) for n, cost in enumerate(steps) if n]
    return speed.index(max(speed))


def first_fall(acceptance, draft, steps):
    speed = [on_average([acceptance] * n) / (cost + draft * (n > 0)) for n, cost in enumerate(steps)]
    return next((n for n in range(len(speed) - 1) if speed[n + 1] <= speed[n]), len(speed) - 1)


RIGHT = [(check_tokens, on_average), (check_correction, correction), (check_depth, best_depth)]
WRONG = [
    (check_tokens, lambda c: 1 + sum(c), r"for the confidences \[1.0, 1.0\]|\[0.9, 0.0, 1.0\]"),
    (check_tokens, lambda c: on_average(c) - 1, "for the confidences .*tokens is wrong"),
    (check_tokens, lambda c: 1 + len(c) * c[-1], "wrong|cannot be used"),
    (check_correction, lambda p, q: p, "with a chance that is off by 0"),
    (check_correction, lambda p, q: p - q, "are no chances"),
    (check_correction, lambda p, q: (p - q).clamp(min=0), "are no chances"),
    (check_correction, lambda p, q: correction(q, p), "with a chance that is off by 0"),
    (check_correction, lambda p, q: p[:1] * 0 + 1, "chances of shape"),
    (check_depth, lambda *_: 5, "with acceptance .* depth 5 is wrong"),
    (check_depth, without_drafts_cost, "wrong"),
    (check_depth, always_drafting, "with acceptance 0.3, a draft of 0.5 .* depth 2 is wrong"),
    (check_depth, first_fall, "is wrong"),
]  # fmt: skip

(test_a_right_answer_is_accepted, test_an_open_exercise_is_neither_right_nor_wrong,
 test_a_wrong_answer_is_refused_with_a_reason) = three_tests(RIGHT, WRONG)  # fmt: skip


def test_chi_square_adds_up_squares_over_what_was_expected():
    chances = torch.tensor([0.5, 0.3, 0.2])
    assert chi_square(torch.tensor([50, 30, 20]), chances) == pytest.approx(0, abs=1e-9)
    # expected 5, 3, 2
    assert chi_square(torch.tensor([7, 2, 1]), chances) == pytest.approx(4 / 5 + 1 / 3 + 1 / 2, rel=1e-5)


def test_costs_are_told_for_every_depth_and_leave_the_model_alone():
    model = scattered(DRAFTING, draft=True)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = cost_ratios(model, context=12, rounds=2)
    assert list(found) == list(range(6)) and found[0] == 1
    assert all(cost > 0 for cost in found.values())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with pytest.raises(ValueError, match="drafter"):
        cost_ratios(scattered(DRAFTING), context=12, rounds=1)


def test_a_step_of_one_token_reads_what_decoding_reads():
    """But for its row of the embedding, which `DecodeTraffic` counts too."""
    flash = ds.Config.preset("flash")
    row, decoding = 2 * flash.hidden_size, DecodeTraffic(flash).at(1).weights
    assert decoding is not None
    assert WeightBytes(flash).step(1) == pytest.approx(decoding - row, rel=1e-12)


def test_more_tokens_read_experts_of_their_own_until_all_are_read():
    """The difference of two steps is made of experts alone: E (1 - (1 - A/E)^n) of them in each layer."""
    flash = ds.Config.preset("flash")
    weights = WeightBytes(flash)
    D, inner, E, A = flash.hidden_size, flash.moe_intermediate_size, flash.n_routed_experts, flash.num_experts_per_tok
    expert = 2 * matrix_bytes(FP4, inner, D) + matrix_bytes(FP4, D, inner)
    met = {n: E * (1 - (1 - A / E) ** n) for n in (1, 6, 100_000)}
    for n in (6, 100_000):
        more = flash.num_hidden_layers * (met[n] - met[1]) * expert
        assert weights.step(n) - weights.step(1) == pytest.approx(more, rel=1e-9)


def test_a_draft_reads_its_blocks_once_and_the_output_head():
    flash = ds.Config.preset("flash")
    weights = WeightBytes(flash)
    D, inner = flash.hidden_size, flash.moe_intermediate_size
    E, A, slots, rank = 128, 3, 5, 256
    assert (flash.dspark_n_routed_experts, flash.dspark_num_experts_per_tok) == (E, A)
    assert (flash.dspark_block_size, flash.dspark_markov_rank) == (slots, rank)
    expert = 2 * matrix_bytes(FP4, inner, D) + matrix_bytes(FP4, D, inner)
    met = {n: E * (1 - (1 - A / E) ** (n * slots)) for n in (1, 7)}
    rows = 6 * slots * rank * 2  # of the Markov table, one per slot
    assert weights.draft(7) - weights.draft(1) == pytest.approx(3 * (met[7] - met[1]) * expert + rows, rel=1e-9)
    rest = weights.draft(1) - 3 * met[1] * expert
    assert rest > 2 * flash.vocab_size * (D + rank)  # output and Markov head, 2 bytes a number
    with pytest.raises(ValueError, match="no draft blocks"):
        WeightBytes(NANO.replace(num_nextn_predict_layers=0, dspark_target_layer_ids=[]))
