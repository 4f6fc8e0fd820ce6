"""Mixture of experts: whom the gate chooses, how it weighs, and where an expert's activations end."""

from __future__ import annotations

import math

import pytest
import torch
from models import NANO, context, random_ids, scatter

from tinyds41.model.moe import Expert, Gate, MoE
from tinyds41.model.transformer import Model
from tinyds41.ops import Ops, experts, experts_grouped, swiglu

SMALL = NANO.replace(hidden_size=4, n_routed_experts=4, num_experts_per_tok=2)


def score(x: float) -> float:
    """sqrt(softplus(x)), without overflow."""
    return math.sqrt(max(x, 0) + math.log1p(math.exp(-abs(x))))


def silu(x: float) -> float:
    return x / (1 + math.exp(-x))


def gate_of(logits: list[float], bias: list[float] | None = None, **changes) -> Gate:
    """A gate that answers the input (1, 0, 0, 0) with these logits."""
    gate = Gate(SMALL.replace(**changes)).double()
    with torch.no_grad():
        gate.weight.zero_()
        gate.weight[:, 0] = torch.tensor(logits)
        gate.bias.copy_(torch.tensor(bias or [0.0] * 4))
        gate.bias_vl.fill_(100)  # for image tokens: changes nothing here
    return gate


ONE = torch.tensor([[[1.0, 0, 0, 0]]], dtype=torch.float64)


def test_scores_are_the_root_of_softplus_also_at_plus_and_minus_20():
    """20 gives sqrt(20.000000002), -20 gives e^-10: a sigmoid or a bare softplus would not."""
    scores = gate_of([20.0, -20.0, 0.0, 1.0])(ONE)[0]
    assert scores.flatten().tolist() == pytest.approx([score(x) for x in (20, -20, 0, 1)], rel=1e-12)
    assert scores[0, 0, :2].tolist() == pytest.approx([4.47213595, 4.53999298e-5], rel=1e-8)


def test_the_bias_steers_the_choice_and_not_the_weights():
    """Expert 3 is pushed in by its bias; its weight is still that of its small score."""
    _, chosen, weights = gate_of([2.0, 1.0, 0.0, -1.0], bias=[0.0, 0.0, 0.0, 5.0])(ONE)
    assert chosen.tolist() == [[[0, 3]]]
    total = score(2) + score(-1)
    assert weights.flatten().tolist() == pytest.approx([1.5 * score(2) / total, 1.5 * score(-1) / total], rel=1e-12)


def test_weights_of_tiny_scores_are_normalised_too():
    """Scores of e^-40 over their sum + 1e-20; their own sum is 8e-18, so 1e-20 shows in the third digit."""
    _, _, weights = gate_of([-80.0] * 4)(ONE)
    tiny = math.exp(-40)
    assert weights.flatten().tolist() == pytest.approx([1.5 * tiny / (2 * tiny + 1e-20)] * 2, rel=1e-9)
    assert weights.sum() < 1.5 - 1e-3


def test_ties_go_to_the_lower_expert():
    assert gate_of([1.0, 2.0, 1.0, 1.0])(ONE)[1].tolist() == [[[0, 1]]]


def test_temperature_and_scaling_are_those_of_the_config():
    scores, _, weights = gate_of([2.0, 1.0, 0.0, -1.0], gate_temp=0.5, routed_scaling_factor=3.0)(ONE)
    assert scores[0, 0, 0].item() == pytest.approx(score(4), rel=1e-12)
    assert weights.sum().item() == pytest.approx(3.0, rel=1e-12)


def test_the_gate_works_in_float32_of_bfloat16_weights():
    gate = Gate(SMALL).bfloat16()
    with torch.no_grad():
        gate.weight.copy_(torch.randn(4, 4))
    scores, _, weights = gate(torch.randn(1, 3, 4).bfloat16())
    assert scores.dtype == weights.dtype == torch.float32


# ---- one expert ----


