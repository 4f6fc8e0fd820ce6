"""What a session keeps for its drafter: target rows that follow the text through every way of reading and cutting."""

from __future__ import annotations

import itertools

import pytest
import torch
from models import random_ids, scattered
from sessions import (
    BOUNDED,
    DRAFTING,
    EXACT,
    alone,
    assert_close,
    fed_session,
    memory_full_of_nan,
    ratio,
    without_decoder,
    without_engram,
)
from torch import Tensor

from tinyds41.formats import WINDOW
from tinyds41.infer.cache import Cache
from tinyds41.infer.session import Session
from tinyds41.infer.tiered_store import TieredStore
from tinyds41.model.context import Sequence
from tinyds41.model.draft_context import DraftContext
from tinyds41.model.transformer import Model

W = DRAFTING.sliding_window
LENGTHS = [1, W - 1, W, W + 1, 2 * W + 1, 13]


@pytest.fixture(scope="module")
def model() -> Model:
    return scattered(DRAFTING, draft=True)


def expected_rows(model: Model, ids: Tensor) -> list[Tensor]:
    """Target rows of a whole text by the one-shot path, as they are stored. Shapes: -> [S,C] per block."""
    ctx = Sequence(model.config, ids)
    with torch.no_grad():
        rows = model.target_rows(model.decode(model.encode(ids, ctx), ctx), ctx)
    return [(WINDOW.fake_quant(x) if model.config.quantize_cache else x)[0] for x in rows]


def assert_window(session: Session, expected: list[Tensor], length: int, b: int = 0) -> None:
    """The last W rows of the text, each at its place, and how many there are."""
    found, held = session.cache.target_rows()
    assert held[b] == min(length, W)
    for rows, text in zip(found, expected, strict=True):
        assert_close(rows[b, rows.shape[1] - held[b] :], text[max(0, length - W) : length])


# ---- reading ----


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("config", [DRAFTING, without_engram(DRAFTING), without_decoder(DRAFTING),
                                    DRAFTING.replace(quantize_cache=False)])  # fmt: skip
def test_after_a_full_prefill_the_windows_hold_the_last_rows_of_the_text(config, length):
    model, ids = scattered(config, draft=True), random_ids(1, length)
    assert_window(fed_session(model, ids), expected_rows(model, ids), length)


@pytest.mark.parametrize("length", [1, W, W + 1, EXACT, EXACT + 1, 29])
def test_after_an_exact_prefill_they_are_those_of_a_full_one(model, length):
    """Target layers of encoder, middle and last decoder layer: the last W tokens are exact in all of them."""
    ids = random_ids(1, length)
    session = Session(model)
    session.prefill(ids, mode="exact", chunk=3)
    assert_window(session, expected_rows(model, ids), length)
    assert session.fingerprint() == fed_session(model, ids).fingerprint()


def test_a_bounded_prefill_leaves_w_rows_that_approximate(model):
    ids, session = random_ids(1, 29), Session(model)
    session.prefill(ids, mode="bounded")
    rows, held = session.cache.target_rows()
    assert held == [BOUNDED] and rows[0].isfinite().all()
    assert session.fingerprint() != fed_session(model, ids).fingerprint()


def test_pieces_and_single_tokens_leave_what_one_shot_leaves(model):
    """C2, C3: every partition of the text into up to three pieces, and token by token."""
    ids = random_ids(1, 9)
    whole = fed_session(model, ids).fingerprint()
    for first, second in itertools.combinations(range(1, 9), 2):
        session = Session(model)
        session.prefill(ids[:, :first], mode="full")
        session.extend(ids[:, first:second])
        session.extend(ids[:, second:])
        assert session.fingerprint() == whole
    session = Session(model)
    for token in ids[0].tolist():
        session.extend([token])
    assert session.fingerprint() == whole


