"""Where a run went wrong: forwards the first intermediate, backwards the parameter next to the logits."""

from __future__ import annotations

import pytest
import torch

from tinyds41.config import Config
from tinyds41.model.transformer import Model
from tinyds41.train.finite import first_not_finite, gradient_not_finite, require_finite


def poisoned(name: str, value: float) -> Model:
    model = Model(Config.preset("nano"), seed=1)
    with torch.no_grad():
        model.get_parameter(name).view(-1)[0] = value
    return model


@pytest.mark.parametrize(("name", "began"), [
    ("embed.weight", "embed"), ("layers.3.attn.wkv.weight", "layers.3.attn.window_kv"),
    ("layers.5.ffn.gate.weight", "layers.5.ffn.scores"), ("head.weight", "logits"),
])  # fmt: skip
def test_the_first_intermediate_is_named(name, began):
    ids = torch.arange(40).view(2, 20) % 60
    assert first_not_finite(poisoned(name, torch.nan), ids) == began


def test_a_sound_model_has_none_although_hidden_scores_are_minus_infinity():
    assert first_not_finite(Model(Config.preset("nano"), seed=1), torch.arange(40).view(2, 20)) is None


def test_every_row_is_looked_at_with_its_own_documents():
    ids = torch.full((3, 20), 7)
    ids[2, 4] = 0  # alone reads the first row of the table, whose first number is poisoned
    assert first_not_finite(poisoned("embed.weight", torch.inf), ids, torch.arange(20).expand(3, 20) // 5) == "embed"


def test_a_gradient_is_traced_to_the_parameter_next_to_the_logits():
    model = Model(Config.preset("nano"), seed=1)
    assert gradient_not_finite(model) is None
    for name in ("embed.weight", "layers.2.attn.wq_a.weight"):
        parameter = model.get_parameter(name)
        parameter.grad = torch.full_like(parameter, torch.nan)
    later = model.get_parameter("layers.6.attn.wq_a.weight")
    later.grad = torch.zeros_like(later)
    assert gradient_not_finite(model) == "layers.2.attn.wq_a.weight"


def test_only_what_is_not_finite_is_refused():
    require_finite("loss", torch.tensor(3.0), 4)
    with pytest.raises(FloatingPointError, match=r"the loss is inf at step 4, beginning in embed: the update"):
        require_finite("loss", torch.tensor(torch.inf), 4, "embed")
    with pytest.raises(FloatingPointError, match=r"the loss is nan at step 4: the update"):
        require_finite("loss", torch.tensor(torch.nan), 4)
