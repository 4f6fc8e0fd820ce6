"""The plan says what every layer is, whose KV it reads and whose selection it follows."""

import pytest

from tinyds41 import Config

NANO = Config.preset("nano")

NANO_TABLE = """\
layer  half     mode     ratio  KV from  indices from  pool    Engram
0      encoder  SWA      -      -        -             -       -
1      encoder  SWA      -      -        -             -       0
2      encoder  FULL     2      2        2             -       -
3      encoder  REUSE    2      2        2             -       1
4      decoder  FULL     1      4        4             forms   -
5      decoder  REUSE    1      4        4             -       -
6      decoder  REINDEX  1      4        6             inside  -
7      decoder  REUSE    1      4        6             -       -"""


def layers_where(plan, name: str, value=True) -> list[int]:
    return [layer.layer for layer in plan if getattr(layer, name) == value]


def test_the_plan_of_flash_is_the_released_one():
    plan = Config.preset("flash").plan()
    assert (plan.boundary, plan.n_encoder, plan.n_decoder, len(plan)) == (20, 20, 20, 40)
    assert layers_where(plan, "half", "decoder") == list(range(20, 40))
    assert layers_where(plan, "mode", "SWA") == [0, 1]
    assert layers_where(plan, "mode", "FULL") == [2, 8, 14, 20]
    assert layers_where(plan, "mode", "REINDEX") == [24, 28, 32, 36]
    assert [layer.ratio for layer in plan] == [0] * 2 + [2] * 18 + [1] * 20
    assert [layer.kv_source for layer in plan] == [None] * 2 + [2] * 6 + [8] * 6 + [14] * 6 + [20] * 20
    assert [layer.index_source for layer in plan] == (
        [None] * 2 + [2] * 6 + [8] * 6 + [14] * 6 + [20] * 4 + [24] * 4 + [28] * 4 + [32] * 4 + [36] * 4)
    assert layers_where(plan, "forms_pool") == [20]
    assert layers_where(plan, "pooled") == [24, 28, 32, 36]
    assert [(layer.layer, layer.engram) for layer in plan if layer.engram is not None] == [(1, 0), (14, 1)]


def test_a_layer_writes_globals_as_full_and_selects_as_full_or_reindex():
    plan = Config.preset("flash").plan()
    assert layers_where(plan, "writes_globals") == [2, 8, 14, 20]
    assert layers_where(plan, "selects") == [2, 8, 14, 20, 24, 28, 32, 36]


def test_the_printed_table_shows_each_layer_on_a_line():
    assert str(NANO.plan()) == repr(NANO.plan()) == NANO_TABLE


@pytest.mark.parametrize("name", ["nano", "toy"])
def test_the_small_presets_hold_a_layer_of_every_kind(name):
    plan = Config.preset(name).plan()
    kinds = {(layer.mode, layer.ratio) for layer in plan}
    assert kinds == {("SWA", 0), ("FULL", 2), ("REUSE", 2), ("FULL", 1), ("REUSE", 1), ("REINDEX", 1)}
    assert sum(layer.engram is not None for layer in plan) == 2
    assert sum(layer.pooled for layer in plan) == 1


@pytest.mark.parametrize("name", ["nano", "toy", "small", "flash"])
def test_the_pool_really_restricts_within_the_longest_context(name):
    config = Config.preset(name)
    pool = config.candidate_topk_blocks * config.candidate_block_size
    assert config.index_topk < pool < config.max_position_embeddings


def interleaved(**changes) -> Config:
    """Ratios 2 and 1 in turn behind layer 1, so that the newest source is often the wrong one."""
    fields = {"compress_ratios": (0, 0, 2, 1, 2, 1, 2, 1), "kv_source_layer_ids": (2, 3),
              "index_source_layer_ids": (2, 3, 4, 5), "candidate_source_layer_id": 3}  # fmt: skip
    return NANO.replace(**{**fields, **changes})


def test_global_kv_comes_from_the_newest_source_of_the_same_ratio():
    assert [layer.kv_source for layer in interleaved().plan()] == [None, None, 2, 3, 2, 3, 2, 3]


def test_indices_come_from_the_newest_selection_made_against_the_same_source():
    assert [layer.index_source for layer in interleaved().plan()] == [None, None, 2, 3, 4, 5, 4, 5]


def test_a_selection_against_another_source_is_not_pooled():
    assert layers_where(interleaved().plan(), "pooled") == [5]


def test_without_a_candidate_source_there_is_no_pool():
    plan = interleaved(candidate_source_layer_id=None).plan()
    assert not layers_where(plan, "pooled")
    assert not layers_where(plan, "forms_pool")


def test_the_decoder_begins_at_the_last_source_of_ratio_one():
    config = NANO.replace(compress_ratios=(0, 0, 1, 1, 1, 1, 1, 1))
    assert (config.plan().boundary, config.plan().n_encoder) == (4, 4)


def test_a_plan_without_a_source_of_ratio_one_has_no_decoder():
    plan = NANO.replace(compress_ratios=(0, 0, 2, 2, 2, 2, 2, 2)).plan()
    assert (plan.boundary, plan.n_encoder, plan.n_decoder) == (None, 8, 0)
    assert layers_where(plan, "half", "encoder") == list(range(8))
    assert layers_where(plan, "mode", "FULL") == [2, 4]


def test_a_model_of_windows_alone_is_a_plan_too():
    plan = NANO.replace(compress_ratios=(0,) * 8, kv_source_layer_ids=(), index_source_layer_ids=(),
                        candidate_source_layer_id=None).plan()  # fmt: skip
    assert layers_where(plan, "mode", "SWA") == list(range(8))
    assert plan.boundary is None


def test_ratios_of_draft_blocks_are_kept_and_change_no_layer():
    config = NANO.replace(compress_ratios=(*NANO.compress_ratios[:8], 5, 0, 7))
    assert config.compress_ratios[8:] == (5, 0, 7)
    assert config.plan() == NANO.plan()
