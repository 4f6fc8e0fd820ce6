"""Rows of different length in one batch: each equals the row alone, whatever lies beside it, before it or in memory."""

from __future__ import annotations

import pytest
import torch
from models import PAD, random_ids, scattered
from sessions import BOUNDED, EXACT, SHORT, alone, assert_close, fed_session, memory_full_of_nan, ratio, without_engram
from torch import Tensor

from tinyds41.infer.session import Session
from tinyds41.model.transformer import Model


@pytest.fixture(scope="module")
def model() -> Model:
    return scattered(SHORT)


def texts(lengths: list[int], seed: int = 0) -> list[Tensor]:
    return [random_ids(1, n, seed=seed + b)[0] for b, n in enumerate(lengths)]


def padded(rows: list[Tensor], left: list[int], width: int, pad: int = PAD) -> tuple[Tensor, Tensor]:
    """ids and mask [B,width], each row behind left[b] pads."""
    ids, mask = torch.full((len(rows), width), pad), torch.zeros(len(rows), width, dtype=torch.bool)
    for b, (row, n) in enumerate(zip(rows, left, strict=True)):
        ids[b, n : n + len(row)], mask[b, n : n + len(row)] = row, True
    return ids, mask


LENGTHS = [1, 13, 2, 5, 10]  # no group of two yet; longer than the decoder's share; two groups and a half; as long


@pytest.mark.parametrize("mode", ["exact", "bounded", "full"])
@pytest.mark.parametrize("chunk", [3, 100])
def test_padded_rows_equal_each_alone(model, mode, chunk):
    """C6: padding left, right and on both sides, chunks that are all padding; then tokens one by one (C8)."""
    rows, more = texts(LENGTHS), random_ids(5, 4, seed=9)
    ids, mask = padded(rows, [15, 1, 0, 7, 3], 16)
    with memory_full_of_nan():
        session = Session(model)
        logits = session.prefill(ids, mode=mode, chunk=chunk, mask=mask)
        assert session.lengths == LENGTHS
        following = torch.cat([session.extend(more[:, :3]), session.extend(more[:, 3:])], 1)
    for b, row in enumerate(rows):
        single = Session(model)
        assert_close(logits[b], single.prefill(row, mode=mode)[0])
        assert_close(following[b], single.extend(more[b])[0])
        assert alone(session, b) == single.fingerprint()


def test_what_stands_in_the_padding_does_not_matter(model):
    rows = texts([3, 7])
    found = []
    for pad, left in ((PAD, [5, 0]), (17, [5, 1]), (4, [0, 0])):
        ids, mask = padded(rows, left, 8, pad)
        session = Session(model)
        found.append((session.prefill(ids, mask=mask), session.fingerprint()))
    assert_close(found[1][0], found[0][0])
    assert_close(found[2][0], found[0][0])
    assert len({fingerprint for _, fingerprint in found}) == 1


def test_a_mask_of_tokens_alone_is_no_mask(model):
    ids = random_ids(2, 7)
    masked = Session(model)
    assert torch.equal(masked.prefill(ids, mask=torch.ones_like(ids).bool()), Session(model).prefill(ids))
    one = Session(model).prefill(ids[:, :5])
    assert_close(Session(model).prefill(ids, mask=torch.tensor([[True] * 5 + [False] * 2] * 2)), one)


@pytest.mark.parametrize("config", [ratio(3), without_engram(SHORT.replace(sliding_window=1, quantize_cache=False))],
                         ids=["ratio 3", "W=1, plain rows"])  # fmt: skip
def test_a_second_prompt_of_different_lengths_goes_on_from_each_row(config):
    """One row waits for the others with a single token; one has nothing in the encoder's store yet."""
    model, first, second = scattered(config), texts([2, 9, 4]), texts([8, 1, 5], seed=5)
    with memory_full_of_nan():
        session = Session(model)
        session.prefill(*padded(first, [7, 0, 2], 9)[:1], mask=padded(first, [7, 0, 2], 9)[1], mode="full")
        ids, mask = padded(second, [0, 7, 1], 8)
        logits = session.prefill(ids, mask=mask, mode="full", chunk=3)
    for b, (start, rest) in enumerate(zip(first, second, strict=True)):
        assert_close(logits[b], model(torch.cat([start, rest])[None])[0, -1])
        assert alone(session, b) == fed_session(model, torch.cat([start, rest])[None]).fingerprint()


