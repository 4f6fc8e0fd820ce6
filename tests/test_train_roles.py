"""Every parameter has one role, by its name; the table shows what each role's optimiser does."""

import pytest
import torch

from tinyds41.config import Config, preset_names
from tinyds41.model.transformer import Model
from tinyds41.train.roles import ROLES, n_matrices, parameter_roles, role


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("embed.weight", "table"), ("head.weight", "table"), ("layers.1.engram.embed.weight", "engram table"),
        ("norm.weight", "norm"), ("layers.2.attn.kv_norm.weight", "norm"), ("layers.2.indexer.k_norm.weight", "norm"),
        ("layers.2.compressor.norm.weight", "norm"), ("layers.0.ffn_norm.weight", "norm"),
        ("layers.2.attn.attn_sink", "scale"), ("layers.2.hc_attn.base", "scale"), ("layers.2.hc_ffn.scale", "scale"),
        ("layers.1.engram.q_weight", "scale"), ("layers.1.engram.k_weight", "scale"),
        ("layers.2.ffn.gate.bias", "gate bias"), ("layers.2.ffn.gate.bias_vl", "gate bias"),
        ("layers.2.hc_attn.fn", "matrix"), ("layers.2.ffn.gate.weight", "matrix"),
        ("layers.1.engram.wkv.weight", "matrix"), ("layers.2.compressor.wgate.weight", "matrix"),
        ("layers.2.attn.wq_a.weight", "matrix"), ("layers.2.ffn.shared_experts.w1.weight", "matrix"),
        ("layers.2.indexer.weights_proj.weight", "matrix"), ("layers.2.indexer.wk.weight", "matrix"),
        ("layers.2.attn.wq_b.weight", "heads"), ("layers.2.indexer.wq_b.weight", "index heads"),
        ("layers.2.ffn.experts.w1", "experts"), ("layers.39.ffn.experts.w2", "experts"),
        # Draft blocks, under their released names (spec 13).
        ("mtp.0.main_proj.weight", "matrix"), ("mtp.0.main_norm.weight", "norm"), ("mtp.2.norm.weight", "norm"),
        ("mtp.2.markov_head.embed.weight", "table"), ("mtp.2.markov_head.head.weight", "table"),
        ("mtp.2.confidence_head.proj.weight", "matrix"), ("mtp.1.attn.wq_b.weight", "heads"),
        ("mtp.1.attn.attn_sink", "scale"), ("mtp.0.ffn.experts.w3", "experts"), ("mtp.0.hc_ffn.base", "scale"),
        ("mtp.0.ffn.gate.bias", "gate bias"),
    ],
)  # fmt: skip
def test_the_role_follows_from_the_name(name, expected):
    assert role(name) == expected


@pytest.mark.parametrize("name", [
    "layers.2.attn.wq_c.weight", "attn.wq_b.weight", "layers.2.experts.w1", "layers.1.engram.embed.scale", "embed.bias",
    "layers.x.attn_norm.weight", "layers.2.other_norm.weight", "layers.2.attn.wq_b.weight.more", "vision.embed.weight",
])  # fmt: skip
def test_an_unknown_parameter_is_named(name):
    with pytest.raises(ValueError, match=f"no role is known for the parameter {name!r}: roles are matrix, heads, "):
        role(name)


@pytest.mark.parametrize("draft", [False, True])
@pytest.mark.parametrize("preset", preset_names())
def test_every_parameter_of_every_preset_is_in_exactly_one_role(preset, draft):
    model = Model(Config.preset(preset), device="meta", draft=draft)
    names = [name for row in parameter_roles(model) for name in row.names]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    assert sum(row.numbers for row in parameter_roles(model)) == sum(p.numel() for p in model.parameters())


def test_heads_are_those_of_the_config():
    config = Config.preset("toy")
    assert n_matrices("heads", config) == config.num_attention_heads == 4
    assert n_matrices("index heads", config) == config.index_n_heads == 8
    assert {n_matrices(name, config) for name in ROLES if name not in ("heads", "index heads")} == {1}


def test_what_decays_and_how_fast_each_role_learns():
    """Spec 11."""
    assert {name: (r.optimizer, r.weight_decay, r.lr_factor) for name, r in ROLES.items()} == {
        "matrix": ("Muon", 0.1, 1), "heads": ("Muon", 0.1, 1), "index heads": ("Muon", 0.1, 1),
        "experts": ("Muon", 0.1, 1), "table": ("balanced momentum", 0, 1),
        "engram table": ("balanced momentum", 0, 5), "norm": ("AdamW", 0.1, 1), "scale": ("AdamW", 0, 1),
        "gate bias": ("load", 0, 0),
    }  # fmt: skip


def test_the_table_is_readable():
    lines = str(parameter_roles(Model(Config.preset("nano"), device="meta"))).splitlines()
    assert [" ".join(line.split()) for line in lines] == [
        "role optimiser each alone parameters numbers weight decay lr factor",
        "matrix Muon matrix 90 149,792 0.1 1",
        "heads Muon head 8 8,192 0.1 1",
        "index heads Muon head 3 4,608 0.1 1",
        "experts Muon expert 24 49,152 0.1 1",
        "table balanced momentum table 2 4,096 0 1",
        "engram table balanced momentum table 2 14,720 0 5",
        "norm AdamW number 37 1,056 0.1 1",
        "scale AdamW number 44 960 0 1",
        "gate bias load number 16 64 0 0",
    ]


def test_a_role_without_parameters_has_no_line():
    config = Config.preset("nano", engram_layer_ids=(), engram_num_embeddings=())
    roles = [row.role for row in parameter_roles(Model(config, device="meta"))]
    assert "engram table" not in roles and "table" in roles


def test_a_parameter_outside_the_model_is_named():
    model = Model(Config.preset("nano"), device="meta")
    model.extra = torch.nn.Linear(2, 2, device="meta")
    with pytest.raises(ValueError, match=r"no role is known for the parameter 'extra\.weight'"):
        parameter_roles(model)
