"""A fast run changes steps and softens assertions, and nothing of it lands among the lessons."""

import json
import re
from pathlib import Path

import pytest

from tinyds41.cli import main
from tinyds41.course import notebooks
from tinyds41.course.fast_lessons import NOT_HELD, quickened, run_fast

SCRIPT = '''\
# %% [markdown]
# # How far do 140 steps get?

# %%
from pathlib import Path

# %%
STEPS, LENGTH = 140, 128


def train(steps, seed=7):
    Path("trained.txt").write_text(str(steps))
    return steps


first, second = train(steps=STEPS), train(steps=260)
assert first == 140, f"only {first}"
assert (
    second == 260
    and LENGTH == 128
)
for limit in (1, 100):
    assert second > limit
assert LENGTH == 128
print("trained", first, second)

# %%
print("later", first)
'''


def cell(code):
    return {"cells": [{"cell_type": "code", "source": code}]}


@pytest.mark.parametrize(("code", "fast"), [
    ("train(model, steps=140)", "train(model, steps=14)"),
    ("train(model, steps=1_400, seed=140)", "train(model, steps=140, seed=140)"),
    ("STEPS, LENGTH = 140, 128", "STEPS, LENGTH = 14, 128"),
    ("STEPS = 12", "STEPS = 2"),
    ("steps=1", "steps=1"),
    ("train(steps=STEPS)", "train(steps=STEPS)"),
    ("first_steps=140", "first_steps=140"),
    ("%matplotlib inline\nassert x", "%matplotlib inline\nassert x"),
    ("if x: assert y", "if x: assert y"),
    ("assert x; z = 1", "assert x; z = 1"),
])  # fmt: skip
def test_only_steps_change(code, fast):
    assert quickened(cell(code))["cells"][0]["source"] == fast


def test_text_and_the_given_notebook_stay():
    given = {"cells": [{"cell_type": "markdown", "source": "steps=140"}, *cell("f(steps=140)")["cells"]]}
    before = json.dumps(given)
    assert quickened(given)["cells"][0] == given["cells"][0]
    assert json.dumps(given) == before


def softened(code, **values):
    """What the softened code prints and defines."""
    printed = []
    exec(quickened(cell(code))["cells"][0]["source"], values | {"print": printed.append}, values)
    return printed, values


def test_a_failed_assertion_is_said_and_the_cell_goes_on():
    code = "assert x == 1\nassert x == 2\nfor i in (1, 2):\n    assert (\n        i\n        < 2)\ny = 3"
    printed, values = softened(code, x=1)
    assert printed == [f"{NOT_HELD}x == 2", f"{NOT_HELD}i < 2"] and values["y"] == 3


def test_what_is_no_assertion_still_fails():
    with pytest.raises(ZeroDivisionError):
        softened("assert 1 / 0")


@pytest.fixture
def folder(tmp_path):
    lessons = tmp_path / "lessons"
    lessons.mkdir()
    (lessons / "00_steps.py").write_text(SCRIPT, encoding="utf-8")
    return lessons


def test_a_fast_run_writes_to_its_own_folder_alone(folder, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    path, not_held = run_fast(folder / "00_steps.py", out)
    assert not_held == ["first == 140", "second == 260 and LENGTH == 128", "second > limit"]
    assert path == out / "00_steps.ipynb" and [entry.name for entry in folder.iterdir()] == ["00_steps.py"]
    assert (out / "trained.txt").read_text() == "26"
    printed = [output["text"] for one in json.loads(path.read_text())["cells"] for output in one.get("outputs", [])]
    assert any("trained 14 26" in "".join(text) for text in printed) and "later 14\n" in map("".join, printed)


def test_the_command_prints_where_and_what_did_not_hold(folder, capsys):
    assert main(["lessons", "run", "--fast", "00_steps", "--folder", str(folder)]) == 0
    shown = capsys.readouterr().out
    found = re.search(r"00_steps: executed .* stored in (.*)\n  does not hold: first == 140\n", shown)
    assert found and Path(found[1]).is_file() and Path(found[1]).parent != folder
    assert not list(folder.glob("*.ipynb"))


@pytest.mark.parametrize("argv", [["check", "--fast"], ["time", "--fast"], ["run", "--json"], []])
def test_an_option_of_another_action_is_refused(argv, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["lessons", *argv])
    assert "tinyds41" in capsys.readouterr().err


def test_a_fast_run_finds_the_steps_of_every_lesson_that_trains():
    """A lesson that writes them another way would train as long as ever."""
    for script in notebooks.lessons(Path(__file__).parents[1] / "notebooks"):
        lesson = notebooks.read_script(script)
        code, fast = (training_cells(notebook) for notebook in (lesson, quickened(lesson)))
        assert not code or code != fast, script.name


def training_cells(notebook):
    sources = [notebooks.source(each) for each in notebook["cells"] if each["cell_type"] == "code"]
    return [code for code in sources if "ds.train(" in code or "STEPS" in code]