@pytest.mark.parametrize(("gate", "up", "expected"), [
    (20.0, 20.0, silu(10) * 10),
    (20.0, -20.0, silu(10) * -10),
    (-20.0, 20.0, silu(-20) * 10),
    (-20.0, -20.0, silu(-20) * -10),
    (3.0, 2.0, silu(3) * 2),
])  # fmt: skip
def test_the_gate_branch_is_limited_above_and_the_other_on_both_sides(gate, up, expected):
    """Limit 10, inputs of +-20; by hand, 1e-12 relative. -20 through silu is -4e-8, through a limit of -10 -5e-4."""
    one = torch.ones(1, 1, dtype=torch.float64)
    assert swiglu(one, one * gate, one, one * up, 10.0).item() == pytest.approx(expected, rel=1e-12)


def test_an_expert_takes_tokens_of_any_shape():
    """None, one, rows of rows and no token at all. 1e-14: a product of one row may be summed in another order."""
    w1, w2, w3 = (torch.randn(shape, dtype=torch.float64) for shape in ((3, 4), (4, 3), (3, 4)))
    x = torch.randn(2, 5, 4, dtype=torch.float64)
    whole = swiglu(x, w1, w2, w3, 1.0)
    torch.testing.assert_close(swiglu(x[1, 2], w1, w2, w3, 1.0), whole[1, 2], rtol=0, atol=1e-14)
    torch.testing.assert_close(swiglu(x[1], w1, w2, w3, 1.0), whole[1], rtol=0, atol=1e-14)
    assert swiglu(x[:, :0], w1, w2, w3, 1.0).shape == (2, 0, 4)


def test_the_shared_expert_is_limited_too():
    expert = Expert(SMALL.replace(moe_intermediate_size=1)).double()
    with torch.no_grad():
        expert.w1.weight[:] = expert.w3.weight[:] = torch.tensor([20.0, 0, 0, 0])
        expert.w2.weight.fill_(1)
    assert expert(ONE).flatten().tolist() == pytest.approx([silu(10) * 10] * 4, rel=1e-12)


def test_activations_are_float32_between_the_products():
    """In bfloat16, silu and product rounded once, before the last matrix."""
    x, w1, w2, w3 = (torch.randn(shape).bfloat16() for shape in ((5, 8), (6, 8), (8, 6), (6, 8)))
    gate, up = (x @ w1.T).float(), (x @ w3.T).float()
    expected = (torch.nn.functional.silu(gate.clamp(max=2)) * up.clamp(-2, 2)).bfloat16() @ w2.T
    assert torch.equal(swiglu(x, w1, w2, w3, 2.0), expected)


# ---- all experts ----


def random_experts(n: int, n_experts: int, n_active: int, dtype=torch.float64):
    """x, index, weight, w1, w2, w3; the stacks with three axes."""
    x = torch.randn(n, 6, dtype=dtype) * 4
    index = torch.stack([torch.randperm(n_experts)[:n_active] for _ in range(n)])
    weight = torch.rand(n, n_active, dtype=dtype)
    w1, w3 = (torch.randn(n_experts, 5, 6, dtype=dtype) for _ in range(2))
    return x, index, weight, w1, torch.randn(n_experts, 6, 5, dtype=dtype), w3


def loop(x, index, weight, w1, w2, w3, limit):
    """The definition: token by token, expert by expert."""
    out = torch.zeros_like(x)
    for token in range(x.shape[0]):
        for expert, share in zip(index[token].tolist(), weight[token], strict=True):
            out[token] += share * swiglu(x[token : token + 1], w1[expert], w2[expert], w3[expert], limit)[0]
    return out


@pytest.mark.parametrize(("n", "n_experts", "n_active"), [(1, 4, 2), (13, 4, 1), (13, 4, 4), (7, 16, 3), (40, 3, 2)])
def test_sorted_experts_equal_the_loop(n, n_experts, n_active):
    """With experts that no token visits; 1e-12 in float64. Limits of 1 are reached by most values."""
    case = random_experts(n, n_experts, n_active)
    torch.testing.assert_close(experts(*case, 1.0), loop(*case, 1.0), rtol=0, atol=1e-12)


