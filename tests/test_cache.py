"""The packed cache without a model: any cutting stores the same bytes, and what is taken back leaves no trace."""

from __future__ import annotations

import itertools

import pytest
import torch
from models import NANO, PAD, random_ids, window_only
from sessions import SHORT, alone, fed, feed, ratio, without_decoder, without_engram

from tinyds41.config import Config
from tinyds41.formats import GLOBAL, INDEX
from tinyds41.infer import stores
from tinyds41.infer.cache import Cache
from tinyds41.model.rope import Rope

CONFIGS = {
    "short": SHORT, "nano": NANO, "ratio 3": ratio(3), "W=1": SHORT.replace(sliding_window=1),
    "W=5, ratio 1": ratio(1, sliding_window=5), "no Engram": without_engram(),
    "plain rows": ratio(3, quantize_cache=False), "no decoder": without_decoder(),
}  # fmt: skip
each_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
CASES = [*((config, torch.float32) for config in CONFIGS.values()), (SHORT, torch.bfloat16), (SHORT, torch.float64)]
each_case = pytest.mark.parametrize(("config", "dtype"), CASES, ids=[*CONFIGS, "bfloat16", "float64"])


@pytest.fixture
def short_buffers(monkeypatch):
    """As in test_stores.py: a few tokens cross every border."""
    monkeypatch.setattr(stores, "FIRST_CHUNK", 4)
    monkeypatch.setattr(stores, "SLACK", 8)


# ---- chunks ----


@pytest.mark.parametrize("m", [2, 3])
def test_every_partition_of_a_prompt_stores_the_same(m):
    """C2, W1: all 1,023 ways to cut 1 to 10 tokens, that is 2m+1, 3m+1, W, 2W and 2W+1 among them.

    Plain rows, which are packed one by one, in three layers: only where they lie depends on the cutting.
    """
    config, ids = ratio(m, quantize_cache=False, num_hidden_layers=3, index_source_layer_ids=[1, 2]), random_ids(1, 10)
    expected = [fed(config, ids[:, :n]).fingerprint() for n in range(11)]

    def go_on(cache: Cache, start: int) -> int:
        seen = 0
        for stop in range(start + 1, 11):
            longer = cache.fork()
            feed(longer, ids[:, start:stop])
            assert longer.fingerprint() == expected[stop], (start, stop)
            seen += 1 + go_on(longer, stop)
        return seen

    assert go_on(Cache(config), 0) == 2**10 - 1


@each_case
def test_a_long_text_in_pieces_stores_the_same(config, dtype, short_buffers):
    """Past the slack of the buffers: their rows move to the front, or are replaced at once; stores grow by chunks."""
    ids, pieces = random_ids(2, 64), [1] * 20 + [3, 25, 1, 9, 6]
    chopped = fed(config, ids, pieces, dtype=dtype, rollback=2)
    assert chopped.windows[0].buffer.shape[1] < 20
    assert chopped.fingerprint() == fed(config, ids, dtype=dtype).fingerprint()


def test_the_fingerprint_sees_every_token_that_is_still_read():
    """Another token anywhere: its entry stays for ever. Without global entries only what windows hold counts."""
    ids = random_ids(1, 12)
    for config, reach in ((SHORT, 12), (window_only(), 3)):
        expected = fed(config, ids).fingerprint()
        for t in range(12):
            changed = ids.clone()
            changed[0, t] = (ids[0, t] + 7) % 60 + 4
            assert (fed(config, changed).fingerprint() != expected) == (t >= 12 - reach)


def test_the_fingerprint_sees_engrams_look_back_and_groups_that_wait():
    """Two ids that store the same rows: only the ids behind them differ. And a token that no group has yet."""
    ids = random_ids(1, 9)
    one, other = (fed(SHORT, ids) for _ in range(2))
    other.history.buffer[0, other.history.end - 1] += 1
    assert one.fingerprint() != other.fingerprint()
    for number in range(2):
        other = fed(SHORT, ids)
        pending = other.sources[1].pending[number]
        pending.buffer[0, pending.end - 1] += 1
        assert one.fingerprint() != other.fingerprint()


# ---- what the new tokens see ----


@pytest.mark.parametrize("window", [1, 2, 4, 5])
def test_a_window_holds_the_last_w_rows_of_the_text(window):
    """W1: in pieces around W; each query sees itself and up to W-1 rows before, never the start of another text."""
    config, ids = SHORT.replace(sliding_window=window, quantize_cache=False), random_ids(1, 26)
    whole = fed(config, ids)  # every row is held: 26 tokens are fewer than the rollback
    rows = whole.windows[0].latest(0, 26).clone()
    cache, position = Cache(config), 0
    for n in (window - 1, 1, window, window + 1, 2, 1, 1):
        if n == 0:
            continue
        _, windows = feed(cache, ids[:, position : position + n])
        shown = windows[0].rows.all()[0]
        for query in range(n):
            own = shown.shape[0] - n + query
            first = max(0, int(windows[0].first[0, query]))
            expected = rows[max(0, position - window + 1) : position + 1]
            assert torch.equal(shown[first : own + 1], expected)
            position += 1


