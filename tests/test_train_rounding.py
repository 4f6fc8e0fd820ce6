"""Other roundings reach exactly the rows they are meant for, after rotation, and the released ones change nothing."""

import math

import pytest
import torch

from tinyds41 import Config, Model, Trace, variant
from tinyds41.formats import GLOBAL, INDEX, WINDOW
from tinyds41.train.rounding import Roundings, few_bits, rounded_logits, token_losses


@pytest.fixture(scope="module")
def model():
    return Model(Config.preset("nano"), seed=3)


@pytest.fixture(scope="module")
def ids(model):
    return torch.randint(4, model.config.vocab_size, (2, 61), generator=torch.Generator().manual_seed(1))


def as_is(x):
    return x


def test_the_released_roundings_give_what_the_model_gives(model, ids):
    assert torch.equal(rounded_logits(model, ids, Roundings()), model(ids).detach())


def test_no_rounding_gives_what_a_model_without_formats_gives(model, ids):
    free = variant(model, quantize_cache=False)
    logits = rounded_logits(free, ids, Roundings(as_is, as_is, as_is))
    assert torch.equal(logits, free(ids).detach())
    assert not torch.equal(logits, model(ids).detach())


@pytest.mark.parametrize("kind", ["window", "entries", "keys"])
def test_a_rounding_reaches_its_rows_alone(model, ids, kind):
    """In the first Full layer; later layers read what came of it, and so would it of other windows before."""
    source = model.config.kv_source_layer_ids[0]
    names = {"window": f"layers.{source}.attn.window_kv", "entries": f"layers.{source}.compressor.global_kv",
             "keys": f"layers.{source}.indexer.keys"}  # fmt: skip
    before, after = Trace(*names.values()), Trace(*names.values())
    rounded_logits(model, ids, Roundings(), before)
    forms = {"window": WINDOW, "entries": GLOBAL, "keys": INDEX}
    seen = []

    def doubled(rows):
        seen.append(rows)
        return forms[kind].fake_quant(rows) * (2 if kind != "window" else 1)

    rounded_logits(model, ids, Roundings(**{kind: doubled}), after)
    for name, path in names.items():
        factor = 2 if name == kind != "window" else 1
        assert torch.equal(after[path], factor * before[path]), name
    n_calls = len(model.plan) if kind == "window" else len(model.config.kv_source_layer_ids)
    assert len(seen) == n_calls
    assert not any(torch.equal(rows, forms[kind].fake_quant(rows)) for rows in seen)  # they arrive unrounded


def test_rows_that_nothing_rounds_stay_off_the_grids(model, ids):
    source = model.config.kv_source_layer_ids[0]
    trace = Trace(f"layers.{source}.*")
    rounded_logits(model, ids, Roundings(as_is, as_is, as_is), trace)
    rows = {"attn.window_kv": WINDOW, "compressor.global_kv": GLOBAL, "indexer.keys": INDEX}
    for name, form in rows.items():
        seen = trace[f"layers.{source}.{name}"]
        assert not torch.equal(seen, form.fake_quant(seen)), name


def test_losses_are_those_of_the_next_tokens(model, ids):
    logits = model(ids[:, :-1]).detach()
    wanted = -torch.log_softmax(logits, -1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    losses = token_losses(model, ids, Roundings())
    assert losses.shape == (2, 60)
    torch.testing.assert_close(losses, wanted)


def test_losses_of_a_wide_model_are_not_narrowed(ids):
    model = Model(Config.preset("nano"), seed=3, dtype=torch.float64)
    wanted = -torch.log_softmax(model(ids[:, :-1]).detach(), -1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    # Rounding of float64 sums of 64 terms; float32 would be 1e-7 off.
    torch.testing.assert_close(token_losses(model, ids, Roundings()), wanted, rtol=0, atol=1e-13)


def test_ids_are_checked(model):
    with pytest.raises(ValueError, match="id"):
        rounded_logits(model, torch.tensor([[model.config.vocab_size]]), Roundings())


# Squared error of the best quantiser of a normal variable, from tables of Lloyd-Max quantisers.
@pytest.mark.parametrize(("bits", "known"), [(1, 0.3634), (2, 0.1175), (3, 0.03454)])
def test_few_bits_reach_the_known_error_of_their_levels(bits, known):
    x = torch.randn(64, 4096, generator=torch.Generator().manual_seed(0))
    got = few_bits(bits, block=4096)(x)
    # 262,144 values: the mean square is within a per cent of its expectation.
    assert float((got - x).pow(2).mean()) == pytest.approx(known, rel=0.02)
    assert all(len(row.unique()) == 2**bits for row in got)
    assert torch.equal(got.signbit(), x.signbit())


def test_few_bits_size_each_block_by_itself():
    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    larger = x.clone()
    larger[:, 16:] *= 8
    got, want = few_bits(2)(larger), few_bits(2)(x)
    torch.testing.assert_close(got[:, :16], want[:, :16], rtol=0, atol=0)
    torch.testing.assert_close(got[:, 16:], 8 * want[:, 16:])
    assert math.isfinite(float(few_bits(1)(torch.zeros(1, 16)).sum()))


def test_other_numbers_of_bits_are_refused():
    with pytest.raises(ValueError, match="bits=4: there are levels for 1, 2, 3"):
        few_bits(4)
