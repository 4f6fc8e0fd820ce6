"""Who sees whom: no future, no other row, no other document, and padding on either side."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from models import NANO, context, random_ids, scattered, traced, window_only
from torch import Tensor

from tinyds41.model.context import PADDING, Sequence
from tinyds41.model.transformer import Model

# Rounding of sums in another order; logits spread over 10.
TOLERANCE = 1e-12
RATIO_3 = NANO.replace(compress_ratios=[0, 0, 3, 3, 1, 1, 1, 1])


@pytest.fixture(scope="module")
def model() -> Model:
    return scattered()


@torch.no_grad()
def logits(model: Model, ids: Tensor, documents: Tensor | None = None) -> Tensor:
    return model(ids, documents=documents)


def another(ids: Tensor, row: int, position: int) -> Tensor:
    """The same ids with another token there, no special one."""
    changed = ids.clone()
    changed[row, position] = (ids[row, position] - 4 + 7) % 60 + 4
    return changed


def difference(model: Model, one: Tensor, other: Tensor, documents: Tensor | None = None) -> Tensor:
    """[B,S]: the largest change of a logit at each position."""
    return (logits(model, one, documents) - logits(model, other, documents)).abs().amax(-1)


def runs(documents: Tensor) -> list[tuple[int, int]]:
    """Start and end of each run of equal ids in one row."""
    borders = [0, *(i for i in range(1, len(documents)) if documents[i] != documents[i - 1]), len(documents)]
    return list(pairwise(borders))


def random_layout(length: int, generator: torch.Generator) -> Tensor:
    """Runs of 1 to 12 tokens; ids repeat, and every third run on average is padding."""
    parts, last = [], None
    while sum(parts_len := [len(part) for part in parts]) < length:
        document = last
        while document == last:
            document = int(torch.randint(PADDING, 3, (), generator=generator))
        run = int(torch.randint(1, 13, (), generator=generator))
        parts.append(torch.full((min(run, length - sum(parts_len)),), document))
        last = document
    return torch.cat(parts)


# ---- the future ----


@pytest.mark.parametrize("t", [0, 1, 6, 7, 19, 24])
def test_a_token_changes_no_logit_before_it(model, t):
    """At both phases of a ratio-2 group, with a pool that restricts."""
    ids = random_ids(2, 25)
    change = difference(model, ids, another(ids, 0, t))
    assert not (change[0, :t] > TOLERANCE).any()
    assert change[0, t] > 1e-3
    assert not (change[1] > TOLERANCE).any()  # nor one of the other row


def test_a_token_is_seen_long_after_its_window(model):
    """Four tokens of window in two layers reach 6 positions; entries reach further."""
    ids = random_ids(1, 25)
    assert (difference(model, ids, another(ids, 0, 4))[0, 4:] > 1e-9).sum() > 15


# ---- documents ----


@pytest.mark.parametrize("config", [NANO, RATIO_3], ids=["ratio 2", "ratio 3"])
@pytest.mark.parametrize("seed", range(3))
def test_packed_documents_equal_the_documents_alone(config, seed):
    """Random layouts with documents of one token, repeated ids, padding left, between and right."""
    model, generator = scattered(config), torch.Generator().manual_seed(seed)
    ids = random_ids(2, 32, seed=seed)
    documents = torch.stack([random_layout(32, generator) for _ in range(2)])
    together = logits(model, ids, documents)
    for row in range(2):
        for start, end in runs(documents[row]):
            part = (slice(row, row + 1), slice(start, end))
            alone = logits(model, ids[part], documents[part])
            torch.testing.assert_close(together[part], alone, rtol=0, atol=TOLERANCE)
            if documents[row, start] != PADDING:
                torch.testing.assert_close(alone, logits(model, ids[part]), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("lengths", [[1, 1, 1], [1, 13], [13, 1], [7, 5, 9], [3, 20], [4, 8, 6]])
def test_documents_at_every_phase_of_groups_and_blocks_equal_the_documents_alone(model, lengths):
    """Odd ones leave a group unfinished, long ones make the pool restrict."""
    ids = random_ids(1, sum(lengths))
    documents = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]
    together = logits(model, ids, documents)
    for start, end in runs(documents[0]):
        torch.testing.assert_close(
            together[:, start:end], logits(model, ids[:, start:end]), rtol=0, atol=TOLERANCE)


def test_one_document_equals_no_documents(model):
    ids = random_ids(2, 17)
    torch.testing.assert_close(
        logits(model, ids, torch.full_like(ids, 5)), logits(model, ids), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("t", [0, 5, 10])
def test_no_other_document_changes(model, t):
    """Token t of the first of two: window, global entries, pool and look-back all end at the seam."""
    ids = random_ids(1, 30)
    documents = torch.tensor([[0] * 11 + [1] * 19])
    change = difference(model, ids, another(ids, 0, t), documents)[0]
    assert not (change[11:] > TOLERANCE).any()
    assert change[t] > 1e-3


def test_all_four_paths_stop_at_the_seam():
    """One at a time: the window, the entries that are visible, the pool, Engram's look-back."""
    documents = torch.tensor([[0] * 7 + [1] * 6])
    ctx = Sequence(NANO.replace(quantize_cache=False), random_ids(1, 13), documents)
    window = ctx.add_window(0, torch.zeros(1, 13, 32))
    assert window.first[0].tolist() == [0, 0, 0, 0, 1, 2, 3, 7, 7, 7, 7, 8, 9]
    assert window.size == 4
    assert ctx.positions[0].tolist() == [0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4, 5]
    kv = torch.arange(13.0).view(1, 13, 1)
    c, _, positions = ctx.groups(2, kv, None)
    ctx.add_entries(2, c[:, :, 0], c[:, :, 0])
    entries = ctx.entries(2)
    seen = [list(range(first, last)) for first, last in zip(
        entries.first[0].tolist(), entries.last[0].tolist(), strict=True)]  # fmt: skip
    # By first tokens: pairs (0,1), (2,3), (4,5), token 6 waits for ever, then (7,8), (9,10), (11,12).
    tokens = [[int(c[0, j, 0]) for j in row] for row in seen]
    assert tokens == [[], [0], [0], [0, 2], [0, 2], [0, 2, 4], [0, 2, 4], [], [7], [7], [7, 9], [7, 9], [7, 9, 11]]
    assert [int(positions[0, j]) for j in seen[-1]] == [0, 2, 4]
    assert all(first % NANO.candidate_block_size == 0 for first in entries.first[0].tolist())
    back = ctx.look_back(random_ids(1, 13), 4)
    assert [(row >= 0).sum().item() for row in back[0]] == [1, 2, 3, 4, 4, 4, 4, 1, 2, 3, 4, 4, 4]


