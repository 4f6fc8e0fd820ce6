"""Float64 finite differences of each part on nano, and of the whole model. Cache quantisers off: they are steps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from models import NANO, context, random_ids, scatter, scattered
from torch import Tensor
from torch.autograd import gradcheck
from torch.func import functional_call

from tinyds41 import mixing, ops
from tinyds41.formats import Rows
from tinyds41.model.compressor import Compressor
from tinyds41.model.engram_gate import gated_read
from tinyds41.model.moe import MoE
from tinyds41.model.norm import RMSNorm
from tinyds41.model.rope import rotate
from tinyds41.ops import Ops, Selection, Window, attend, experts, hyper_coefficients, hyper_step, swiglu
from tinyds41.sinkhorn import sinkhorn

FLOATS = NANO.replace(quantize_cache=False, quantize_engram=False)


def leaf(*shape: int, size: float = 1.0) -> Tensor:
    return (torch.randn(shape, dtype=torch.float64) * size).requires_grad_()


@pytest.mark.parametrize("chunked", [False, True])
def test_attention_over_window_entries_and_sink(monkeypatch, chunked):
    """7 queries, W = 3, one of them with a cut window, one without a pick."""
    if chunked:
        monkeypatch.setattr(ops, "ATTEND_ELEMENTS", 1)
    first = (torch.arange(7) - 2).clamp(min=0)[None]
    first[0, 5] = 5
    index = torch.tensor([[[0, 2], [1, -1], [-1, -1], [0, 1], [2, 1], [0, 0], [2, -1]]])

    def run(q: Tensor, window: Tensor, kv: Tensor, sink: Tensor) -> Tensor:
        return attend(q, Window(Rows(window), first, 3), Selection(index, Rows(kv)), sink)

    assert gradcheck(run, (leaf(1, 7, 2, 4), leaf(1, 7, 4), leaf(1, 3, 4), leaf(2)))


def test_rows_shared_by_two_layers_collect_both_gradients():
    """A Reuse layer attends to rows gathered once: their gradient is the sum. 1e-12 in float64."""
    kv, q = leaf(1, 3, 4), leaf(1, 2, 1, 4)
    index, rows = torch.tensor([[[0, 2], [1, 1]]]), Rows(torch.zeros(1, 2, 4, dtype=torch.float64))
    window = Window(rows, torch.zeros(1, 2, dtype=torch.long), 2)
    sink = torch.zeros(1, dtype=torch.float64)
    shared = Selection(index, Rows(kv))
    (attend(q, window, shared, sink).sum() + attend(2 * q, window, shared, sink).sum()).backward()
    together, kv.grad = kv.grad, None
    for factor in (1, 2):
        attend(factor * q, window, Selection(index, Rows(kv)), sink).sum().backward()
    torch.testing.assert_close(together, kv.grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize("ratio", [1, 2, 3])
def test_compressor(ratio):
    compressor = Compressor(NANO, ratio).double()
    scatter(compressor, 1.0)
    z = leaf(1, 2, ratio, 32) if ratio > 1 else None
    inputs = (leaf(1, 2, ratio, 32), *(() if z is None else (z,)))
    assert gradcheck(lambda c, z=None: compressor.latent(c, z), inputs)


def test_hyper_connection_coefficients_and_mixing():
    def run(streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        pre, post, comb, same = hyper_coefficients(streams, fn, scale, base, n_iters=4, eps=1e-6, norm_eps=1e-20)
        return hyper_step(same, y, post, comb, pre)

    assert gradcheck(run, (leaf(1, 2, 3, 4), leaf(15, 12), leaf(3), leaf(15), leaf(1, 2, 4)))


def test_experts_with_one_that_no_token_visits():
    """Values on both sides of the limit of 1, and each stack on its own."""
    index = torch.tensor([[0, 1], [3, 0], [1, 3]])

    def run(*inputs: Tensor) -> Tensor:
        x, weight, w1, w2, w3 = inputs
        return experts(x, index, weight, w1, w2, w3, 1.0)

    assert gradcheck(run, (leaf(3, 4), leaf(3, 2), leaf(4, 3, 4), leaf(4, 4, 3), leaf(4, 3, 4)))


def test_mixture_of_experts_with_its_gate():
    moe = MoE(NANO, 0, Ops.plain()).double()
    with torch.no_grad():
        for parameter in moe.parameters():
            parameter.zero_()
    scatter(moe, 0.5)
    assert gradcheck(lambda x: moe(x, context(NANO, 3)), leaf(1, 3, 32))


def test_engram_gate_and_value():
    """Streams and memory; a dead position passes no gradient."""
    engram, alive = scattered(FLOATS).layers[1].engram, torch.tensor([[True, False, True]])

    def run(streams: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        return engram.read(streams, memory, alive)[:2]

    inputs = leaf(1, 3, 4, 32), leaf(1, 3, 192)
    assert gradcheck(run, inputs, fast_mode=True)
    (run(*inputs)[0] - inputs[0]).sum().backward()
    assert not inputs[0].grad[0, 1].any() and not inputs[1].grad[0, 1].any()
    assert inputs[0].grad[0, 2].any()


def test_engram_weights_of_streams_and_keys():
    streams, read, alive = leaf(3, 2, 4), leaf(3, 12), torch.tensor([True, False, True])
    run = lambda x, both, weight: gated_read(x, both, weight, alive, 1e-20)
    assert gradcheck(run, (streams, read, leaf(2, 4)))


def test_engram_gradients_are_those_of_plain_autograd():
    """The equation again, by autograd; 1e-12 in float64, an agreement of exactly 0 among the cases."""
    streams, read, weight = leaf(5, 2, 4), leaf(5, 12), leaf(2, 4)
    with torch.no_grad():
        streams[3] = 0
    alive, eps = torch.tensor([True, False, True, True, True]), 1e-6
    keys, value = read[:, :8].unflatten(-1, (2, 4)), read[:, 8:]
    t = (streams * weight * keys).sum(-1) / 2
    t = t * (streams.square().mean(-1) + eps).rsqrt() * (keys.square().mean(-1) + eps).rsqrt()
    gate = torch.sigmoid(torch.where(t < 0, -1.0, 1.0) * t.abs().clamp(min=1e-6).sqrt()) * alive.unsqueeze(-1)
    expected = streams + gate.unsqueeze(-1) * value.unsqueeze(1)
    found, found_gate = gated_read(streams, read, weight, alive, eps)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    upstream, leaves = torch.randn_like(expected), (streams, read, weight)
    ours = torch.autograd.grad((found * upstream).sum() + found_gate.sum(), leaves)
    plain = torch.autograd.grad((expected * upstream).sum() + gate.sum(), leaves)
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_rotation_turns_gradients_back():
    rotation = torch.polar(torch.ones(2, 3, 2, dtype=torch.float64), torch.randn(2, 3, 2, dtype=torch.float64))
    assert gradcheck(lambda x: rotate(x, rotation), leaf(2, 3, 6))
    assert gradcheck(lambda x: rotate(x, rotation), leaf(2, 3, 7))  # pairs at odd offsets
    assert gradcheck(lambda x: rotate(x, rotation[:1, :1]), leaf(1, 1, 7))


def test_swiglu_where_clamps_hold_some_values():
    x, w1, w2, w3 = leaf(6, 4), leaf(5, 4), leaf(4, 5), leaf(5, 4)
    held = ((x @ w1.T > 0.5).any(), ((x @ w3.T).abs() > 0.5).any(), ((x @ w3.T).abs() < 0.5).any())
    assert all(held)
    assert gradcheck(lambda *inputs: swiglu(*inputs, 0.5), (x, w1, w2, w3))


def as_results(case: str) -> tuple[Callable, tuple[Tensor, ...]]:
    """A function of several results, and its inputs."""
    if case == "coefficients":
        run = lambda *x: hyper_coefficients(*x, n_iters=4, eps=1e-6, norm_eps=1e-20)
        return run, (leaf(1, 2, 3, 4), leaf(15, 12), leaf(3), leaf(15))
    if case == "step":
        return hyper_step, (leaf(1, 2, 3, 4), leaf(1, 2, 4), leaf(1, 2, 3), leaf(1, 2, 3, 3), leaf(1, 2, 3))
    alive = torch.tensor([True, False, True])
    return lambda *x: gated_read(*x, alive, 1e-20), (leaf(3, 2, 4), leaf(3, 12), leaf(2, 4))


@pytest.mark.parametrize("case", ["coefficients", "step", "engram"])
def test_a_loss_of_one_result_needs_no_other(case):
    """Finite differences of each result alone."""
    run, inputs = as_results(case)
    for place in range(len(run(*inputs))):
        assert gradcheck(lambda *x, place=place: run(*x)[place], inputs), place


@pytest.mark.parametrize("case", ["coefficients", "step", "engram"])
def test_gradients_in_pieces_equal_one_shot(monkeypatch, case):
    """Pieces of one token: 1e-14, gradients of weights are summed over tokens in another order."""
    run, inputs = as_results(case)
    found = []
    for piece in (mixing.PIECE, 1):
        monkeypatch.setattr(mixing, "PIECE", piece)
        results = run(*inputs)
        found.append((*results, *torch.autograd.grad(sum(x.sin().sum() for x in results), inputs)))
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-14)


def test_inputs_that_are_not_contiguous_get_the_same_gradients():
    """Every second row, axes swapped, one row for all, as views of what the leaves hold; finite differences."""
    first, index = torch.zeros(2, 5, dtype=torch.long), torch.tensor([[[0, -1]] * 5, [[1, 0]] * 5])

    def attention(q: Tensor, rows: Tensor, kv: Tensor, sink: Tensor) -> Tensor:
        selection = Selection(index, Rows(kv.expand(2, -1, -1)))
        return attend(q.mT, Window(Rows(rows[:, ::2]), first, 5), selection, sink.expand(3)).mT

    assert gradcheck(attention, (leaf(2, 5, 4, 3), leaf(2, 10, 4), leaf(1, 2, 4), leaf(1)))
    assert gradcheck(lambda x, w1, w2, w3: swiglu(x.mT, w1.mT, w2.mT, w3.mT, 0.5).mT,
                     (leaf(2, 4, 3), leaf(4, 5), leaf(5, 4), leaf(4, 5)))  # fmt: skip
    rotation = torch.polar(torch.ones(3, 2, dtype=torch.float64), torch.randn(3, 2, dtype=torch.float64)).unsqueeze(1)
    assert gradcheck(lambda x: rotate(x.mT, rotation).mT, leaf(2, 3, 6, 2))
    alive = torch.tensor([True, False, True])
    assert gradcheck(lambda x, both, weight: gated_read(x.mT.expand(-1, 2, -1), both[::2], weight.mT, alive, 1e-20),
                     (leaf(3, 4, 1), leaf(5, 12), leaf(4, 2)))  # fmt: skip
    sizes = {"n_iters": 4, "eps": 1e-6, "norm_eps": 1e-20}
    assert gradcheck(lambda x, fn, *rest: hyper_coefficients(x[:, ::2].expand(-1, -1, 3, -1), fn.mT, *rest, **sizes),
                     (leaf(2, 4, 1, 4), leaf(12, 15), leaf(3), leaf(15)))  # fmt: skip


@pytest.mark.parametrize("reached", ["attn_sink", "hc_ffn.fn", "experts.w2", "q_weight", "kv_norm", "embed"])
def test_frozen_weights_change_no_gradient_of_the_others(reached):
    """1e-12 in float64."""
    model, ids = scattered(), random_ids(1, 11)
    model(ids).square().sum().backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters() if reached in name}
    for name, parameter in model.named_parameters():
        parameter.grad = None
        parameter.requires_grad_(name in expected)
    model(ids).square().sum().backward()
    for name, parameter in model.named_parameters():
        if name in expected:
            torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-12, atol=1e-12)
        else:
            assert parameter.grad is None


def test_gradients_of_bfloat16_inputs_are_rounded_ones():
    """Attention and SwiGLU: within 2 % of the float64 gradients at the same values, in the dtype of the input."""
    first, index = (torch.arange(23) - 3).clamp(min=0).expand(2, -1), torch.randint(-1, 9, (2, 23, 5))

    def attention(q: Tensor, rows: Tensor, kv: Tensor, sink: Tensor) -> Tensor:
        return attend(q, Window(Rows(rows), first, 4), Selection(index, Rows(kv)), sink)

    for run, shapes in ((attention, ((2, 23, 3, 32), (2, 23, 32), (2, 9, 32), (3,))),
                        (lambda *x: swiglu(*x, 100.0), ((50, 16), (24, 16), (16, 24), (24, 16)))):  # fmt: skip
        rounded = [torch.randn(shape).bfloat16().requires_grad_() for shape in shapes]
        exact = [x.detach().double().requires_grad_() for x in rounded]
        found, expected = (torch.autograd.grad(run(*x).sum(), x) for x in (rounded, exact))
        for ours, theirs in zip(found, expected, strict=True):
            assert ours.dtype == torch.bfloat16
            assert (ours - theirs).norm() < 0.02 * theirs.norm()


def test_a_second_derivative_is_refused_not_wrong():
    """What the backward passes keep is constant to them."""
    window, sink = Window(Rows(leaf(1, 2, 4)), torch.zeros(1, 2, dtype=torch.long), 2), leaf(1)
    for run, x in (
        (lambda x: attend(x, window, None, sink), leaf(1, 2, 1, 4)),
        (lambda x: swiglu(x, torch.ones(3, 4).double(), torch.ones(4, 3).double(), torch.ones(3, 4).double(), 9.0),
         leaf(2, 4)),
        (RMSNorm(4, 1e-6).double(), leaf(2, 4)),
        (lambda x: sinkhorn(x, 3, 1e-6), leaf(2, 3, 3)),
    ):  # fmt: skip
        first = torch.autograd.grad(run(x).square().sum(), x, create_graph=True)[0]
        with pytest.raises(RuntimeError, match="once_differentiable"):
            first.sum().backward()


@pytest.mark.parametrize("documents", [None, torch.tensor([[0] * 4 + [1] * 7])], ids=["one document", "two"])
def test_the_whole_model_with_respect_to_its_embeddings(documents):
    """All layers, pool and Engram: the choice of entries and experts is constant nearby."""
    model, ids = scattered(FLOATS), random_ids(1, 11)

    def run(weight: Tensor) -> Tensor:
        return functional_call(model, {"embed.weight": weight}, (ids,), {"documents": documents})

    weight = model.embed.weight.detach().clone().requires_grad_()
    assert gradcheck(run, weight, fast_mode=True)


def test_the_whole_model_with_respect_to_all_weights():
    """Along a random direction of every trained weight at once; 1e-6 relative at a step of 1e-6."""
    model, ids = scattered(FLOATS), random_ids(1, 11)
    upstream = torch.randn(1, 11, 64, dtype=torch.float64)
    (model(ids) * upstream).sum().backward()
    trained = [parameter for parameter in model.parameters() if parameter.grad is not None]
    direction = [torch.randn_like(parameter) for parameter in trained]
    slope = sum((parameter.grad * step).sum() for parameter, step in zip(trained, direction, strict=True))
    values = []
    for sign in (1, -2):
        with torch.no_grad():
            for parameter, step in zip(trained, direction, strict=True):
                parameter.add_(step, alpha=sign * 1e-6)
            values.append((model(ids) * upstream).sum())
    assert ((values[0] - values[1]) / 2e-6).item() == pytest.approx(slope.item(), rel=1e-6)


def test_every_weight_is_reached_but_the_indexers_and_the_balance_biases():
    """With quantisers on: the gradient passes straight through them."""
    model = scattered()
    model(random_ids(2, 21)).square().sum().backward()
    silent = {name for name, parameter in model.named_parameters() if parameter.grad is None}
    balance = ("bias", "bias_vl")
    assert silent == {name for name, _ in model.named_parameters() if ".indexer." in name or name.endswith(balance)}
    for name, parameter in model.named_parameters():
        if name not in silent:
            assert parameter.grad.isfinite().all() and parameter.grad.any(), name
