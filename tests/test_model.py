"""The model as a whole: what it refuses, what it leaves alone, and its three precisions."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from models import NANO, context, random_ids, scatter, scattered, traced
from torch import Tensor

from tinyds41 import memory
from tinyds41.checkpoint.names import our_name, to_released
from tinyds41.config import Config
from tinyds41.model.norm import RMSNorm
from tinyds41.model.transformer import Model
from tinyds41.ops import Ops
from tinyds41.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def model() -> Model:
    return scattered(dtype=torch.float32)


# ---- bad input ----


@pytest.mark.parametrize(("ids", "message"), [
    (torch.tensor([[0, 64]]), "id 64 is out of range: ids are 0..63"),
    (torch.tensor([[5, -1]]), "id -1 is out of range: ids are 0..63"),
    (torch.zeros(1, 0, dtype=torch.long), r"an empty prompt: ids have shape \(1, 0\)"),
    (torch.zeros(0, 3, dtype=torch.long), r"an empty prompt: ids have shape \(0, 3\)"),
    (torch.zeros(3, dtype=torch.long), r"ids have shape \(3,\), expected \[B, S\]"),
    (torch.zeros(1, 2, 3, dtype=torch.long), r"ids have shape \(1, 2, 3\), expected \[B, S\]"),
    (torch.zeros(1, 3), "ids are torch.float32, expected int64 or int32"),
    (torch.zeros(1, 257, dtype=torch.long), "257 tokens exceed max_position_embeddings=256"),
])  # fmt: skip
def test_ids_that_do_not_fit_are_refused(model, ids, message):
    with pytest.raises(ValueError, match=message):
        model(ids)


def test_the_largest_id_and_the_longest_prompt_are_taken():
    model = Model(NANO.replace(max_position_embeddings=9))
    assert model(torch.full((1, 9), 63)).shape == (1, 9, 64)


def test_int32_ids_give_the_logits_of_int64_ids(model):
    ids = random_ids(2, 9)
    assert torch.equal(model(ids.int()), model(ids))


def test_too_little_memory_is_said_before_anything_is_allocated(monkeypatch):
    """Needed and available bytes; 0.2 TB of weights would not fit into this machine."""
    monkeypatch.setattr(memory, "available_bytes", lambda device: 123_456)
    n_bytes = 4 * sum(parameter.numel() for parameter in Model(NANO, device="meta").parameters())
    with pytest.raises(MemoryError, match=rf"needs {n_bytes:,} bytes, cpu has 123,456 bytes available"):
        Model(NANO)
    with pytest.raises(MemoryError, match=r"a model of [\d,]+ parameters in torch\.float64 needs [\d,]+ bytes"):
        Model(Config.preset("flash", engram_compressed_vocab_size=129280), dtype=torch.float64)


def test_memory_that_is_not_known_refuses_nothing(monkeypatch):
    monkeypatch.setattr(memory, "available_bytes", lambda device: None)
    assert Model(NANO).device.type == "cpu"


def test_a_model_on_the_meta_device_holds_shapes_alone():
    flash = Model(Config.preset("flash"), device="meta", dtype=torch.bfloat16)
    assert {parameter.device.type for parameter in flash.parameters()} == {"meta"}
    assert flash.layers[20].ffn.experts.w1.shape == (384, 2304, 5120)


def test_a_tokenizer_larger_than_the_vocabulary_is_refused():
    class Large:
        vocab_size = 65

    with pytest.raises(ValueError, match="the tokenizer has 65 ids, vocab_size is 64"):
        Model(NANO, tokenizer=Large())  # type: ignore[arg-type]


def test_a_tokenizer_brings_its_token_map_and_what_it_lacks_is_a_pad():
    class Small:
        vocab_size = 60

        def compressed_map(self) -> Tensor:
            return torch.arange(60).clamp(max=49)

    model = Model(NANO.replace(engram_compressed_vocab_size=50), tokenizer=Small())  # type: ignore[arg-type]
    for layer in (1, 3):
        assert model.layers[layer].engram.token_map.tolist() == [*range(50), *[49] * 10, *[2] * 4]


@pytest.mark.parametrize("width", [31, 1])
def test_inputs_of_another_width_are_refused(model, width):
    """1 would broadcast through a norm."""
    wrong = torch.zeros(1, 2, width)
    block, rotation = model.layers[4], torch.ones(1, 2, 8, dtype=torch.complex64)
    message = rf"expected \[\.\.\., 32\], got \(1, 2, {width}\)"
    with pytest.raises(ValueError, match=message):
        RMSNorm(32, 1e-20)(wrong)
    with pytest.raises(ValueError, match=message):
        block.attn.query_latent(wrong)
    with pytest.raises(ValueError, match=message):
        block.attn(wrong, torch.zeros(1, 2, 16), context(NANO, 2), rotation, None)
    with pytest.raises(ValueError, match=rf"query_latent: expected \[\.\.\., 16\], got \(1, 2, {width}\)"):
        block.attn(torch.zeros(1, 2, 32), wrong, context(NANO, 2), rotation, None)


def test_building_a_model_does_not_load_the_compiler():
    """Initialising an embedding on the meta device would: seconds before anything happens."""
    code = (
        "import sys; from tinyds41 import Config; from tinyds41.model.transformer import Model;"
        "Model(Config.preset('nano')); sys.exit('torch._dynamo' in sys.modules)")
    root = Path(__file__).parents[1]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0


# ---- seeds ----


def test_a_seed_gives_the_same_model_and_another_seed_another():
    one, same, other = (Model(NANO, seed=seed).state_dict() for seed in (3, 3, 4))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["layers.4.attn.wq_b.weight"], other["layers.4.attn.wq_b.weight"])


def test_a_seed_gives_the_same_weights_rounded_in_bfloat16():
    wide, narrow = Model(NANO).state_dict(), Model(NANO, dtype=torch.bfloat16).state_dict()
    for name, tensor in wide.items():
        if "engram.wkv" not in name:  # its value rows are scaled after rounding
            assert torch.equal(tensor.to(narrow[name].dtype), narrow[name]), name


def test_the_global_random_state_is_neither_read_nor_changed():
    def states():
        return torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()

    before = states()
    first = Model(NANO)
    first(random_ids(1, 5))
    for old, new in zip(before, states(), strict=True):
        assert torch.equal(old, new) if torch.is_tensor(old) else old == new
    torch.manual_seed(99)
    second = Model(NANO)
    assert torch.equal(first.embed.weight, second.embed.weight)


def test_initial_weights_are_those_of_the_recipe():
    """Matrices of deviation 0.02 (within 5 % for 2,000 draws), norms 1, sinks and biases 0."""
    state = Model(NANO).state_dict()
    for name, tensor in state.items():
        if "norm" in name or name.endswith(("q_weight", "k_weight", "hc_attn.scale", "hc_ffn.scale")):
            assert (tensor == 1).all(), name
        elif name.endswith(("attn_sink", "gate.bias", "gate.bias_vl")):
            assert (tensor == 0).all(), name
    assert state["layers.1.engram.embed.weight"].std().item() == pytest.approx(0.02, rel=0.05)
    assert state["layers.4.ffn.experts.w1"].std().item() == pytest.approx(0.02, rel=0.05)
    assert state["layers.4.hc_attn.fn"].std().item() == pytest.approx(0.02, rel=0.05)


# ---- precision ----


def test_bfloat16_is_finite_and_close_to_float32():
    """The same weights; every entry and expert chosen and no cache rounded, so that nothing can flip.

    Within 5 % of the spread of the logits: 2.3 % seen, of bfloat16 with its 8 bits through 16 sub-layers.
    """
    config = NANO.replace(quantize_cache=False, index_topk=64, candidate_topk_blocks=64, num_experts_per_tok=4)
    wide, narrow = scattered(config, torch.float32), scattered(config, torch.bfloat16)
    wide.load_state_dict({name: tensor.float() for name, tensor in narrow.state_dict().items()})
    ids = random_ids(2, 40)
    with torch.no_grad():
        exact, rounded = wide(ids), narrow(ids)
    assert rounded.dtype == torch.bfloat16
    assert rounded.isfinite().all()
    assert (rounded.float() - exact).abs().mean() < 0.05 * exact.std()
    assert scattered(dtype=torch.bfloat16)(ids).isfinite().all()  # with quantisers and choices too


def test_the_carried_mix_and_the_coefficients_of_a_bfloat16_model_are_float32():
    trace = traced(scattered(dtype=torch.bfloat16), random_ids(1, 6))
    for name in ("hc_attn.pre", "hc_ffn.post", "hc_attn.comb", "ffn.scores", "ffn.weights", "indexer.scores"):
        assert trace[f"layers.4.{name}"].dtype == torch.float32, name
    for name in ("streams", "attn.q", "attn.window_kv", "compressor.global_kv", "ffn.input"):
        assert trace[f"layers.4.{name}"].dtype == torch.bfloat16, name


def test_nothing_is_rounded_to_float32_in_a_float64_model():
    """Every intermediate is float64, and a nudge of 1e-12 of one weight arrives at the logits, to 1e-3 of itself."""
    model, ids = scattered(NANO.replace(quantize_cache=False)), random_ids(1, 9)
    for name, value in traced(model, ids).items():
        assert value.dtype in (torch.float64, torch.int64), name
    outputs = []
    for step in (0, 1e-12, 1e-6):
        with torch.no_grad():
            model.embed.weight[ids[0, 0], 0] += step
            outputs.append(model(ids))
            model.embed.weight[ids[0, 0], 0] -= step
    small, large = (outputs[1] - outputs[0]) * 1e12, (outputs[2] - outputs[0]) * 1e6
    assert (small - large).abs().max() < 0.05 * large.abs().max()


def test_rmsnorm_is_the_equation_with_its_epsilon():
    """eps 1e-20 keeps a row of 1e-8 at full size; eps 1e-2 does not."""
    x = torch.tensor([[3e-8, 4e-8]], dtype=torch.float64)
    norm = RMSNorm(2, 1e-20).double()
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([1.0, 2.0]))
    root = (25e-16 / 2 + 1e-20) ** 0.5
    assert norm(x)[0].tolist() == pytest.approx([3e-8 / root, 8e-8 / root], rel=1e-12)
    norm.eps = 1e-2
    assert norm(x)[0, 0].item() == pytest.approx(3e-7, rel=1e-6)


def test_rmsnorm_is_float32_inside_a_bfloat16_model():
    """A mean of squares in bfloat16 would be off by more than its own rounding."""
    x, norm = torch.randn(4, 64).bfloat16(), RMSNorm(64, 1e-20).bfloat16()
    scatter(norm)
    wide = x.float()
    expected = norm.weight.float() * wide * wide.square().mean(-1, keepdim=True).rsqrt()
    assert torch.equal(norm(x), expected.bfloat16())


# ---- the halves and their parts ----


def test_both_halves_in_turn_are_the_whole(model):
    ids = random_ids(2, 11)
    ctx = context(NANO, 11, 2)
    with torch.no_grad():
        carry = model.decode(model.encode(ids, ctx), ctx)
        assert torch.equal(model.logits(carry), model(ids))
    assert ctx.counters.tokens_run == dict.fromkeys(range(8), 22)
    assert ctx.counters.boundary_projections == {4: 22}


def test_a_plan_without_a_decoder_runs_every_layer_as_encoder():
    config = NANO.replace(
        compress_ratios=[0, 0, 2, 2, 2, 2, 2, 2], candidate_source_layer_id=None)
    model, ids, ctx = scattered(config), random_ids(1, 11), context(config, 11)
    with torch.no_grad():
        carry = model.encode(ids, ctx)
        assert torch.equal(model.logits(carry), model(ids))
    assert model.decode(carry, ctx) is carry


def test_the_operations_are_those_passed_in():
    calls = []

    def experts(*args):
        calls.append(args[0].shape)
        return Ops.plain().experts(*args)

    Model(NANO, ops=Ops(experts=experts))(random_ids(2, 5))
    assert calls == [(10, 32)] * 8


def test_names_are_the_released_ones_and_go_both_ways(model):
    released = to_released(model.state_dict())
    for name in ("layers.2.attn.compressor.wgate.weight", "layers.2.attn.indexer.wk.weight", "layers.6.hc_ffn_base",
                 "layers.6.attn.indexer.wq_b.weight", "layers.5.ffn.experts.3.w2.weight", "layers.1.engram.q_weight",
                 "layers.0.attn.attn_sink", "layers.7.ffn.gate.bias_vl"):  # fmt: skip
        assert name in released
    assert "layers.4.attn.compressor.wgate.weight" not in released  # ratio 1
    assert "layers.6.attn.indexer.wk.weight" not in released  # no source
    assert not any("token_map" in name for name in released)
    assert {our_name(name) for name in released} == set(model.state_dict())


@pytest.mark.parametrize("ids", [[[1, 2]], "text", None])
def test_ids_that_are_no_tensor_are_refused_by_kind(model, ids):
    with pytest.raises(ValueError, match=f"ids are a {type(ids).__name__}, expected a tensor"):
        model(ids)


def test_a_model_without_weights_says_so_when_it_is_run(model):
    with pytest.raises(ValueError, match="the model is on the meta device"):
        Model(NANO, device="meta")(random_ids(1, 3))
    with pytest.raises(ValueError, match="ids are on meta, the model is on cpu"):
        model(random_ids(1, 3).to("meta"))


@pytest.mark.parametrize("dtype", [torch.int32, torch.complex64, torch.float8_e4m3fn, "float32", None])
def test_a_dtype_that_no_model_has_is_refused(dtype):
    with pytest.raises(ValueError, match=r"is none of torch\.float32"):
        Model(NANO, dtype=dtype)


@pytest.mark.parametrize("device", ["abacus", "", None])
def test_a_device_that_is_not_there_is_refused_by_name(device):
    with pytest.raises(ValueError, match=f"device {device!r} cannot be used"):
        Model(NANO, device=device)


@pytest.mark.parametrize("token_map", [[1, 2], torch.zeros(64)])
def test_a_token_map_that_is_no_tensor_of_ids_is_refused(token_map):
    with pytest.raises(ValueError, match="expected a tensor of int64 or int32"):
        Model(NANO, token_map=token_map)


def test_a_pad_token_that_the_tokenizer_lacks_is_refused():
    tokenizer = Tokenizer.train([], 260)
    config = NANO.replace(
        vocab_size=300, engram_compressed_vocab_size=tokenizer.compressed_vocab_size, engram_pad_token_id=299)
    with pytest.raises(ValueError, match="engram_pad_token_id=299 is none of the tokenizer's 260 ids"):
        Model(config, tokenizer=tokenizer)
