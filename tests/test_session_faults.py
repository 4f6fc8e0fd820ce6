"""What a strict reader found: odd calls that crashed, or left a session that was silently wrong."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from models import NANO, random_ids, scattered

from tinyds41.formats import GLOBAL, INDEX, WINDOW, Rows
from tinyds41.infer.cache import Cache
from tinyds41.infer.generate import generate_ids
from tinyds41.infer.session import Session
from tinyds41.infer.stores import SplitRows
from tinyds41.infer.tiered_store import TieredStore
from tinyds41.model.norm import RMSNorm
from tinyds41.model.transformer import Model
from tinyds41.ops import score_and_select
from tinyds41.trace import Trace


@pytest.fixture(scope="module")
def model():
    return scattered()


def test_a_choice_records_no_gradient():
    q = torch.randn(1, 3, 2, 8, requires_grad=True)
    last, counted = torch.tensor([[1, 2, 3]]), []
    index, pool = score_and_select(q, torch.randn(1, 3, 2, requires_grad=True), Rows(torch.randn(1, 3, 8)),
                                   torch.zeros_like(last), last, 2, form_blocks=2, count=counted.append)  # fmt: skip
    assert not index.is_floating_point() and pool is not None and sum(counted) == 9
    with torch.no_grad():
        assert not torch.is_grad_enabled()
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("form", [WINDOW, GLOBAL, INDEX], ids=lambda form: form.name)
def test_no_rows_decode_to_no_rows(form):
    with torch.no_grad():
        assert form.decode(torch.empty(1, 0, form.row_bytes(64), dtype=torch.uint8), 64).shape == (1, 0, 64)


def test_the_trace_of_a_first_token_has_stores_without_rows(model):
    session, trace = Session(model), Trace("layers.2.compressor.global_kv", "logits")
    session.extend([5], trace=trace)
    assert trace["layers.2.compressor.global_kv"].shape == (1, 0, 32)


@pytest.mark.parametrize("tokens", [1, 5, 10])
def test_autocast_decides_nothing_by_the_number_of_tokens(tokens):
    with torch.autocast("cpu", torch.bfloat16):
        session = Session(scattered(dtype=torch.float32))
        session.prefill(random_ids(1, 12))
        assert session.extend(random_ids(1, tokens)).isfinite().all()


def test_a_call_that_fails_halfway_loses_the_text_and_says_so(model, monkeypatch):
    """Some layers had written their rows: going on would be silently wrong."""
    session = Session(model)
    session.prefill(random_ids(1, 9))
    with monkeypatch.context() as patch:
        patch.setattr(model.layers[5].ffn, "forward", lambda *a: (_ for _ in ()).throw(MemoryError("all gone")))
        with pytest.raises(MemoryError, match="all gone"):
            session.decode(7)
    for call in (lambda: session.decode(7), lambda: session.prefill(random_ids(1, 3)), session.fingerprint):
        with pytest.raises(ValueError, match=r"failed halfway \(MemoryError: all gone\): the session's text is lost"):
            call()


def test_a_zero_row_without_epsilon_is_no_number_and_no_crash():
    norm = RMSNorm(8, 0.0)
    with torch.no_grad(), np.errstate(invalid="ignore"):
        assert norm(torch.zeros(1, 1, 8)).isnan().all() and norm(torch.zeros(1, 20, 8)).isnan().all()


def test_split_rows_narrow_inside_their_bounds():
    parts = SplitRows([Rows(torch.randn(1, 3, 4)), Rows(torch.randn(1, 5, 4))])
    assert parts.narrow(0, 0).shape == (1, 0, 4)
    with pytest.raises(IndexError, match=r"entries 6\.\.9 are not in a store of 8"):
        parts.narrow(6, 4)


def test_a_filled_cache_can_take_tokens_back():
    cache = Cache(NANO)
    cache.fill(101)
    cache.truncate([60])
    assert cache.lengths == [60]
    with pytest.raises(ValueError, match="fill with 1000 tokens: max_position_embeddings=256"):
        Cache(NANO).fill(1000)


@pytest.mark.parametrize("rollback", [0, 64])
def test_windows_are_reported_whole_with_and_without_padding(model, rollback):
    ids, mask = random_ids(1, 20), torch.ones(1, 20, dtype=torch.bool)
    plain, padded = Session(model, rollback=rollback), Session(model, rollback=rollback)
    plain.prefill(ids)
    mask[0, :6] = False
    padded.prefill(ids, mask=mask)
    assert plain.report().window_bytes == padded.report().window_bytes == 8 * 4 * 33


def test_rows_that_end_do_not_leave_a_session_unasked(model):
    with pytest.raises(ValueError, match="3 prompts for a session"):
        generate_ids(Session(model), random_ids(3, 5), max_new_tokens=2)
    assert len(generate_ids(Session(model), random_ids(1, 5)[0], max_new_tokens=2)[0]) == 2


def test_too_many_tokens_name_the_row(model):
    session, mask = Session(model), torch.ones(2, 200, dtype=torch.bool)
    mask[0, :150] = False
    session.prefill(random_ids(2, 200), mask=mask)
    with pytest.raises(ValueError, match="row 1: 200 tokens and 60 more exceed max_position_embeddings=256"):
        session.extend(random_ids(2, 60))


def test_arguments_are_refused_before_a_text_is_touched(model):
    session = Session(model)
    session.prefill([1, 2, 3])
    before = session.fingerprint()
    for call in (lambda: session.prefill([4, 5], chunk=2.0), lambda: session.prefill([]), lambda: session.truncate(1.5),
                 lambda: generate_ids(session, torch.tensor([[1, 2]]), max_new_tokens=3, top_k=1.5),
                 lambda: generate_ids(session, torch.tensor([[1, 2]]), max_new_tokens=3, stop_ids=["1"]),
                 lambda: generate_ids(session, torch.tensor([[1, 2]]), max_new_tokens=1.5)):  # fmt: skip
        with pytest.raises((TypeError, ValueError)):
            call()
        assert session.fingerprint() == before
    with pytest.raises(ValueError, match="an empty prompt"):
        session.prefill([])


def test_numbers_of_other_libraries_are_numbers(model):
    session = Session(model)
    session.prefill(list(range(4, 10)), chunk=np.int64(4))
    session.truncate(np.int64(5))
    session.truncate(torch.tensor(4))
    session.truncate(torch.tensor([3]))
    assert session.lengths == [3]


def test_a_model_that_changed_its_type_is_refused():
    session = Session(scattered())
    session.prefill([1, 2, 3])
    session.model.float()
    with pytest.raises(ValueError, match=r"rows of torch.float64, the model is torch.float32 now"):
        session.decode(4)
    assert session.lengths == [3]


def test_a_broken_session_begins_anew_and_cannot_be_forked(model, monkeypatch):
    session = Session(model)
    with monkeypatch.context() as patch:
        patch.setattr(model.layers[5].ffn, "forward", lambda *a: (_ for _ in ()).throw(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            session.prefill([1, 2, 3])
    with pytest.raises(ValueError, match="failed halfway"):
        session.fork()
    session.start()
    session.prefill([1, 2, 3])
    assert session.lengths == [3]


def test_stop_ids_may_be_any_iterable_of_numbers(model):
    ids = random_ids(1, 6)
    stop = generate_ids(model, ids, max_new_tokens=5, temperature=0)[0][2]
    expected = generate_ids(model, ids, max_new_tokens=5, temperature=0, stop_ids=[stop])
    assert len(expected[0]) <= 2
    assert generate_ids(model, ids, max_new_tokens=5, temperature=0, stop_ids=iter([stop])) == expected


def test_the_limit_of_positions_counts_tokens_not_padding(model):
    ids, mask = random_ids(2, 250), torch.arange(250).expand(2, 250) < 3
    assert [len(row) for row in generate_ids(model, ids, mask=mask, max_new_tokens=8)] == [8, 8]


@pytest.mark.parametrize("ids", [None, "abc", [[1, 2], [3]], {"a": 1}, [None], [10**30]])
def test_what_is_no_array_of_whole_numbers_is_named(model, ids):
    session = Session(model)
    with pytest.raises(ValueError, match=r"ids are .+: expected whole numbers in rows of equal length"):
        session.prefill(ids)
    session.prefill([5, 6, 7])
    for call in (session.decode, session.extend):
        with pytest.raises(ValueError, match="expected whole numbers"):
            call(ids)
    assert session.lengths == [3]


@pytest.mark.parametrize(("call", "reason"), [
    (lambda model: Session(model.config), "needs a Model, not a Config"),
    (lambda model: Session(model, rollback=1.5), "float"),
    (lambda model: Cache(model), "needs a Config and a floating dtype, not Model"),
    (lambda model: Cache(model.config, dtype=torch.int64), "not Config and torch.int64"),
    (lambda model: started(model).reorder(["a"]), "str"),
    (lambda model: started(model).decode(5, trace="layers.0"), "trace is a str"),
    (lambda model: started(model).save(None), "store and namespace are NoneType and str"),
    (lambda model: Session(model).resume([5], None), "store and namespace are NoneType and str"),
    (lambda model: TieredStore("nowhere", model.config), "needs a Model, not a Config"),
])  # fmt: skip
def test_an_argument_of_another_type_is_named(model, call, reason):
    with pytest.raises(TypeError, match=reason):
        call(model)


def started(model: Model) -> Session:
    session = Session(model)
    session.prefill([5, 6, 7])
    return session
