"""The generations: published bytes, growth and ratios follow from layouts and sizes."""

from dataclasses import replace

import pytest

from tinyds41.config import Config
from tinyds41.cost.flops import decode_cost
from tinyds41.cost.generations import GENERATIONS, Generation, generation
from tinyds41.cost.kv_bytes import StoreBytes, kv_bytes
from tinyds41.cost.layouts import FP8_LATENT, Layout, Part

K4, M1 = 2**12, 2**20


def earlier(name: str) -> Generation:
    found = generation(name)
    assert isinstance(found, Generation)
    return found


@pytest.mark.parametrize(("name", "published"), [
    ("V1", 389_120), ("V2", 69_120), ("V3", 70_272), ("V3.2", 48_068), ("V4-Flash", 3514.25), ("V4.1-Flash", 890),
])  # fmt: skip
def test_bytes_per_token_are_the_published(name, published):
    assert generation(name).kv_bytes().bytes_per_token == published


def test_v4_pro_rests_on_an_assumed_split_and_says_so():
    assert round(float(generation("V4-Pro").kv_bytes().bytes_per_token), 2) == 5031.44
    assert "30 layers of ratio 4 and 31 of ratio 128" in generation("V4-Pro").assumed
    assert [name for name, model in GENERATIONS.items() if model.assumed] == ["V4-Pro"]


def test_bytes_fell_by_the_published_ratios():
    per_token = {name: model.kv_bytes().bytes_per_token for name, model in GENERATIONS.items()}
    assert round(per_token["V1"] / per_token["V4.1-Flash"]) == 437
    assert round(float(per_token["V4-Flash"] / per_token["V4.1-Flash"]), 2) == 3.95
    at_1m = {name: (model.kv_bytes().bytes_at(M1) - model.kv_bytes().window_bytes) / 1e9
             for name, model in GENERATIONS.items()}  # fmt: skip
    assert (round(at_1m["V1"]), round(at_1m["V4.1-Flash"], 3)) == (408, 0.933)


