"""Prompts that begin with a stored prefix, against the definition with cut windows and against reading anew."""

from __future__ import annotations

import pytest
import torch
from models import random_ids, scattered
from sessions import SHORT, assert_close, ratio, without_decoder, without_engram
from torch import Tensor

from tinyds41 import reference
from tinyds41.checkpoint.names import to_released
from tinyds41.config import Config
from tinyds41.infer.engram_host import engram_to_host
from tinyds41.infer.replay import Replay, first_replayed
from tinyds41.infer.session import Session
from tinyds41.infer.tiered_store import TieredStore, model_key
from tinyds41.model.transformer import Model

W = SHORT.sliding_window
IDS = random_ids(1, 64, SHORT)
MORE = 5  # tokens decoded behind a prompt: what it left behind is read again


@pytest.fixture(scope="module")
def model() -> Model:
    return scattered(SHORT)


@pytest.fixture
def store(tmp_path, model):
    with TieredStore(tmp_path / "store.sqlite", model, block_tokens=1) as store:
        yield store


def stored(model: Model, store: TieredStore, ids: Tensor, *, windows: bool = False) -> None:
    """The store knows these ids; their windows are in the pool or have been forgotten."""
    session = Session(model)
    session.resume(ids, store)
    session.save(store)
    if not windows:
        store.windows.clear()


def continued(session: Session, logits: Tensor, ids: Tensor) -> Tensor:
    """Logits [1,1+S,V] of the last prompt token and of the ids behind it."""
    return torch.cat([logits.unsqueeze(1), *(session.decode(i).unsqueeze(1) for i in ids[0].tolist())], 1)


def definition(model: Model, ids: Tensor, found: int, n_prompt: int, start: int, n_last: int) -> Tensor:
    """`reference` with windows cut where the segments of bounded replay begin, and global rows of a cold run."""
    config, cold = model.config, {}
    weights = to_released(model.state_dict())
    reference.forward(config, weights, ids[:, :found], record=cold)
    record = {}
    for layer in config.plan():
        record[f"layers.{layer.layer}.window_start"] = start if layer.half == "encoder" else n_prompt - n_last
        if layer.writes_globals:
            for kind in ("entries", "keys"):
                record[f"layers.{layer.layer}.stored_{kind}"] = cold[f"layers.{layer.layer}.{kind}"]
    return reference.forward(config, weights, ids, record=record)[:, n_prompt - 1 :]


# Hits around W, odd ones that cut a group, and prompts that end before, at and behind W tokens after the hit.
HITS = [(1, 0), (1, W), (W - 1, 1), (W - 1, W + 3), (W, 0), (W, W - 1), (W + 1, 0), (W + 1, 1), (W + 1, W),
        (2 * W + 1, W - 1), (20, 0), (20, 1), (20, W + 3), (31, 0), (31, W - 1), (31, W), (45, 11)]  # fmt: skip


@pytest.mark.parametrize(("found", "new"), HITS)
def test_bounded_replay_is_the_definition_with_windows_cut_at_the_segments_start(model, store, found, new):
    stored(model, store, IDS[:, :found])
    session, n_prompt = Session(model), found + new
    logits = continued(session, session.resume(IDS[:, :n_prompt], store), IDS[:, n_prompt : n_prompt + MORE])
    assert session.resumed is not None and session.resumed.found == found
    start = max(0, found - W)
    assert_close(logits, definition(model, IDS[:, : n_prompt + MORE], found, n_prompt, start, min(W, n_prompt)))


@pytest.mark.parametrize("config", [without_engram(), ratio(3), without_decoder(), SHORT.replace(quantize_cache=False)])
def test_bounded_replay_is_the_definition_for_other_layer_plans(tmp_path, config: Config):
    model, found, n_prompt = scattered(config), 19, 21
    with TieredStore(tmp_path / "store.sqlite", model, block_tokens=1) as store:
        stored(model, store, IDS[:, :found])
        session = Session(model)
        logits = continued(session, session.resume(IDS[:, :n_prompt], store), IDS[:, n_prompt : n_prompt + MORE])
        assert session.resumed is not None and session.resumed.replayed == W
    assert_close(logits, definition(model, IDS[:, : n_prompt + MORE], found, n_prompt, found - W, W))


