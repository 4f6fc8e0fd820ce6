"""What all explorers share: who is asked for what, what is shown, and what a stored lesson keeps of it."""

import json
import subprocess
import sys
from io import BytesIO

import matplotlib.pyplot as plt
import pytest
from matplotlib.colors import to_hex

from tinyds41.course import notebook_rules, notebooks
from tinyds41.show.explorer import as_png, explorer
from tinyds41.show.style import PALETTES, Style, new_axes, styled

LESSON = """\
# %% [markdown]
# # What is in the pool?

# %%
import torch

import tinyds41 as ds
from tinyds41.show.explore_hash import explore_hash, hash_view
from tinyds41.show.explore_plan import explore_plan, plan_view
from tinyds41.show.explore_pool import explore_pool, pool_view

config = ds.Config.preset("nano")
model = ds.Model(config, seed=0)
ids = torch.arange(4, 24)[None]
assert ids.shape == (1, 20)

# %%
ax = pool_view(model, ids, query=19)

# %%
# NBVAL_IGNORE_OUTPUT
explore_pool(model, ids)

# %% tags=["nbval-check-output"]
print(hash_view(model, "5 6 7"))

# %%
# NBVAL_IGNORE_OUTPUT
explore_hash(model, "5 6 7")

# %%
# NBVAL_IGNORE_OUTPUT
explore_plan(config)
"""


@styled
def line(style, height):
    ax = new_axes(style)
    ax.plot([0, height])
    return ax


@pytest.fixture
def slider():
    widgets = pytest.importorskip("ipywidgets")
    return widgets.IntSlider(1, 0, 9, description="height")


def parts(box):
    """Picture and text of an explorer, and which of both is on show."""
    _, picture, text = box.children
    return picture, text, ["picture", "text"][picture.layout.display == "none"]


def test_a_figure_a_text_and_an_error_take_turns(slider):
    def view(height):
        if height > 5:
            raise ValueError(f"height={height} is <high>")
        return line(height) if height > 2 else f"only {height} & flat"

    box = explorer(view, {"height": slider})
    picture, text, on_show = parts(box)
    assert on_show == "text" and "only 1 &amp; flat" in text.value
    slider.value = 4
    assert parts(box)[2] == "picture" and picture.value == as_png(line(4)) and text.layout.display == "none"
    slider.value = 6
    assert parts(box)[2] == "text" and "height=6 is &lt;high&gt;" in text.value and text.layout.display == ""
    slider.value = 5
    assert parts(box)[2] == "picture" and picture.value == as_png(line(5))


def test_a_mistake_that_is_no_wrong_value_is_not_hidden(slider):
    with pytest.raises(ZeroDivisionError):
        explorer(lambda height: str(1 // (height - 1)), {"height": slider})


def test_the_picture_is_the_whole_figure_on_its_own_paper():
    ax = line(3, style=Style("slide", "dark"))
    ax.annotate("outside", (1.2, 0.5), xycoords="axes fraction", annotation_clip=False)
    wide = plt.imread(BytesIO(as_png(ax)))
    assert to_hex(wide[0, 0, :3]) == PALETTES["dark"].paper and wide[..., 3].min() == 1
    assert wide.shape[1] > plt.imread(BytesIO(as_png(line(3, style=Style("slide", "dark"))))).shape[1]
    assert not plt.get_fignums()


def test_ipywidgets_is_imported_when_an_explorer_is_made_and_not_before():
    code = ("import sys; from tinyds41.show import explore_hash, explore_plan, explore_pool;"
            "sys.exit('ipywidgets' in sys.modules)")  # fmt: skip
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A lesson with all three explorers, executed."""
    for package in ("jupytext", "nbclient", "ipykernel", "ipywidgets"):
        pytest.importorskip(package)
    script = tmp_path_factory.mktemp("lesson") / "20_explorers.py"
    script.write_text(LESSON)
    return notebooks.run(script)


def test_a_lesson_with_explorers_is_sound_and_a_second_run_gives_the_same_bytes(stored):
    first = stored.read_bytes()
    assert notebook_rules.check(stored.with_suffix(".py")) == []
    assert notebooks.run(stored.with_suffix(".py")).read_bytes() == first


def test_a_stored_explorer_keeps_its_first_picture_and_its_twin(stored):
    """Opened without a kernel the page has the twin's figure; where widgets are drawn from the file, also theirs."""
    notebook = json.loads(stored.read_text())
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    kinds = [set(output.get("data", {"text": ""})) for cell in code for output in cell["outputs"]]
    assert kinds == [{"image/png", "text/plain"}, {notebooks.VIEW, "text/plain"}, {"text"},
                     {notebooks.VIEW, "text/plain"}, {notebooks.VIEW, "text/plain"}]  # fmt: skip
    states = notebook["metadata"]["widgets"][notebooks.STATE]["state"].values()
    pictures = [state["buffers"] for state in states if state["model_name"] == "ImageModel" and "buffers" in state]
    # Of the pool and of the plan; the hash explorer has none.
    assert [len(buffers) for buffers in pictures if len(buffers[0]["data"]) > 1000] == [1, 1]


def test_nbval_runs_a_stored_lesson_with_explorers(stored):
    pytest.importorskip("nbval")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-o", "addopts=",
         "--rootdir", str(stored.parent), "--nbval-lax", "--nbval-current-env", str(stored)],
        cwd=stored.parent, capture_output=True, text=True, check=False)  # fmt: skip
    assert done.returncode == 0 and "6 passed" in done.stdout, done.stdout + done.stderr
