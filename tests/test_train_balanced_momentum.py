"""Balanced momentum against a plain reference: rows of one length, columns near one, small rows left alone."""

import math

import pytest
import torch

from tinyds41.train.balanced_momentum import BalancedMomentum, balanced


def by_loops(rows: list[list[float]]) -> list[list[float]]:
    """Spec 11 in Python numbers: small rows zeroed, then rows and columns by turns, eleven times, rows first."""
    norms = [math.sqrt(sum(x * x for x in row)) for row in rows]
    mean = sum(norms) / len(norms)
    found = [row[:] if norm > 1e-3 * mean else [0.0] * len(row) for row, norm in zip(rows, norms, strict=True)]
    for k in range(1, 12):
        if k % 2 == 0:
            found = [list(column) for column in zip(*found, strict=True)]
        for row in found:
            length = max(math.sqrt(sum(x * x for x in row)), 1e-20)
            row[:] = [x / length for x in row]
        if k % 2 == 0:
            found = [list(column) for column in zip(*found, strict=True)]
    return found


def stepped(weight, gradients, rate=0.01):
    parameter = torch.nn.Parameter(weight.clone())
    optimizer = BalancedMomentum([parameter], rate)
    for gradient in gradients:
        parameter.grad = gradient.to(parameter.dtype)
        optimizer.step()
    return parameter.detach()


def gradient(n_rows=9, n_columns=4, dtype=torch.float64):
    """Rows and columns of very different size, one row of zeros."""
    found = torch.randn(n_rows, n_columns, dtype=dtype)
    found *= torch.logspace(0, -2, n_rows, dtype=dtype)[:, None] * torch.logspace(0, 1, n_columns, dtype=dtype)
    found[3] = 0
    return found


@pytest.mark.parametrize("shape", [(9, 4), (5, 8), (4, 1)])
def test_it_equals_the_plain_reference(shape):
    g = gradient(*shape)
    torch.testing.assert_close(balanced(g), torch.tensor(by_loops(g.tolist()), dtype=torch.float64), rtol=1e-12, atol=0)


def test_several_steps_equal_the_plain_reference():
    weight, gradients = torch.randn(9, 4, dtype=torch.float64), [gradient() for _ in range(4)]
    found, mean = weight.clone(), torch.zeros_like(weight)
    for g in gradients:
        mean = 0.95 * mean + 0.05 * g
        ahead = 0.95 * mean + 0.05 * g
        found -= 0.01 * 0.18 * math.sqrt(4) * torch.tensor(by_loops(ahead.tolist()), dtype=torch.float64)
    torch.testing.assert_close(stepped(weight, gradients), found, rtol=1e-12, atol=0)


def test_rows_end_with_length_1_and_columns_near_one_another():
    """Eleven is odd: rows come last. Columns then share the rows' length evenly."""
    g = gradient(400, 8)
    rows, columns = balanced(g).norm(dim=1), balanced(g).norm(dim=0)
    assert torch.allclose(rows[rows > 0], torch.ones(399, dtype=torch.float64), rtol=1e-12)
    assert rows[3] == 0
    torch.testing.assert_close(columns, torch.full((8,), math.sqrt(399 / 8), dtype=torch.float64), rtol=1e-3, atol=0)
    assert (g.norm(dim=0).max() / g.norm(dim=0).min()) > 5  # they were not, before


def test_small_rows_are_left_alone_and_those_just_above_are_not():
    """Five rows of length 1 and one small one: a thousandth of their mean is 8.33e-4."""
    for small, moves in ((8.3e-4, False), (8.4e-4, True)):
        g = torch.zeros(6, 3, dtype=torch.float64)
        g[:, 0], g[2, 0] = 1.0, small
        assert bool(balanced(g)[2].any()) == moves


def test_rows_that_were_never_touched_keep_their_bits():
    weight = torch.randn(9, 4)
    gradients = [gradient(dtype=torch.float32) for _ in range(3)]
    found = stepped(weight, gradients)
    assert torch.equal(found[3], weight[3])
    assert (found != weight).all(-1).sum() == 8


def test_a_row_touched_once_goes_on_until_its_momentum_is_small():
    """.95 (.05 .95^n) falls below a thousandth of the mean, here two thirds of the others' length, after 83 steps."""
    once = torch.ones(3, 2, dtype=torch.float64)
    later = once.clone()
    later[1] = 0
    after = {n: stepped(torch.zeros(3, 2), [once, *[later] * n])[1, 0] for n in (82, 83, 84)}
    assert after[84] == after[83] < after[82]


def test_nothing_decays():
    weight = torch.randn(9, 4)
    assert torch.equal(stepped(weight, [torch.zeros(9, 4)]), weight)


def test_each_row_moves_by_18_hundredths_of_the_rate_a_weight():
    moved = stepped(torch.zeros(9, 4, dtype=torch.float64), [gradient()], 0.01)
    found = moved.square().mean(1).sqrt()
    torch.testing.assert_close(found[found > 0], torch.full((8,), 0.0018, dtype=torch.float64), rtol=1e-12, atol=0)


def test_the_gradients_scale_does_not_matter():
    """Powers of two are exact in floats, so the bits are the same."""
    weight, gradients = torch.randn(9, 4), [gradient(dtype=torch.float32) for _ in range(3)]
    expected = stepped(weight, gradients)
    for scale in (2.0**-30, 2.0**30):
        assert torch.equal(stepped(weight, [g * scale for g in gradients]), expected)


def test_bfloat16_tables_are_balanced_in_float32():
    weight, g = (0.01 * torch.randn(9, 4)).bfloat16(), gradient(dtype=torch.bfloat16)
    mean = (0.05 * g.double()).bfloat16().double()  # it is stored like the table
    U = torch.tensor(by_loops((0.95 * mean + 0.05 * g.double()).tolist()), dtype=torch.float64)
    assert torch.equal(stepped(weight, [g]), (weight.double() - 0.01 * 0.18 * 2 * U).bfloat16())


def test_what_is_no_table_is_refused():
    with pytest.raises(ValueError, match=r"balanced momentum needs tables \[rows, columns\], got \(4,\)"):
        BalancedMomentum([torch.nn.Parameter(torch.zeros(4))], 0.01)