@pytest.mark.parametrize("mode", ["exact", "bounded", "full"])
def test_padded_rows_keep_what_each_keeps_alone(model, mode):
    lengths = [1, 13, 2, 5, 10]
    texts = [random_ids(1, n, seed=n)[0] for n in lengths]
    ids, mask = torch.full((5, 13), 2), torch.zeros(5, 13, dtype=torch.bool)
    for b, text in enumerate(texts):
        ids[b, 13 - len(text) :], mask[b, 13 - len(text) :] = text, True
    more = random_ids(5, 4, seed=9)
    with memory_full_of_nan():
        session = Session(model)
        session.prefill(ids, mode=mode, chunk=3, mask=mask)
        read = session.fork()
        session.extend(more)
    for b, text in enumerate(texts):
        single = Session(model)
        single.prefill(text, mode=mode)
        assert alone(read, b) == single.fingerprint()
        assert read.cache.target_rows()[1][b] == min(W, len(text))
        single.extend(more[b])
        assert alone(session, b) == single.fingerprint()
        if mode != "bounded":
            assert_window(session, expected_rows(model, torch.cat([text, more[b]])[None]), lengths[b] + 4, b)


@pytest.mark.parametrize(("length", "mode"), [(EXACT + 1, "exact"), (EXACT - 1, "exact"), (BOUNDED + 1, "bounded")])
def test_a_second_prompt_sees_live_windows_or_begins_anew(model, length, mode):
    """A row of a shorter second prompt goes on; of a longer one nothing from before the segment remains."""
    first, second = random_ids(1, 7), random_ids(1, length, seed=5)
    session = fed_session(model, first)
    session.prefill(second, mode=mode)
    if mode == "exact":
        assert_window(session, expected_rows(model, torch.cat([first, second], 1)), 7 + length)
    else:
        assert session.cache.target_rows()[1] == [BOUNDED] and session.cache.drafts[0].held(0) == BOUNDED


# ---- taking back, forking, trading places ----


@pytest.mark.parametrize("config", [DRAFTING, ratio(3, num_nextn_predict_layers=2, dspark_target_layer_ids=[0, 4])])
def test_what_is_taken_back_leaves_no_trace(config):
    """S1: every number of tokens up to 6, around W, from a text that went on before."""
    model = scattered(config, draft=True)
    ids, draft = random_ids(1, 12), random_ids(1, 6, seed=1)
    for length in range(1, 12):
        clean, rolled = fed_session(model, ids[:, :length]), fed_session(model, ids[:, :length])
        rolled.extend(draft[:, : 1 + length % 6])
        assert rolled.fingerprint() != clean.fingerprint()
        rolled.truncate(length)
        assert rolled.fingerprint() == clean.fingerprint()
        assert_window(rolled, expected_rows(model, ids[:, :length]), length)
        rolled.extend(draft), clean.extend(draft)
        assert rolled.fingerprint() == clean.fingerprint()


@pytest.mark.parametrize("rollback", [0, 1, 3, 5])
def test_a_window_reaches_as_far_as_rollback_promises(model, rollback):
    """S2: all of W + rollback rows; one token more is refused or exact."""
    ids = random_ids(1, 40)
    for taken in range(rollback + 3):
        session = Session(model, rollback=rollback)
        session.prefill(ids, mode="full", chunk=4)
        try:
            session.truncate(40 - taken)
        except ValueError:
            assert taken > rollback
            continue
        assert_window(session, expected_rows(model, ids), 40 - taken)


def test_rows_are_taken_back_by_themselves(model):
    ids, draft = random_ids(3, 7), random_ids(3, 4, seed=1)
    session = fed_session(model, ids)
    session.extend(draft)
    session.truncate([7, 9, 11])
    for b, n in enumerate([0, 2, 4]):
        assert alone(session, b) == fed_session(model, torch.cat([ids[b], draft[b, :n]])[None]).fingerprint()


