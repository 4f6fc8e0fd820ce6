"""Where cached rows lie: growth moves nothing, a fork sees no other, and the latest rows are the latest."""

from __future__ import annotations

import pytest
import torch
from sessions import memory_full_of_nan
from torch import Tensor

from tinyds41.formats import GLOBAL, Format, Rows
from tinyds41.infer import stores
from tinyds41.infer.stores import Growing, Recent, SplitRows

CPU = torch.device("cpu")
WIDTH = 32


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Chunks of 4 rows, and 3 rows of slack: a few rows cross every border."""
    monkeypatch.setattr(stores, "FIRST_CHUNK", 4)
    monkeypatch.setattr(stores, "SLACK", 3)


def growing(batch: int = 2, form: Format | None = GLOBAL) -> Growing:
    return Growing(batch, WIDTH, form, torch.float64, CPU)


def rows_of(batch: int, n: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, n, WIDTH, generator=generator, dtype=torch.float64)


def filled(n: int, batch: int = 2, form: Format | None = GLOBAL) -> Growing:
    store, rows = growing(batch, form), rows_of(batch, n)
    for j in range(n):
        store.append(rows[:, j : j + 1], [1] * batch)
    return store


def stored(x: Tensor, form: Format | None) -> Tensor:
    return x if form is None else form.fake_quant(x)


# ---- rows of the whole past ----


@pytest.mark.parametrize("form", [GLOBAL, None], ids=["packed", "plain"])
def test_rows_come_back_in_order_whatever_the_chunks(form):
    """Pieces of 1, 2, ... 6 rows over four chunks of 4 rows and more."""
    store, rows, start = growing(2, form), rows_of(2, 21), 0
    for n in range(1, 7):
        store.append(rows[:, start : start + n], [n, n])
        start += n
        view = store.rows()
        assert view.shape == (2, start, WIDTH)
        assert torch.equal(view.all(), stored(rows[:, :start], form))
    assert len(store.chunks) == 4


@pytest.mark.parametrize("form", [GLOBAL, None], ids=["packed", "plain"])
def test_several_chunks_read_like_one(form):
    """By number, -1 for none, and in every part from any start."""
    split, rows = filled(14, form=form).rows(), stored(rows_of(2, 14), form)
    assert isinstance(split, SplitRows)
    one = Rows(rows)
    index = torch.tensor([[[0, 3, 4], [13, -1, 7]], [[12, 12, -1], [8, 5, 1]]])
    assert torch.equal(split.take(index), one.take(index))
    for start in range(14):
        for length in range(1, 15 - start):
            assert torch.equal(split.narrow(start, length).all(), rows[:, start : start + length])
    part = split.narrow(3, 9)
    assert torch.equal(part.take(index[:, :1].clamp(max=8)), Rows(rows[:, 3:12]).take(index[:, :1].clamp(max=8)))


def test_an_entry_behind_the_last_is_refused_in_several_chunks():
    """Chunks have more room than rows: row 14 exists, but was never written."""
    with pytest.raises(IndexError, match=r"entries 0\.\.14 are not in a store of 14"):
        filled(14).rows().take(torch.tensor([[[0, 14]], [[1, 2]]]))


def test_growth_does_not_move_the_past():
    store, rows = growing(), rows_of(2, 30)
    seen: list[int] = []
    for j in range(30):
        store.append(rows[:, j : j + 1], [1, 1])
        pointers = [chunk.data_ptr() for chunk in store.chunks]
        assert pointers[: len(seen)] == seen
        seen = pointers
    assert [chunk.shape[1] for chunk in store.chunks] == [4, 4, 8, 16]  # each doubles what there is


def test_room_that_was_reserved_is_one_chunk():
    store = growing()
    store.reserve(23)
    store.append(rows_of(2, 23), [23, 23])
    assert [chunk.shape[1] for chunk in store.chunks] == [26]  # and a little more for what is decoded


def test_only_the_rows_asked_for_are_decoded(monkeypatch):
    split, decoded = filled(14).rows(), []
    decode = Format.decode

    def counted(self, rows, *rest):
        decoded.append(rows.shape[:-1].numel())
        return decode(self, rows, *rest)

    monkeypatch.setattr(Format, "decode", counted)
    split.take(torch.tensor([[[0, 13, 4]], [[9, -1, 2]]]))
    assert decoded == [6]
    split.narrow(3, 3).all()  # one of the first chunk, two of the second, in each of two batch rows
    assert decoded == [6, 2, 4]


def test_batch_rows_of_different_length_keep_their_own_rows():
    store, rows = growing(3), rows_of(3, 12)
    taken = [0, 0, 0]
    for counts in ([1, 0, 3], [4, 4, 4], [0, 5, 2], [2, 0, 0]):
        piece = torch.stack([
            torch.cat([rows[b, taken[b] : taken[b] + n], rows.new_full((5 - n, WIDTH), 9.0)])
            for b, n in enumerate(counts)])  # fmt: skip
        store.append(piece, counts)
        taken = [n + count for n, count in zip(taken, counts, strict=True)]
    assert store.lengths == taken == [7, 9, 9]
    for b, n in enumerate(taken):
        assert torch.equal(GLOBAL.decode(store.stored(b), WIDTH, torch.float64), GLOBAL.fake_quant(rows[b, :n]))


def test_rows_that_were_never_written_are_zeros():
    """A shorter batch row is read at row 0 where nothing was chosen: NaN there would spread at weight 0."""
    with memory_full_of_nan():
        store = growing()
        store.append(rows_of(2, 3), [3, 0])
        assert torch.equal(store.rows().all()[1], torch.zeros(3, WIDTH, dtype=torch.float64))


def test_packed_rows_are_stored_as_they_are():
    store, packed = growing(), GLOBAL.encode(rows_of(2, 7))
    store.append_packed(packed[:, :5])
    store.append_packed(packed[:, 5:])
    assert store.lengths == [7, 7]
    assert torch.equal(store.stored(1), packed[1])
    assert store.row_bytes == packed.shape[-1] == 18  # 32 channels of half a byte, two scales


# ---- forks ----


def content(store: Growing) -> list[Tensor]:
    return [store.stored(b).clone() for b in range(store.batch)]


@pytest.mark.parametrize("first", ["original", "twin"])
def test_neither_of_a_fork_sees_the_other(first):
    """Both write the same place: the next free row, and after a cut a row that the other still has."""
    for length in (6, 3):
        original = filled(6)
        twin = original.fork()
        one, other = (original, twin) if first == "original" else (twin, original)
        before = content(other)
        one.lengths = [length] * 2
        one.append(rows_of(2, 2, seed=1), [2, 2])
        assert all(torch.equal(x, y) for x, y in zip(content(other), before, strict=True))
        mine = content(one)
        other.lengths = [length] * 2
        other.append(rows_of(2, 3, seed=2), [3, 3])
        assert all(torch.equal(x, y) for x, y in zip(content(one), mine, strict=True))
        assert not torch.equal(content(one)[0][length], content(other)[0][length])


def test_a_fork_copies_only_the_chunk_it_writes():
    original = filled(6)
    twin = original.fork()
    pointers = [chunk.data_ptr() for chunk in original.chunks]
    assert [chunk.data_ptr() for chunk in twin.chunks] == pointers
    twin.append(rows_of(2, 1), [1, 1])
    assert [chunk.data_ptr() == p for chunk, p in zip(twin.chunks, pointers, strict=True)] == [True, False]
    assert [chunk.data_ptr() for chunk in original.chunks] == pointers
    copied = twin.chunks[1].data_ptr()
    twin.append(rows_of(2, 1), [1, 1])  # its own by now: written in place
    assert twin.chunks[1].data_ptr() == copied


def test_a_fork_of_a_fork_is_a_third():
    first = filled(6)
    second = first.fork()
    third = second.fork()
    before = content(first)
    second.append(rows_of(2, 1, seed=1), [1, 1])
    third.append(rows_of(2, 1, seed=2), [1, 1])
    assert not torch.equal(content(second)[0], content(third)[0])
    first.append(rows_of(2, 1, seed=3), [1, 1])
    assert all(torch.equal(x[:6], y) for store in (first, second, third)
               for x, y in zip(content(store), before, strict=True))  # fmt: skip


def test_reordered_rows_are_the_rows_and_a_copy():
    original = filled(6, batch=3)
    before, twin = content(original), original.fork()
    twin.reorder([2, 0, 0, 1])
    assert twin.batch == 4 and twin.lengths == [6] * 4
    assert all(torch.equal(x, before[b]) for x, b in zip(content(twin), [2, 0, 0, 1], strict=True))
    twin.lengths = [2] * 4
    twin.append(rows_of(4, 2, seed=1), [2, 2, 2, 2])
    assert all(torch.equal(x, y) for x, y in zip(content(original), before, strict=True))
    assert not torch.equal(twin.stored(1)[2:], twin.stored(2)[2:])  # a repeated row goes its own way


# ---- the latest rows ----


class Oracle:
    """The same in lists: every number ever appended, and how many of them have to be there still."""

    def __init__(self, batch: int, keep: int):
        self.keep, self.rows, self.promised = keep, [[] for _ in range(batch)], [0] * batch

    def append(self, new: list[list[int]]) -> None:
        self.rows = [row + more for row, more in zip(self.rows, new, strict=True)]
        self.promised = [min(self.keep, n + len(more)) for n, more in zip(self.promised, new, strict=True)]

    def drop(self, counts: list[int]) -> None:
        self.rows = [row[: len(row) - n] for row, n in zip(self.rows, counts, strict=True)]
        self.promised = [n - count for n, count in zip(self.promised, counts, strict=True)]

    def forget(self, b: int) -> None:
        self.rows[b], self.promised[b] = [], 0

    def reorder(self, rows: list[int]) -> None:
        self.rows, self.promised = [list(self.rows[b]) for b in rows], [self.promised[b] for b in rows]

    def check(self, recent: Recent) -> None:
        for b, (row, promised) in enumerate(zip(self.rows, self.promised, strict=True)):
            assert promised <= recent.held(b) <= len(row)
            for n in range(recent.held(b) + 1):
                assert recent.latest(b, n).tolist() == row[len(row) - n :]


def check_view(oracle: Oracle, view: Tensor, start: list[int], past: int, before: list[int], new: list[int]) -> None:
    """Behind its start a row of the view is the end of the text; all that was promised and asked for is there."""
    for b, row in enumerate(oracle.rows):
        shown = view[b, max(start[b], 0) :].tolist()
        assert shown == row[len(row) - len(shown) :]
        assert len(shown) >= min(past, before[b]) + new[b]


@pytest.mark.parametrize("keep", [0, 1, 2, 5, 9])
@pytest.mark.parametrize("seed", range(6))
def test_the_latest_rows_are_those_of_a_list(keep, seed):
    """Random appends with and without padding, drops, emptied rows, orders and forks; S2: any window and rollback."""
    draw = torch.Generator().manual_seed(seed)

    def below(n: int) -> int:
        return int(torch.randint(n, (), generator=draw))

    batch, number = 3, 0
    recent, oracle = Recent(batch, (), torch.int64, keep, CPU), Oracle(batch, keep)
    for _ in range(60):
        action = below(8)
        if action < 5:
            n_new, past = 1 + below(6), below(keep + 1)
            pads = [below(n_new + 1) for _ in range(batch)] if action == 4 else None
            rows = torch.arange(number, number + batch * n_new).view(batch, n_new)
            number += rows.numel()
            new, before = [row[n:].tolist() for row, n in zip(rows, pads or [0] * batch, strict=True)], oracle.promised
            oracle.append(new)
            view, start = recent.append(rows, pads, past)
            check_view(oracle, view, start, past, before, [len(row) for row in new])
        elif action == 5:
            counts = [below(n + 1) for n in oracle.promised]
            recent.drop(counts)
            oracle.drop(counts)
        elif action == 6:
            b = below(batch)
            recent.forget(b)
            oracle.forget(b)
        else:
            twin = recent.fork()
            twin.append(torch.full((batch, 2), -7), None, 0)  # in a buffer of its own
            rows = [below(batch) for _ in range(batch)]
            recent.reorder(rows)
            oracle.reorder(rows)
        oracle.check(recent)


def test_the_buffer_of_the_latest_rows_does_not_grow():
    recent = Recent(1, (), torch.int64, 5, CPU)
    pointer = recent.buffer.data_ptr()
    for n in range(50):
        recent.append(torch.tensor([[n]]), None, 4)
    assert recent.buffer.shape == (1, 8) and recent.buffer.data_ptr() == pointer