@pytest.mark.parametrize(("found", "new"), HITS)
def test_exact_replay_leaves_the_session_that_reading_anew_leaves(model, store, found, new):
    stored(model, store, IDS[:, :found])
    session, cold = Session(model), Session(model)
    logits = session.resume(IDS[:, : found + new], store, replay="exact")
    assert session.resumed is not None and session.resumed.found == found
    assert_close(logits, cold.prefill(IDS[:, : found + new]))
    assert session.fingerprint() == cold.fingerprint()


def test_exact_replay_goes_back_no_further_than_windows_reach(model, store):
    stored(model, store, IDS[:, :50])
    session = Session(model)
    session.resume(IDS[:, :52], store, replay="exact")
    # 10 tokens for the decoder, 2 of them new; two encoder layers of W - 1 tokens
    assert session.resumed is not None and session.resumed.replayed == 8 + 2 * (W - 1)
    # One token less, and it is no longer what reading anew leaves.
    assert first_replayed(SHORT, 50, 8, "exact") == 50 - 14


@pytest.mark.parametrize("tokens", [0, 1, W, 15])
def test_a_number_of_replayed_tokens_cuts_windows_there(model, store, tokens):
    found, n_prompt = 31, 38  # the decoder wants nothing of the found ones
    stored(model, store, IDS[:, :found])
    session = Session(model)
    first = session.resume(IDS[:, :n_prompt], store, replay=tokens)
    logits = continued(session, first, IDS[:, n_prompt : n_prompt + MORE])
    replayed = max(tokens, found % 2)  # the token that waits for its group runs again in any case
    assert session.resumed is not None and session.resumed.replayed == replayed
    assert_close(logits, definition(model, IDS[:, : n_prompt + MORE], found, n_prompt, found - replayed, W))


@pytest.mark.parametrize("chunk", [1, 3, W, 100])
@pytest.mark.parametrize("replay", ["bounded", "exact"])
def test_chunks_do_not_change_what_a_replay_leaves(model, store, chunk, replay):
    stored(model, store, IDS[:, :31])
    one, several = Session(model), Session(model)
    expected = one.resume(IDS[:, :38], store, replay=replay)
    store.windows.clear()
    assert_close(several.resume(IDS[:, :38], store, replay=replay, chunk=chunk), expected)
    assert several.fingerprint() == one.fingerprint()


@pytest.mark.parametrize("new", [0, 1, W, 11])
def test_windows_from_the_pool_are_those_of_the_text_itself(model, store, new):
    stored(model, store, IDS[:, :31], windows=True)
    session, cold = Session(model), Session(model)
    logits = session.resume(IDS[:, : 31 + new], store)
    assert session.resumed is not None and session.resumed.windows == "pool"
    assert session.resumed.replayed == max(0, W - new)  # for the decoder alone
    assert_close(logits, cold.prefill(IDS[:, : 31 + new], mode="bounded"))
    assert session.fingerprint() == cold.fingerprint()


def test_windows_that_do_not_reach_far_enough_are_made_anew(model, store):
    first = Session(model, rollback=0)  # keeps W rows
    first.resume(IDS[:, :31], store)
    first.save(store)
    for n_prompt, windows in ((31 + W, "pool"), (31, "replay")):  # the decoder wants no output, or W of them
        session, cold = Session(model), Session(model)
        logits = session.resume(IDS[:, :n_prompt], store)
        assert session.resumed is not None and session.resumed.windows == windows
        if windows == "pool":
            assert_close(logits, cold.prefill(IDS[:, :n_prompt], mode="bounded"))
            assert session.fingerprint() == cold.fingerprint()


