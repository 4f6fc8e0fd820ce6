"""The pool explorer shows what the model computes under each setting, and its sliders change the picture."""

import sys
from io import BytesIO

import matplotlib.pyplot as plt
import pytest
import torch
from models import NANO, random_ids, scattered, traced
from plot_checks import check_plot, texts

import tinyds41 as ds
from tinyds41.show.explore_pool import explore_pool, pool_view
from tinyds41.show.explorer import as_png
from tinyds41.show.index_observations import CANDIDATE_NAMES, candidates

QUERY = 18


@pytest.fixture(scope="module")
def model():
    return scattered()


IDS = random_ids(2, 21)


def bars(ax) -> dict[int, tuple]:
    """Height and colour of each block, by its first token."""
    return {round(bar.get_x()): (bar.get_y() + bar.get_height(), bar.get_facecolor()) for bar in ax.patches}


def marks(ax) -> list[float]:
    [line] = ax.lines
    return sorted(line.get_ydata())


# ---------------------------------------------------------------------------------------------- static twin


@pytest.mark.parametrize(("blocks", "topk", "layer", "row"), [(1, 3, 4, 0), (5, 2, 6, 1), (10, 7, 6, 0), (2, 1, 4, 1)])
def test_the_view_shows_a_model_built_with_that_setting(model, blocks, topk, layer, row):
    other = ds.Model(NANO.replace(candidate_topk_blocks=blocks, index_topk=topk), dtype=torch.float64)
    other.load_state_dict(model.state_dict())
    found = candidates(traced(other, IDS, *CANDIDATE_NAMES), other.config, QUERY, layer, row)
    ax = pool_view(model, IDS, query=QUERY, candidate_topk_blocks=blocks, index_topk=topk, layer=layer, row=row)
    # The same weights in the same dtype: equal, not close.
    assert marks(ax) == sorted(one.score for one in found if one.selected) and len(marks(ax)) == min(topk, 19)
    assert set(bars(ax)) == {one.first for one in found if one.entry % 2 == 0 and one.score is not None}
    assert any(f"{min(blocks, 10)} blocks in the pool" in text for text in texts(ax))
    assert f"layer {layer} " in ax.get_title(loc="left") and f"query at {QUERY}" in ax.get_title(loc="left")
    assert f"candidate_topk_blocks={blocks} of 2 entries, index_topk={topk}" in ax.get_xlabel()


def test_without_a_setting_the_view_shows_the_model_itself(model):
    mine = pool_view(model, IDS, query=QUERY, name="nano")
    explicit = pool_view(model, IDS, query=QUERY, candidate_topk_blocks=3, index_topk=3, layer=4)
    assert bars(mine) == bars(explicit) and marks(mine) == marks(explicit)
    check_plot(lambda **style: pool_view(model, IDS, query=QUERY, name="nano", **style), "nano")


def test_the_view_leaves_the_model_as_it_was(model):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    pool_view(model, IDS, query=QUERY, candidate_topk_blocks=1, index_topk=1)
    assert model.config == NANO and all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_view_that_does_not_exist_is_refused(model):
    with pytest.raises(ValueError, match="queries name position 21: positions are 0"):
        pool_view(model, IDS, query=21)
    with pytest.raises(ValueError, match="candidate_topk_blocks=0"):
        pool_view(model, IDS, query=QUERY, candidate_topk_blocks=0)
    with pytest.raises(ValueError, match="layer=2 neither forms"):
        pool_view(model, IDS, query=QUERY, layer=2)
    with pytest.raises(ValueError, match="no layer forms a candidate pool"):
        pool_view(scattered(NANO.replace(candidate_source_layer_id=None)), IDS, query=QUERY)


def test_a_query_before_the_first_entry_is_refused_by_name():
    """With ratio 2 the token at 0 sees nothing; the one at 1 sees an entry."""
    wide = scattered(NANO.replace(compress_ratios=[0, 0, 2, 2, 2, 2, 2, 2, 0, 0, 0]))
    with pytest.raises(ValueError, match="query=0 sees no entry of layer 4: its first one ends at token 1"):
        pool_view(wide, IDS, query=0)
    assert len(bars(pool_view(wide, IDS, query=1))) == 1


