"""Generations side by side, work by component and the data flow show what cost and plan say."""

import pytest
from matplotlib.patches import Rectangle
from plot_checks import check_plot, texts

from tinyds41.config import Config
from tinyds41.cost.flops import ACCOUNTINGS
from tinyds41.cost.generations import GENERATIONS, generation
from tinyds41.cost.kv_bytes import kv_bytes
from tinyds41.cost.prefill import MODES, decoder_tokens
from tinyds41.plan import LayerPlan
from tinyds41.show.cost_plots import plot_kv_bytes
from tinyds41.show.flow_plot import RAILS, plot_data_flow
from tinyds41.show.generation_plots import (
    GenerationBytes,
    flops,
    generation_rows,
    plot_generation_bytes,
    plot_work_by_component,
    plot_work_by_generation,
)
from tinyds41.show.style import Style, label_right, new_axes

NANO, FLASH = Config.preset("nano"), Config.preset("flash")
CONTEXTS = [2**12, 2**14, 2**16, 2**18, 2**20]
FLASH_COST = generation("V4.1-Flash").decode_cost()


def curves(accounting: str) -> dict:
    return {
        name: (FLASH_COST if name == "V4.1-Flash" else model.decode_cost()).curve(CONTEXTS, accounting)
        for name, model in GENERATIONS.items()
    }


def flow(config: Config, mode: str, tokens: int, **style):
    in_decoder = decoder_tokens(config, tokens, mode)
    return plot_data_flow(config.plan(), model="m41", tokens=tokens, in_decoder=in_decoder, mode=mode, **style)


# ---------------------------------------------------------------------------------------------- bytes


def test_generations_are_labelled_with_bytes_and_times_of_the_newest():
    rows = generation_rows(GENERATIONS.values())
    check_plot(lambda **style: plot_generation_bytes(rows, **style), "V4.1-Flash")
    ax = plot_generation_bytes(rows)
    labels = [text.split() for text in texts(ax)]
    assert [label[0] for label in labels] == [
        "389,120", "69,120", "70,272", "48,068", "3,514.25", "5,031.44", "890"]  # fmt: skip
    assert labels[0][2] == "437×" and labels[4][2] == "3.95×" and len(labels[-1]) == 2
    assert [bar.get_width() for bar in ax.patches] == [row.bytes_per_token for row in rows]
    assert ax.get_xscale() == "log"


def test_only_an_assumed_generation_is_marked_and_explained():
    ax = plot_generation_bytes(generation_rows(GENERATIONS.values()))
    names = [label.get_text() for label in ax.get_yticklabels()]
    assert [name for name in names if "*" in name] == ["V4-Pro *"]
    assert [name for name, bar in zip(names, ax.patches, strict=True) if bar.get_hatch()] == ["V4-Pro *"]
    assert "* V4-Pro: assumed, 30 layers of ratio 4 and 31 of ratio 128" in ax.get_xlabel()


def test_the_two_stores_of_a_generation_stay_apart_in_its_row():
    [row] = generation_rows([generation("V3.2")])
    assert row == GenerationBytes("V3.2", global_kv=61 * 656, index_keys=61 * 132)


def test_many_layers_are_one_segment_and_few_keep_theirs():
    caches = {name: generation(name).kv_bytes() for name in ("V3.2", "V4-Flash", "V4.1-Flash")}
    check_plot(lambda **style: plot_kv_bytes(caches, **style), "V4.1-Flash")
    ax = plot_kv_bytes(caches)
    # Four stores of more than 12 layers, and two of four layers each.
    assert len(ax.patches) == 4 + 8
    assert sum(bar.get_width() for bar in ax.patches) == 48068 + 3514.25 + 890
    assert any("40,016 B (61 layers, 0..60)" in text for text in texts(ax))
    assert "one for more than 12" in ax.get_xlabel() and "V3.2" not in ax.get_xlabel()  # V3.2 has no windows
    assert "12" not in plot_kv_bytes({"nano": kv_bytes(NANO)}).get_xlabel().split("\n")[0]