def test_an_emptied_session_has_no_target_rows(model):
    session = fed_session(model, random_ids(1, 9))
    session.truncate(0)
    assert session.cache.target_rows()[1] == [0]
    session.prefill(random_ids(1, 5, seed=3))
    assert session.fingerprint() == fed_session(model, random_ids(1, 5, seed=3)).fingerprint()


def test_forks_and_rows_in_another_order(model):
    ids = random_ids(3, 7)
    session = fed_session(model, ids)
    fork, before = session.fork(), session.fingerprint()
    fork.extend(random_ids(3, 3, seed=2))
    assert session.fingerprint() == before
    fork.truncate(7)
    assert fork.fingerprint() == before
    session.reorder([2, 0, 0])
    for b, row in enumerate([2, 0, 0]):
        assert alone(session, b) == fed_session(model, ids[row : row + 1]).fingerprint()
        assert_window(session, expected_rows(model, ids[row : row + 1]), 7, b)


def test_the_fingerprint_sees_every_target_row_that_is_still_read(model):
    for block in range(2):
        session = fed_session(model, random_ids(1, 9))
        before, recent = session.fingerprint(), session.cache.drafts[block]
        recent.buffer[0, recent.end - W - 1] += 1
        assert session.fingerprint() == before
        recent.buffer[0, recent.end - W] += 1
        assert session.fingerprint() != before


# ---- prefix hits ----


@pytest.mark.parametrize("config", [DRAFTING, without_decoder(DRAFTING)])
@pytest.mark.parametrize(("found", "new"), [(1, 0), (W, 0), (W + 1, 1), (20, 0), (20, 1), (20, W), (31, W + 3)])
def test_an_exact_hit_leaves_the_windows_of_reading_anew(tmp_path, config, found, new):
    model, ids = scattered(config, draft=True), random_ids(1, found + new)
    with TieredStore(tmp_path / "store.sqlite", model, block_tokens=1) as store:
        first = Session(model)
        first.resume(ids[:, :found], store)
        first.save(store)
        store.windows.clear()
        session, cold = Session(model), Session(model)
        session.resume(ids, store, replay="exact")
        assert session.resumed is not None and session.resumed.found == found
    cold.prefill(ids)
    assert session.fingerprint() == cold.fingerprint()
    assert_window(session, expected_rows(model, ids), found + new)


@pytest.mark.parametrize("config", [DRAFTING, without_decoder(DRAFTING)])
@pytest.mark.parametrize("windows", ["pool", "replay"])
def test_a_bounded_hit_has_w_rows_again(tmp_path, config, windows):
    """From the pool they are those of a bounded prefill (of a full one without a decoder); else an approximation."""
    model, ids = scattered(config, draft=True), random_ids(1, 33)
    with TieredStore(tmp_path / "store.sqlite", model, block_tokens=1) as store:
        first = Session(model)
        first.resume(ids[:, :31], store)
        first.save(store)
        if windows == "replay":
            store.windows.clear()
        session, cold = Session(model), Session(model)
        session.resume(ids, store)
        assert session.resumed is not None and session.resumed.windows == windows
    cold.prefill(ids, mode="bounded")
    assert session.cache.target_rows()[1] == [W]
    assert (session.fingerprint() == cold.fingerprint()) == (windows == "pool")


def test_a_store_is_of_the_backbone_whatever_the_drafter_has_learned(tmp_path):
    """Stored are global rows and encoder windows, which no draft block writes."""
    model, ids = scattered(DRAFTING), random_ids(1, 12)
    with TieredStore(tmp_path / "store.sqlite", model, block_tokens=1) as store:
        first = Session(model)
        first.resume(ids[:, :9], store)
        first.save(store)
        model.add_draft(seed=1)
        with torch.no_grad():
            model.drafter.last.norm.weight.mul_(2)
        session, cold = Session(model), Session(model)
        session.resume(ids, store, replay="exact")
        assert session.resumed is not None and session.resumed.found == 9
        cold.prefill(ids)
        assert session.fingerprint() == cold.fingerprint()
        with torch.no_grad():
            model.norm.weight.mul_(2)
        with pytest.raises(ValueError, match="the store belongs to the model"):
            Session(model).resume(ids, store)


