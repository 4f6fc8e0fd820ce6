"""Three prefills: exact equals full, bounded begins its windows with the segment; the decoder runs once per prompt."""

from __future__ import annotations

import pytest
import torch
from models import NANO, random_ids, scattered
from sessions import BOUNDED, EXACT, SHORT, assert_close, fed_session, without_decoder
from torch import Tensor

from tinyds41.config import Config
from tinyds41.infer.prefill_modes import MODES, decoder_tokens
from tinyds41.infer.session import Session
from tinyds41.infer.tokens import Tokens
from tinyds41.model.block import Carry
from tinyds41.model.context import Sequence
from tinyds41.model.transformer import Model, check_ids


@pytest.fixture(scope="module")
def model() -> Model:
    return scattered(SHORT)


@torch.no_grad()
def bounded_oracle(model: Model, ids: Tensor, n_last: int = BOUNDED) -> Tensor:
    """W4: the logits of the last token when no decoder window reaches behind the last n_last tokens.

    One run over the whole text without any cache. Tokens before the segment see nothing in the decoder; nobody in
    the segment sees them.
    """
    ctx = Sequence(model.config, ids)
    encoded = model.encode(ids, ctx)
    ctx.start = torch.full_like(ctx.start, ids.shape[1] - n_last)
    return model.logits(model.decode(encoded, ctx))[:, -1]


# ---- how many tokens ----


def test_the_decoders_share_of_a_prompt():
    """exact: W + (n_dec - 1)(W - 1); flash has 20 decoder layers and W = 128."""
    flash = Config.preset("flash")
    assert [decoder_tokens(flash, mode) for mode in ("exact", "bounded", "full")] == [128 + 19 * 127, 128, None]
    assert [decoder_tokens(NANO, mode) for mode in ("exact", "bounded", "full")] == [13, 4, None]
    assert [decoder_tokens(SHORT, mode) for mode in ("exact", "bounded", "full")] == [EXACT, BOUNDED, None]
    assert [decoder_tokens(SHORT.replace(sliding_window=1), mode) for mode in ("exact", "bounded")] == [1, 1]
    assert [decoder_tokens(without_decoder(), mode) for mode in MODES] == [None] * 3
    with pytest.raises(ValueError, match="mode='lazy' is none of exact, bounded, full"):
        decoder_tokens(SHORT, "lazy")


class Footsteps(Model):
    """Without weights: it only notes which tokens pass; their ids are their positions, and its logits their ids."""

    dtype, device = torch.float32, torch.device("cpu")

    def __init__(self, config: Config):
        torch.nn.Module.__init__(self)
        self.config, self.decodes, self.mtp = config, 0, None

    def check(self, ids: Tensor) -> None:
        check_ids(ids, self.config)

    def encode(self, ids: Tensor, ctx: Tokens) -> Carry:
        for layer in range(self.config.plan().n_encoder):
            ctx.counters.add("tokens_run", layer, ids.numel())
        ctx.counters.add("boundary_projections", self.config.plan().boundary, ids.numel())
        return Carry.start(ids.double().unsqueeze(-1), 1)

    def decode(self, carry: Carry, ctx: Tokens) -> Carry:
        self.decodes += 1
        assert torch.equal(carry.collapsed[..., 0][ctx.alive].long(), ctx.positions[ctx.alive])
        for layer in self.config.plan()[self.config.plan().n_encoder :]:
            ctx.counters.add("tokens_run", layer.layer, carry.collapsed.shape[1])
        return carry

    def logits(self, carry: Carry) -> Tensor:
        return carry.collapsed