# ---------------------------------------------------------------------------------------------- widget


def parts(box) -> dict:
    """The controls of an explorer by name, its picture and its text."""
    rows, picture, text = box.children
    return {**{control.description: control for control in rows.children}, "picture": picture, "text": text}


def pixels(picture):
    return plt.imread(BytesIO(picture.value))


@pytest.mark.parametrize(("control", "value"), [
    ("query", 9), ("candidate_topk_blocks", 6), ("index_topk", 9), ("layer", 6)])  # fmt: skip
def test_each_control_changes_the_picture_to_that_of_the_view(model, control, value):
    pytest.importorskip("ipywidgets")
    start = {"query": 20, "candidate_topk_blocks": 3, "index_topk": 3, "layer": 4}
    shown = parts(explore_pool(model, IDS))
    assert {name: shown[name].value for name in start} == start
    before = shown["picture"].value
    shown[control].value = value
    assert shown["picture"].value != before
    assert shown["picture"].value == as_png(pool_view(model, IDS, **{**start, control: value}))
    assert shown["picture"].layout.display == "" and shown["text"].layout.display == "none"
    assert pixels(shown["picture"]).std() > 0.05  # not a blank sheet
    assert not plt.get_fignums()  # or a notebook would show the figure a second time


def test_the_sliders_reach_from_the_least_to_where_nothing_is_left_out(model):
    pytest.importorskip("ipywidgets")
    shown = parts(explore_pool(model, IDS))
    reach = {name: (shown[name].min, shown[name].max) for name in ("query", "candidate_topk_blocks", "index_topk")}
    assert reach == {"query": (0, 20), "candidate_topk_blocks": (1, 11), "index_topk": (1, 21)}
    assert [value for _, value in shown["layer"].options] == [4, 6]
    assert not any(shown[name].continuous_update for name in reach)


def test_every_end_of_every_slider_is_drawn():
    """Also with entries of two tokens, an odd number of tokens, and a model whose pool is larger than the text."""
    pytest.importorskip("ipywidgets")
    ratios = [0, 0, 2, 2, 2, 2, 2, 2, 0, 0, 0]
    wide = scattered(NANO.replace(compress_ratios=ratios, candidate_topk_blocks=9, index_topk=20))
    shown = parts(explore_pool(wide, IDS))
    assert shown["candidate_topk_blocks"].max == 9 and shown["index_topk"].max == 20 and shown["query"].min == 1
    for name in ("query", "candidate_topk_blocks", "index_topk"):
        for end in (shown[name].min, shown[name].max):
            before, changed = shown["picture"].value, shown[name].value != end
            shown[name].value = end
            assert shown["picture"].layout.display == "" and (shown["picture"].value != before) == changed


def test_a_start_is_taken_and_a_wrong_one_refused(model):
    pytest.importorskip("ipywidgets")
    shown = parts(explore_pool(model, IDS, query=7, index_topk=2, layer=6))
    assert (shown["query"].value, shown["index_topk"].value, shown["layer"].value) == (7, 2, 6)
    with pytest.raises(ValueError, match=r"query=21 is outside 0\.\.20"):
        explore_pool(model, IDS, query=21)
    with pytest.raises(ValueError, match="no control is called 'topk': they are query, candidate_topk_blocks"):
        explore_pool(model, IDS, topk=2)
    with pytest.raises(ValueError, match=r"layer=99 neither forms the candidate pool nor .*: one of \[4, 6\]"):
        explore_pool(model, IDS, layer=99)


def test_without_ipywidgets_the_explorer_names_the_extra_and_the_view_still_works(model, monkeypatch):
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    with pytest.raises(ImportError, match=r"pip install 'tinyds41\[notebooks\]'"):
        explore_pool(model, IDS)
    assert bars(pool_view(model, IDS, query=QUERY))
