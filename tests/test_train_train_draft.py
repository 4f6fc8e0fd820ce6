"""Training a drafter: it learns, alone, from its documents, the same bits each time."""

from __future__ import annotations

import dataclasses
import signal

import pytest
import torch
from models import NANO, random_ids, scattered

from tinyds41.infer.session import Session
from tinyds41.model.draft_context import DraftContext
from tinyds41.train.corpus import Batch
from tinyds41.train.draft_loss import draft_loss
from tinyds41.train.snapshot import read_snapshot
from tinyds41.train.step_log import read_log
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
    session, size = Session(model), NANO.dspark_block_size or 0
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
    ({"optimizer": "sgd"}, "optimizer='sgd': one of"), ({"snapshot_every": -1}, "snapshot_every=-1"),
    ({"table_factor": 0.0}, "table_factor=0.0"), ({"bias_rate": float("nan")}, "bias_rate=nan"),
    ({"warmup": -1}, "warmup=-1"), ({"clip": float("nan")}, "clip=nan"),
])  # fmt: skip
def test_numbers_out_of_range_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        DraftConfig(**changes)


class Stopped(Text):
    """Presses Ctrl-C in step n."""

    def __init__(self, n: int):
        super().__init__()
        self.n = n

    def batch(self, step: int, batch_size: int, length: int, seed: int) -> Batch:
        if step == self.n:
            signal.raise_signal(signal.SIGINT)
        return super().batch(step, batch_size, length, seed)


QUICK = DraftConfig(steps=5, length=24, batch_size=2, anchors=8, snapshot_every=2)


def drafting(dtype: torch.dtype = torch.float32):
    return scattered(draft=True, dtype=dtype)


@pytest.mark.parametrize("optimizer", ["report", "adamw"])
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path, optimizer):
    whole, halves, config = drafting(), drafting(), dataclasses.replace(QUICK, optimizer=optimizer)
    expected = train_draft(whole, Text(), config, progress=False)
    stopped = train_draft(halves, Stopped(2), config, folder=tmp_path, progress=False)
    assert stopped.interrupted and stopped.step == 3 and expected.step == 5
    fresh = drafting()
    fresh.add_draft(seed=9)
    history = train_draft(fresh, Text(), config, folder=tmp_path, resume=True, progress=False)
    assert history.losses == expected.losses and history.acceptance == expected.acceptance
    assert not history.interrupted and [line["step"] for line in read_log(tmp_path)] == [0, 1, 2, 3, 4]
    assert all(torch.equal(tensor, fresh.state_dict()[name]) for name, tensor in whole.state_dict().items())


def test_a_run_is_resumed_with_its_config_rows_and_backbone_alone(tmp_path):
    train_draft(drafting(), Text(), QUICK, steps=1, folder=tmp_path, progress=False)
    other = drafting()
    with torch.no_grad():
        other.norm.weight[0] += 1
    before = state(other)
    for model, text, changes, named in (
        (drafting(), Text(), {"clip": 2.0, "steps": 1}, r"clip=1\.0 there and 2\.0 here$"),
        (drafting(), Text(packed=True), {"steps": 1}, "other rows there than here"),
        (other, Text(), {"steps": 1}, "another backbone there than here"),
    ):
        with pytest.raises(ValueError, match=f"is of another run: {named}"):
            train_draft(model, text, QUICK, **changes, folder=tmp_path, resume=True, progress=False)
    assert all(torch.equal(before[name], tensor) for name, tensor in other.state_dict().items())
    again = train_draft(drafting(), Text(), QUICK, steps=1, snapshot_every=7, folder=tmp_path, resume=True,
                        progress=False)  # fmt: skip
    assert again.step == 1
    with pytest.raises(ValueError, match="resume=True needs the folder"):
        train_draft(drafting(), Text(), QUICK, resume=True, progress=False)
    with pytest.raises(FileNotFoundError, match="no snapshot"):
        train_draft(drafting(), Text(), QUICK, folder=tmp_path / "none", resume=True, progress=False)


def test_a_failed_run_leaves_its_last_snapshot_and_the_drafter_of_the_step_before(tmp_path):
    model, seen = drafting(), {}

    class Broken(Text):
        def batch(self, step: int, batch_size: int, length: int, seed: int) -> Batch:
            if step == 3:
                seen.update(state(model))
                with torch.no_grad():
                    model.norm.weight[0] = torch.nan  # of the backbone, which teaches
            return super().batch(step, batch_size, length, seed)

    with pytest.raises(FloatingPointError, match="the drafter's loss is nan at step 3"):
        train_draft(model, Broken(), QUICK, folder=tmp_path, progress=False)
    assert read_snapshot(tmp_path).record["step"] == 2
    assert all(torch.equal(seen[name], tensor) for name, tensor in state(model).items() if name.startswith("mtp."))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_gate_biases_follow_the_load():
    """The busiest expert of each draft block is chosen less, by the rate."""
    model, loads = drafting(), []
    generator = torch.Generator().manual_seed(0)
    loads = draft_step(model, Text().batch(0, 2, 24, 0), 8, generator).load
    assert loads.shape == (3, 4) and loads.sum(1).tolist() == [8 * 5 * 2] * 3
    before = state(model)
    train_draft(model, Text(), QUICK, steps=1, bias_rate=0.5, progress=False)
    for block in range(3):
        name = f"mtp.{block}.ffn.gate.bias"
        moved = model.state_dict()[name] - before[name]
        assert torch.allclose(moved, 0.5 * torch.sign(loads[block].mean() - loads[block]), atol=1e-6)


def test_markov_tables_have_a_rate_of_their_own():
    slow, fast = drafting(), drafting()
    before = state(slow)
    for model, factor in ((slow, 1.0), (fast, 3.0)):
        train_draft(model, Text(), QUICK, steps=1, table_factor=factor, progress=False)
    name = "mtp.2.markov_head.embed.weight"
    steps = [model.state_dict()[name] - before[name] for model in (slow, fast)]
    assert steps[0].any() and torch.allclose(steps[1], 3 * steps[0], atol=1e-6)
    other = "mtp.2.attn.wkv.weight"
    assert torch.equal(slow.state_dict()[other], fast.state_dict()[other])


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
