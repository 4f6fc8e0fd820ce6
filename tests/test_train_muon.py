"""Muon against plain references, and what it promises: singular values of 1, head by head, at any gradient's scale."""

import math

import pytest
import torch

from tinyds41.train import momentum, muon
from tinyds41.train.muon import Muon, orthogonal

SHAPES = [(5, 12), (12, 5), (7, 7), (1, 9)]  # wide, tall, square, one row


def of_singular_values(values, rows: int, columns: int) -> torch.Tensor:
    """A random matrix with these singular values."""
    left, right = (torch.linalg.qr(torch.randn(n, len(values), dtype=torch.float64))[0] for n in (rows, columns))
    return left @ torch.diag(torch.tensor(values, dtype=torch.float64)) @ right.T


def by_singular_values(matrix: torch.Tensor) -> torch.Tensor:
    """The definition: an odd polynomial changes singular values alone, so it is applied to each of them."""
    left, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    values = values / math.sqrt(float((values**2).sum()))
    for a, b, c in [(3.4445, -4.7750, 2.0315)] * 8 + [(2, -1.5, 0.5)] * 2:
        values = a * values + b * values**3 + c * values**5
    return left @ torch.diag(values) @ right


def by_loops(weight, gradients, rate, n_matrices=1):
    """Muon over several steps, written down: m = .95 m + .05 g and a look ahead, each matrix alone."""
    dtype, weight, mean = weight.dtype, weight.double(), torch.zeros_like(weight, dtype=torch.float64)
    for gradient in gradients:
        mean = (0.95 * mean + 0.05 * gradient.double()).to(dtype).double()  # it is stored like the weight
        ahead = 0.95 * mean + 0.05 * gradient.double()
        parts = [by_singular_values(part) for part in ahead.chunk(n_matrices)]
        update = 0.18 * math.sqrt(max(parts[0].shape)) * torch.cat(parts)
        weight = weight - rate * 0.1 * weight - rate * update
    return weight


def stepped(weight, gradients, rate=0.01, **group):
    """The weight after Muon's steps, and Muon itself."""
    parameter = torch.nn.Parameter(weight.clone())
    optimizer = Muon([{"params": [parameter], **group}], rate)
    for gradient in gradients:
        parameter.grad = gradient.to(parameter.dtype)
        optimizer.step()
    return parameter.detach(), optimizer


def update(gradient, **group):
    """What Muon subtracts per unit of rate, from a weight of zeros."""
    return -stepped(torch.zeros_like(gradient), [gradient], 1.0, **group)[0]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("dtype", "near"), [(torch.float64, 1e-9), (torch.float32, 1e-5)])
def test_it_is_the_polynomial_of_each_singular_value(shape, dtype, near):
    """fp32: ten products of rounded matrices; measured 1e-6."""
    gradient = torch.randn(shape, dtype=dtype)
    torch.testing.assert_close(orthogonal(gradient[None])[0].double(), by_singular_values(gradient), rtol=0, atol=near)


@pytest.mark.parametrize("spread", [1.0, 1e-2, 4e-5])
def test_singular_values_come_near_1_over_four_decades(spread):
    """The eight steps end between .68 and 1.13, the last two within .003 of 1, for all above 3e-5 of the norm."""
    values = torch.logspace(0, math.log10(spread), 6).tolist()
    found = torch.linalg.svdvals(orthogonal(of_singular_values(values, 6, 9)[None])[0])
    assert found.min() > 0.9999 and found.max() < 1.003


def test_what_lies_below_the_promise_is_raised_but_not_to_1():
    found = torch.linalg.svdvals(orthogonal(of_singular_values([1.0, 1e-6], 4, 4)[None])[0])
    assert 0.05 < found[1] < 0.2  # 1e-6 grows some 80,000 times


@pytest.mark.parametrize("shape", [(6, 12), (12, 6), (3, 5, 7)])
def test_several_steps_equal_the_plain_reference(shape):
    weight = torch.randn(shape, dtype=torch.float64)
    gradients = [torch.randn(shape, dtype=torch.float64) * 10.0**-i for i in range(4)]
    flat = [t.flatten(0, -2) for t in (weight, *gradients)]
    expected = by_loops(flat[0], flat[1:], 0.01, n_matrices=shape[0] if len(shape) == 3 else 1)
    found = stepped(weight, gradients)[0].flatten(0, -2)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-11)


def test_heads_are_orthogonalised_alone():
    weight, gradients = torch.randn(12, 5), [torch.randn(12, 5) for _ in range(3)]
    together = stepped(weight, gradients, n_matrices=3)[0]
    alone = [stepped(part, [g.chunk(3)[head] for g in gradients])[0] for head, part in enumerate(weight.chunk(3))]
    assert torch.equal(together, torch.cat(alone))
    assert not torch.allclose(together, stepped(weight, gradients)[0], atol=1e-4)


