"""Losses against plain loops, and which weights each of them moves."""

import pytest
import torch
from models import reached, scattered, uneven

from tinyds41.train.losses import IGNORED, balance, balance_loss, cross_entropy, run, targets

LENGTH = 29  # odd, more than the pool of 3 blocks of 2 entries holds
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def model():
    return uneven()


@pytest.fixture
def ids():
    return torch.randint(3, 64, (2, LENGTH), generator=torch.Generator().manual_seed(3))


def test_targets_stay_inside_their_document_and_out_of_padding():
    ids = torch.tensor([[10, 11, 12, 13, 14, 15]])
    documents = torch.tensor([[0, 0, 1, 1, -1, -1]])
    assert targets(ids, documents).tolist() == [[11, IGNORED, 13, IGNORED, IGNORED]]
    assert targets(ids, None).tolist() == [[11, 12, 13, 14, 15]]


def test_cross_entropy_is_the_mean_over_the_kept_positions():
    logits = torch.randn(2, 3, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    wanted = torch.tensor([[1, IGNORED, 3], [IGNORED, 6, 0]])
    kept = [(b, s) for b in range(2) for s in range(3) if wanted[b, s] != IGNORED]
    plain = sum(-logits[b, s].log_softmax(0)[wanted[b, s]] for b, s in kept) / len(kept)
    # Rounding of float64 sums of seven terms.
    assert cross_entropy(logits, wanted) == pytest.approx(float(plain), rel=1e-14)


def test_cross_entropy_without_any_target_is_zero_with_zero_gradient():
    logits = torch.randn(1, 4, 5, requires_grad=True)
    loss = cross_entropy(logits, torch.full((1, 4), IGNORED))
    loss.backward()
    assert loss == 0 and torch.equal(logits.grad, torch.zeros_like(logits))


def test_balance_loss_equals_its_definition_and_ignores_padding():
    generator = torch.Generator().manual_seed(4)
    scores = torch.rand(2, 5, 4, dtype=torch.float64, generator=generator)
    experts = torch.tensor([[[0, 1], [0, 2], [0, 3], [1, 2], [3, 3]], [[0, 1], [0, 1], [0, 1], [2, 3], [2, 3]]])
    alive = torch.tensor([[True] * 4 + [False], [True] * 5])
    plain = 0.0
    for row in range(2):
        tokens = [t for t in range(5) if alive[row, t]]
        for e in range(4):
            f = 4 / (2 * len(tokens)) * sum(int(e in experts[row, t]) for t in tokens)
            plain += f * sum(float(scores[row, t, e] / scores[row, t].sum()) for t in tokens) / len(tokens) / 2
    # Rounding of float64 sums of some ten terms.
    assert float(balance_loss(scores, experts, alive)) == pytest.approx(plain, rel=1e-14)


def test_balance_loss_is_one_when_even_and_pushes_a_busy_expert_down():
    scores = torch.ones(1, 4, 4, requires_grad=True)
    even = torch.tensor([[[0, 1], [2, 3], [0, 1], [2, 3]]])
    alive = torch.ones(1, 4, dtype=torch.bool)
    assert float(balance_loss(scores, even, alive).detach()) == pytest.approx(1, abs=1e-6)
    busy = torch.tensor([[[0, 1], [0, 2], [0, 3], [0, 1]]])
    balance_loss(scores, busy, alive).backward()
    assert (scores.grad[..., 0] > 0).all() and (scores.grad[..., 3] < 0).all()


def test_balance_counts_every_layer_and_reaches_no_table_of_experts(model, ids):
    _, ctx = run(model, ids)
    loss, load = balance(model, ctx)
    loss.backward()
    assert load.sum(-1).tolist() == [2 * ids.numel()] * 8
    assert model.get_parameter("layers.7.ffn.gate.weight").grad.abs().sum() > 0
    assert model.get_parameter("layers.7.ffn.experts.w1").grad is None


def moved_by_tokens(model) -> set[str]:
    """Every parameter but those of indexers and the gates' biases."""
    return {name for name, _ in model.named_parameters()
            if ".indexer." not in name and not name.endswith(("gate.bias", "gate.bias_vl"))}  # fmt: skip


@DTYPES
def test_the_next_token_loss_reaches_all_weights_but_those_of_indexers_and_gate_biases(ids, dtype):
    model = scattered(dtype=dtype)  # Engram's values begin at 0, which lets no gradient through
    logits, _ = run(model, ids)
    cross_entropy(logits[:, :-1], ids[:, 1:]).backward()
    assert reached(model) == moved_by_tokens(model)


@DTYPES
def test_the_balance_loss_reaches_what_leads_to_a_gate(ids, dtype):
    """Not the last layer's experts, nor what mixes their output, nor the head."""
    model = scattered(dtype=dtype)
    _, ctx = run(model, ids)
    balance(model, ctx)[0].backward()
    behind = ("experts.w1", "experts.w2", "experts.w3", "shared_experts.w1.weight", "shared_experts.w2.weight",
              "shared_experts.w3.weight")  # fmt: skip
    last = {f"layers.7.ffn.{leaf}" for leaf in behind} | {f"layers.7.hc_ffn.{leaf}" for leaf in ("fn", "base", "scale")}
    assert reached(model) == moved_by_tokens(model) - last - {"head.weight", "norm.weight"}
