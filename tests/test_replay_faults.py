"""What a store may say after a bounded replay, a filled cache, a cut replay: an exact one still reads anew."""

from __future__ import annotations

import pytest
from models import random_ids, scattered
from sessions import SHORT, assert_close
from torch import Tensor

from tinyds41.infer.prefix import Windows
from tinyds41.infer.session import Session
from tinyds41.infer.tiered_store import TieredStore
from tinyds41.model.transformer import Model

W = SHORT.sliding_window
IDS = random_ids(1, 64, SHORT)


@pytest.fixture(scope="module")
def model() -> Model:
    return scattered(SHORT)


@pytest.fixture
def store(tmp_path, model):
    with TieredStore(tmp_path / "store.sqlite", model, block_tokens=1) as store:
        yield store


def read(model: Model, store: TieredStore, ids: Tensor, **options) -> Session:
    """A session that has resumed and saved these ids."""
    session = Session(model)
    session.resume(ids, store, **options)
    session.save(store)
    return session


def assert_read_anew(model: Model, store: TieredStore, ids: Tensor, found: int) -> Session:
    """An exact resume finds so many tokens, and leaves what a prefill leaves."""
    session, cold = Session(model), Session(model)
    logits = session.resume(ids, store, replay="exact")
    assert session.resumed is not None and session.resumed.found == found
    assert_close(logits, cold.prefill(ids))
    assert session.fingerprint() == cold.fingerprint()
    return session


def test_windows_of_a_bounded_replay_are_not_handed_out_as_exact(model, store):
    read(model, store, IDS[:, :30])
    store.windows.clear()
    Session(model).resume(IDS[:, :30], store)  # leaves its windows in the pool
    session = assert_read_anew(model, store, IDS[:, :45], 30)
    assert session.resumed is not None and session.resumed.windows == "replay"
    # a bounded one goes on with such windows
    read(model, store, IDS[:, :30])
    session = Session(model)
    session.resume(IDS[:, :50], store)
    assert session.resumed is not None and session.resumed.windows == "pool"


@pytest.mark.parametrize("clear", [False, True])
def test_rows_behind_a_bounded_replay_are_not_handed_out_as_exact(model, store, clear):
    """Nor what is read behind them, by whomever, until the text is read anew."""
    read(model, store, IDS[:, :30])
    store.windows.clear()
    session = read(model, store, IDS[:, :40])
    session.decode(int(IDS[0, 40]))
    session.save(store)
    if clear:
        store.windows.clear()
    assert_read_anew(model, store, IDS[:, :45], 30).save(store)
    assert store.blocks.find(IDS[0].tolist()) == 45
    assert_read_anew(model, store, IDS[:, :50], 30)
    # a bounded one reads them all, and what it adds is no better; nor is that of its twin
    bounded = read(model, store, IDS[:, :50])
    assert bounded.resumed is not None and bounded.resumed.found == 45
    twin = bounded.fork()
    twin.reorder([0])
    twin.decode(int(IDS[0, 50]))
    twin.save(store)
    assert_read_anew(model, store, IDS[:, :51], 30)
    # what was taken back altogether is forgotten
    bounded.truncate(0)
    bounded.prefill(IDS[:, 5:40])
    bounded.save(store)
    assert_read_anew(model, store, IDS[:, 5:45], 35)


def test_a_replay_that_reaches_far_enough_is_exact_whatever_its_name(model, store):
    read(model, store, IDS[:, :30])
    for replay, n_prompt, found in ((2 * (W - 1), 40, 40), (2 * (W - 1) - 1, 50, 40)):
        store.windows.clear()
        read(model, store, IDS[:, :n_prompt], replay=replay)
        assert_read_anew(model, store, IDS[:, :55], found)


def test_exact_windows_over_inexact_rows_leave_inexact_windows(model, store):
    """Rows may leave the file and be read anew while the pool still holds what came after the others."""
    read(model, store, IDS[:, :30])
    store.windows.clear()
    read(model, store, IDS[:, :40])
    for n_prompt, replay, exact in ((40, "exact", True), (50, "bounded", False)):
        session = read(model, store, IDS[:, :n_prompt], replay=replay)
        windows = store.windows.get(store.blocks.keys(IDS[0, :n_prompt].tolist())[-1])
        assert isinstance(windows, Windows) and windows.exact is exact
    assert session.resumed is not None and (session.resumed.found, session.resumed.windows) == (40, "pool")


@pytest.mark.parametrize("new", range(1, 14))
def test_the_cut_windows_at_the_start_of_an_exact_replay_are_not_kept(tmp_path, model, new):
    """They are there, but only the later ones are those of reading anew."""
    with TieredStore(tmp_path / "store.sqlite", model, block_tokens=15) as store:
        read(model, store, IDS[:, :30])
        store.windows.clear()
        read(model, store, IDS[:, :44], replay="exact")  # nothing found is wanted by the decoder
        assert_read_anew(model, store, IDS[:, : 30 + new], 30)


def test_random_rows_are_not_saved(model, store):
    session = Session(model)
    session.start().fill(40)
    for twin in (session, session.fork()):
        with pytest.raises(ValueError, match="random rows"):
            twin.save(store)
    session.truncate(0)
    session.prefill(IDS[:, :9])
    assert session.save(store) > 0
    assert_read_anew(model, store, IDS[:, :12], 9)


def test_counters_are_those_of_the_last_resume(model, store):
    session = Session(model)
    session.prefill(IDS[:, :20])
    session.truncate(0)
    session.resume(IDS[:, :12], store)
    assert session.counters.tokens_run == {0: 12, 1: 12, 2: 10, 3: 10, 4: 10}
