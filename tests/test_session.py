"""A running text equals the text at once: any pieces, taken back, forked, grown, counted; bad input changes nothing."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from models import random_ids, scattered, traced
from sessions import SHORT, fed_session, ratio, without_decoder, without_engram
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tinyds41.config import Config
from tinyds41.formats import GLOBAL, INDEX, Format
from tinyds41.infer import stores
from tinyds41.infer.session import Session
from tinyds41.model.transformer import Model
from tinyds41.trace import COUNTS, Trace

# Rounding of sums in another order; logits spread over 10.
TOLERANCE = 1e-12

VARIANTS = {
    "short": SHORT,
    "plain rows": SHORT.replace(quantize_cache=False),
    "ratio 3": ratio(3),
    "ratio 1": ratio(1),
    "W=1": SHORT.replace(sliding_window=1),
    "no Engram": without_engram(),
    "no decoder": without_decoder(),
    "multi pass": SHORT.replace(mhc_mode="multi_pass"),
    # A decoder layer that follows the encoder's choice, and Engram in the decoder; each chunk has fewer entries than K.
    "encoder's choice": ratio(2).replace(compress_ratios=[0, 2, 1, 2, 1], index_topk=64, engram_layer_ids=[1, 3],
                                         engram_num_embeddings=[156, 304]),
    # A decoder layer that chooses inside the encoder's pool.
    "encoder's pool": ratio(2).replace(compress_ratios=[0, 2, 1, 1, 2], candidate_source_layer_id=1,
                                       candidate_topk_blocks=2),
    "K=1": SHORT.replace(index_topk=1),
    "K=64": SHORT.replace(index_topk=64),
}  # fmt: skip


@pytest.fixture(scope="module")
def model() -> Model:
    return scattered(SHORT)


@torch.no_grad()
def at_once(model: Model, ids: Tensor) -> Tensor:
    return model(ids)


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)


# ---- pieces ----


def test_every_step_from_any_length_equals_one_shot(model):
    """C1, C2, C3, W1: k tokens one by one, then l-k at once, for all k < l <= 2W+2. So every partition does.

    Equal fingerprints continue equally: what a partition reaches at k is what single tokens reach.
    """
    ids, single = random_ids(1, 10), Session(model)
    expected, prints, forks = at_once(model, ids), [], []
    for k in range(10):
        forks.append(single.fork())
        close(single.extend(ids[:, k : k + 1]), expected[:, k : k + 1])
        prints.append(single.fingerprint())
    for k in range(10):
        for stop in range(k + 2, 11):
            session = forks[k].fork()
            close(session.extend(ids[:, k:stop]), expected[:, k:stop])
            assert session.fingerprint() == prints[stop - 1], (k, stop)


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
def test_chunks_pieces_and_single_tokens_equal_one_shot(config):
    """Prefill in chunks of 3, a piece of 2, tokens one by one; also a text of 19 = 4W+3 from single tokens alone."""
    model, ids = scattered(config), random_ids(2, 19)
    expected = at_once(model, ids)
    session = Session(model)
    close(session.prefill(ids[:, :14], chunk=3), expected[:, 13])
    close(session.extend(ids[:, 14:16]), expected[:, 14:16])
    for p in range(16, 19):
        close(session.decode(ids[:, p]), expected[:, p])
    one_shot = fed_session(model, ids)
    assert session.fingerprint() == one_shot.fingerprint()
    single = Session(model)
    for p in range(19):
        close(single.extend(ids[:, p : p + 1])[:, 0], expected[:, p])
    assert single.fingerprint() == one_shot.fingerprint()


def test_a_text_of_one_piece_equals_the_model_bit_for_bit():
    """F4: packed rows are the fake-quantised ones, in any type; the same products over the same rows."""
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        model, ids = scattered(SHORT, dtype), random_ids(2, 13)
        assert torch.equal(Session(model).extend(ids), at_once(model, ids))


def test_pieces_in_float32_are_close():
    """Plain rows: 2e-5 on logits that spread over 10, some hundred roundings of 6e-8. Packed ones may flip a code."""
    model, ids = scattered(SHORT.replace(quantize_cache=False), torch.float32), random_ids(2, 19)
    session, expected = Session(model), at_once(model, ids)
    found = torch.cat([session.extend(part) for part in ids.split([5, 1, 1, 6, 1, 2, 3], 1)], 1)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)
    assert expected.std() > 1


def test_what_a_decoded_token_computes_is_what_it_computes_in_the_whole(model):
    """C4, C5, C9, I5 and all between: every traced value of the last 5 of 17 tokens, read after 12.

    What belongs to queries is compared at these; entries and keys as a whole; what a step adds, at its end.
    """
    ids, trace = random_ids(1, 17), Trace("*")
    whole, session = traced(model, ids), fed_session(model, ids[:, :12])
    session.extend(ids[:, 12:], trace=trace)
    assert trace.keys() == whole.keys()
    for name, value in trace.items():
        expected = whole[name]
        if name.endswith("window_first"):
            continue  # row numbers of the rows that are shown, which are fewer
        if not name.endswith(("global_kv", "keys")):
            expected = expected[:, -value.shape[1] :]
        if name.endswith("scores") and "indexer" in name:
            finite = expected.isfinite()
            assert torch.equal(finite, value.isfinite())
            value, expected = value[finite], expected[finite]
        torch.testing.assert_close(value, expected, rtol=1e-11, atol=1e-11)  # streams of up to a few hundred
    assert trace["layers.1.compressor.positions"].tolist() == [[12, 14]]
    assert trace["layers.2.compressor.positions"].tolist() == [[12, 13, 14, 15, 16]]
    pool = trace["layers.2.indexer.pool"][0]
    assert all(p // 2 in blocks for p, blocks in zip(range(12, 17), pool.tolist(), strict=True))


def test_constant_scores_choose_the_first_entries_however_the_text_is_cut():
    """I9: all scores 0; bare topk would pick at random. The pool keeps the newest block among the first."""
    model, ids = scattered(SHORT), random_ids(1, 15)
    with torch.no_grad():
        for layer in (1, 2, 4):
            block = model.layers[layer]
            block.indexer.weights_proj.weight.zero_()
    expected, session, found = at_once(model, ids), Session(model), []
    for part in ids.split([4, 1, 1, 6, 3], 1):
        trace = Trace("*.selection", "*.pool")
        found.append(session.extend(part, trace=trace))
    close(torch.cat(found, 1), expected)
    assert trace["layers.1.indexer.selection"][0].tolist() == [[0, 1, 2]] * 3
    assert trace["layers.2.indexer.selection"][0].tolist() == [[0, 1, 2]] * 3
    assert trace["layers.2.indexer.pool"][0].tolist() == [[0, 1, 6], [0, 1, 6], [0, 1, 7]]


# ---- taking back ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_rejected_draft_leaves_no_trace(dtype):
    """S1: at both phases of a group and around W, 2W; in every bit, the next logits too."""
    model, ids, draft = scattered(SHORT, dtype), random_ids(1, 12), random_ids(1, 5, seed=1)
    clean = Session(model)
    for length in range(1, 11):
        clean.extend(ids[:, length - 1 : length])
        before = clean.fingerprint()
        going_on = clean.fork().decode(ids[:, length])
        rolled = clean.fork()
        rolled.extend(draft[:, : 1 + length % 5])  # every number below 6: test_cache.py
        assert rolled.fingerprint() != before
        rolled.truncate(length)
        assert rolled.lengths == [length] and rolled.fingerprint() == before
        assert torch.equal(rolled.decode(ids[:, length]), going_on)


def test_a_draft_accepted_in_part_equals_never_drafted(model):
    """S1: 5 tokens drafted, 0 to 5 accepted, at both phases; float64, where pieces do not matter."""
    ids, draft = random_ids(1, 8), random_ids(1, 5, seed=1)
    for length in (7, 8):
        base = fed_session(model, ids[:, :length])
        drafted = base.fork()
        drafted.extend(draft)
        for accepted in range(6):
            rolled, clean = drafted.fork(), base.fork()
            rolled.truncate(length + accepted)
            if accepted:
                clean.extend(draft[:, :accepted])
            assert rolled.fingerprint() == clean.fingerprint()
            close(rolled.decode([9]), clean.decode([9]))


def test_a_session_emptied_begins_anew(model):
    ids = random_ids(1, 12)
    session = fed_session(model, random_ids(1, 9, seed=1))
    session.truncate(0)
    assert session.lengths == [0]
    close(session.prefill(ids, mode="bounded"), Session(model).prefill(ids, mode="bounded"))


# ---- forks and growth ----


def test_neither_session_of_a_fork_sees_the_other(model):
    """One reads on, the other takes back and reads something else; both equal sessions of their own."""
    ids, other = random_ids(1, 14), random_ids(1, 14, seed=1)
    original = fed_session(model, ids[:, :9])
    twin = original.fork()
    twin.truncate(6)
    twin.extend(other[:, :5])
    original.extend(ids[:, 9:])
    twin.decode(other[:, 5])
    assert original.fingerprint() == fed_session(model, ids).fingerprint()
    assert twin.fingerprint() == fed_session(model, torch.cat([ids[:, :6], other[:, :6]], 1)).fingerprint()
    assert Session(model).fork().lengths == []
    # Its own counters, and the same rollback.
    assert fed_session(model, ids, rollback=3).fork().rollback == 3


def test_several_chunks_equal_one(monkeypatch):
    """Chunks of 2, 2, 4, 8 rows against one of 1,024, bit for bit in fp32; the past is never moved."""
    model, ids = scattered(SHORT, torch.float32), random_ids(2, 15)
    whole, split = Session(model), Session(model)
    expected = [whole.extend(ids[:, p : p + 1]) for p in range(15)]
    assert len(whole.cache.sources[2].kv.chunks) == 1
    monkeypatch.setattr(stores, "FIRST_CHUNK", 2)
    monkeypatch.setattr(stores, "SLACK", 1)
    seen: list[int] = []
    for p in range(15):
        assert torch.equal(split.extend(ids[:, p : p + 1]), expected[p])
        pointers = [chunk.data_ptr() for chunk in split.cache.sources[2].kv.chunks]
        assert pointers[: len(seen)] == seen
        seen = pointers
    assert [chunk.shape[1] for chunk in split.cache.sources[2].kv.chunks] == [2, 2, 4, 8]
    assert split.fingerprint() == whole.fingerprint()


def test_a_prompt_lies_in_one_chunk(model, monkeypatch):
    """Room is made before its first chunk is read."""
    monkeypatch.setattr(stores, "FIRST_CHUNK", 2)
    session = Session(model)
    session.prefill(random_ids(1, 13), chunk=4)
    session.extend(random_ids(1, 20))
    assert [chunk.shape[1] for chunk in session.cache.sources[2].kv.chunks] == [13 + stores.SLACK]


# ---- counters ----


class Seen(TorchDispatchMode):
    """Work seen where it is done: products over index channels, and rows of packed global KV that are gathered."""

    def __init__(self, config: Config):
        super().__init__()
        self.config, self.scores, self.gathered, self.kv_bytes = config, [], 0, GLOBAL.row_bytes(config.head_dim)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in ("mm", "bmm", "mv") and args[0].shape[-1] == self.config.index_head_dim:
            self.scores.append(out.numel() // self.config.index_n_heads)
        if name in ("embedding", "index", "index_select", "gather") and out.dtype == torch.uint8:
            self.gathered += out.shape[:-1].numel() if out.shape[-1] == self.kv_bytes else 0
        return out


@pytest.mark.parametrize("n_rows", [1, 2])
@pytest.mark.parametrize("length", [1, 2, 6, 31])
def test_counters_are_what_the_dispatcher_sees_in_one_decode_step(length, n_rows, monkeypatch):
    """Scores and decoded rows, from the shapes of products and gathers; J = 96 is no other width of the model.

    Watched, a step is computed in PyTorch; not watched, one row goes through NumPy: the counters are the same.
    """
    config = SHORT.replace(index_head_dim=96)
    model, decoded, decode = scattered(config), Counter(), Format.decode
    session, ids = fed_session(model, random_ids(n_rows, length)), torch.arange(9, 9 + n_rows)
    unwatched = session.fork()

    def counted(self, rows, *rest):
        decoded[self.name] += rows.shape[:-1].numel()
        return decode(self, rows, *rest)

    monkeypatch.setattr(Format, "decode", counted)
    logits = unwatched.decode(ids)
    decoded_unwatched = Counter(decoded)
    decoded.clear()
    with Seen(config) as seen:
        close(session.decode(ids), logits)
    counters, n = session.counters, length + 1
    pool = 2 * min(3, -(-n // 2))  # blocks of two: the newest may be half full
    expected = {1: n_rows * (n // 2), 2: n_rows * n, 4: n_rows * pool}
    assert counters.entries_scored == {layer: count for layer, count in expected.items() if count}
    assert [count for count in seen.scores if count] == list(counters.entries_scored.values())
    # Layer 3 finds what layer 2 has gathered. No more rows are gathered than chosen, none are decoded twice.
    chosen = {1: n_rows * min(3, n // 2), 2: n_rows * min(3, n), 4: n_rows * min(3, n)}
    assert counters.rows_decoded == {layer: count for layer, count in chosen.items() if count}
    assert seen.gathered == decoded[GLOBAL.name] == sum(chosen.values())
    assert decoded[INDEX.name] == sum(expected.values())
    assert counters.tokens_run == dict.fromkeys(range(5), n_rows)
    assert counters.boundary_projections == {2: n_rows}
    for name in COUNTS:
        assert getattr(unwatched.counters, name) == getattr(counters, name)
    assert decoded_unwatched == decoded


def test_a_later_index_layer_scores_its_pool_however_long_the_text(model):
    """What makes the curve flat: 6 entries from the sixth token on, while the source scores them all."""
    session = fed_session(model, random_ids(1, 1))
    for n in range(2, 30):
        session.decode([n + 4])
        scored = session.counters.entries_scored
        assert scored[2] == n
        assert scored[4] == min(n + n % 2, 6)


def test_counters_are_those_of_the_last_call(model):
    session = Session(model)
    session.prefill(random_ids(1, 12))
    assert session.counters.tokens_run[0] == 12
    session.decode([5])
    assert session.counters.tokens_run[0] == 1


# ---- inputs ----


def test_ids_come_as_tensors_lists_and_numbers(model):
    ids = random_ids(1, 9)
    session = Session(model)
    close(session.prefill(ids[0].tolist()), at_once(model, ids)[:, -1])
    step = session.fork().decode(7)
    assert step.shape == (1, 64)
    for same in (torch.tensor(7), torch.tensor([7]), [7], torch.tensor([[7]]), torch.tensor([7], dtype=torch.int32)):
        assert torch.equal(session.fork().decode(same), step)
    for same in ([7, 8], torch.tensor([7, 8]), torch.tensor([[7, 8]], dtype=torch.int32)):
        assert torch.equal(session.fork().extend(same)[:, 0], session.fork().extend([[7, 8]])[:, 0])
    long = random_ids(1, 290)[:, :200].int()
    assert torch.equal(Session(model).extend(long), Session(model).extend(long.long()))


REFUSED = {
    "longer than positions": (lambda s: s.prefill(random_ids(1, 248)), "9 tokens and 248 more exceed max_position"),
    "extended beyond positions": (lambda s: s.extend(random_ids(1, 248)), "9 tokens and 248 more exceed max_position"),
    "chunk of nothing": (lambda s: s.prefill([5], chunk=0), "chunk=0"),
    "unknown mode": (lambda s: s.prefill([5], mode="fast"), "mode='fast' is none of exact, bounded, full"),
    "too many rows": (lambda s: s.prefill(random_ids(2, 3)), "ids have 2 rows, the session has 1"),
    "too many rows to decode": (lambda s: s.decode([5, 6]), "ids have 2 rows, the session has 1"),
    "cut beyond the end": (lambda s: s.truncate(10), "truncate to 10 tokens: row 0 has 9"),
    "negative cut": (lambda s: s.truncate(-1), "truncate to -1 tokens: row 0 has 9"),
    "cut of another batch": (lambda s: s.truncate([4, 4]), "the session has 1 rows"),
    "rows that are not there": (lambda s: s.reorder([1]), r"there are rows 0\.\.0"),
    "no rows": (lambda s: s.reorder([]), r"there are rows 0\.\.0"),
    "half an id": (lambda s: s.prefill([5.5, 6]), "ids are torch.float32"),
    "no ids": (lambda s: s.extend(torch.empty(1, 0, dtype=torch.long)), "an empty prompt"),
    "boolean ids": (lambda s: s.decode(True), "ids are torch.bool"),
    "id out of range": (lambda s: s.extend([5, 64]), "id 64 is out of range"),
    "three axes": (lambda s: s.extend([[[5]]]), r"ids have shape \(1, 1, 1\)"),
    "mask of another shape": (lambda s: s.prefill([[5, 6]], mask=torch.ones(1, 3).bool()), r"mask is \(1, 3\)"),
    "mask of numbers": (lambda s: s.prefill([[5, 6]], mask=torch.ones(1, 2)), "of torch.float32, expected"),
    "mask in a list": (lambda s: s.prefill([[5, 6]], mask=[[True, True]]), "mask is list, expected"),
    "mask with a hole": (lambda s: s.prefill([[5, 6, 7]], mask=torch.tensor([[True, False, True]])),
                         "row 0 has padding between its tokens 0 and 2"),
    "mask without a token": (lambda s: s.prefill([[5, 6]], mask=torch.zeros(1, 2).bool()), "row 0 has no token"),
    "a traced query outside": (lambda s: s.extend([5], trace=Trace("logits", queries=[1])), "position 1"),
}  # fmt: skip


@pytest.fixture(scope="module")
def running(model) -> Session:
    return fed_session(model, random_ids(1, 9))


@pytest.mark.parametrize(("call", "message"), REFUSED.values(), ids=REFUSED)
def test_a_refused_call_changes_nothing(running, call, message):
    before = (running.fingerprint(), running.lengths, running.counters.tokens_run)
    with pytest.raises(ValueError, match=message):
        call(running)
    assert (running.fingerprint(), running.lengths, running.counters.tokens_run) == before


@pytest.mark.parametrize("n", [4.0, [4.0], None])
def test_a_cut_that_is_no_whole_number_is_refused(running, n):
    before = running.fingerprint()
    with pytest.raises(TypeError):
        running.truncate(n)
    assert running.fingerprint() == before
    assert all(isinstance(length, int) for length in running.lengths)


EMPTY = {
    "decode": lambda s: s.decode([5]), "truncate": lambda s: s.truncate(0), "reorder": lambda s: s.reorder([0]),
    "report": lambda s: s.report(), "fingerprint": lambda s: s.fingerprint(),
}  # fmt: skip


@pytest.mark.parametrize("call", EMPTY.values(), ids=EMPTY)
def test_without_a_text_there_is_nothing_to_do(model, call):
    with pytest.raises(ValueError, match="the session holds no text yet: prefill comes first"):
        call(Session(model))


def test_a_refused_first_call_leaves_the_session_empty(model):
    """Above all its number of rows: the next call may bring another."""
    for name in ("unknown mode", "id out of range", "mask with a hole", "a traced query outside", "chunk of nothing"):
        session = Session(model)
        with pytest.raises(ValueError):
            REFUSED[name][0](session)
        assert session.lengths == []
        session.prefill(random_ids(3, 4))
        assert session.lengths == [4, 4, 4]


def test_negative_rollback_is_refused(model):
    with pytest.raises(ValueError, match="rollback=-1"):
        Session(model, rollback=-1)


def test_the_last_position_may_be_filled(model):
    """256 tokens, not one more."""
    session = Session(model)
    session.prefill(random_ids(1, 255))
    session.decode([5])
    assert session.lengths == [256]
    with pytest.raises(ValueError, match="256 tokens and 1 more exceed max_position_embeddings=256"):
        session.decode([5])


def test_a_pattern_that_matches_nothing_is_told_when_the_tokens_are_read(model):
    """Names are known at the end of a run: the session goes on as if it had not been traced."""
    ids = random_ids(1, 9)
    session = fed_session(model, ids[:, :6])
    with pytest.raises(KeyError, match="no intermediate is called 'nothing'"):
        session.extend(ids[:, 6:8], trace=Trace("nothing"))
    close(session.decode(ids[:, 8]), at_once(model, ids)[:, 8])


def test_a_trace_stays_as_it_was_when_the_text_goes_on():
    """Plain rows lie in the cache's own buffers, which are written again after a cut."""
    model, ids = scattered(SHORT.replace(quantize_cache=False)), random_ids(1, 12)
    session, trace = fed_session(model, ids[:, :8]), Trace("*.window_kv", "*.keys", "*.global_kv")
    session.extend(ids[:, 8:], trace=trace)
    before = {name: value.clone() for name, value in trace.items()}
    session.truncate(6)
    session.extend(random_ids(1, 6, seed=1))
    assert all(torch.equal(trace[name], value) for name, value in before.items())
