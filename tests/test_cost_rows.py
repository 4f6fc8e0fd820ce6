"""Rows that a token touches: the cost model says what the operations' own counts say."""

import pytest
from one_query import attend_everywhere, choose
from torch.utils.flop_counter import FlopCounterMode

from tinyds41.config import Config
from tinyds41.cost.flops import decode_cost
from tinyds41.cost.rows import attended_rows, gathered_rows, pool_shares, scored_entries

# Around the sizes of each: nano has a window of 4, top-3, pools of 3 blocks of 2; toy 32, 16, 16 of 4; small 64, 64,
# 64 of 8; ratios 2 and 1. Odd contexts leave a group or a block open; the longest overflow every pool.
CASES = [
    *(("nano", context) for context in (1, 2, 3, 5, 6, 7, 13, 64, 255)),
    *(("toy", context) for context in (1, 15, 33, 63, 65, 130, 1001)),
    *(("small", context) for context in (3, 129, 511, 515, 2049)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "context"), CASES)
def test_scored_entries_are_what_the_operation_counts(name, context):
    config = Config.preset(name)
    scored, _ = choose(config, context)
    full, pool = scored_entries(config, context)
    assert {layer: n for layer, n in (full | pool).items() if n} == {layer: n for layer, n in scored.items() if n}
    assert set(pool) == {layer.layer for layer in config.plan() if layer.pooled} != set()


@pytest.mark.parametrize(("name", "context"), CASES)
def test_gathered_rows_are_what_the_operation_counts(name, context):
    """Charged to the index source, which gathers first; a source without entries gathers nothing."""
    config = Config.preset(name)
    _, selections = choose(config, context)
    found = attend_everywhere(config, context, selections)
    assert {layer: n for layer, n in gathered_rows(config, context).items() if n} == found


@pytest.mark.parametrize(("name", "context"), CASES)
def test_attended_rows_are_a_window_and_the_selection(name, context):
    config = Config.preset(name)
    _, selections = choose(config, context)
    for layer in config.plan():
        chosen = 0 if layer.index_source is None else selections[layer.index_source].index.numel()
        window = len(range(max(0, context - config.sliding_window), context))
        assert attended_rows(config, context)[layer.layer] == window + chosen


@pytest.mark.parametrize(("name", "context"), CASES)
def test_attention_and_index_flops_are_what_the_flop_counter_sees(name, context):
    """Equal, but for the sum over index heads, which the counter sees and the cost model leaves out as 1/J."""
    config = Config.preset(name)
    cost = decode_cost(config).at(context)
    with FlopCounterMode(display=False) as indexed:
        scored, selections = choose(config, context)
    head_sums = 2 * config.index_n_heads * sum(scored.values())
    assert indexed.get_total_flops() == cost.index_full + cost.index_pool + head_sums
    with FlopCounterMode(display=False) as attended:
        attend_everywhere(config, context, selections)
    assert attended.get_total_flops() == cost.attention


def test_the_pool_is_what_makes_later_index_layers_flat():
    config = Config.preset("toy")
    at = {context: scored_entries(config, context) for context in (1024, 4096)}
    assert at[4096][1] == at[1024][1] == {6: config.candidate_topk_blocks * config.candidate_block_size}
    assert all(at[4096][0][layer] == 4 * at[1024][0][layer] for layer in (2, 4))


def test_the_pool_holds_a_sixtieth_of_a_million_entries_and_the_selection_a_two_thousandth():
    flash = Config.preset("flash")
    pool, selection = pool_shares(flash, 2**20)
    assert (round(pool * 2**20), f"{pool:.1%}", f"{selection:.2%}") == (2048 * 8, "1.6%", "0.05%")
    assert pool_shares(flash, 512) == (1, 1)
    assert pool_shares(flash, 513) == (1, 512 / 513)  # an open block holds no entry that does not exist


def test_a_config_without_a_pool_has_no_shares():
    config = Config.preset("nano", candidate_source_layer_id=None)
    with pytest.raises(ValueError, match="candidate_source_layer_id is None"):
        pool_shares(config, 16)
    assert scored_entries(config, 16) == ({2: 8, 4: 16, 6: 16}, {})


@pytest.mark.parametrize("context", [0, 257])
def test_a_context_that_cannot_be_is_named(context):
    for count in (scored_entries, attended_rows, gathered_rows, pool_shares):
        with pytest.raises(ValueError, match=f"context={context}"):
            count(Config.preset("nano"), context)
