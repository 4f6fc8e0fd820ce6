"""Training a drafter: it learns, alone, from its documents, the same bits each time."""

from __future__ import annotations

import pytest
import torch
from models import NANO, random_ids, scattered

from tinyds41.infer.session import Session
from tinyds41.model.draft_context import DraftContext
from tinyds41.train.corpus import Batch
from tinyds41.train.draft_loss import draft_loss
from tinyds41.train.train_draft import DraftConfig, draft_step, train_draft


class Text:
    """Rows that repeat a short phrase, of one document each or of two."""

    def __init__(self, packed: bool = False):
        self.packed = packed

    def batch(self, step: int, batch_size: int, length: int, seed: int) -> Batch:
        phrase = random_ids(1, 6, seed=1)[0]
        start = torch.arange(batch_size).unsqueeze(1) + step
        ids = phrase[(start + torch.arange(length + 1)) % 6]
        documents = (torch.arange(length + 1) >= length // 2).long().expand_as(ids) if self.packed else None
        return Batch(ids, documents, None)


def state(model) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def test_the_drafter_learns_and_the_backbone_stays():
    model = scattered(draft=True, dtype=torch.float32)
    before, wanted_gradients = state(model), {name: p.requires_grad for name, p in model.named_parameters()}
    history = train_draft(model, Text(), steps=30, length=24, anchors=16, progress=False)
    moved = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    # Those of vision are nobody's; the other gate biases follow the load of experts, not a gradient.
    assert moved == {name for name in before if name.startswith("mtp.") and not name.endswith(".bias_vl")}
    assert sum(history.losses[-5:]) < 0.8 * sum(history.losses[:5])
    assert sum(history.accepted_lengths[-5:]) > sum(history.accepted_lengths[:5])
    assert len(history.acceptance) == 30 and len(history.acceptance[0]) == 5
    assert {name: p.requires_grad for name, p in model.named_parameters()} == wanted_gradients
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_same_seed_gives_the_same_bits():
    runs = []
    for _ in range(2):
        model = scattered(draft=True, dtype=torch.float32)
        train_draft(model, Text(), steps=3, length=24, anchors=8, progress=False)
        runs.append(state(model))
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])


@pytest.mark.parametrize("packed", [False, True])
def test_a_block_in_training_is_the_block_of_its_text_alone(packed):
    """Features, positions and what is asked for, against a text that ends at the anchor (trap S5, T1)."""
    model = scattered(draft=True)
    ids = random_ids(1, 21)
    documents = torch.tensor([[0] * 8 + [1] * 13]) if packed else None
    generator = torch.Generator().manual_seed(3)
    shown = draft_step(model, Batch(ids, documents, None), 99, generator)
    loss, confidence = shown.loss, shown.confidence
    start = 8 if packed else 0
    places = [0, 1, 2] if packed else []
    places += list(range(start, 16))
    assert len(confidence) == len(places)
    alone = []
    for place in places:
        first = start if place >= start else 0
        last = 21 if place >= start else 8
        text = Batch(ids[:, first:last], None, None)
        alone.append(_block(model, text.ids, place - first))
    acceptance = torch.stack([block for block, _ in alone])
    order = _order(acceptance, loss.acceptance)
    assert torch.allclose(loss.acceptance[order], acceptance, atol=1e-12)
    assert torch.allclose(confidence[order], torch.stack([c for _, c in alone]), atol=1e-12)


def _order(expected: torch.Tensor, found: torch.Tensor) -> list[int]:
    """Which found row is each expected one; all must be there."""
    distances = torch.cdist(expected, found.to(expected))
    order = distances.argmin(1).tolist()
    assert sorted(order) == list(range(len(found)))
    return order


def _block(model, ids: torch.Tensor, place: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A block's acceptance and confidence as a session drafts it, with the text's tokens before each slot."""
    session, size = Session(model), NANO.dspark_block_size
    if place:
        session.prefill(ids[:, :place], mode="full")
    else:
        session.start()
    cache = session.cache
    rows, held = cache.target_rows()
    ctx = DraftContext(model.config, rows, torch.tensor(held), torch.tensor(cache.lengths))
    with torch.no_grad():
        hidden, base = model.draft(ids[:, place], ctx)
        previous = ids[:, place : place + size]
        confidence = model.drafter.confidence(hidden, previous)
        target = model(ids)[:, place : place + size]
        draft = base + model.drafter.markov(previous)
    return draft_loss(draft, target, previous, confidence).acceptance[0], confidence[0]


@pytest.mark.parametrize(("changes", "message"), [
    ({"steps": 0}, "steps=0"), ({"anchors": -1}, "anchors=-1"), ({"learning_rate": 0.0}, "learning_rate=0.0"),
    ({"warmup": -1}, "warmup=-1"), ({"clip": float("nan")}, "clip=nan"),
])  # fmt: skip
def test_numbers_out_of_range_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        DraftConfig(**changes)


def test_a_model_without_a_drafter_is_refused():
    with pytest.raises(ValueError, match="has no drafter"):
        train_draft(scattered(), Text(), progress=False)


def test_a_loss_that_is_not_finite_stops():
    model = scattered(draft=True, dtype=torch.float32)
    wanted_gradients = [parameter.requires_grad for parameter in model.parameters()]
    with torch.no_grad():
        model.drafter.last.norm.weight[0] = torch.inf
    with pytest.raises(FloatingPointError, match="the drafter's loss is nan at step 0"):
        train_draft(model, Text(), steps=2, length=24, progress=False)
    assert [parameter.requires_grad for parameter in model.parameters()] == wanted_gradients
