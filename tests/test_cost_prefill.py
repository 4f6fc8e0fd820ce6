"""Prefill work: sums over positions of what decode does, and matrices that the FLOP counter sees."""

import pytest
import torch
from models import random_ids
from one_query import weights_alone
from torch.utils.flop_counter import FlopCounterMode

from tinyds41.config import Config
from tinyds41.cost.flops import decode_cost
from tinyds41.cost.parameters import count_parameters
from tinyds41.cost.prefill import MODES, PrefillCost, decoder_tokens, prefill_cost
from tinyds41.cost.rows import attended_rows, scored_entries
from tinyds41.model.context import Sequence
from tinyds41.model.transformer import Model

NANO = Config.preset("nano")


@pytest.fixture(scope="module")
def flash() -> PrefillCost:
    return prefill_cost(Config.preset("flash"), "flash")


def test_bounded_replay_runs_half_of_the_layer_tokens(flash):
    assert round(flash.at(4096).layer_token_share, 3) == 0.516
    assert round(flash.at(2**20).layer_token_share, 2) == 0.50
    assert flash.at(4096, "full").layer_token_share == 1
    assert flash.at(100).layer_token_share == 1  # a prompt inside one window skips nothing


def test_the_modes_run_the_decoder_on_the_published_tokens(flash):
    """W and W + (n_dec - 1)(W - 1), with W = 128 and 20 decoder layers."""
    for tokens, full, exact, bounded in ((8192, 8192, 2541, 128), (1000, 1000, 1000, 128), (128, 128, 128, 128)):
        found = [decoder_tokens(flash.config, tokens, mode) for mode in MODES]
        assert found == [full, exact, bounded]
    layer_tokens = [flash.at(8192, mode).layer_tokens for mode in MODES]
    assert layer_tokens == [20 * (8192 + n) for n in (8192, 2541, 128)]


def test_a_prompt_token_of_the_encoder_costs_twice_its_active_parameters(flash):
    """To a ten-thousandth: ours leaves out vectors, and m tokens share an index key's product."""
    active = count_parameters(flash.config).active_prefill
    assert 0.9999 < flash.at(4096).encoder / (2 * active * 4096) < 1


@pytest.mark.parametrize("tokens", [1, 2, 5, 13, 40])
def test_a_full_prefill_is_the_sum_of_decoding_every_position(tokens):
    """Linear work apart: a prompt needs the output head once."""
    decode, prefill = decode_cost(NANO), prefill_cost(NANO).at(tokens, "full")
    steps = [decode.at(context) for context in range(1, tokens + 1)]
    for part in ("index_full", "index_pool", "attention"):
        assert getattr(prefill, part) == sum(getattr(step, part) for step in steps)


@pytest.mark.parametrize("mode", ["exact", "bounded"])
@pytest.mark.parametrize("tokens", [3, 7, 11, 40])
def test_a_short_decoder_does_the_work_of_its_own_positions(mode, tokens):
    """Counted by hand, query by query: global rows from the prompt's start, window rows from the segment's."""
    full = pool = attended = 0
    start = tokens - decoder_tokens(NANO, tokens, mode)
    for layer in NANO.plan():
        first = start if layer.half == "decoder" else 0
        for position in range(first, tokens):
            in_window = min(NANO.sliding_window, position + 1 - first)
            in_window_of_all = min(NANO.sliding_window, position + 1)
            attended += attended_rows(NANO, position + 1)[layer.layer] - in_window_of_all + in_window
            counts = scored_entries(NANO, position + 1)
            full += counts[0].get(layer.layer, 0)
            pool += counts[1].get(layer.layer, 0)
    work = prefill_cost(NANO).at(tokens, mode)
    per_entry, per_row = 2 * NANO.index_n_heads * NANO.index_head_dim, 4 * NANO.num_attention_heads * NANO.head_dim
    assert (work.index_full, work.index_pool) == (per_entry * full, per_entry * pool)
    assert work.attention == per_row * attended


