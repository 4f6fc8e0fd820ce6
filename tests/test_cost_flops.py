"""Decode work: the formulas equal what the operations really do, and `flash` has the published growth."""

import pytest
import torch
from one_query import weights_alone
from torch.utils.flop_counter import FlopCounterMode

from tinyds41.config import Config
from tinyds41.cost.flops import ACCOUNTINGS, DecodeCost, decode_cost, linear_flops
from tinyds41.cost.parameters import count_parameters
from tinyds41.cost.rows import attended_rows, scored_entries
from tinyds41.model.transformer import Model


@pytest.fixture(scope="module")
def flash() -> DecodeCost:
    return decode_cost(Config.preset("flash"), "flash")


def flops_of(run) -> int:
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


# The published growth, to its digits.
@pytest.mark.parametrize(("accounting", "growth"), [("raw", 1.61), ("weighted", 1.28)])
def test_flash_grows_little_from_4k_to_1m(flash, accounting, growth):
    assert round(flash.growth(4096, 2**20, accounting), 2) == growth


def test_flash_by_component_equals_a_count_by_hand(flash):
    for context in (4096, 65_536, 2**20):
        work = flash.at(context)
        assert work.index_full == (3 * 0.5 + 1) * context * 8192
        assert work.index_pool == 4 * min(context, 16_384) * 8192
        assert work.attention == (38 * (512 + 128) + 2 * 128) * 64 * 512 * 4
        assert work.total == work.linear + work.index_full + work.index_pool + work.attention


def test_weighted_halves_linear_work_and_quarters_index_scores(flash):
    raw, weighted = flash.at(8192), flash.at(8192, "weighted")
    assert weighted.linear == raw.linear / 2
    assert (weighted.index_full, weighted.index_pool) == (raw.index_full / 4, raw.index_pool / 4)
    assert weighted.attention == raw.attention


def test_linear_work_is_twice_the_active_parameters_to_a_ten_thousandth(flash):
    """Estimates count 2 FLOPs per active parameter; ours leaves the vectors out (norms, biases, sinks)."""
    active = count_parameters(flash.config).active_decode
    assert 0.9999 < flash.linear / (2 * active) < 1


@pytest.mark.parametrize("name", ["nano", "toy"])
def test_linear_work_is_what_the_flop_counter_sees(name):
    """With attention, selection and stream mixing stubbed out, every product left has a weight in it."""
    config = Config.preset(name)
    model = Model(config, ops=weights_alone())
    n_tokens = 6  # whole groups of 2, so that an index key's product is shared by its tokens
    # Engram collapses the streams once more: N x D multiply-adds per Engram layer and token, no weights.
    mixing = 2 * len(config.engram_layer_ids) * config.hc_mult * config.hidden_size
    counted = flops_of(lambda: model(torch.arange(3, 3 + n_tokens)[None]))
    assert counted / n_tokens - mixing == linear_flops(config)


def test_a_model_without_global_attention_costs_the_same_at_any_context():
    config = Config.preset("nano", compress_ratios=(0,) * 8, kv_source_layer_ids=(), index_source_layer_ids=(),
                           candidate_source_layer_id=None, engram_layer_ids=(), engram_num_embeddings=())  # fmt: skip
    cost = decode_cost(config)
    for accounting in ACCOUNTINGS:
        assert cost.growth(4, 256, accounting) == 1
    assert cost.at(256).index_full == cost.at(256).index_pool == 0


def test_a_curve_is_one_row_per_context(flash):
    rows = flash.curve([4096, 8192], "weighted")
    assert [(row.model, row.context, row.accounting) for row in rows] == [
        ("flash", 4096, "weighted"), ("flash", 8192, "weighted")]  # fmt: skip


@pytest.mark.parametrize("context", [0, -5, 2**20 + 1, 4096.0])
def test_a_context_that_cannot_be_is_named(flash, context):
    for count in (flash.at, lambda n: scored_entries(flash.config, n), lambda n: attended_rows(flash.config, n)):
        with pytest.raises(ValueError, match=f"context={context}"):
            count(context)


def test_an_unknown_accounting_names_the_known(flash):
    with pytest.raises(ValueError, match=r"'bf16'.*raw, weighted"):
        flash.at(4096, "bf16")
