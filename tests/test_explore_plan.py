"""The schedule editor says what the config and the cost model say, and refuses with the config's own words."""

import html
import re
import sys

import matplotlib.pyplot as plt
import pytest
from plot_checks import check_plot

from tinyds41.config import Config
from tinyds41.cost.kv_bytes import kv_bytes
from tinyds41.cost.rows import scored_entries
from tinyds41.plan import FULL, REINDEX, REUSE, SWA
from tinyds41.show.explore_plan import explore_plan, modes_of, plan_view, schedule
from tinyds41.show.explorer import as_png
from tinyds41.show.plan_plot import plot_layer_plan

NANO, TOY = Config.preset("nano"), Config.preset("toy")


def changed(modes, **changes):
    """The modes with `layer_5=(FULL, 1)` put in."""
    return [changes.get(f"layer_{layer}", mode) for layer, mode in enumerate(modes)]


# ---------------------------------------------------------------------------------------------- schedule


@pytest.mark.parametrize("name", ["nano", "toy", "small", "flash"])
def test_the_modes_of_a_config_give_the_config_back(name):
    config = Config.preset(name)
    assert schedule(config, modes_of(config), config.candidate_source_layer_id) == config


def test_each_layer_becomes_what_was_asked_for():
    wanted = [(FULL, 4), (SWA, 0), (REINDEX, 4), (FULL, 2), (REUSE, 4), (FULL, 1), (REUSE, 1), (REINDEX, 1)]
    config = schedule(NANO, wanted, 5)
    assert modes_of(config) == wanted
    assert [layer.kv_source for layer in config.plan()] == [0, None, 0, 3, 0, 5, 5, 5]
    assert [layer.layer for layer in config.plan() if layer.pooled] == [7]
    assert config.compress_ratios[8:] == NANO.compress_ratios[8:] and config.hidden_size == NANO.hidden_size
    assert not any(layer.forms_pool or layer.pooled for layer in schedule(NANO, wanted, None).plan())


BROKEN = [
    ({"layer_2": (SWA, 0)}, 4, "compress_ratios gives layer 3 ratio 2: .* has no source of ratio 2 at or before it"),
    ({"layer_4": (REINDEX, 1)}, None, "compress_ratios gives layer 4 ratio 1: .* has no source of ratio 1"),
    ({"layer_6": (FULL, 2)}, 4, None),
    ({"layer_7": (FULL, 2)}, 2, None),
    ({}, 6, r"candidate_source_layer_id=6 is not in kv_source_layer_ids=\[2, 4\]"),
]


def test_the_refusal_is_the_configs_own():
    for changes, candidate, message in BROKEN:
        modes = changed(modes_of(NANO), **changes)
        if message is None:
            message = r"kv_source_layer_ids names layer \d behind the decoder's first layer 4"
        with pytest.raises(ValueError, match=message):
            schedule(NANO, modes, candidate)
    with pytest.raises(ValueError, match="7 modes for num_hidden_layers=8"):
        schedule(NANO, modes_of(NANO)[:7], 4)
    with pytest.raises(ValueError, match="layer 1: mode 'full' is none of SWA, FULL, REINDEX, REUSE"):
        schedule(NANO, changed(modes_of(NANO), layer_1=("full", 2)), 4)


# ---------------------------------------------------------------------------------------------- static twin


@pytest.mark.parametrize(("config", "context"), [(NANO, 100), (TOY, 4096), (TOY, 999), (Config.preset("flash"), 2**20)])
def test_the_view_writes_the_costs_below_the_plan(config, context):
    label = plan_view(config, context=context).get_xlabel()
    full, pool = (sum(rows.values()) for rows in scored_entries(config, context))
    assert full > 0 < pool
    assert f"a token at {context:,}: {full + pool:,}\n({full:,} in full scans, {pool:,} in the pool)" in label
    size = float(kv_bytes(config).bytes_per_token)
    assert float(re.search(r"cache: ([\d,.]+) bytes per token", label)[1].replace(",", "")) == size
    assert f"windows {kv_bytes(config).window_bytes:,} bytes" in label