class Short(Sequence):
    """A context without attention, for a decoder that sees the last tokens alone."""

    def rotation(self, rope, dtype):
        return super().rotation(rope, dtype)[:, -self.n :]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("tokens", [5, 12])
def test_linear_work_is_what_the_flop_counter_sees(mode, tokens):
    """The model's own halves, the decoder on its last tokens; attention, selection and mixing stubbed out."""
    model, ids, n = Model(NANO, ops=weights_alone()), random_ids(1, tokens), decoder_tokens(NANO, tokens, mode)
    ctx = Short(NANO, ids, None)
    ctx.n = tokens
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        carry = model.encode(ids, ctx)
        ctx.n = n
        model.logits(model.decode(carry.last(n), ctx).last(1))
    # Engram collapses the streams once more: N x D multiply-adds per Engram layer and token, no weights.
    mixing = 2 * len(NANO.engram_layer_ids) * NANO.hc_mult * NANO.hidden_size * tokens
    work = prefill_cost(NANO).at(tokens, mode)
    assert counter.get_total_flops() - mixing == work.linear
    assert work.linear == work.encoder + work.boundary + work.decoder + work.head
    assert work.head == 2 * NANO.vocab_size * NANO.hidden_size


def test_weighted_halves_linear_work_and_quarters_index_scores(flash):
    raw, weighted = flash.at(8192), flash.at(8192, accounting="weighted")
    assert weighted.linear == raw.linear / 2
    assert (weighted.index_full, weighted.index_pool) == (raw.index_full / 4, raw.index_pool / 4)
    assert (weighted.attention, weighted.layer_tokens) == (raw.attention, raw.layer_tokens)


def test_the_saving_is_half_of_the_linear_work_and_most_of_the_decoders_index_work(flash):
    """Long prompts: what is left is the encoder's half, its index scores grow with the square."""
    full, bounded = flash.at(65_536, "full"), flash.at(65_536)
    # A little over half: Engram and the boundary layer's projections run for every token.
    assert 0.5 < bounded.linear / full.linear < 0.52
    # Index scores: three sources of ratio 2 stay, one of ratio 1 goes, three halves against one.
    assert round(bounded.index_full / full.index_full, 2) == 0.6
    assert bounded.index_pool / full.index_pool < 0.01
    assert flash.share(65_536) == bounded.total / full.total < 0.56


def test_without_a_decoder_every_mode_runs_everything():
    config = NANO.replace(
        compress_ratios=(0, 0, 2, 2, 2, 2, 2, 2), kv_source_layer_ids=(2,), index_source_layer_ids=(2, 6),
        candidate_source_layer_id=None)  # fmt: skip
    works = [prefill_cost(config).at(40, mode) for mode in MODES]
    assert len({work.total for work in works}) == 1
    assert works[0].layer_token_share == 1 and works[0].boundary == works[0].decoder == works[0].index_pool == 0


def test_engram_at_the_boundary_runs_for_every_token():
    moved = NANO.replace(engram_layer_ids=(1, 4))
    here, there = prefill_cost(NANO).at(40), prefill_cost(moved).at(40)
    engram = 2 * (NANO.hc_mult + 1) * NANO.hidden_size * 3 * NANO.engram_n_heads * NANO.engram_head_dim * 40
    assert there.boundary - here.boundary == here.encoder - there.encoder == engram


@pytest.mark.parametrize("tokens", [0, -3, 257, 1.5])
def test_a_length_that_cannot_be_is_named(tokens):
    with pytest.raises(ValueError, match=f"context={tokens}"):
        prefill_cost(NANO).at(tokens)


def test_an_unknown_mode_or_accounting_names_the_known():
    with pytest.raises(ValueError, match=r"'half'.*full, exact, bounded"):
        prefill_cost(NANO).at(4, "half")
    with pytest.raises(ValueError, match=r"'bf16'.*raw, weighted"):
        prefill_cost(NANO).at(4, accounting="bf16")