def test_a_hit_leaves_stored_blocks_as_they_are(model, store):
    stored(model, store, IDS[:, :31])
    before = store.blocks.read(IDS[0, :31].tolist())
    session = Session(model)
    session.resume(IDS[:, :40], store)
    session.save(store)
    assert store.blocks.read(IDS[0, :31].tolist()) == before
    # and the rows a session holds are the stored ones
    cold = Session(model)
    cold.prefill(IDS[:, :31])
    for layer, source in cold.cache.sources.items():
        mine = session.cache.sources[layer]
        n_rows = source.kv.lengths[0]
        assert torch.equal(source.kv.stored(0), mine.kv.stored(0)[:n_rows])
        assert torch.equal(source.keys.stored(0), mine.keys.stored(0)[:n_rows])


def test_a_replay_refuses_to_add_entries(model):
    session = Session(model)
    session.prefill(IDS[:, :9])
    ctx = Replay(session.cache, [5], 4, None, session.counters, None)
    rows = torch.zeros(1, 1, SHORT.head_dim, dtype=torch.float64)
    with pytest.raises(ValueError, match="adds 1 entries to layer 1"):
        ctx.add_entries(1, rows, rows)


def test_the_same_prompt_again_and_then_another_suffix(model, store):
    """Windows of one request never show in another (trap W2)."""
    for n_prompt in (20, 20, 25):
        session, cold = Session(model), Session(model)
        logits = session.resume(IDS[:, :n_prompt], store, replay="exact")
        assert_close(logits, cold.prefill(IDS[:, :n_prompt]))
        session.save(store)
    other = torch.cat([IDS[:, :18], IDS[:, 40:47]], 1)
    session, cold = Session(model), Session(model)
    logits = session.resume(other, store, replay="exact")
    assert session.resumed is not None and session.resumed.found == 18
    assert_close(logits, cold.prefill(other))
    assert session.fingerprint() == cold.fingerprint()


def test_without_a_hit_a_prompt_is_read_exactly(model, store):
    session, cold = Session(model), Session(model)
    logits = session.resume(IDS[:, :30], store)
    assert session.resumed is not None and (session.resumed.found, session.resumed.windows) == (0, "none")
    assert_close(logits, cold.prefill(IDS[:, :30]))
    assert session.fingerprint() == cold.fingerprint()


@pytest.mark.parametrize("found", [1, 3, 12, 30])
def test_a_found_prompt_runs_a_token_at_least(model, store, found):
    stored(model, store, IDS[:, :found])
    session = Session(model)
    session.resume(IDS[:, :found], store)
    assert session.resumed is not None and session.resumed.new == 0 and session.resumed.replayed >= 1
    assert all(count >= 1 for count in session.counters.tokens_run.values())


def test_the_encoder_runs_on_replayed_and_new_tokens_only(model, store):
    stored(model, store, IDS[:, :50])
    session = Session(model)
    session.resume(IDS[:, :57], store)
    assert session.counters.tokens_run == {0: W + 7, 1: W + 7, 2: W, 3: W, 4: W}


def test_what_was_decoded_is_saved_with_the_prompt(model, store):
    session = Session(model)
    session.prefill(IDS[:, :20])
    for token in IDS[0, 20:30].tolist():
        session.decode(token)
    session.save(store)
    assert store.blocks.find(IDS[0].tolist()) == 30


def test_a_taken_back_token_is_not_saved(model, store):
    session = Session(model)
    session.prefill(IDS[:, :30], mode="full")
    session.truncate(27)
    session.save(store)
    assert store.blocks.find(IDS[0].tolist()) == 27