def test_a_pool_forms_inside_its_document():
    """The second document's first query keeps the block of its own newest entry, none of the first's."""
    model, ids = scattered(), random_ids(1, 24)
    documents = torch.tensor([[0] * 9 + [1] * 15])
    pool = traced(model, ids, "*.pool", documents=documents)["layers.4.indexer.pool"][0]
    # Entries of document 1 begin at slot 10, block 5: document 0 has 9 entries in 5 blocks of 2.
    for position in range(15):
        blocks = [block for block in pool[9 + position].tolist() if block >= 0]
        assert set(blocks) <= set(range(5, 5 + position // 2 + 1))
        assert 5 + position // 2 in blocks
        assert len(blocks) == min(3, position // 2 + 1)


# ---- padding ----


@pytest.mark.parametrize("length", [1, 5, 8, 13])
def test_a_padded_row_equals_the_row_alone(model, length):
    """Pads on the left, on the right or on both sides, of any token ids; the other row is full."""
    ids = random_ids(2, 16)
    alone = logits(model, ids[:1, :length])
    for left in {0, 3, 16 - length}:
        if left + length > 16:
            continue
        padded, documents = ids.clone(), torch.zeros_like(ids)
        padded[0] = random_ids(1, 16, seed=9)[0]
        padded[0, left : left + length] = ids[0, :length]
        documents[0], documents[0, left : left + length] = PADDING, 0
        out = logits(model, padded, documents)
        torch.testing.assert_close(out[:1, left : left + length], alone, rtol=0, atol=TOLERANCE)
        torch.testing.assert_close(out[1:], logits(model, ids[1:]), rtol=0, atol=TOLERANCE)
        assert out.isfinite().all()


def test_right_padding_without_documents_changes_nothing_before_it(model):
    ids = random_ids(1, 16)
    torch.testing.assert_close(
        logits(model, ids)[:, :11], logits(model, ids[:, :11]), rtol=0, atol=TOLERANCE)


def test_rows_of_a_batch_trade_places_with_their_logits(model):
    ids = random_ids(3, 14)
    order = torch.tensor([2, 0, 1])
    torch.testing.assert_close(logits(model, ids[order]), logits(model, ids)[order], rtol=0, atol=TOLERANCE)


# ---- windows ----


@pytest.mark.parametrize("length", [3, 4, 5, 8, 9])
def test_a_window_holds_the_last_w_tokens(length):
    """W = 4, at W-1, W, W+1, 2W, 2W+1 tokens."""
    window = context(NANO, length).add_window(0, torch.zeros(1, length, 32))
    assert window.first[0].tolist() == [max(0, position - 3) for position in range(length)]


def test_one_layer_of_windows_sees_exactly_w_tokens():
    """Token 0 reaches positions 0..W-1 and no further."""
    config = window_only(1)
    model, ids = scattered(config), random_ids(1, 9)
    reached = difference(model, ids, another(ids, 0, 0))[0] > 1e-9
    assert reached.tolist() == [True] * 4 + [False] * 5


def test_documents_of_another_shape_are_refused(model):
    with pytest.raises(ValueError, match=r"documents have shape \(1, 4\), ids \(1, 5\)"):
        model(random_ids(1, 5), documents=torch.zeros(1, 4, dtype=torch.long))


@pytest.mark.parametrize(("documents", "message"), [
    (torch.zeros(1, 5), "documents are torch.float32, expected a tensor"),
    (torch.full((1, 5), torch.nan), "documents are torch.float32"),  # NaN differs from itself: five documents
    (torch.ones(1, 5, dtype=torch.bool), "documents are torch.bool"),  # a mask would be read as ids
    ([[0] * 5], "documents are list"),
    (torch.full((1, 5), -2), "document id -2 is negative: only -1 is"),
])  # fmt: skip
def test_documents_that_are_no_ids_are_refused(model, documents, message):
    with pytest.raises(ValueError, match=message):
        model(random_ids(1, 5), documents=documents)