@pytest.mark.parametrize(("mode", "share"), [("exact", EXACT), ("bounded", BOUNDED)])
def test_a_long_second_prompt_begins_anew_in_its_own_row_alone(model, mode, share):
    """Beside it a short one sees its live windows: what is cut depends on each row's own length."""
    first, second = random_ids(2, 8), texts([share + 1, share - 1], seed=5)
    ids, mask = padded(second, [0, 2], share + 1)
    session = fed_session(model, first)
    logits = session.prefill(ids, mask=mask, mode=mode, chunk=3)
    for b in range(2):
        single = fed_session(model, first[b : b + 1])
        assert_close(logits[b], single.prefill(second[b], mode=mode)[0])
        assert alone(session, b) == single.fingerprint()
    with pytest.raises(ValueError, match="row 0 had its decoder run on the end"):
        session.truncate([8, 8])
    session.truncate([8 + share + 1, 8])  # row 1 was skipped nowhere
    assert alone(session, 1) == fed_session(model, first[1:]).fingerprint()


def test_outputs_trade_places_with_their_rows(model):
    """C7: permuted, evicted, repeated and readmitted between steps."""
    rows, more = texts([6, 1, 9]), random_ids(4, 6, seed=9)
    ids, mask = padded(rows, [3, 8, 0], 9)
    session = Session(model)
    session.prefill(ids, mask=mask, mode="full")
    said = [row.tolist() for row in rows]

    def step(column: Tensor) -> None:
        logits = session.decode(column)
        for b, text in enumerate(said):
            text.append(int(column[b]))
            assert_close(logits[b], model(torch.tensor([text]))[0, -1])

    def order(chosen: list[int]) -> None:
        session.reorder(chosen)
        said[:] = [list(said[b]) for b in chosen]

    step(more[:3, 0])
    order([2, 0, 1])
    step(more[:3, 1])
    order([2, 0])  # evicted: the one in the middle
    step(more[:2, 2])
    order([1, 0, 0])  # one text goes on in two ways
    step(more[:3, 3])
    session.truncate([0, len(said[1]), len(said[2]) - 2])  # emptied, to be readmitted with another text
    said[2] = said[2][:-2]
    prompt = texts([5], seed=3)[0]
    new = [prompt, more[1, 4:5], more[2, 4:5]]
    ids, mask = padded(new, [0, 4, 0], 5)
    logits = session.prefill(ids, mask=mask, mode="full")
    said[:] = [prompt.tolist(), [*said[1], int(more[1, 4])], [*said[2], int(more[2, 4])]]
    for b, text in enumerate(said):
        assert_close(logits[b], model(torch.tensor([text]))[0, -1])
    step(more[:3, 5])


def test_each_row_takes_back_its_own_tokens(model):
    """Drafts of one batch are accepted to different lengths: S1 per row; also without Engram, which has no history."""
    for changed in (model, scattered(without_engram())):
        ids, draft = random_ids(3, 7), random_ids(3, 4, seed=1)
        for accepted in ((0, 1, 3), (0, 4, 2)):
            session = fed_session(changed, ids)
            session.extend(draft)
            session.truncate([7 + n for n in accepted])
            logits = session.decode([5, 6, 7])
            for b, n in enumerate(accepted):
                text = torch.cat([ids[b], draft[b, :n], torch.tensor([5 + b])])
                assert_close(logits[b], changed(text[None])[0, -1])


def test_rows_in_float32_equal_each_alone_in_the_middle(model):
    """A code may flip in fp32: 1e-4 in the median over logits that spread over 10, as for the goldens."""
    single = scattered(SHORT, torch.float32)
    rows = texts(LENGTHS)
    ids, mask = padded(rows, [15, 1, 0, 7, 3], 16)
    logits = Session(single).prefill(ids, mask=mask)
    expected = torch.cat([Session(single).prefill(row) for row in rows])
    assert (logits - expected).abs().amax(-1).median() < 1e-4
