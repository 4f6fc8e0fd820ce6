"""Hyper-connections: the coefficients, the mixing, and which sub-layer's mix is read."""

from __future__ import annotations

import math

import pytest
import torch
from goldens import load
from models import NANO, context, random_ids, scattered, traced, window_only
from torch import Tensor

from tinyds41.mixing import collapse, hyper_coefficients, hyper_step
from tinyds41.model.block import Carry
from tinyds41.model.hyper_connections import HyperConnection
from tinyds41.model.transformer import Model
from tinyds41.ops import Ops
from tinyds41.sinkhorn import sinkhorn

UNITS = {name.removeprefix("hc."): tensor for name, tensor in load("units").items() if name.startswith("hc.")}
SIZES = {"n_iters": 20, "eps": 1e-6, "norm_eps": 1e-20}


def plain_sinkhorn(logits: Tensor, n_iters: int, eps: float = 1e-6) -> Tensor:
    """The equations of spec 7, left to autograd."""
    comb = logits.softmax(-1) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(n_iters - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return comb


def plain_coefficients(hc: HyperConnection, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of streams [N,D], token by token."""
    n = streams.shape[0]
    h = streams.flatten() / (streams.flatten().square().mean() + 1e-20).sqrt()
    t = hc.fn @ h
    pre = torch.sigmoid(t[:n] * hc.scale[0] + hc.base[:n]) + 1e-6
    post = 2 * torch.sigmoid(t[n : 2 * n] * hc.scale[1] + hc.base[n : 2 * n])
    return pre, post, plain_sinkhorn((t[2 * n :] * hc.scale[2] + hc.base[2 * n :]).view(n, n), 20)


def random_case(tokens: int = 3, width: int = 6, dtype=torch.float64):
    """Streams [1,S,4,D] and weights of the coefficients."""
    shapes = [(1, tokens, 4, width), (24, 4 * width), (3,), (24,)]
    return [torch.randn(shape, dtype=dtype) for shape in shapes]


def test_coefficients_equal_the_golden():
    """1e-6: float32 data of values up to 2."""
    *found, same = hyper_coefficients(UNITS["streams"], UNITS["fn"], UNITS["scale"], UNITS["base"], **SIZES)
    assert torch.equal(same, UNITS["streams"])
    for name, tensor in zip(("pre", "post", "comb"), found, strict=True):
        torch.testing.assert_close(tensor, UNITS[name], rtol=0, atol=1e-6)


def test_mixing_equals_the_golden():
    """Relative 1e-6: float32 sums of streams up to 145."""
    streams, collapsed = hyper_step(UNITS["streams"], UNITS["sublayer_out"], UNITS["post"], UNITS["comb"], UNITS["pre"])
    torch.testing.assert_close(streams, UNITS["expanded"], rtol=1e-6, atol=2e-5)
    torch.testing.assert_close(
        collapse(UNITS["streams"], UNITS["pre"]), UNITS["collapsed_by_pre"], rtol=1e-6, atol=2e-5
    )
    torch.testing.assert_close(collapsed, collapse(UNITS["expanded"], UNITS["pre"]), rtol=1e-6, atol=2e-5)


def test_coefficients_do_not_depend_on_the_size_of_the_streams():
    """The streams are normalised first; 1e-13 for the rounding of a factor of 1000."""
    streams, *weights = random_case()
    for small, large in zip(
        hyper_coefficients(streams, *weights, **SIZES)[:3], hyper_coefficients(streams * 1000, *weights, **SIZES)[:3],
        strict=True,
    ):  # fmt: skip
        torch.testing.assert_close(small, large, rtol=1e-13, atol=0)


def test_the_first_index_of_comb_is_the_source():
    """Stream j holds a 1 in channel j alone: stream k of the result shows column k of comb."""
    comb = torch.arange(16, dtype=torch.float64).view(1, 1, 4, 4) / 7
    streams = torch.eye(4, 5, dtype=torch.float64).view(1, 1, 4, 5)
    y, post = torch.zeros(1, 1, 5, dtype=torch.float64), torch.ones(1, 1, 4, dtype=torch.float64)
    mixed, _ = hyper_step(streams, y, post, comb, post)
    for source in range(4):
        for target in range(4):
            assert mixed[0, 0, target, source] == comb[0, 0, source, target]
    assert not mixed[..., 4].any()


def test_post_scales_the_output_of_the_sub_layer_per_stream():
    post, y = torch.tensor([[[0.5, 2.0, 0.0]]]), torch.tensor([[[1.0, -3.0]]])
    mixed, collapsed = hyper_step(
        torch.zeros(1, 1, 3, 2), y, post, torch.eye(3).view(1, 1, 3, 3), torch.tensor([[[0.0, 1.0, 4.0]]])
    )
    assert mixed.tolist() == [[[[0.5, -1.5], [2.0, -6.0], [0.0, 0.0]]]]
    assert collapsed.tolist() == [[[2.0, -6.0]]]


def test_rows_and_columns_of_comb_sum_to_one():
    """Columns within eps, they come last; rows within 1e-3, what 20 rounds leave of normal logits."""
    comb = sinkhorn(torch.randn(50, 4, 4, dtype=torch.float64), 20, 1e-6)
    assert (comb > 0).all()
    assert (comb.sum(-2) - 1).abs().max() < 2e-6
    assert (comb.sum(-1) - 1).abs().max() < 1e-3


def test_comb_reads_its_rows_from_the_projection_row_by_row():
    """An uneven matrix of one round: transposed on the way in, its softmax would run over the sources."""
    streams, fn, scale, base = random_case(tokens=1)
    comb = hyper_coefficients(streams, fn * 0, scale, base, n_iters=1, eps=1e-6, norm_eps=1e-20)[2][0, 0]
    rows = [[math.exp(base[8 + 4 * j + k]) for k in range(4)] for j in range(4)]
    rows = [[x / sum(row) + 1e-6 for x in row] for row in rows]
    columns = [sum(row[k] for row in rows) + 1e-6 for k in range(4)]
    expected = torch.tensor([[row[k] / columns[k] for k in range(4)] for row in rows], dtype=torch.float64)
    torch.testing.assert_close(comb, expected, rtol=1e-14, atol=0)


@pytest.mark.parametrize("n_iters", [1, 2, 3, 20])
@pytest.mark.parametrize("n_streams", [1, 3, 4])
def test_sinkhorn_and_its_gradient_equal_plain_autograd(n_iters, n_streams):
    """1e-13 in float64, of values and gradients up to a few units; an upstream gradient without symmetry."""
    ours = torch.randn(2, 3, n_streams, n_streams, dtype=torch.float64, requires_grad=True)
    plain = ours.detach().clone().requires_grad_()
    upstream = torch.randn(2, 3, n_streams, n_streams, dtype=torch.float64)
    found, expected = sinkhorn(ours, n_iters, 1e-3), plain_sinkhorn(plain, n_iters, 1e-3)
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=0)
    (found * upstream).sum().backward()
    (expected * upstream).sum().backward()
    torch.testing.assert_close(ours.grad, plain.grad, rtol=0, atol=1e-13)


def test_the_gradient_of_sinkhorn_equals_finite_differences():
    logits = torch.randn(2, 4, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: sinkhorn(x, 5, 1e-6), logits)


def test_the_gradient_of_sinkhorn_without_eps_is_finite_where_a_softmax_is_0():
    """e^-2000 is 0 also in float64; 1e-13 as above."""
    ours = torch.eye(3, dtype=torch.float64).mul(2000).repeat(2, 1, 1).requires_grad_()
    with torch.no_grad():
        ours[1] = torch.randn(3, 3) + 3 * torch.tensor([[1.0, -600, 1], [1, 1, 1], [1, 1, 1]])
    plain, upstream = ours.detach().clone().requires_grad_(), torch.randn(2, 3, 3, dtype=torch.float64)
    (sinkhorn(ours, 3, 0.0) * upstream).sum().backward()
    (plain_sinkhorn(plain, 3, 0.0) * upstream).sum().backward()
    assert ours.grad[1].any()
    torch.testing.assert_close(ours.grad, plain.grad, rtol=0, atol=1e-13)


def test_coefficients_are_float32_of_bfloat16_weights_and_streams():
    """Equal to float32 arithmetic on the same rounded values, bit for bit."""
    rounded = [tensor.bfloat16() for tensor in random_case(dtype=torch.float32)]
    *found, same = hyper_coefficients(*rounded, **SIZES)
    *exact, _ = hyper_coefficients(*(tensor.float() for tensor in rounded), **SIZES)
    assert torch.equal(same, rounded[0])
    for ours, expected in zip(found, exact, strict=True):
        assert ours.dtype == torch.float32
        assert torch.equal(ours, expected)


def test_mixing_adds_in_float32_and_rounds_once():
    """256 + 1 + 1 = 258: rounded to bfloat16 on the way, whose step is 2 there, each 1 would be lost."""
    streams, y = torch.tensor([[[[256.0], [1.0], [0.0], [0.0]]]]).bfloat16(), torch.ones(1, 1, 1).bfloat16()
    mixed, collapsed = hyper_step(streams, y, torch.ones(1, 1, 4), torch.ones(1, 1, 4, 4), torch.full((1, 1, 4), 0.25))
    assert mixed.dtype == collapsed.dtype == torch.bfloat16
    assert mixed.flatten().tolist() == [258.0] * 4
    assert collapsed.item() == 258.0


@pytest.mark.parametrize("mode", ["single_pass", "multi_pass", "residual"])
def test_two_layers_equal_the_equations_unrolled(mode):
    """Only attention and experts are taken from the model; every mix is written out. 1e-12 in float64."""
    config = window_only(mhc_mode=mode)
    model, ids = scattered(config), random_ids(1, 6, config)
    ctx = context(config, 6)
    with torch.no_grad():
        streams = model.embed(ids).unsqueeze(2).repeat(1, 1, 4, 1)
        mix = torch.tensor([1.0, 0, 0, 0], dtype=torch.float64).expand(1, 6, 4)
        for block in model.layers:
            for hc, norm, sub_layer in ((block.hc_attn, block.attn_norm, attention_of(block, ctx)),
                                        (block.hc_ffn, block.ffn_norm, lambda x, b=block: b.ffn(x, ctx))):  # fmt: skip
                pre, post, comb = (
                    torch.stack(part)[None]
                    for part in zip(*(plain_coefficients(hc, token) for token in streams[0]), strict=True)
                )
                if mode == "residual":
                    post, comb = torch.ones_like(post), torch.eye(4, dtype=torch.float64).expand_as(comb)
                read = {"single_pass": mix, "multi_pass": pre, "residual": torch.eye(4)[0].expand_as(pre)}[mode]
                y = sub_layer(norm(sum(read[..., i, None] * streams[..., i, :] for i in range(4))))
                streams = torch.stack([
                    post[..., k, None] * y + sum(comb[..., j, k, None] * streams[..., j, :] for j in range(4))
                    for k in range(4)], 2)  # fmt: skip
                mix = torch.eye(4)[0].expand_as(pre) if mode == "residual" else pre
        last = sum(mix[..., i, None] * streams[..., i, :] for i in range(4))
        expected = model.head(model.norm(last))
        torch.testing.assert_close(model(ids), expected, rtol=0, atol=1e-12)  # so few tokens: by NumPy
    torch.testing.assert_close(model(ids), expected, rtol=0, atol=1e-12)  # with gradients: as long texts are read


def attention_of(block, ctx):
    def run(x: Tensor) -> Tensor:
        return block.attn(x, block.attn.query_latent(x), ctx, ctx.rotation(block.rope, x.dtype), None)

    return run


def test_every_layer_reads_its_streams_with_the_mix_of_the_sub_layer_before():
    """Through Engram and across the encoder-decoder boundary; 1e-12 in float64."""
    model = scattered()
    trace = traced(model, random_ids(1, 9))
    for layer in range(1, 8):
        mix, streams = trace[f"layers.{layer - 1}.hc_ffn.pre"], trace[f"layers.{layer}.streams"]
        with torch.no_grad():
            expected = model.layers[layer].attn_norm((mix.unsqueeze(-1) * streams).sum(2))
        torch.testing.assert_close(trace[f"layers.{layer}.attn.input"], expected, rtol=0, atol=1e-12)


def test_the_first_layer_reads_the_first_stream_alone():
    carry = Carry.start(torch.randn(1, 3, 8).bfloat16(), 4)
    assert carry.mix.tolist() == [[[1, 0, 0, 0]] * 3]
    assert carry.mix.dtype == torch.float32
    assert torch.equal(carry.streams, carry.collapsed.unsqueeze(2).expand(1, 3, 4, 8))


def test_a_layer_that_starts_is_close_to_a_plain_residual():
    """Before training pre is 1/N, post 1 and comb nearly the identity, within what fn of 0.02 moves."""
    pre, post, comb, _ = Model(window_only()).layers[0].hc_attn(torch.randn(1, 5, 4, 32))
    assert (pre - 0.25).abs().max() < 0.15
    assert (post - 1).abs().max() < 0.4
    assert (comb - torch.eye(4)).abs().max() < 0.1


def test_streams_of_another_width_are_refused():
    with pytest.raises(ValueError, match=r"expected \[\.\.\., 32\], got \(1, 2, 4, 31\)"):
        HyperConnection(NANO, Ops.plain())(torch.zeros(1, 2, 4, 31))
