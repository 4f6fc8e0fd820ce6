"""Each formula against plain Python at the places where implementations go wrong."""

from __future__ import annotations

import math

import pytest
import torch

from tinyds41 import reference_formulas as formulas
from tinyds41.config import Config

INF = math.inf


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_rotation_by_hand_turns_neighbours_not_halves():
    """R = 4 behind two passing channels: (1, 0) turns by 3 · 0.5, (3, 2) by 3 · 0.1."""
    x = torch.tensor([[[7.0, 8.0, 1.0, 0.0, 3.0, 2.0]]], dtype=torch.float64)
    turned = formulas.rotate(x, torch.tensor([3]), torch.tensor([0.5, 0.1], dtype=torch.float64))
    cos, sin = math.cos(0.3), math.sin(0.3)
    expected = [7, 8, math.cos(1.5), math.sin(1.5), 3 * cos - 2 * sin, 3 * sin + 2 * cos]
    assert turned.flatten().tolist() == pytest.approx(expected, rel=1e-12)


def test_rotation_refuses_fewer_channels_than_it_turns():
    with pytest.raises(ValueError, match=r"at least 4 channels.*\(1, 1, 3\)"):
        formulas.rotate(torch.zeros(1, 1, 3), torch.tensor([0]), torch.ones(2, dtype=torch.float64))


def test_attention_output_does_not_depend_on_absolute_positions():
    """Rotated keys are also the values: only the inverse turn of the output makes a common shift vanish."""
    freq = torch.tensor([1.0, 0.03], dtype=torch.float64)
    q, kv, allowed = randn(1, 5, 2, 6), randn(1, 5, 6, seed=1), torch.ones(1, 5, 5, dtype=torch.bool).tril()
    outputs = []
    for shift in (0, 1000):
        p = torch.arange(5) + shift
        o = formulas.attend(formulas.rotate(q, p, freq), formulas.rotate(kv, p, freq), allowed, randn(2, seed=2))
        outputs.append(formulas.rotate(o, p, freq, inverse=True))
    torch.testing.assert_close(outputs[1], outputs[0], rtol=0, atol=1e-12)


def test_attend_equals_plain_python_and_gives_zero_where_nothing_is_allowed():
    q, kv, sink = randn(1, 3, 2, 4), randn(1, 5, 4, seed=1), randn(2, seed=2)
    allowed = torch.tensor([[[0, 0, 0, 0, 0], [1, 0, 1, 0, 0], [1, 1, 1, 1, 1]]], dtype=torch.bool)
    o = formulas.attend(q, kv, allowed, sink)
    assert torch.equal(o[0, 0], torch.zeros(2, 4, dtype=torch.float64))
    for s in (1, 2):
        for h in range(2):
            seen = [t for t in range(5) if allowed[0, s, t]]
            mass = [math.exp(float(q[0, s, h] @ kv[0, t]) / 2) for t in seen]
            total = sum(mass) + math.exp(float(sink[h]))
            expected = sum(m * kv[0, t] for m, t in zip(mass, seen, strict=True)) / total
            torch.testing.assert_close(o[0, s, h], expected, rtol=1e-12, atol=0)


def test_index_scores_silence_each_head_before_the_sum():
    """Head 0 likes entry 0; head 1 hates it so much that a sum without ReLU, or a ReLU of the sum, would flip it."""
    q = torch.tensor([[[[1.0, 0.0], [-3.0, 0.0]]]])
    keys = torch.tensor([[[2.0, 0.0], [-1.0, 0.0], [0.0, 5.0]]])
    scores = formulas.index_scores(q, torch.tensor([[[2.0, -0.5]]]), keys)
    expected = torch.tensor([2 * 2.0, -0.5 * 3.0, 0.0]) * 2**-0.5 * 2**-0.5
    torch.testing.assert_close(scores[0, 0], expected)


@pytest.mark.parametrize(
    ("scores", "k", "expected"),
    [
        ([0.0, -0.0, 0.0, -0.0, 0.0], 3, [0, 1, 2]),  # all tied: the lower entries, whatever the sign of zero
        ([1.0, 5.0, 5.0, 2.0, 5.0], 2, [1, 2]),
        ([1.0, 5.0, 2.0, 5.0, 5.0], 4, [1, 2, 3, 4]),
        ([-7.0, -INF, -3.0, -INF], 3, [0, 2, -1]),  # an invisible entry is never picked
        ([-INF, -INF], 2, [-1, -1]),
        ([4.0, 3.0], 4, [0, 1, -1, -1]),  # more wanted than there are
        ([], 2, [-1, -1]),
    ],
)
def test_select_top_breaks_ties_low_and_ascends(scores, k, expected):
    assert formulas.select_top(torch.tensor(scores), k).tolist() == expected


