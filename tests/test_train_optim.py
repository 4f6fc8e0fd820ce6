"""Which optimiser has which parameter, one object for several, the learning rate's course, biases that follow the load.
"""

import copy
import math

import pytest
import torch

from tinyds41.config import Config
from tinyds41.model.transformer import Model
from tinyds41.train.muon import orthogonal
from tinyds41.train.optim import ByRole, adamw, learning_rate_at, move_gate_biases, optimizers, set_learning_rate
from tinyds41.train.roles import parameter_roles
from tinyds41.train.train_config import TrainConfig


@pytest.fixture(scope="module")
def model():
    return Model(Config.preset("nano"))


def with_gradients(seed: int = 3) -> Model:
    """A nano whose parameters have random gradients, of both signs and many sizes."""
    model = Model(Config.preset("nano"), seed=1)
    give_gradients(model, seed)
    return model


def give_gradients(model: Model, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.randn(parameter.shape, generator=generator)


@pytest.mark.parametrize("make", [adamw, ByRole])
def test_every_trained_parameter_is_in_exactly_one_group(model, make):
    groups = make(model, 1e-3).param_groups
    named = [name for group in groups for name in group["names"]]
    assert len(named) == len(set(named))
    assert set(named) == {name for name, p in model.named_parameters() if p.requires_grad}
    assert not any(name.endswith((".bias", ".bias_vl")) for name in named)
    assert all(p is model.get_parameter(n) for g in groups for n, p in zip(g["names"], g["params"], strict=True))


OWN = {"kv_source_layer_ids": (2, 3, 4, 5, 6, 7), "index_source_layer_ids": (2, 3, 4, 5, 6, 7)}


@pytest.mark.parametrize("make", [adamw, ByRole])
@pytest.mark.parametrize("changes", [
    {"engram_layer_ids": (), "engram_num_embeddings": ()}, {"mhc_mode": "residual"}, {"mhc_mode": "multi_pass"}, OWN,
], ids=["no Engram", "residual", "multi-pass", "own entries and indices"])  # fmt: skip
def test_every_parameter_of_every_kind_of_model_is_assigned_once(make, changes):
    """To a group, or to the load that moves a gate's bias."""
    model = Model(Config.preset("nano", **changes), device="meta")
    grouped = [name for group in make(model, 1e-3).param_groups for name in group["names"]]
    biases = [name for row in parameter_roles(model) if row.optimizer == "load" for name in row.names]
    assert sorted(grouped + biases) == sorted(name for name, _ in model.named_parameters())


@pytest.mark.parametrize("make", [adamw, ByRole])
def test_norms_and_matrices_decay_scales_and_tables_do_not(model, make):
    decay = {group["role"]: group["weight_decay"] for group in make(model, 1e-3).param_groups}
    assert decay == {"matrix": 0.1, "heads": 0.1, "index heads": 0.1, "experts": 0.1, "norm": 0.1,
                     "table": 0, "engram table": 0, "scale": 0}  # fmt: skip


@pytest.mark.parametrize(("chosen", "kind"), [("adamw", torch.optim.AdamW), ("report", ByRole)])
def test_the_config_chooses(model, chosen, kind):
    assert type(optimizers(model, TrainConfig(optimizer=chosen))) is kind
    assert TrainConfig().optimizer == "adamw"


def test_engram_learns_five_times_as_fast_by_the_report_and_at_one_rate_by_adamw(model):
    for make, factor in ((ByRole, 5), (adamw, 1)):
        optimizer = make(model, 1e-3)
        fresh = {group["role"]: group["lr"] for group in optimizer.param_groups}
        set_learning_rate(optimizer, 0.5)
        rates = {group["role"]: group["lr"] for group in optimizer.param_groups}
        assert rates.pop("engram table") == 0.5 * factor and fresh.pop("engram table") == 1e-3 * factor
        assert set(rates.values()) == {0.5} and set(fresh.values()) == {1e-3}


@pytest.mark.parametrize(("name", "n_matrices"), [
    ("layers.2.attn.wq_b.weight", 2), ("layers.2.indexer.wq_b.weight", 3), ("layers.2.ffn.experts.w1", 4),
    ("layers.2.attn.wo_a.weight", 1), ("layers.2.hc_attn.fn", 1),
])  # fmt: skip
def test_muons_first_step_is_orthogonal_in_each_head_and_expert(name, n_matrices):
    model = with_gradients()
    parameter = model.get_parameter(name)
    before, gradient = parameter.detach().clone(), parameter.grad.clone()
    ByRole(model, 0.01).step()
    parts = gradient.flatten(0, -2).unflatten(0, (n_matrices, -1))
    factor = 0.01 * 0.18 * math.sqrt(max(parts.shape[1:]))
    expected = before * (1 - 0.01 * 0.1) - factor * orthogonal(parts).reshape(before.shape)
    # fp32; the gradient is first scaled by .0975, which the iteration's rounding sees.
    torch.testing.assert_close(parameter.detach(), expected, rtol=0, atol=1e-7)


def test_norms_and_scales_move_as_adamw_moves_them():
    one, two = with_gradients(), with_gradients()
    optimizers = ByRole(one, 0.01), adamw(two, 0.01)
    for seed in (4, 5):
        for model, optimizer in zip((one, two), optimizers, strict=True):
            optimizer.step()
            give_gradients(model, seed)
    others = dict(two.named_parameters())
    same = {n for n, p in one.named_parameters() if p.requires_grad and torch.equal(p, others[n])}
    assert same == {n for g in optimizers[0].param_groups if g["role"] in ("norm", "scale") for n in g["names"]}


def test_matrices_and_tables_have_one_moment_norms_and_scales_two():
    model = with_gradients()
    optimizer = ByRole(model, 0.01)
    optimizer.step()
    kinds = {g["role"]: set(optimizer.state[g["params"][0]]) for g in optimizer.param_groups}
    two = {"step", "exp_avg", "exp_avg_sq"}
    assert kinds.pop("norm") == kinds.pop("scale") == two
    assert len(kinds) == 6 and set(map(frozenset, kinds.values())) == {frozenset({"momentum"})}


def test_a_loaded_state_goes_on_bit_for_bit():
    """Also a second time: loading replaces groups and state, of which the parts keep no older ones."""
    whole, halves = with_gradients(), with_gradients()
    first, second = ByRole(whole, 0.01), ByRole(halves, 0.01)
    for seed in range(4):
        give_gradients(whole, seed)
        give_gradients(halves, seed)
        set_learning_rate(first, 0.01 / (seed + 1))
        first.step()
        saved = copy.deepcopy(second.state_dict())
        second = ByRole(halves, 7.0)
        second.load_state_dict(saved)
        second.load_state_dict(saved)
        set_learning_rate(second, 0.01 / (seed + 1))
        second.step()
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), halves.parameters(), strict=True))


def test_a_parameter_without_a_role_is_named():
    model = Model(Config.preset("nano"), device="meta")
    model.extra = torch.nn.Linear(2, 2, device="meta")
    for make in (adamw, ByRole):
        with pytest.raises(ValueError, match=r"no role is known for the parameter 'extra\.weight'"):
            make(model, 1e-3)


@pytest.mark.parametrize("make", [adamw, ByRole])
def test_a_row_that_no_token_named_stays_as_it_was(make):
    """With eps 1e-20 a gradient of zero must move nothing, and give no 0/0."""
    model = Model(Config.preset("nano"))
    before = model.embed.weight.detach().clone()
    optimizer = make(model, 1e-3)
    for _ in range(2):
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