# ---- what a draft reads ----


@pytest.mark.parametrize("length", LENGTHS)
def test_a_draft_from_the_cache_is_the_draft_of_training(model, length):
    """The anchor is the next token; slots stand at positions length to length + 4."""
    ids = random_ids(1, length + 1)
    session = fed_session(model, ids[:, :length])
    rows, held = session.cache.target_rows()
    ctx = DraftContext(model.config, rows, torch.tensor(held), torch.tensor([length]))
    text = Sequence(model.config, ids)
    with torch.no_grad():
        found = model.draft(ids[:, -1], ctx)
        carry = model.decode(model.encode(ids, text), text)
        anchors = torch.tensor([0]), torch.tensor([length])
        expected = model.draft(ids[:, -1], DraftContext.at(
            model.config, model.target_rows(carry, text), text.positions, anchors))  # fmt: skip
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-11)  # logits spread over 30


def test_drafts_of_rows_of_different_length(model):
    """C8: each as alone; the first has read less than a window, so its window begins later."""
    rows = [random_ids(1, n, seed=n)[0] for n in (2, 9)]
    ids, mask = torch.full((2, 9), 2), torch.ones(2, 9, dtype=torch.bool)
    ids[0, 7:], ids[1], mask[0, :7] = rows[0], rows[1], False
    session = Session(model)
    session.prefill(ids, mask=mask)

    def drafts(session: Session, anchors: Tensor) -> Tensor:
        rows, held = session.cache.target_rows()
        ctx = DraftContext(model.config, rows, torch.tensor(held), torch.tensor(session.lengths))
        with torch.no_grad():
            return model.draft(anchors, ctx)[0]

    together = drafts(session, torch.tensor([7, 8]))
    for b, row in enumerate(rows):
        single = Session(model)
        single.prefill(row)
        torch.testing.assert_close(together[b : b + 1], drafts(single, torch.tensor([7 + b])), rtol=0, atol=1e-11)


# ---- bytes, and models that change ----


def test_the_report_counts_draft_windows_and_plain_caches_have_none(model):
    session = fed_session(model, random_ids(2, 9))
    report = session.report()
    row = WINDOW.row_bytes(DRAFTING.head_dim)
    assert report.bytes("draft_window") == 2 * 2 * W * row
    assert [store.name for store in report.stores if store.kind == "draft_window"] == ["mtp.0.window", "mtp.1.window"]
    plain = fed_session(scattered(DRAFTING), random_ids(2, 9)).report()
    assert plain.stores == tuple(store for store in report.stores if store.kind != "draft_window")
    assert report.allocated_bytes > plain.allocated_bytes
    assert Cache(DRAFTING).drafts == []


def test_a_filled_cache_has_target_rows_too(model):
    session = Session(model)
    session.start().fill(9)
    rows, held = session.cache.target_rows()
    assert held == [W] and len(rows) == 2 and all(x.isfinite().all() and x.abs().sum() > 0 for x in rows)
    session.decode(5)


def test_a_drafter_does_not_change_what_the_backbone_says(model):
    plain, ids = Model(DRAFTING, dtype=torch.float64, seed=None), random_ids(1, 9)
    own = dict(model.named_parameters())
    with torch.no_grad():
        for name, weight in plain.named_parameters():
            weight.copy_(own[name])
    assert torch.equal(Session(plain).prefill(ids), Session(model).prefill(ids))


def test_a_session_that_began_without_the_drafter_is_refused():
    model = scattered(DRAFTING)
    session = fed_session(model, random_ids(1, 5))
    model.add_draft()
    with pytest.raises(ValueError, match="got or lost its drafter since the session began"):
        session.decode(5)
    session = fed_session(model, random_ids(1, 5))
    model.mtp = None
    with pytest.raises(ValueError, match="got or lost its drafter since the session began"):
        session.decode(5)