def test_the_view_names_the_ratio_of_every_layer():
    assert "tokens per entry: none in 0–1, 2 in 2–3, 1 in 4–7\n" in plan_view(NANO).get_xlabel()
    mixed = schedule(NANO, changed(modes_of(NANO), layer_1=(FULL, 4)), 4)
    assert "tokens per entry: none in 0, 4 in 1, 2 in 2–3, 1 in 4–7\n" in plan_view(mixed).get_xlabel()


def test_the_view_is_the_plan_plot():
    def drawn(ax):
        return ([patch.get_bbox().bounds for patch in ax.patches], [text.get_text() for text in ax.texts])

    assert drawn(plan_view(TOY, name="toy")) == drawn(plot_layer_plan(TOY.plan(), model="toy"))
    check_plot(lambda **style: plan_view(TOY, name="toy", **style), "toy")
    check_plot(lambda **style: plan_view(Config.preset("flash"), name="flash", **style), "flash")
    # Nine runs of ratios need two lines.
    restless = schedule(
        TOY, [(FULL, 4), (FULL, 2), (SWA, 0), (REUSE, 2), (REUSE, 4), (SWA, 0), (REINDEX, 2), (FULL, 1)], 7
    )
    check_plot(lambda **style: plan_view(restless, name="toy", **style), "toy")


def test_the_context_is_the_longest_unless_given():
    assert "a token at 256: " in plan_view(NANO).get_xlabel()
    with pytest.raises(ValueError, match="257"):
        plan_view(NANO, context=257)


# ---------------------------------------------------------------------------------------------- widget


def parts(box) -> dict:
    rows, picture, text = box.children
    return {**{control.description: control for control in rows.children}, "picture": picture, "text": text}


@pytest.fixture
def shown():
    pytest.importorskip("ipywidgets")
    return parts(explore_plan(NANO, name="nano"))


def test_the_editor_starts_with_the_config_itself(shown):
    assert shown["picture"].value == as_png(plan_view(NANO, name="nano"))
    assert [shown[f"layer {layer}"].value for layer in range(8)] == modes_of(NANO)
    assert shown["pool of"].value == 4 and shown["context"].value == 256
    assert [value for _, value in shown["context"].options] == [16, 32, 64, 128, 256]


def test_a_changed_layer_pool_or_context_changes_the_picture_to_that_of_the_view(shown):
    modes = modes_of(NANO)
    for control, value, config, context in [
        ("context", 32, NANO, 32),
        ("layer 7", (REINDEX, 1), schedule(NANO, changed(modes, layer_7=(REINDEX, 1)), 4), 32),
        ("pool of", 2, schedule(NANO, changed(modes, layer_7=(REINDEX, 1)), 2), 32),
    ]:
        before = shown["picture"].value
        shown[control].value = value
        assert shown["picture"].value == as_png(plan_view(config, context=context, name="nano")) != before
    assert not plt.get_fignums()


def test_an_inconsistent_schedule_shows_the_configs_message_and_mending_it_the_picture(shown):
    before = shown["picture"].value
    shown["layer 2"].value = (SWA, 0)
    with pytest.raises(ValueError) as refused:
        schedule(NANO, changed(modes_of(NANO), layer_2=(SWA, 0)), 4)
    assert html.escape(str(refused.value)) in shown["text"].value and "ratio 2" in str(refused.value)
    assert (shown["text"].layout.display, shown["picture"].layout.display) == ("", "none")
    shown["layer 2"].value = (FULL, 2)
    assert (shown["text"].layout.display, shown["picture"].layout.display) == ("none", "")
    assert shown["picture"].value == before


def test_without_ipywidgets_the_editor_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    with pytest.raises(ImportError, match=r"pip install 'tinyds41\[notebooks\]'"):
        explore_plan(NANO)