def test_one_expert_may_take_every_token():
    x, index, weight, *stacks = random_experts(9, 5, 1)
    index[:] = 3
    torch.testing.assert_close(
        experts(x, index, weight, *stacks, 1.0), loop(x, index, weight, *stacks, 1.0), rtol=0, atol=1e-12
    )


@pytest.mark.parametrize("n_visited", [1, 4])
def test_grouped_products_equal_the_loop_with_their_gradients(n_visited):
    """float32: 1e-5 is a few roundings of sums over 16 values near 10. Experts that no token visits stay at 0."""
    generator = torch.Generator().manual_seed(3)
    x, w1, w3, w2 = (torch.randn(*shape, generator=generator, requires_grad=True)
                     for shape in ((13, 16), (6, 8, 16), (6, 8, 16), (6, 16, 8)))  # fmt: skip
    index = torch.arange(13 * 2).view(13, 2) % n_visited
    weight = torch.rand(13, 2, generator=generator, requires_grad=True)
    inputs = (x, weight, w1, w2, w3)
    found = []
    for function in (experts, experts_grouped):
        out = function(x, index, weight, w1, w2, w3, 1.0)
        found.append((out, *torch.autograd.grad(out.sin().sum(), inputs)))
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)
    assert not found[1][3][n_visited:].any()


def test_a_model_on_grouped_products_equals_the_plain_one():
    """float32 logits within 1e-5: the same products, in another order of summation."""
    config = NANO.replace(quantize_cache=False, quantize_engram=False)
    ids = random_ids(2, 9)
    plain, grouped = Model(config), Model(config, ops=Ops.grouped())
    assert grouped.layers[0].ffn.ops.experts is experts_grouped
    torch.testing.assert_close(grouped(ids), plain(ids), rtol=0, atol=1e-5)


def test_experts_are_summed_in_float32():
    x, index, weight, *stacks = random_experts(9, 4, 3, torch.float32)
    out = experts(x.bfloat16(), index, weight, *(stack.bfloat16() for stack in stacks), 1.0)
    assert out.dtype == torch.float32


def test_the_shared_expert_is_added_unscaled():
    """Routed and shared parts apart, then together; 1e-12 in float64."""
    moe = MoE(NANO, 0, Ops.plain()).double()
    with torch.no_grad():
        for parameter in moe.parameters():
            parameter.zero_()
    scatter(moe, 1.0)
    x, ctx = torch.randn(2, 5, 32, dtype=torch.float64), context(NANO, 5, 2)
    with torch.no_grad():
        _, index, weight = moe.gate(x)
        stacks = moe.experts.w1, moe.experts.w2, moe.experts.w3
        routed = loop(x.flatten(0, 1), index.flatten(0, 1), weight.flatten(0, 1), *stacks, 10.0).view(2, 5, 32)
        shared = swiglu(x, *(getattr(moe.shared_experts, name).weight for name in ("w1", "w2", "w3")), 10.0)
        torch.testing.assert_close(moe(x, ctx), routed + shared, rtol=0, atol=1e-12)


def test_inputs_of_another_width_are_refused():
    with pytest.raises(ValueError, match=r"Gate: expected \[\.\.\., 4\], got \(1, 3\)"):
        Gate(SMALL)(torch.zeros(1, 3))
    with pytest.raises(ValueError, match=r"Expert: expected \[\.\.\., 4\], got \(1, 3\)"):
        Expert(SMALL)(torch.zeros(1, 3))
    with pytest.raises(ValueError, match=r"expected \[\.\.\., 32\], got \(1, 2, 3\)"):
        MoE(NANO, 0, Ops.plain())(torch.zeros(1, 2, 3), context(NANO, 2))


def test_gradients_flow_outside_an_autocast_block():
    """Forward in bfloat16 under autocast, backward behind it, as torch documents it."""
    x, *weights = (torch.randn(shape, requires_grad=True) for shape in ((3, 8), (6, 8), (8, 6), (6, 8)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = swiglu(x, *weights, 10.0).float().sum()
    loss.backward()
    assert all(leaf.grad is not None and leaf.grad.isfinite().all() for leaf in (x, *weights))