def test_select_top_breaks_ties_low_in_long_rows():
    """Short rows are sorted stably by accident: 3,000 entries with 4 distinct scores."""
    scores = torch.randint(4, (3, 3000), generator=torch.Generator().manual_seed(0)).float()
    for row, picked in zip(scores.tolist(), formulas.select_top(scores, 1700).tolist(), strict=True):
        assert picked == sorted(sorted(range(3000), key=lambda j: (-row[j], j))[:1700])


def test_pool_keeps_the_newest_partly_full_block_and_only_visible_ones():
    scores = torch.tensor([[
        [5.0, 1.0, 3.0, 3.0, 2.0, 3.0, -9.0],  # newest block 3 has the lowest score; blocks 1 and 2 tie
        [5.0, 1.0, 3.0, 3.0, -9.0, -INF, -INF],  # newest block 2 ends in an invisible entry
        [0.5, -INF, -INF, -INF, -INF, -INF, -INF],
        [-INF] * 7,
    ]])  # fmt: skip
    pool = formulas.pool_blocks(scores, 2, 3)
    assert pool.int().tolist() == [[[1, 1, 0, 1], [1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]]]
    assert formulas.pool_blocks(scores, 2, 1)[0, 0].int().tolist() == [0, 0, 0, 1]  # it counts among the blocks
    assert formulas.pool_blocks(scores[..., :0], 2, 3).shape == (1, 4, 0)


def test_mixing_reads_rows_as_sources_and_sums_to_one_both_ways():
    """One-hot streams through an asymmetric mix show which index is the source."""
    config = Config.preset("nano")
    streams = torch.eye(4, dtype=torch.float64)[None, None]  # stream j holds the unit vector of channel j
    comb = randn(1, 1, 4, 4).abs()
    moved = formulas.hyper_update(streams, torch.zeros(1, 1, 4, dtype=torch.float64), randn(1, 1, 4), comb)
    torch.testing.assert_close(moved, comb.mT)  # target k holds comb[j, k] of channel j
    fn, base, scale = randn(24, 32) / 6, randn(24, seed=1), randn(3, seed=2)
    *_, comb = formulas.hyper_coefficients(config, randn(2, 3, 4, 8), fn, base, scale)
    for axis, tolerance in ((-1, 1e-3), (-2, 2e-6)):  # columns are the last to be divided, by their sum + 1e-6
        torch.testing.assert_close(comb.sum(axis), torch.ones(2, 3, 4).double(), rtol=0, atol=tolerance)


def test_expert_limits_the_gate_above_and_the_other_branch_on_both_sides():
    one = torch.ones(1, 1, dtype=torch.float64)
    silu = lambda v: v / (1 + math.exp(-v))
    for gate, up, expected in ((20, 20, silu(10) * 10), (-20, -20, silu(-20) * -10), (3, -4, silu(3) * -4)):
        y = formulas.expert(one, gate * one, one, up * one, 10.0)
        assert y.item() == pytest.approx(expected, rel=1e-12)


def test_router_bias_steers_the_choice_but_not_the_weights():
    config = Config.preset("nano")  # 4 experts, 2 chosen
    x = torch.tensor([[[1.0]]], dtype=torch.float64)
    gate = torch.tensor([[2.0], [1.0], [-1.0], [0.0]], dtype=torch.float64)
    index, weight, _ = formulas.route(config, x, gate, torch.tensor([0.0, -5.0, 5.0, 0.0], dtype=torch.float64))
    assert index.tolist() == [[[0, 2]]]
    s = [math.sqrt(math.log1p(math.exp(v))) for v in (2, -1)]
    assert weight.flatten().tolist() == pytest.approx([1.5 * v / sum(s) for v in s], rel=1e-12)


def test_engram_rows_break_at_the_start_and_at_dead_tokens():
    """Against Python integers: a dead token is replaced itself and hides everything before it."""
    ids, dead = [7, 8, 9, 5, 6, 7, 8], [0, 0, 1, 0, 0, 0, 0]
    multipliers, primes, pad = [11, 13, 17, 19], [23, 29, 31, 37, 41, 43], 2
    dead_BS = torch.tensor([dead], dtype=torch.bool)
    rows = formulas.engram_hash(torch.tensor([ids]), torch.tensor(multipliers), primes, pad, dead_BS)
    for p in range(len(ids)):
        x, expected = 0, []
        for back in range(4):
            seen = p >= back and not any(dead[p - back : p + 1])
            x ^= (ids[p - back] if seen else pad) * multipliers[back]
            for column in (2 * back - 2, 2 * back - 1) if back else ():
                expected.append(x % primes[column] + sum(primes[:column]))
        assert rows[0, p].tolist() == expected, p