@pytest.mark.parametrize("m", [1, 2, 3])
def test_groups_come_when_their_last_token_does(m):
    """C1, C4, C5: entry j has position j*m, and the first to see it is the token at (j+1)m - 1."""
    config, ids = ratio(m), random_ids(1, 11)
    for sizes in ([11], [1] * 11, [m] * (11 // m) + [11 % m] * (11 % m > 0), [2, 5, 4]):
        cache, position = Cache(config), 0
        for part in ids.split(sizes, 1):
            ctx = cache.tokens(part.shape[1])
            c, _, first = ctx.groups(1, torch.zeros(1, part.shape[1], 32), torch.zeros(1, part.shape[1], 32))
            stop = position + part.shape[1]
            entries = range(position // m, stop // m)
            assert first[0].tolist() == [j * m for j in entries] and c.shape[1] == len(entries)
            ctx.add_entries(1, c[:, :, 0], c[:, :, 0])
            assert ctx.entries(1).last[0].tolist() == [(p + 1) // m for p in range(position, stop)]
            assert not ctx.entries(1).first.any()
            cache.advance(part)
            position = stop


def test_engram_looks_back_across_pieces():
    """E3: nothing before the first token; a dead token is an id like any other here."""
    ids = random_ids(2, 12)
    ids[0, 4] = PAD
    expected = torch.full((2, 12, 4), -1)
    for p, back in itertools.product(range(12), range(4)):
        if back <= p:
            expected[:, p, back] = ids[:, p - back]
    for sizes in ([12], [1] * 12, [2, 1, 5, 4], [3, 9]):
        cache, found = Cache(SHORT, batch=2), []
        for part in ids.split(sizes, 1):
            found.append(cache.tokens(part.shape[1]).look_back(part, 4))
            cache.advance(part)
        assert torch.equal(torch.cat(found, 1), expected)


@pytest.mark.parametrize("position", [0, 127, 65_535, 65_536, 1_048_574])
def test_positions_stay_absolute_and_turn_each_kind_of_layer_by_its_own_table(position):
    """R1: windows-only layers and compressed ones, for texts that are equally long and for those that are not."""
    flash = Config.preset("flash")
    for lengths in ([position, position], [position, 7]):
        cache = Cache(flash.replace(num_hidden_layers=3, kv_source_layer_ids=[2], index_source_layer_ids=[2],
                                    candidate_source_layer_id=None, engram_layer_ids=[], engram_num_embeddings=[],
                                    num_nextn_predict_layers=0, dspark_target_layer_ids=[]), batch=2)  # fmt: skip
        cache.lengths = list(lengths)
        ctx = cache.tokens(2)
        assert ctx.positions.tolist() == [[n, n + 1] for n in lengths]
        for compressed in (False, True):
            rope = Rope(flash, compressed=compressed)
            expected = torch.cat([rope.rotation(torch.tensor([[n, n + 1]]), torch.float64) for n in lengths])
            assert torch.equal(ctx.rotation(rope, torch.float64), expected)


# ---- taking back ----


@each_case
def test_what_is_taken_back_leaves_no_trace(config, dtype):
    """S1: 0 to 5 tokens at every phase of a group and around W, 2W; then the text goes on the same."""
    ids, other = random_ids(1, 16), random_ids(1, 5, seed=1)
    for length in range(1, 11):
        clean = fed(config, ids[:, :length], dtype=dtype)
        expected = clean.fingerprint()
        feed(clean, ids[:, length : length + 3])
        for rejected in range(1, 6):
            rolled = fed(config, ids[:, :length], dtype=dtype)
            feed(rolled, other[:, :rejected])
            assert rolled.fingerprint() != expected
            rolled.truncate([length])
            assert rolled.fingerprint() == expected
            feed(rolled, ids[:, length : length + 3])
            assert rolled.fingerprint() == clean.fingerprint()


@pytest.mark.parametrize("config", [SHORT, ratio(3), without_engram(SHORT.replace(sliding_window=1))],
                         ids=["short", "ratio 3", "W=1"])  # fmt: skip
@pytest.mark.parametrize("rollback", [0, 1, 3, 64])
def test_every_cut_equals_cold_or_is_refused(config, rollback, short_buffers):
    """S2, S3: any cut, odd ones too; the last `rollback` tokens are always taken back, and everything is."""
    ids = random_ids(1, 40)
    cold = [fed(config, ids[:, :n], rollback=rollback).fingerprint() for n in range(41)]
    for length in (1, 5, 8, 13, 40):
        full = fed(config, ids[:, :length], rollback=rollback)
        for n in range(length + 1):
            cut = full.fork()
            try:
                cut.truncate([n])
            except ValueError as error:
                assert 0 < n < length - rollback
                assert f"truncate to {n} tokens: row 0 has {length}" in str(error)
                assert f"rollback={rollback} tokens" in str(error)
                assert cut.fingerprint() == cold[length] and cut.lengths == [length]
            else:
                assert cut.fingerprint() == cold[n] and cut.lengths == [n]


def test_a_cut_that_the_window_does_not_reach_is_refused():
    """Without it the loop above could pass with nothing refused. 300 tokens at once leave 6 for Engram's look-back."""
    cache = fed(SHORT, random_ids(1, 300), rollback=3)
    with pytest.raises(ValueError, match="truncate to 296 tokens: row 0 has 300, and the windows before that"):
        cache.truncate([296])
    cache.truncate([297])


@pytest.mark.parametrize("n", [-1, 9])
def test_a_cut_outside_the_text_is_refused(n):
    cache = fed(SHORT, random_ids(2, 8))
    before = cache.fingerprint()
    with pytest.raises(ValueError, match=f"truncate to {n} tokens: row 1 has 8"):
        cache.truncate([5, n])  # the first row would do: it is left alone too
    assert cache.fingerprint() == before and cache.lengths == [8, 8]


@pytest.mark.parametrize("config", [SHORT, ratio(3), without_engram()], ids=["ratio 2", "ratio 3", "no Engram"])
def test_each_row_is_taken_back_by_itself(config):
    """Among them a row emptied, and one left as it is; all go on from where they are."""
    ids, more = random_ids(4, 12), random_ids(4, 40, seed=1)
    for lengths in itertools.product([0, 7], [12, 11], [12, 6], [8]):
        cache = fed(config, ids)
        cache.truncate(list(lengths))
        feed(cache, more[:, :3])
        feed(cache, more[:, 3:])
        for b, n in enumerate(lengths):
            expected = fed(config, torch.cat([ids[b : b + 1, :n], more[b : b + 1]], 1))
            assert cache.lengths[b] == expected.lengths[0]
            assert alone(cache, b) == expected.fingerprint()


# ---- rows of different length ----


def ragged(texts: list[torch.Tensor]) -> tuple[torch.Tensor, list[int]]:
    longest = max(len(text) for text in texts)
    pads = [longest - len(text) for text in texts]
    return torch.stack([torch.cat([text.new_full((n,), PAD), text]) for n, text in zip(pads, texts, strict=True)]), pads


@pytest.mark.parametrize("config", [SHORT, NANO, ratio(3), SHORT.replace(sliding_window=1)],
                         ids=["short", "nano", "ratio 3", "W=1"])  # fmt: skip
@pytest.mark.parametrize("seed", range(4))
def test_rows_that_grow_cut_and_trade_places_equal_each_alone(config, seed):
    """C6, C7, C8: random pieces with padding, per-row cuts, evictions and repetitions, readmissions of empty rows."""
    draw = torch.Generator().manual_seed(seed)

    def below(n: int) -> int:
        return int(torch.randint(n, (), generator=draw))

    cache, texts = Cache(config, batch=3), [torch.empty(0, dtype=torch.long)] * 3
    for step in range(40):
        action = below(6) if step else 0
        if action < 3:
            new = [random_ids(1, 1 + below(7), seed=100 * step + b)[0] for b in range(len(texts))]
            if action == 0:  # in some rows nothing at all
                new = [text[: below(len(text) + 1)] if b else text for b, text in enumerate(new)]
            elif action == 2:  # one token each
                new = [text[:1] for text in new]
            feed(cache, *ragged(new))
            texts = [torch.cat(both) for both in zip(texts, new, strict=True)]
        elif action == 3:
            lengths = [below(3) and max(0, len(text) - below(8)) for text in texts]
            cache.truncate(lengths)
            texts = [text[:n] for text, n in zip(texts, lengths, strict=True)]
        elif action == 4:
            order = [below(len(texts)) for _ in range(1 + below(4))]
            cache.reorder(order)
            texts = [texts[b] for b in order]
        else:
            cache = cache.fork()
        assert cache.lengths == [len(text) for text in texts]
    for b, text in enumerate(texts):
        assert alone(cache, b) == (fed(config, text[None]) if len(text) else Cache(config)).fingerprint()


@pytest.mark.parametrize("rows", [[], [3], [0, -1]])
def test_rows_that_are_not_there_cannot_be_chosen(rows):
    with pytest.raises(ValueError, match=r"there are rows 0\.\.2"):
        Cache(SHORT, batch=3).reorder(rows)


# ---- forks ----


@each_config
def test_neither_cache_of_a_fork_sees_the_other(config):
    """Also where one takes tokens back first and then writes over them."""
    ids = random_ids(2, 30)
    for length, cut in ((7, 7), (8, 5), (9, 4)):
        original = fed(config, ids[:, :length])
        twin, before = original.fork(), original.fingerprint()
        twin.truncate([cut, cut])
        feed(twin, ids[:, 15:21])
        assert original.fingerprint() == before and original.lengths == [length] * 2
        theirs = twin.fingerprint()
        feed(original, ids[:, 22:26])
        original.truncate([length, cut])
        feed(original, ids[:, 26:])
        assert twin.fingerprint() == theirs
        assert theirs == fed(config, torch.cat([ids[:, :cut], ids[:, 15:21]], 1)).fingerprint()


# ---- bytes ----


def test_flash_keeps_890_bytes_per_token_and_its_windows():
    """The project's aim in bytes, counted from buffers that hold 100,000 tokens; no weights."""
    cache = Cache(Config.preset("flash"))
    cache.fill(100_000, seed=0)
    report = cache.report()
    assert report.tokens == 100_000
    assert report.bytes_per_token == 890
    assert report.growing_bytes == 89_000_000
    assert report.window_bytes == 2_703_360
    assert report.bytes("group") == 0  # 100,000 is even: no group waits
    # The same from the tensors: 4 sources, ratios 2, 2, 2 and 1.
    stored = [cache.sources[layer].kv.stored(0).numel() for layer in (2, 8, 14, 20)]
    keys = [cache.sources[layer].keys.stored(0).numel() for layer in (2, 8, 14, 20)]
    assert stored == [50_000 * 288] * 3 + [100_000 * 288]
    assert keys == [50_000 * 68] * 3 + [100_000 * 68]
    assert [window.latest(0, 128).numel() for window in cache.windows] == [128 * 528] * 40
    assert report.allocated_bytes >= report.growing_bytes + report.window_bytes
    assert "890.00 bytes per token of 100,000" in str(report)


def test_the_report_counts_what_is_stored_in_every_form():
    """SHORT: one source of m = 2, one of m = 1; plain rows in bf16, two texts of 5 and 2 tokens."""
    for config, kv, key, window, dtype in (
        (SHORT, 18, 17, 33, torch.float64), (SHORT.replace(quantize_cache=False), 64, 64, 64, torch.bfloat16),
    ):  # fmt: skip
        cache = fed(config, random_ids(2, 5), dtype=dtype)
        cache.truncate([5, 2])
        report = cache.report()
        assert report.bytes("global_kv") == (2 + 5 + 1 + 2) * kv
        assert report.bytes("index_keys") == (2 + 5 + 1 + 2) * key
        assert report.window_bytes == 5 * (4 + 2) * window
        assert report.bytes("group") == 2 * 32 * dtype.itemsize  # c and z of the one token that waits
        assert report.tokens == 7
        assert report.bytes_per_token == pytest.approx(10 * (kv + key) / 7)
    assert Cache(SHORT).report().bytes_per_token == 0


def test_a_filled_cache_is_random_finite_and_repeatable():
    filled = []
    for seed in (0, 0, 1):
        cache = Cache(SHORT, batch=2)
        cache.fill(201, seed=seed)
        filled.append(cache)
    assert filled[0].fingerprint() == filled[1].fingerprint() != filled[2].fingerprint()
    source = filled[0].sources[1]
    assert source.kv.lengths == [100, 100] and filled[0].lengths == [201, 201]
    for store, form in ((source.kv, GLOBAL), (source.keys, INDEX)):
        rows = form.decode(store.stored(1), 32)
        assert rows.isfinite().all() and rows.std() > 0.1
        assert len(store.stored(1).unique(dim=0)) > 90
    assert alone(filled[0], 0) != alone(filled[0], 1)
    feed(filled[0], random_ids(2, 1))  # token 201 closes the group of token 200
    assert filled[0].sources[1].kv.lengths == [101, 101]


def test_only_an_empty_cache_is_filled():
    cache = fed(SHORT, random_ids(1, 3))
    before = cache.fingerprint()
    with pytest.raises(ValueError, match=r"fill with 5 tokens a cache that holds \[3\]"):
        cache.fill(5)
    assert cache.fingerprint() == before
    with pytest.raises(ValueError, match="fill with 0 tokens"):
        Cache(SHORT).fill(0)


@pytest.mark.parametrize(("options", "message"), [
    ({"batch": 0}, "batch=0"), ({"rollback": -1}, "rollback=-1"), ({"device": "nowhere"}, "device 'nowhere'"),
])  # fmt: skip
def test_impossible_caches_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Cache(SHORT, **options)