@pytest.mark.parametrize("mode", MODES)
def test_the_decoder_runs_once_per_prompt_and_the_boundary_projects_every_token(mode):
    """W6: nano, all lengths 1..n+W and chunks of 1..W+1 tokens; encoder S, decoder min(n, S), boundary S."""
    n = {"exact": 13, "bounded": 4, "full": 17}[mode]
    for length in range(1, n + 4 + 1):
        for chunk in range(1, 6):
            model = Footsteps(NANO)
            session = Session(model)
            assert session.prefill(list(range(length)), mode=mode, chunk=chunk).item() == length - 1
            decoder = length if mode == "full" else min(n, length)
            expected = dict.fromkeys(range(4), length) | dict.fromkeys(range(4, 8), decoder)
            assert session.counters.tokens_run == expected, (length, chunk)
            assert session.counters.boundary_projections == {4: length}, (length, chunk)
            assert model.decodes == (1 if decoder < length else -(-length // chunk))


@pytest.mark.parametrize(("mode", "decoder"), [("exact", EXACT), ("bounded", BOUNDED), ("full", 15)])
def test_a_real_model_counts_the_same(model, mode, decoder):
    """W6 again, 15 tokens of two rows in chunks of 4."""
    session = Session(model)
    session.prefill(random_ids(2, 15), mode=mode, chunk=4)
    assert session.counters.tokens_run == dict.fromkeys((0, 1), 30) | dict.fromkeys((2, 3, 4), 2 * decoder)
    assert session.counters.boundary_projections == {2: 30}


# ---- exact ----


@pytest.mark.parametrize("length", [EXACT - 1, EXACT, EXACT + 1, EXACT + BOUNDED + 1, 23])
@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_exact_equals_full(model, length, chunk):
    """The same logits and stores, and so the same text behind."""
    ids = random_ids(2, length + 2)
    exact, full = Session(model), fed_session(model, ids[:, :length])
    assert_close(exact.prefill(ids[:, :length], chunk=chunk), model(ids[:, :length])[:, -1])
    assert exact.fingerprint() == full.fingerprint()
    assert_close(exact.extend(ids[:, length:]), full.extend(ids[:, length:]))


def test_one_token_less_would_not_be_exact(model):
    """Why the share is what it is: the last layer's oldest window row depends on the first of these tokens."""
    ids = random_ids(1, 23)
    expected = model(ids)[:, -1]
    assert_close(bounded_oracle(model, ids, EXACT), expected)
    assert (bounded_oracle(model, ids, EXACT - 1) - expected).abs().max() > 1e-9


# ---- bounded ----


@pytest.mark.parametrize("length", [BOUNDED + 1, EXACT, 2 * BOUNDED + 1, 23])
@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_bounded_begins_the_decoders_windows_with_the_segment(model, length, chunk):
    """W4: absolute positions, all global entries; an approximation, so not the exact logits."""
    ids = random_ids(2, length)
    session = Session(model)
    logits = session.prefill(ids, mode="bounded", chunk=chunk)
    assert_close(logits, bounded_oracle(model, ids))
    difference = (logits - model(ids)[:, -1]).abs().max()
    assert 1e-3 < difference < 100
    # The encoder, global entries and index keys are exact: only decoder windows differ.
    full = fed_session(model, ids)
    assert session.fingerprint() != full.fingerprint()
    for layer in (0, 1):
        assert torch.equal(session.cache.windows[layer].latest(0, 3), full.cache.windows[layer].latest(0, 3))
    for layer in (1, 2):
        assert torch.equal(session.cache.sources[layer].kv.stored(0), full.cache.sources[layer].kv.stored(0))
        assert torch.equal(session.cache.sources[layer].keys.stored(0), full.cache.sources[layer].keys.stored(0))


@pytest.mark.parametrize("length", [1, BOUNDED - 1, BOUNDED])
def test_bounded_cuts_nothing_of_a_prompt_that_fits_a_window(model, length):
    ids = random_ids(1, length)
    session = Session(model)
    assert_close(session.prefill(ids, mode="bounded"), model(ids)[:, -1])
    assert session.fingerprint() == fed_session(model, ids).fingerprint()


def test_without_a_decoder_all_modes_are_full():
    model, ids = scattered(without_decoder()), random_ids(1, 13)
    for mode in MODES:
        session = Session(model)
        assert_close(session.prefill(ids, mode=mode, chunk=4), model(ids)[:, -1])
        session.truncate(5)  # nothing was skipped: any cut is exact


# ---- a second prompt ----


@pytest.mark.parametrize("mode", ["exact", "bounded"])
def test_a_short_second_prompt_sees_the_live_windows(model, mode):
    """As long as the decoder's share, or shorter: the whole is one long text."""
    ids = random_ids(2, 25)
    for second in (1, 3, decoder_tokens(SHORT, mode)):
        session = fed_session(model, ids[:, :12])
        assert_close(session.prefill(ids[:, 12 : 12 + second], mode=mode, chunk=2), model(ids[:, : 12 + second])[:, -1])
        assert session.fingerprint() == fed_session(model, ids[:, : 12 + second]).fingerprint()


def test_a_long_second_prompt_begins_the_decoders_windows_anew(model):
    """bounded: as if the first had never been in them, which is what a cut at the segment means."""
    ids = random_ids(2, 22)
    for second in (BOUNDED + 1, 10):
        session = fed_session(model, ids[:, :12])
        text = ids[:, : 12 + second]
        logits = session.prefill(ids[:, 12 : 12 + second], mode="bounded", chunk=3)
        assert_close(logits, bounded_oracle(model, text))
        assert (logits - model(text)[:, -1]).abs().max() > 1e-3
        once = Session(model)
        once.prefill(text, mode="bounded")
        assert session.fingerprint() == once.fingerprint()
        assert_close(session.decode([5, 6]), once.decode([5, 6]))


def test_a_long_second_prompt_in_exact_mode_equals_one_long_text(model):
    ids = random_ids(2, 12 + EXACT + 1)
    session = fed_session(model, ids[:, :12])
    assert_close(session.prefill(ids[:, 12:], chunk=4), model(ids)[:, -1])
    assert session.fingerprint() == fed_session(model, ids).fingerprint()


# ---- taking back what the decoder skipped ----


@pytest.mark.parametrize(("mode", "length"), [("exact", 14), ("bounded", 14), ("bounded", 4), ("full", 14)])
def test_every_cut_of_a_prompt_equals_cold_or_is_refused(model, mode, length):
    """S3: where the decoder ran on the end of a prompt alone, earlier decoder windows do not exist."""
    ids, skipped = random_ids(1, length + 3), length > {"exact": EXACT, "bounded": BOUNDED, "full": 99}[mode]
    session = Session(model)
    session.prefill(ids[:, :length], mode=mode)
    prints = [None, *(fed_session(model, ids[:, :n]).fingerprint() for n in range(1, length))] if not skipped else []
    prints = prints or [None] * length
    prints.append(session.fingerprint())
    for n in range(length, length + 3):
        session.extend(ids[:, n : n + 1])
        prints.append(session.fingerprint())
    for n in range(length + 4):
        cut = session.fork()
        if skipped and 0 < n < length:
            with pytest.raises(ValueError, match=f"truncate to {n} tokens: row 0 had its decoder run on the end of its "
                                                 f"first {length} tokens only.*mode='full'\\) keeps them"):  # fmt: skip
                cut.truncate(n)
            assert cut.fingerprint() == prints[-1]
        else:
            cut.truncate(n)
            assert cut.lengths == [n]
            assert n == 0 or cut.fingerprint() == prints[n]


def test_an_emptied_row_forgets_what_the_decoder_skipped(model):
    ids = random_ids(1, 14)
    session = Session(model)
    session.prefill(ids, mode="bounded")
    session.truncate(0)
    session.extend(ids[:, :9])
    session.truncate(5)
    assert session.fingerprint() == fed_session(model, ids[:, :5]).fingerprint()


def test_a_fork_and_an_order_keep_what_was_skipped(model):
    """Row 0 is longer than the decoder's share, row 1 is not."""
    session, mask = Session(model), torch.ones(2, 9).bool()
    mask[1, 3:] = False
    session.prefill(random_ids(2, 9), mode="bounded", mask=mask)
    session.fork().truncate([9, 1])
    for twin in (session, session.fork()):
        twin.reorder([1, 0])
        with pytest.raises(ValueError, match="truncate to 8 tokens: row 1 had its decoder run on the end of its first"):
            twin.truncate([3, 8])
        twin.truncate([2, 9])
        twin.reorder([1, 0])
