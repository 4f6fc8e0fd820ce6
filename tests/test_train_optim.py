"""Roles of parameters, the learning rate's course, and gate biases that follow the load."""

import pytest
import torch

from tinyds41.config import Config
from tinyds41.model.transformer import Model
from tinyds41.train.optim import adamw, learning_rate_at, move_gate_biases, role


@pytest.fixture(scope="module")
def model():
    return Model(Config.preset("nano"))


def test_every_trained_parameter_is_in_exactly_one_group(model):
    named = [name for group in adamw(model, 1e-3).param_groups for name in group["names"]]
    assert len(named) == len(set(named))
    assert set(named) == {name for name, p in model.named_parameters() if p.requires_grad}
    assert not any(name.endswith((".bias", ".bias_vl")) for name in named)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("embed.weight", "table"), ("head.weight", "table"), ("layers.1.engram.embed.weight", "table"),
        ("norm.weight", "norm"), ("layers.2.attn.kv_norm.weight", "norm"), ("layers.2.indexer.k_norm.weight", "norm"),
        ("layers.2.attn.attn_sink", "scale"), ("layers.2.hc_attn.base", "scale"), ("layers.2.hc_ffn.scale", "scale"),
        ("layers.1.engram.q_weight", "scale"), ("layers.2.ffn.gate.bias", "scale"),
        ("layers.2.hc_attn.fn", "matrix"), ("layers.2.ffn.experts.w1", "matrix"),
        ("layers.2.ffn.gate.weight", "matrix"), ("layers.1.engram.wkv.weight", "matrix"),
        ("layers.2.indexer.wq_b.weight", "matrix"),
    ],
)  # fmt: skip
def test_the_role_follows_from_the_name(name, expected):
    assert role(name) == expected


def test_norms_and_matrices_decay_scales_and_tables_do_not(model):
    decay = {group["role"]: group["weight_decay"] for group in adamw(model, 1e-3).param_groups}
    assert decay == {"matrix": 0.1, "norm": 0.1, "scale": 0, "table": 0}


def test_a_row_that_no_token_named_stays_as_it_was():
    """With eps 1e-20 a gradient of zero must move nothing, and give no 0/0."""
    model = Model(Config.preset("nano"))
    before = model.embed.weight.detach().clone()
    optimizer = adamw(model, 1e-3)
    model(torch.tensor([[5, 6, 7]])).logsumexp(-1).sum().backward()
    optimizer.step()
    moved = (model.embed.weight != before).any(-1).nonzero().flatten().tolist()
    assert moved == [5, 6, 7]


def test_the_learning_rate_rises_linearly_and_ends_at_a_tenth():
    rates = [learning_rate_at(step, base=1.0, warmup=4, steps=20) for step in range(20)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates[-1] == pytest.approx(0.1)
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert learning_rate_at(12, base=1.0, warmup=5, steps=20) == pytest.approx(0.55)  # half-way: (1 + 0.1) / 2


def test_a_run_shorter_than_its_warm_up_still_has_a_rate():
    assert learning_rate_at(0, base=1.0, warmup=0, steps=1) == 1.0
    assert learning_rate_at(2, base=1.0, warmup=10, steps=3) == pytest.approx(0.3)


def test_biases_of_busy_experts_fall_and_of_idle_ones_rise():
    model = Model(Config.preset("nano"))
    load = torch.full((8, 4), 5.0)
    load[3] = torch.tensor([9.0, 5.0, 5.0, 1.0])
    move_gate_biases(model, load)
    move_gate_biases(model, load)
    biases = [model.get_parameter(f"layers.{layer}.ffn.gate.bias") for layer in range(8)]
    # Two steps of 0.001 in fp32.
    torch.testing.assert_close(biases[3].detach(), torch.tensor([-0.002, 0, 0, 0.002]), rtol=1e-6, atol=0)
    assert not any(bias.any() for layer, bias in enumerate(biases) if layer != 3)