def test_windows_are_constant_per_sequence():
    windows = {name: model.kv_bytes().window_bytes for name, model in GENERATIONS.items()}
    assert (windows["V4-Flash"], windows["V4.1-Flash"]) == (3_214_336, 2_703_360)
    assert windows["V1"] == windows["V2"] == windows["V3"] == windows["V3.2"] == 0
    v4 = generation("V4-Flash").kv_bytes()
    assert v4.bytes_at(1) == 43 * 584  # one window row per layer, and no group is finished
    assert v4.bytes_at(131) == 3_214_336 + 21 * (131 // 4) * (584 + 68) + 20 * 584
    assert "no windows" in str(generation("V3").kv_bytes())


def test_the_newest_generation_is_the_preset_and_no_second_description():
    flash = Config.preset("flash")
    assert str(generation("V4.1-Flash").kv_bytes()) == str(kv_bytes(flash))
    assert generation("V4.1-Flash").decode_cost() == decode_cost(flash, "V4.1-Flash")


@pytest.mark.parametrize(("name", "raw", "weighted"), [
    ("V3.2", 10.25, 8.07), ("V4-Flash", 4.89, 3.87), ("V4-Pro", 2.79, 2.65), ("V4.1-Flash", 1.61, 1.28),
])  # fmt: skip
def test_decode_work_grows_from_4k_to_1m_as_published(name, raw, weighted):
    cost = generation(name).decode_cost()
    assert (round(cost.growth(K4, M1), 2), round(cost.growth(K4, M1, "weighted"), 2)) == (raw, weighted)


@pytest.mark.parametrize(("name", "share"), [("V4-Flash", 0.10), ("V4-Pro", 0.27)])
def test_weighted_work_at_1m_is_the_published_share_of_v32(name, share):
    at_1m = {model: generation(model).decode_cost().at(M1, "weighted").total for model in (name, "V3.2")}
    assert round(at_1m[name] / at_1m["V3.2"], 2) == share


# By hand, from the sizes: layers x rows x heads x channels x 2 per multiply-add.
@pytest.mark.parametrize(("name", "context", "attention", "index"), [
    ("V1", 1000, 95 * 1000 * 64 * 128 * 4, 0),
    ("V2", 1000, 60 * 1000 * 128 * (576 + 512) * 2, 0),
    ("V3", 1000, 61 * 1000 * 128 * (576 + 512) * 2, 0),
    ("V3.2", 1000, 61 * 1000 * 128 * (576 + 512) * 2, 61 * 1000 * 64 * 128 * 2),
    ("V3.2", 4096, 61 * 2048 * 128 * (576 + 512) * 2, 61 * 4096 * 64 * 128 * 2),
    ("V4-Flash", 1003, (2 * 128 + 21 * (128 + 250) + 20 * (128 + 7)) * 64 * 512 * 4, 21 * 250 * 64 * 128 * 2),
    ("V4-Flash", 65_536, (2 * 128 + 21 * (128 + 512) + 20 * (128 + 512)) * 64 * 512 * 4, 21 * 16_384 * 64 * 128 * 2),
    ("V4-Pro", 65_536, (30 * (128 + 1024) + 31 * (128 + 512)) * 128 * 512 * 4, 30 * 16_384 * 64 * 128 * 2),
])  # fmt: skip
def test_decode_work_by_component_equals_a_count_by_hand(name, context, attention, index):
    work = generation(name).decode_cost().at(context)
    assert (work.attention, work.index_full, work.index_pool) == (attention, index, 0)
    assert work.linear == 2 * earlier(name).active_parameters
    assert (work.model, work.context, work.accounting) == (name, context, "raw")


def test_each_generation_has_its_own_rate_for_index_scores():
    """V3.2 scores in FP8, V4 in FP4; linear work and core count alike in all."""
    for name, rate in (("V3.2", 0.5), ("V4-Flash", 0.25), ("V4-Pro", 0.25), ("V4.1-Flash", 0.25)):
        cost = generation(name).decode_cost()
        raw, weighted = cost.at(K4), cost.at(K4, "weighted")
        assert weighted.index_full == rate * raw.index_full
        assert (weighted.linear, weighted.attention) == (raw.linear / 2, raw.attention)
        assert f"{rate:g} (index scores)" in cost.rates["weighted"].meaning


def test_a_short_context_fills_neither_window_nor_selection():
    v4 = earlier("V4-Flash")
    assert v4.window_rows(5) == dict.fromkeys(range(43), 5)
    assert set(v4.global_rows(5).values()) == {0, 1}
    assert v4.scored_entries(3) == dict.fromkeys(range(2, 43, 2), 0)


def test_other_sizes_give_other_bytes():
    """Nothing is a typed total: a change of one size shows in the bytes of its stores alone."""
    v4 = earlier("V4-Flash")
    assert replace(v4, window=64).kv_bytes().window_bytes == v4.kv_bytes().window_bytes / 2
    assert replace(v4, entry=FP8_LATENT).kv_bytes().of("global KV")[0] == StoreBytes("global KV", 2, 656, 4)
    assert replace(v4, ratios=(4,)).kv_bytes().bytes_per_token == (584 + 68) / 4


def test_a_row_of_broken_bytes_is_refused():
    with pytest.raises(ValueError, match="12 bits"):
        Layout((Part("codes", 3, 4),))


def test_an_unknown_generation_names_the_known():
    with pytest.raises(ValueError, match=r"'V5'.*V1, V2, V3, V3\.2, V4-Flash, V4-Pro, V4\.1-Flash"):
        generation("V5")


@pytest.mark.parametrize("name", GENERATIONS)
@pytest.mark.parametrize("context", [0, -1, M1 + 1, 2.5])
def test_a_context_that_cannot_be_is_named(name, context):
    model = generation(name)
    counts = [model.kv_bytes().bytes_at, model.decode_cost().at]
    if isinstance(model, Generation):
        counts += [model.scored_entries, model.global_rows, model.window_rows]
    for count in counts:
        with pytest.raises(ValueError, match=f"context={context}"):
            count(context)