def test_a_block_that_cuts_a_group_gives_the_rows_of_whole_groups(tmp_path, model):
    with TieredStore(tmp_path / "store.sqlite", model, block_tokens=5) as store:
        stored(model, store, IDS[:, :33])
        session, cold = Session(model), Session(model)
        logits = session.resume(IDS[:, :33], store, replay="exact")
        assert session.resumed is not None and session.resumed.found == 30
        assert_close(logits, cold.prefill(IDS[:, :33]))
        assert session.fingerprint() == cold.fingerprint()


def test_two_rows_are_saved_apart(model, store):
    session = Session(model)
    both = torch.cat([IDS[:, :12], IDS[:, 20:32]])
    session.prefill(both)
    session.save(store)
    assert [store.blocks.find(row.tolist()) for row in both] == [12, 12]
    alone = Session(model)
    alone.resume(both[1:], store, replay="exact")
    cold = Session(model)
    cold.prefill(both[1:])
    assert alone.fingerprint() == cold.fingerprint()


def test_a_missing_block_shortens_the_hit(tmp_path, model):
    """Whatever store loses rows, a prefix of the prefix remains (trap W7)."""
    with TieredStore(tmp_path / "store.sqlite", model, block_tokens=4) as store:
        stored(model, store, IDS[:, :32])
        n_bytes = store.blocks.bytes_stored()
    with TieredStore(tmp_path / "store.sqlite", model, block_tokens=4, budget_bytes=n_bytes * 5 // 8) as store:
        stored(model, store, IDS[:, 40:44])
        session, cold = Session(model), Session(model)
        logits = session.resume(IDS[:, :32], store, replay="exact")
        assert session.resumed is not None and 0 < session.resumed.found < 32
        assert_close(logits, cold.prefill(IDS[:, :32]))


def test_another_namespace_finds_nothing(model, store):
    session = Session(model)
    session.resume(IDS[:, :20], store, namespace="ada")
    session.save(store, namespace="ada")
    for namespace, found in (("ada", 20), ("bob", 0), ("", 0)):
        other = Session(model)
        other.resume(IDS[:, :20], store, namespace=namespace)
        assert other.resumed is not None and other.resumed.found == found, namespace


def test_a_store_refuses_another_model_and_weights_changed_since(tmp_path):
    model = scattered(SHORT)
    with TieredStore(tmp_path / "store.sqlite", model) as store:
        with pytest.raises(ValueError, match="the store belongs to the model"):
            Session(Model(SHORT, dtype=torch.float64)).resume(IDS[:, :5], store)
        session = Session(model)
        session.resume(IDS[:, :5], store)
        with torch.no_grad():
            model.norm.weight[0] += 1
        with pytest.raises(ValueError, match="the store belongs to the model"):
            session.save(store)
    with pytest.raises(ValueError, match="model"):
        TieredStore(tmp_path / "store.sqlite", model)


def test_bad_calls_are_refused(model, store):
    session = Session(model)
    for replay in ("bound", -1, 1.5, True, None):
        with pytest.raises(ValueError, match=f"replay={replay!r} is none of bounded, exact, and no number of tokens"):
            session.resume(IDS[:, :5], store, replay=replay)
    with pytest.raises(ValueError, match="one row, ids have 2"):
        session.resume(random_ids(2, 5), store)
    with pytest.raises(ValueError, match="chunk=0"):
        session.resume(IDS[:, :5], store, chunk=0)
    session.resume(IDS[:, :5], store)
    with pytest.raises(ValueError, match="holds texts"):
        session.resume(IDS[:, :5], store)


def test_a_table_in_a_file_is_part_of_the_models_key(tmp_path):
    """Equal in all but the rows of Engram, which are no parameters there."""
    keys, rows = [], []
    for number in range(2):
        model = scattered(SHORT)
        with torch.no_grad():
            model.engrams[1].embed.weight += number
        rows.append(engram_to_host(model, tmp_path / str(number)))
        keys.append(model_key(model))
        assert model_key(model) == keys[number]
    assert keys[0] != keys[1]
    for tables in rows:
        for table in tables.values():
            table.close()