def test_a_loud_head_or_expert_does_not_shrink_its_neighbours():
    gradient = torch.randn(3, 4, 6)
    loud = gradient * torch.tensor([1.0, 2.0**10, 1.0])[:, None, None]
    assert torch.equal(update(loud), update(gradient))
    assert torch.equal(update(loud.flatten(0, 1), n_matrices=3), update(gradient.flatten(0, 1), n_matrices=3))


@pytest.mark.parametrize(("shape", "n_matrices"), [((8, 40), 1), ((40, 8), 1), ((24, 16), 3), ((2, 6, 9), 1)])
def test_the_update_has_a_root_mean_square_of_18_hundredths(shape, n_matrices):
    """Exactly .18 with singular values of 1; they are within .003 of it."""
    for part in update(torch.randn(shape), n_matrices=n_matrices).flatten(0, -2).chunk(n_matrices):
        assert part.square().mean().sqrt().item() == pytest.approx(0.18, rel=3e-3)


def test_the_gradients_scale_does_not_matter():
    """Powers of two are exact in floats, so the bits are the same."""
    weight, gradients = torch.randn(6, 9), [torch.randn(6, 9) for _ in range(3)]
    expected = stepped(weight, gradients)[0]
    for scale in (2.0**-30, 2.0**30):
        assert torch.equal(stepped(weight, [g * scale for g in gradients])[0], expected)


def test_without_a_gradient_a_weight_only_decays():
    weight = torch.randn(4, 6, dtype=torch.float64)
    found = stepped(weight, [torch.zeros(4, 6)], 0.01)[0]
    torch.testing.assert_close(found, weight * (1 - 0.01 * 0.1), rtol=1e-15, atol=0)
    parameter = torch.nn.Parameter(weight.clone())
    Muon([parameter], 0.01).step()  # no gradient at all: not its turn
    assert torch.equal(parameter.detach(), weight)


def test_bfloat16_weights_are_iterated_in_float32_and_rounded_once():
    """The weights are as small as the update, which would otherwise vanish in their rounding."""
    weight, gradient = (0.01 * torch.randn(6, 9)).bfloat16(), torch.randn(6, 9).bfloat16()
    found, optimizer = stepped(weight, [gradient])
    assert found.dtype == torch.bfloat16 and torch.equal(found, by_loops(weight, [gradient], 0.01).bfloat16())
    found, _ = stepped(100 * weight, [torch.zeros(6, 9)], 1.0)  # a decay that is not lost, nor rounded by itself
    assert torch.equal(found, ((100 * weight).double() * 0.9).bfloat16())
    (state,) = optimizer.state.values()
    assert state["momentum"].dtype == torch.bfloat16 and list(state) == ["momentum"]


def test_with_torchs_constants_it_agrees_with_torchs_muon(monkeypatch):
    """Momentum, look-ahead, decay and the factor of the shape are the same; in bfloat16 torch is 2 % off."""
    monkeypatch.setattr(muon, "COEFFICIENTS", ((3.4445, -4.7750, 2.0315),) * 5)
    monkeypatch.setattr(momentum, "UPDATE_RMS", 0.2)
    weight, gradients = torch.randn(8, 24), [torch.randn(8, 24) for _ in range(5)]
    theirs = torch.nn.Parameter(weight.clone())
    optimizer = torch.optim.Muon([theirs], lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for gradient in gradients:
        theirs.grad = gradient
        optimizer.step()
    ours = stepped(weight, gradients)[0]
    distance = (ours - theirs.detach()).norm() / (ours - weight).norm()
    assert distance < 0.02


@pytest.mark.parametrize(("shape", "n_matrices", "message"), [
    ((4,), 1, r"Muon needs matrices \[rows, columns\] or \[n, rows, columns\], got \(4,\)"),
    ((2, 2, 2, 2), 1, r"got \(2, 2, 2, 2\)"),
    ((10, 4), 3, r"10 rows are not 3 matrices of equal height"),
    ((2, 3, 4), 3, r"\(2, 3, 4\) is a stack already: n_matrices=3"),
    ((4, 4), 0, r"n_matrices=0"),
])  # fmt: skip
def test_what_is_no_matrix_is_refused(shape, n_matrices, message):
    with pytest.raises(ValueError, match=message):
        Muon([{"params": [torch.nn.Parameter(torch.zeros(shape))], "n_matrices": n_matrices}], 0.01)