def test_segments_too_narrow_for_edges_have_none():
    ax = plot_kv_bytes({name: generation(name).kv_bytes() for name in ("V3.2", "V4.1-Flash")})
    assert [bar.get_linewidth() for bar in ax.patches] == [1, 1, *[0] * 8]
    assert {bar.get_linewidth() for bar in plot_kv_bytes({"flash": kv_bytes(FLASH)}).patches} == {1}


# ---------------------------------------------------------------------------------------------- work


@pytest.mark.parametrize("accounting", ACCOUNTINGS)
def test_work_by_generation_is_labelled_with_growth_under_its_accounting(accounting):
    data = curves(accounting)
    check_plot(lambda **style: plot_work_by_generation(data, **style), accounting)
    ax = plot_work_by_generation(data)
    growth = {"raw": ("10.2×", "4.89×", "2.79×", "1.61×"), "weighted": ("8.07×", "3.87×", "2.65×", "1.28×")}
    for model, times in zip(("V3.2", "V4-Flash", "V4-Pro", "V4.1-Flash"), growth[accounting], strict=True):
        assert f"{model} {times}" in texts(ax)
    assert accounting in ax.get_xlabel() and (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    looks = [(line.get_color(), line.get_linestyle()) for line in ax.get_lines()]
    assert len(set(looks)) == len(GENERATIONS)


def test_a_short_axis_of_work_has_more_marks_than_powers_of_ten():
    work = curves("weighted")
    ax = plot_work_by_generation({name: work[name] for name in ("V3.2", "V4-Flash", "V4.1-Flash")})
    low, high = ax.get_ylim()
    assert [tick for tick in ax.get_yticks() if low < tick < high] == [2e10, 5e10, 1e11, 2e11, 5e11]
    low, high = (ax := plot_work_by_generation(work)).get_ylim()
    assert {f"{tick:.0e}"[0] for tick in ax.get_yticks() if low < tick < high} == {"1"}


def test_curves_of_two_accountings_are_refused():
    mixed = {"a": FLASH_COST.curve([4096], "raw"), "b": FLASH_COST.curve([4096], "weighted")}
    with pytest.raises(ValueError, match="one plot shows one accounting, got raw, weighted"):
        plot_work_by_generation(mixed)


@pytest.mark.parametrize("accounting", ACCOUNTINGS)
def test_components_add_up_to_the_work_and_show_their_shares(accounting):
    rows = FLASH_COST.curve(CONTEXTS, accounting)
    check_plot(lambda **style: plot_work_by_component(rows, **style), "V4.1-Flash")
    ax = plot_work_by_component(rows)
    for place, row in enumerate(rows):
        mine = [bar for bar in ax.patches if bar.get_x() < place < bar.get_x() + bar.get_width()]
        assert sum(bar.get_height() for bar in mine) == pytest.approx(row.total)  # sums in another order
        assert flops(row.total) in texts(ax)
    assert f"{rows[-1].linear / rows[-1].total:.1%}" in texts(ax)
    assert [label.get_text() for label in ax.get_xticklabels()] == ["4K", "16K", "64K", "256K", "1M"]
    assert accounting in ax.get_title(loc="left")


def test_components_of_two_models_are_refused_and_absent_ones_not_named():
    v3 = generation("V3").decode_cost().curve([4096])
    with pytest.raises(ValueError, match=r"one plot shows one model, got V3, V4\.1-Flash"):
        plot_work_by_component([*v3, *FLASH_COST.curve([4096])])
    assert not any("index" in text for text in texts(plot_work_by_component(v3)))


def test_the_meaning_shown_is_that_of_the_model():
    """V3.2 scores its index in FP8, the others in FP4."""
    v32 = generation("V3.2").decode_cost().curve([4096, 2**20], "weighted")
    assert v32[0].meaning in plot_work_by_component(v32).get_xlabel()
    flash = FLASH_COST.curve([4096], "weighted")
    assert "FP4 0.25 (index scores)" in plot_work_by_component(flash).get_xlabel()
    assert v32[0].meaning != flash[0].meaning


def test_flops_on_an_axis():
    assert [flops(n) for n in (1e9, 2.5e12, 3e15, 57.49e9)] == ["1G", "2.5T", "3P", "57.49G"]


def test_labels_stand_where_their_curves_end_on_a_log_axis_too():
    ax = new_axes(Style())
    ax.set(yscale="log", ylim=(1, 100))
    label_right(ax, [(10, "middle", "red"), (100, "top", "red"), (99, "below", "red")], apart=0.09)
    places = {text.get_text(): text.xy[1] for text in ax.texts}
    # The top label stays inside, and the one below gives way.
    assert places == pytest.approx({"middle": 0.5, "below": 0.88, "top": 0.97})


# ---------------------------------------------------------------------------------------------- data flow


def boxes(ax, height: float = 0.72) -> list[Rectangle]:
    return [patch for patch in ax.patches if isinstance(patch, Rectangle) and patch.get_height() == height]


@pytest.mark.parametrize("mode", MODES)
def test_the_encoder_runs_on_all_tokens_and_the_decoder_on_those_of_the_mode(mode):
    config, tokens = NANO, 32
    check_plot(lambda **style: flow(config, mode, tokens, **style), "m41")
    ax, in_decoder = flow(config, mode, tokens), decoder_tokens(config, tokens, mode)
    for layer in config.plan():
        mine = [box for box in boxes(ax) if box.get_y() < layer.layer < box.get_y() + box.get_height()]
        prefill = [box for box in mine if box.get_x() < 1]
        runs = tokens if layer.half == "encoder" else in_decoder
        assert [round(box.get_width() * tokens) for box in prefill] == [runs]
        assert prefill[0].get_x() + prefill[0].get_width() == pytest.approx(1)  # the last of them
        assert len(mine) == 2  # and once in decode


def test_what_a_shortened_decoder_still_projects_is_drawn_in_its_first_layer():
    [strip] = [patch for patch in flow(NANO, "bounded", 32).patches if patch.get_height() == 0.36]
    assert (strip.get_x(), strip.get_width()) == (0, 1 - 4 / 32) and strip.get_y() < 4 < strip.get_y() + 0.36
    assert "global KV and index keys only" in texts(flow(NANO, "bounded", 32))
    assert not [patch for patch in flow(NANO, "full", 32).patches if patch.get_height() == 0.36]


def test_arrows_lead_from_each_writer_to_its_readers():
    ax = flow(NANO, "bounded", 32)
    assert sorted(arrow.xyann[1] for arrow in ax.texts if arrow.arrow_patch) == [3, 5, 6, 7]
    squares = [line.get_ydata()[0] for line in ax.lines if line.get_marker() == "s"]
    assert squares == [2, 4]


def test_rails_that_overlap_stand_side_by_side():
    """Ratios that alternate: two writers are read at the same time."""
    ax = plot_data_flow(_alternating(), model="two ratios", tokens=8, in_decoder=0, mode="full")
    rails = [line.get_xdata()[0] for line in ax.lines if line.get_marker() == "s"]
    assert rails[0] == RAILS and rails[1] > RAILS


def _alternating() -> list[LayerPlan]:
    sources = (0, 1, 0, 1)
    return [
        LayerPlan(layer=i, half="encoder", mode="FULL" if i < 2 else "REUSE", ratio=(4, 128)[i % 2], kv_source=source,
                  index_source=source, forms_pool=False, pooled=False, engram=None)
        for i, source in enumerate(sources)
    ]  # fmt: skip


def test_the_released_model_fits_page_and_slide():
    check_plot(lambda **style: flow(FLASH, "bounded", 1024, **style), "m41")


@pytest.mark.parametrize(("draw", "message"), [
    (lambda: plot_generation_bytes([]), "nothing to plot: no generations"),
    (lambda: plot_work_by_generation({"a": []}), "nothing to plot: no decode work"),
    (lambda: plot_work_by_component([]), "nothing to plot: no decode work"),
    (lambda: plot_data_flow([], model="x", tokens=4, in_decoder=0, mode="full"), "nothing to plot: no layers"),
    (lambda: plot_data_flow(NANO.plan(), model="x", tokens=4, in_decoder=5, mode="full"), "in_decoder=5 of tokens=4"),
])  # fmt: skip
def test_a_plot_without_its_data_says_what_is_wrong(draw, message):
    with pytest.raises(ValueError, match=message):
        draw()
