"""Training learns, repeats bit for bit, and never loses a run."""

import copy
import dataclasses
import json
import signal

import pytest
import torch

from tinyds41 import memory
from tinyds41.config import Config
from tinyds41.model.transformer import Model
from tinyds41.train import trainer
from tinyds41.train.corpus import Corpus
from tinyds41.train.losses import cross_entropy, targets
from tinyds41.train.optim import optimizers
from tinyds41.train.replay import draw_hits, run_replayed
from tinyds41.train.snapshot import read_snapshot
from tinyds41.train.step_log import read_log
from tinyds41.train.train_config import TrainConfig
from tinyds41.train.trainer import train

QUICK = TrainConfig(steps=6, batch_size=2, length=13, warmup=2, indexer_queries=8, record_every=2, snapshot_every=0)


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def nano(**changes) -> Model:
    return Model(Config.preset("nano", **changes), seed=1)


def text() -> Corpus:
    """A melody of 7 tokens in documents of 50 tokens: learnable within some steps."""
    token = torch.arange(1000)
    return Corpus((token % 7 + 10).int(), (token // 50).int())


class Hooked:
    """A corpus that does something before it gives the batch of one step."""

    def __init__(self, at: int, action):
        self.at, self.action = at, action

    def batch(self, step, batch_size, length, seed):
        if step == self.at:
            self.action()
        return text().batch(step, batch_size, length, seed)


def saved_step(folder, model: Model) -> int:
    """Loads a snapshot's weights; the step that it was saved behind."""
    snapshot = read_snapshot(folder)
    snapshot.restore(model)
    return snapshot.record["step"]


def same(a: Model, b: Model) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


@pytest.fixture(scope="module")
def long_history():
    torch.set_num_threads(1)
    return train(nano(), text(), QUICK, steps=25, batch_size=4, length=20, learning_rate=1e-2, progress=False)


def test_the_loss_falls_and_the_history_has_every_step(long_history):
    assert long_history.step == len(long_history.learning_rates) == len(long_history.indexer_losses) == 25
    assert long_history.losses[0] > 4 and long_history.losses[-1] < 1  # from ln 64 = 4.16; the melody's entropy is 0
    assert [record["step"] for record in long_history.records] == list(range(0, 25, 2))
    assert long_history.tokens_per_second > 0 and long_history.tokens_per_step == 80
    load = torch.tensor(long_history.records[-1]["load"])
    assert load.shape == (8, 4)
    # fp32 sums of four shares.
    torch.testing.assert_close(load.sum(-1), torch.ones(8), rtol=0, atol=1e-6)


def test_imitation_improves(long_history):
    assert long_history.indexer_losses[-1] < 0.8 * max(long_history.indexer_losses)


def test_two_runs_give_the_same_bits_and_another_seed_does_not():
    one, two, other = nano(), nano(), nano()
    first = train(one, text(), QUICK, progress=False)
    assert train(two, text(), QUICK, progress=False).losses == first.losses and same(one, two)
    assert train(other, text(), QUICK, seed=5, progress=False).losses != first.losses


def test_training_the_indexers_leaves_the_first_step_of_the_model_alone():
    """They share neither gradients nor the clipping of gradients."""
    with_it, without = nano(), nano()
    before = {name: p.detach().clone() for name, p in without.named_parameters()}
    for model, weight in ((with_it, 1.0), (without, 0.0)):
        train(model, text(), QUICK, steps=1, clip=1e-3, indexer_weight=weight, progress=False)
    for (name, a), b in zip(with_it.named_parameters(), without.parameters(), strict=True):
        assert torch.equal(a, b) == (".indexer." not in name), name
        # Norms of ones and matrices decay; the untrained indexer's gradient is zero.
        if name.endswith("weights_proj.weight"):
            torch.testing.assert_close(b, before[name] * (1 - 1e-3 * 0.1), rtol=1e-6, atol=0)


def test_formats_come_in_at_a_step_and_not_before():
    """Till then a run is that of a config without them; the loss of that step is the one with them."""
    plain, model, kept = nano(quantize_cache=False), nano(), []
    expected = train(plain, text(), QUICK, progress=False).losses
    config = model.config
    hook = Hooked(3, lambda: kept.append(copy.deepcopy(model)))
    found = train(model, hook, QUICK, quantize_from=3, progress=False).losses
    assert found[:3] == expected[:3] and found[3] != expected[3]
    ids, documents, _ = text().batch(3, QUICK.batch_size, QUICK.length, QUICK.seed)
    logits = kept[0](ids[:, :-1], documents=documents[:, :-1])
    assert found[3] == cross_entropy(logits, targets(ids, documents)).item()
    assert model.config is config and config.quantize_cache
    never = nano()
    assert train(never, text(), QUICK, quantize_from=6, progress=False).losses == expected and same(never, plain)


def test_formats_that_the_config_lacks_cannot_come_in_later():
    with pytest.raises(ValueError, match="quantize_from=3: the model's config has quantize_cache=False"):
        train(nano(quantize_cache=False), text(), QUICK, quantize_from=3, progress=False)


def test_a_share_of_the_steps_reads_replayed_rows():
    """The loss of such a step is that of the served tokens; other steps are as they were."""
    plain, model, kept = nano(), nano(), []
    expected = train(plain, text(), QUICK, progress=False).losses
    drawn = [draw_hits(plain.config, step, (2, QUICK.length), 0.4, 0) for step in range(QUICK.steps)]
    first = [hits is not None for hits in drawn].index(True)
    assert 0 < first < QUICK.steps - 1 and None in drawn[first:]
    hook = Hooked(first, lambda: kept.append(copy.deepcopy(model)))
    found = train(model, hook, QUICK, replay_share=0.4, progress=False).losses
    assert found[:first] == expected[:first] and found[first] != expected[first]
    ids, documents, _ = text().batch(first, QUICK.batch_size, QUICK.length, QUICK.seed)
    logits, _ = run_replayed(kept[0], ids[:, :-1], documents[:, :-1], drawn[first])
    assert found[first] == cross_entropy(logits, drawn[first].served(targets(ids, documents))).item()


def test_indexers_are_taught_what_they_may_choose_once_the_dense_share_is_over():
    dense, later = nano(), nano()
    expected = train(dense, text(), QUICK, length=29, progress=False).indexer_losses
    found = train(later, text(), QUICK, length=29, indexer_dense=0.5, progress=False).indexer_losses
    assert found[:3] == expected[:3] and found[3] != expected[3]


def test_gate_biases_move_by_the_load():
    model = nano()
    train(model, text(), QUICK, steps=1, progress=False)
    bias = model.get_parameter("layers.3.ffn.gate.bias")
    assert bias.abs().max() == pytest.approx(0.001) and bias.any()


def test_the_bias_rate_is_how_far_a_step_moves_a_gate_and_0_leaves_it():
    for rate in (0, 0.03):
        model = nano()
        train(model, text(), QUICK, steps=1, bias_rate=rate, progress=False)
        # One step of 0.03 in fp32.
        assert model.get_parameter("layers.3.ffn.gate.bias").abs().max().item() == pytest.approx(rate, rel=1e-6)


@pytest.mark.parametrize("changes", [
    {}, {"optimizer": "report"}, {"indexer_dense": 0.8, "quantize_from": 4, "replay_share": 0.5},
    {"optimizer": "report", "quantize_from": 4, "replay_share": 0.5, "accumulate": 2},
])  # fmt: skip
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path, changes):
    whole, halves, config = nano(), nano(), dataclasses.replace(QUICK, **changes)
    expected = train(whole, text(), config, progress=False)
    train(halves, Hooked(2, lambda: signal.raise_signal(signal.SIGINT)), config, folder=tmp_path, progress=False)
    fresh = Model(Config.preset("nano"), seed=9)
    history = train(fresh, text(), config, folder=tmp_path, resume=True, progress=False)
    assert history.losses == expected.losses and same(fresh, whole)
    assert history.records == expected.records and not history.interrupted


@pytest.mark.parametrize(("model", "changes", "named"), [
    ({}, {"optimizer": "report"}, "optimizer='adamw' there and 'report' here"),  # moments would be dropped in silence
    ({}, {"steps": 9, "clip": 2.0}, r"clip=1\.0 there and 2\.0 here; steps=6 there and 9 here"),
    ({"sliding_window": 8}, {}, "sliding_window=4 there and 8 here"),
])  # fmt: skip
def test_a_run_is_not_resumed_with_another_config(tmp_path, model, changes, named):
    train(nano(), text(), QUICK, folder=tmp_path, progress=False)
    fresh = nano(**model)
    with pytest.raises(ValueError, match=f"the snapshot in .* is of another run: {named}$"):
        train(fresh, text(), QUICK, **changes, folder=tmp_path, resume=True, progress=False)
    assert same(fresh, nano(**model))


def test_a_run_is_not_resumed_with_another_text(tmp_path):
    """Its fields may all be the same; the rows tell."""
    train(nano(), text(), QUICK, folder=tmp_path, progress=False)
    fresh, other = nano(), Corpus(text().ids.flip(0), text().documents)
    with pytest.raises(ValueError, match=r"is of another run: other rows there than here, of another text or task$"):
        train(fresh, other, QUICK, folder=tmp_path, resume=True, progress=False)
    assert same(fresh, nano())


def test_how_often_a_run_is_saved_may_change_when_it_goes_on(tmp_path):
    train(nano(), text(), QUICK, folder=tmp_path, progress=False)
    history = train(nano(), text(), QUICK, snapshot_every=1, folder=tmp_path, resume=True, progress=False)
    assert history.step == QUICK.steps


def test_fields_of_both_configs_have_names_of_their_own():
    """One list names what differs between two runs."""
    assert not set(QUICK.to_dict()) & set(Config.preset("nano").to_dict())


@pytest.mark.parametrize("changes", [{}, {"replay_share": 1.0}])
def test_parts_of_a_batch_give_the_gradients_of_the_whole(changes):
    """Documents of 50 tokens end in some rows: a row with fewer targets counts less, as in the whole batch.

    Three steps: later the two runs part, perhaps by a rounding or a choice that falls on the other side.
    """
    whole, parted = nano().double(), nano().double()
    config = dataclasses.replace(QUICK, steps=3, batch_size=4, length=40, **changes)
    expected = train(whole, text(), config, progress=False)
    found = train(parted, text(), config, accumulate=4, progress=False)
    assert found.losses == pytest.approx(expected.losses, rel=1e-9)
    assert found.balance_losses == pytest.approx(expected.balance_losses, rel=1e-9)
    for (name, a), b in zip(parted.named_parameters(), whole.parameters(), strict=True):
        if ".indexer." not in name:  # their loss is the mean of the parts, whichever see more entries
            # The root of the second moment amplifies the other order of sums.
            torch.testing.assert_close(a, b, rtol=0, atol=1e-7, msg=name)


def test_parts_run_one_after_the_other(monkeypatch):
    shapes, run = [], trainer.run
    monkeypatch.setattr(trainer, "run", lambda model, ids, own: shapes.append(ids.shape) or run(model, ids, own))
    train(nano(), text(), QUICK, steps=1, batch_size=4, accumulate=2, progress=False)
    assert shapes == [(2, QUICK.length)] * 2


def test_autocast_computes_products_in_bfloat16_and_leaves_weights_alone():
    plain, cast = nano(), nano()
    expected = train(plain, text(), QUICK, progress=False).losses
    found = train(cast, text(), QUICK, autocast=True, progress=False).losses
    assert found != expected and found == pytest.approx(expected, abs=0.1)  # eight bits of a product
    assert {p.dtype for p in cast.parameters()} == {torch.float32}


def test_a_batch_that_cannot_fit_is_refused_before_the_first_step(monkeypatch):
    least = trainer.least_kept_bytes(nano(), 2, QUICK.length)
    monkeypatch.setattr(memory, "available_bytes", lambda device: 100 * least)
    message = r"a step with 2000 rows of 13 tokens \(raise accumulate, .*\) needs [\d,]+ bytes, cpu has [\d,]+ bytes"
    with pytest.raises(MemoryError, match=message):
        train(nano(), Hooked(0, pytest.fail), QUICK, batch_size=2000, progress=False)


def test_what_a_step_surely_keeps_is_less_than_what_it_keeps():
    seen: dict[int, int] = {}
    pack = lambda tensor: seen.__setitem__(tensor.data_ptr(), tensor.nbytes) or tensor
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        train(nano(), text(), QUICK, steps=1, progress=False)
    assert trainer.least_kept_bytes(nano(), QUICK.batch_size, QUICK.length) < sum(seen.values())


def test_a_run_logs_every_step_and_goes_on_behind_its_snapshot(tmp_path):
    """Killed behind its snapshot: the steps that it makes again stand in the log once."""
    config = dataclasses.replace(QUICK, snapshot_every=3)

    class Killed(BaseException):
        pass

    def die():
        raise Killed

    with pytest.raises(Killed):
        train(nano(), Hooked(5, die), config, folder=tmp_path, progress=False)
    assert [line["step"] for line in read_log(tmp_path)] == [0, 1, 2, 3, 4]
    history = train(nano(), text(), config, folder=tmp_path, resume=True, progress=False)
    log = read_log(tmp_path)
    assert [line["step"] for line in log] == list(range(6)) and [line["loss"] for line in log] == history.losses
    assert [line["step"] for line in log if "recall" in line] == [record["step"] for record in history.records]
    assert log[2]["load"] == history.records[1]["load"]


def test_ctrl_c_finishes_the_step_saves_and_returns(tmp_path):
    model = nano()
    before = signal.getsignal(signal.SIGINT)
    history = train(
        model, Hooked(2, lambda: signal.raise_signal(signal.SIGINT)), QUICK, folder=tmp_path, progress=False)
    assert history.interrupted and history.step == 3
    assert signal.getsignal(signal.SIGINT) is before
    saved = nano()
    assert saved_step(tmp_path, saved) == 3 and same(saved, model)


def test_ctrl_c_while_a_snapshot_is_saved_finishes_it_and_returns(tmp_path, monkeypatch):
    """Also while the last one is, without which a run that saves only at its end would be lost."""
    save = trainer.save_snapshot
    monkeypatch.setattr(trainer, "save_snapshot", lambda *args: (signal.raise_signal(signal.SIGINT), save(*args)))
    for every, steps in ((2, 2), (0, QUICK.steps)):
        model, saved, folder = nano(), nano(), tmp_path / str(every)
        history = train(model, text(), QUICK, snapshot_every=every, folder=folder, progress=False)
        assert history.interrupted and history.step == saved_step(folder, saved) == steps and same(saved, model)


def test_a_second_ctrl_c_stops_at_once_and_keeps_the_last_snapshot(tmp_path, monkeypatch):
    """In a step, or while a snapshot is written; the run then goes on as if it had never stopped."""
    whole = train(nano(), text(), QUICK, progress=False)
    before = signal.getsignal(signal.SIGINT)

    def twice():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    def half(tensors, path, metadata):
        path.write_bytes(b"half")
        twice()

    with pytest.raises(KeyboardInterrupt):
        train(nano(), Hooked(4, twice), QUICK, snapshot_every=3, folder=tmp_path, progress=False)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr("tinyds41.train.snapshot.save_file", half)
        train(nano(), text(), QUICK, folder=tmp_path, resume=True, progress=False)
    assert signal.getsignal(signal.SIGINT) is before and saved_step(tmp_path, nano()) == 3
    assert sorted(file.name for file in tmp_path.iterdir()) == ["log.jsonl", "snapshot.safetensors"]
    assert train(nano(), text(), QUICK, folder=tmp_path, resume=True, progress=False).losses == whole.losses


def test_weights_that_are_not_finite_are_not_saved_over_those_that_are(tmp_path):
    """An update may overflow behind a sound loss, which only the next step would show."""
    model = nano()

    def poison():
        with torch.no_grad():
            model.get_parameter("layers.3.ffn.gate.bias_vl")[0] = torch.inf  # of no text, so no loss knows of it

    message = r"layers\.3\.ffn\.gate\.bias_vl is not finite behind step 5: nothing was saved"
    with pytest.raises(FloatingPointError, match=message):
        train(model, Hooked(4, poison), QUICK, snapshot_every=3, folder=tmp_path, progress=False)
    assert saved_step(tmp_path, nano()) == 3


def test_a_loss_that_is_not_finite_at_the_first_step_saves_nothing(tmp_path):
    model = nano()
    with torch.no_grad():
        model.get_parameter("layers.5.ffn.gate.weight")[0, 0] = torch.nan
    with pytest.raises(FloatingPointError, match=r"loss is nan at step 0, beginning in layers\.5\.ffn\.scores"):
        train(model, text(), QUICK, snapshot_every=1, folder=tmp_path, progress=False)
    assert [file.name for file in tmp_path.iterdir()] == ["log.jsonl"]


def test_a_gradient_that_is_not_finite_names_its_parameter_and_moves_nothing(tmp_path):
    model = nano()
    parameter = model.get_parameter("layers.2.attn.wq_a.weight")
    hook = lambda: parameter.register_hook(lambda gradient: gradient * torch.inf)
    message = r"gradient norm is (nan|inf) at step 3, beginning in layers\.2\.attn\.wq_a\.weight"
    with pytest.raises(FloatingPointError, match=message):
        train(model, Hooked(3, hook), QUICK, snapshot_every=3, folder=tmp_path, progress=False)
    saved = nano()
    assert saved_step(tmp_path, saved) == 3 and same(saved, model)


def test_a_loss_that_is_not_finite_stops_with_the_step_and_keeps_the_last_snapshot(tmp_path):
    model = nano()

    def poison():
        with torch.no_grad():
            model.get_parameter("layers.3.attn.wkv.weight")[0, 0] = torch.nan

    with pytest.raises(FloatingPointError, match=r"loss is nan at step 4, beginning in layers\.3\.attn\.window_kv: "):
        train(model, Hooked(4, poison), QUICK, snapshot_every=3, folder=tmp_path, progress=False)
    saved = nano()
    assert saved_step(tmp_path, saved) == 3
    assert all(torch.isfinite(p).all() for p in saved.parameters())


def test_a_failed_save_keeps_the_snapshot_before_and_leaves_no_rubbish(tmp_path, monkeypatch):
    model = nano()
    train(model, text(), QUICK, steps=1, folder=tmp_path, progress=False)
    good = (tmp_path / "snapshot.safetensors").read_bytes()

    def fail(*args):
        raise OSError("disk full")

    monkeypatch.setattr("tinyds41.whole_file.os.replace", fail)
    with pytest.raises(OSError, match="disk full"):
        train(model, text(), QUICK, steps=2, folder=tmp_path, progress=False)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["log.jsonl", "snapshot.safetensors"]
    assert (tmp_path / "snapshot.safetensors").read_bytes() == good


def test_a_missing_snapshot_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no snapshot at .*snapshot\.safetensors"):
        train(nano(), text(), QUICK, folder=tmp_path, resume=True, progress=False)


def test_a_train_config_survives_json(tmp_path):
    config = TrainConfig(steps=7, learning_rate=1e-4, seed=3)
    config.to_json(tmp_path / "train.json")
    assert TrainConfig.from_json(tmp_path / "train.json") == config
    (tmp_path / "train.json").write_text(json.dumps({**config.to_dict(), "speed": 1}))
    with pytest.raises(ValueError, match="unknown field 'speed'"):
        TrainConfig.from_json(tmp_path / "train.json")


@pytest.mark.parametrize(("field", "value"), [
    ("steps", 0), ("length", 0), ("accumulate", 0), ("accumulate", 3), ("autocast", 1),
    ("learning_rate", float("nan")), ("clip", 0.0), ("warmup", -1), ("bias_rate", -0.1),
    ("bias_rate", float("nan")), ("balance_weight", float("inf")), ("optimizer", "muon"), ("optimizer", None),
    ("optimizer", {}), ("indexer_dense", 1.5), ("indexer_dense", float("nan")), ("quantize_from", -1),
    ("replay_share", -0.1),
])  # fmt: skip
def test_a_bad_train_config_names_the_field(field, value):
    with pytest.raises(ValueError, match=f"{field}={value!r}: .* is needed"):
        TrainConfig(**{field: value})


@pytest.mark.parametrize(("field", "value"), [
    ("seed", 2**63), ("warmup", 10**400), ("learning_rate", 10**400), ("balance_weight", 10**400), ("steps", 2**63),
])  # fmt: skip
def test_a_number_too_large_for_the_machine_names_the_field(field, value):
    with pytest.raises(ValueError, match=f"{field}={value}: at most 9223372036854775807 is needed"):
        TrainConfig(**{field: value})


@pytest.mark.parametrize(("field", "value"), [("steps", 1.5), ("seed", "0"), ("learning_rate", None), ("clip", True)])
def test_a_train_config_of_other_kinds_names_the_field(field, value):
    with pytest.raises(ValueError, match=f"{field}={value!r}: a .*number is needed"):
        TrainConfig(**{field: value})


@pytest.mark.parametrize("content", ["[]", "5", "{", '{"steps": null}', '{"clip": "1"}', "[" * 100_000])
def test_an_unsound_train_config_names_its_file(tmp_path, content):
    (tmp_path / "train.json").write_text(content)
    with pytest.raises(ValueError, match=r"train\.json: "):
        TrainConfig.from_json(tmp_path / "train.json")


@pytest.mark.parametrize(("ids", "length", "message"), [
    (torch.arange(40) + 60, 13, "id .* is out of range"),
    (torch.arange(400) % 64, 300, "300 tokens exceed max_position_embeddings=256"),
])  # fmt: skip
def test_training_refuses_what_the_model_refuses(ids, length, message):
    with pytest.raises(ValueError, match=message):
        train(nano(), Corpus(ids.int()), QUICK, length=length, progress=False)


def test_a_text_that_is_too_short_names_its_length():
    with pytest.raises(ValueError, match="10 tokens is too short for a sequence of length 13"):
        train(nano(), Corpus(torch.arange(10).int()), QUICK, progress=False)


def test_resuming_without_a_folder_is_refused():
    with pytest.raises(ValueError, match="resume=True needs the folder"):
        train(Model(Config.preset("nano")), None, steps=1, resume=True, progress=False)


def test_a_model_without_weights_is_refused_at_once():
    with pytest.raises(ValueError, match="the model is on the meta device: it has no weights to train"):
        train(Model(Config.preset("nano"), device="meta"), None, steps=1, progress=False)


def test_a_float16_model_is_refused_at_once():
    """Its loss would be nan at step 2: float16 holds no second moments."""
    message = r"is torch\.float16, which does not train: torch\.bfloat16, torch\.float32, torch\.float64 do"
    with pytest.raises(ValueError, match=message):
        train(Model(Config.preset("nano"), dtype=torch.float16), None, steps=1, progress=False)


@pytest.mark.parametrize("optimizer", ["adamw", "report"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_other_dtypes_train(dtype, optimizer):
    model = Model(Config.preset("nano"), seed=1, dtype=dtype)
    losses = train(model, text(), QUICK, learning_rate=1e-2, optimizer=optimizer, progress=False).losses
    assert losses[-1] < losses[0] - 0.5


@pytest.mark.parametrize(("dtype", "optimizer"), [
    (torch.float32, "adamw"), (torch.bfloat16, "adamw"), (torch.float32, "report"), (torch.bfloat16, "report"),
])  # fmt: skip
def test_too_little_memory_for_gradients_and_moments_is_said_before_training(monkeypatch, dtype, optimizer):
    """What a step leaves allocated in gradients and moments is what is asked for, to the byte."""
    model = Model(Config.preset("nano"), seed=1, dtype=dtype)
    made, config = [], dataclasses.replace(QUICK, steps=1, optimizer=optimizer)
    monkeypatch.setattr(trainer, "optimizers", lambda *args: made.append(optimizers(*args)) or made[0])
    train(model, text(), config, progress=False)
    trained = [p for p in model.parameters() if p.requires_grad]
    moments = [tensor for state in made[0].state.values() for name, tensor in state.items() if name != "step"]
    needed = sum(tensor.nbytes for tensor in [*moments, *trained])
    fresh = Model(Config.preset("nano"), dtype=dtype)
    monkeypatch.setattr(memory, "available_bytes", lambda device: needed - 1)
    message = rf"training [\d,]+ parameters .* needs {needed:,} bytes, cpu has {needed - 1:,} bytes available"
    with pytest.raises(MemoryError, match=message):
        train(fresh, None, config, progress=False)
    monkeypatch.setattr(memory, "available_bytes", lambda device: needed)
    train(fresh, text(), config, progress=False)


@pytest.mark.parametrize("optimizer", ["adamw", "report"])
def test_training_the_backbone_leaves_its_drafter_alone(optimizer):
    """And is the same, bit for bit, with a drafter beside it."""
    config = dataclasses.replace(QUICK, steps=2, optimizer=optimizer)
    plain, drafting = nano(), nano()
    drafting.add_draft()
    before = {name: weight.clone() for name, weight in drafting.drafter.named_parameters()}
    train(plain, text(), config)
    train(drafting, text(), config)
    assert all(torch.equal(weight, drafting.get_parameter(name)) for name, weight in plain.named_parameters())
    assert all(torch.equal(weight, before[name]) for name, weight in drafting.drafter.named_parameters())
