"""A lesson is executed, stored without chance, and refused when it breaks a rule of the house."""

import copy
import json
import re
from pathlib import Path

import pytest

from tinyds41.cli import main
from tinyds41.course import notebook_rules, notebooks

PLACE = "/".join(["", "home", "someone"])  # in pieces: no file of ours holds such a path
SCRIPT = '''\
# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Is a sum the same both ways?
# It is 4,950 for the numbers below 100.

# %%
import os
import sys

from tinyds41.show.setting_plots import plot_loss_by_setting

# %%
# NBVAL_CHECK_OUTPUT
total = sum(range(100))
print("the sum is", end=" ")
sys.stdout.flush()
print(total)
assert total == 4950

# %% tags=["solution"]
# Chance that no run repeats: random ids of widgets, times in a progress bar.
print(f"threads: {os.environ['OMP_NUM_THREADS']}")
print(" 50%|#####     | 1/2 [00:03<00:03]", file=sys.stderr)

# %%
ax = plot_loss_by_setting({1: 2.0}, setting="k", trained=1, model="one")

# %%
ax = plot_loss_by_setting({1: 2.0}, setting="k", trained=1, model="two")
'''

REPOSITORY = Path(__file__).parents[1]
LESSONS = sorted((REPOSITORY / "notebooks").glob("[0-9]*.py"))


@pytest.mark.parametrize("script", LESSONS, ids=lambda script: script.stem)
def test_every_stored_lesson_is_sound(script):
    assert notebook_rules.check(script) == []


PATTERNS = ("README.md", "docs/*.md", "tinyds41/cli.py", "tinyds41/*/*_command.py")
READ_BY_USERS = [*LESSONS, *(page for pattern in PATTERNS for page in sorted(REPOSITORY.glob(pattern)))]


@pytest.mark.parametrize("page", READ_BY_USERS, ids=lambda page: page.name)
def test_no_page_sends_the_reader_to_a_lesson_that_is_not_there(page):
    named = re.findall(r"(?i:lessons?)\s(?:#\s)?\**(\d\d)|第 ?(\d\d) ?课", page.read_text(encoding="utf-8"))
    assert {one or other for one, other in named} <= {script.stem[:2] for script in LESSONS}


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    """A small lesson after two runs: its script, and the bytes of both."""
    script = tmp_path_factory.mktemp("lessons") / "00_sum.py"
    script.write_text(SCRIPT, encoding="utf-8")
    first = notebooks.run(script).read_bytes()
    return script, first, notebooks.run(script).read_bytes()


@pytest.fixture
def lesson(executed, tmp_path):
    """A copy of it: its script, and a function that stores a changed notebook and returns what is wrong with it."""
    script = tmp_path / "00_sum.py"
    script.write_text(SCRIPT, encoding="utf-8")

    def changed(edit):
        notebook = json.loads(executed[1])
        edit(notebook["cells"])
        script.with_suffix(".ipynb").write_text(json.dumps(notebook), encoding="utf-8")
        return notebook_rules.check(script)

    return script, changed


def test_a_second_run_gives_the_same_bytes(executed):
    _, first, second = executed
    assert first == second


def test_a_stored_lesson_has_its_outputs_counts_and_tags_and_no_version(executed):
    notebook = json.loads(executed[1])
    imports, total, solution = notebook["cells"][1:4]
    assert [cell["execution_count"] for cell in (imports, total, solution)] == [1, 2, 3]
    assert ["".join(output["text"]) for output in total["outputs"]] == ["the sum is 4950\n"]
    assert "".join(solution["outputs"][0]["text"]) == "threads: 1\n"
    assert solution["metadata"]["tags"] == ["solution"]
    assert set(notebook["metadata"]) == {"jupytext", "kernelspec", "language_info"}
    assert "version" not in notebook["metadata"]["language_info"]


def test_a_progress_bar_is_not_stored(executed):
    assert len(json.loads(executed[1])["cells"][3]["outputs"]) == 1


def test_every_figure_is_stored_not_only_the_first(executed):
    """A style that ends with its plot must not end the notebook's own settings."""
    for cell in json.loads(executed[1])["cells"][4:]:
        assert [sorted(output["data"]) for output in cell["outputs"]] == [["image/png", "text/plain"]]


def test_a_sound_lesson_passes(lesson):
    _, changed = lesson
    assert changed(lambda cells: None) == []


def set_count(cells):
    cells[2]["execution_count"] = 7


def store_error(cells):
    cells[2]["outputs"].append({"output_type": "error", "ename": "KeyError", "evalue": "'x'", "traceback": []})


def store_warning(cells):
    cells[2]["outputs"].append({"output_type": "stream", "name": "stderr", "text": ["UserWarning: old\n"]})


def store_path(cells):
    cells[2]["outputs"][0]["text"] = [f"saved in {PLACE}/runs\n", "4950\n"]


def drop_cell(cells):
    cells.pop()


def change_source(cells):
    cells[2]["source"] = cells[2]["source"] + ["\nprint(2)"]


def drop_tag(cells):
    cells[3]["metadata"].pop("tags")


@pytest.mark.parametrize(("edit", "message"), [
    (set_count, "00_sum cell 2: execution count 7, expected 2"),
    (store_error, "00_sum cell 2: stored error KeyError: 'x'"),
    (store_warning, "00_sum cell 2: stored stderr: UserWarning: old"),
    (store_path, f"00_sum cell 2: a path of one machine: {PLACE}"),
    (drop_cell, "00_sum has 6 cells in 00_sum.py, 5 in its .ipynb"),
    (change_source, "00_sum cell 2: 00_sum.py and its .ipynb differ: run `tinyds41 lessons run 00_sum`"),
    (drop_tag, "00_sum cell 3: 00_sum.py and its .ipynb differ: run `tinyds41 lessons run 00_sum`"),
])  # fmt: skip
def test_a_notebook_that_is_stale_or_unclean_is_refused(lesson, edit, message):
    _, changed = lesson
    assert changed(edit) == [message]


@pytest.mark.parametrize("cell", [{}, 1, {"cell_type": "code", "metadata": {}}])
def test_what_is_no_cell_is_refused(tmp_path, cell):
    (tmp_path / "odd.ipynb").write_text(json.dumps({"cells": [cell]}))
    with pytest.raises(ValueError, match=r"odd\.ipynb is not a notebook: cell 0 lacks its type, source or metadata"):
        notebooks.read_notebook(tmp_path / "odd.ipynb")


def test_a_kernel_that_dies_is_named(tmp_path):
    (tmp_path / "dies.py").write_text("# %%\nimport os\nos._exit(3)\n")
    with pytest.raises(ValueError, match=r"dies.*: its kernel died"):
        notebooks.run(tmp_path / "dies.py")


def cells_of(*code, text="# Why?"):
    """An executed notebook of these code cells, in memory."""
    cells = [{"cell_type": "markdown", "source": text, "metadata": {}}]
    cells += [{"cell_type": "code", "source": each, "metadata": {}, "outputs": [], "execution_count": number}
              for number, each in enumerate(code, 1)]  # fmt: skip
    return {"cells": cells}


def lines(n):
    return "\n".join(["# a comment does not count", "", *(f"x{i} = {i}" for i in range(n))])


@pytest.mark.parametrize(("notebook", "rule", "message"), [
    (cells_of(lines(26), "x = 1", "y = 1"), "short_cells", "cell 1: 26 lines of code, at most 25"),
    (cells_of(lines(9), lines(9), "y = 1"), "short_cells", "has code cells of 9 lines (median), at most 8"),
    (cells_of("y = 1", text="word " * 91), "short_cells", "cell 0: 91 words of text, at most 90"),
    (cells_of("y = 1", text="字" * 182), "short_cells", "cell 0: 91 words of text, at most 90"),
    (cells_of("import os", "from os import path\nassert path"), "structure", "imports in cells [1, 2], one import cell "
                                                                             "is wanted"),
    (cells_of("import os", "# assert\nx = 1"), "structure", "asserts nothing"),
    (cells_of("x = 12_345", text="From 12,345 to 1,234."), "computed_numbers",
     "cell 0: 1,234 is neither computed nor asserted"),
    (cells_of("x = 161", text="It grew 1.61 times."), "computed_numbers",
     "cell 0: 1.61 is neither computed nor asserted"),
])  # fmt: skip
def test_a_rule_of_the_house_that_is_broken_is_named(notebook, rule, message):
    assert list(getattr(notebook_rules, rule)(notebook, None)) == [message]


@pytest.mark.parametrize(("notebook", "rule"), [
    (cells_of(lines(25), "x = 1"), "structure_free"),
    (cells_of("y = 1", text="**word** - word <b>x</b> " * 30), "short_cells"),
    (cells_of(lines(25), lines(8), lines(8)), "short_cells"),
    (cells_of("y = 1.50", text="V4.1, 1.50, lesson 05, 25 minutes, §2.3, `x[17]`, [site](https://a.b/2609.19969)"),
     "computed_numbers"),
])
def test_what_is_just_within_the_limits_passes(notebook, rule):
    if rule == "structure_free":
        notebook["cells"] = notebook["cells"][2:]
        rule = "short_cells"
    assert list(getattr(notebook_rules, rule)(notebook, None)) == []


def widget_notebook(*ids):
    """A notebook that shows one widget, whose child and a widget that nothing shows are stored with it."""
    shown, child, lost = ids
    data = {notebooks.VIEW: {"model_id": shown}, "text/plain": "FloatSlider()"}
    cell = {"cell_type": "code", "source": "", "metadata": {"execution": {"t": 1}}, "execution_count": 1,
            "outputs": [{"output_type": "display_data", "data": data, "metadata": {}}]}  # fmt: skip
    state = {lost: {"s": 1}, child: {"s": 2}, shown: {"children": [f"IPY_MODEL_{child}"]}}
    return {"cells": [cell], "metadata": {"widgets": {notebooks.STATE: {"state": state}}, "papermill": 3}}


def test_widget_ids_become_the_same_in_every_run():
    ids = [letter * 32 for letter in "abcdef"]
    first, second = (notebooks.normalised(widget_notebook(*three)) for three in (ids[:3], ids[:2:-1]))
    assert first == second
    states = first["metadata"]["widgets"][notebooks.STATE]["state"]
    assert list(states.values()) == [{"children": ["IPY_MODEL_" + "2".zfill(32)]}, {"s": 2}]
    assert set(first["metadata"]) == {"widgets", "language_info", "jupytext"} and first["cells"][0]["metadata"] == {}


def test_a_failing_lesson_says_why_and_leaves_the_stored_one(lesson, capsys):
    script, changed = lesson
    changed(lambda cells: None)
    before = script.with_suffix(".ipynb").read_bytes()
    script.write_text(SCRIPT.replace("== 4950", "== 4951"), encoding="utf-8")
    with pytest.raises(ValueError, match=r"^00_sum.py: assert total == 4951: AssertionError$"):
        notebooks.run(script)
    assert script.with_suffix(".ipynb").read_bytes() == before
    assert main(["lessons", "check", "--folder", str(script.parent)]) == 1
    assert "00_sum cell 2: 00_sum.py and its .ipynb differ" in capsys.readouterr().out


def test_a_wrong_number_in_the_text_or_in_an_assertion_makes_the_command_fail(lesson, capsys):
    """Text: the check refuses it, with a notebook in step. Assertion: the execution fails."""
    script, _ = lesson
    folder = ["--folder", str(script.parent)]
    script.write_text(SCRIPT.replace("# It is 4,950", "# It is 4,951"), encoding="utf-8")
    assert main(["lessons", "run", *folder]) == 1
    assert "00_sum cell 0: 4,951 is neither computed nor asserted\n" in capsys.readouterr().out
    assert main(["lessons", "check", *folder]) == 1
    script.write_text(SCRIPT.replace("total == 4950", "total == 4951"), encoding="utf-8")
    assert main(["lessons", "run", *folder]) == 2
    assert "00_sum.py: assert total == 4951: AssertionError" in capsys.readouterr().err


def test_a_script_that_was_changed_after_its_run_is_stale_also_in_its_text(lesson, capsys):
    script, changed = lesson
    assert changed(lambda cells: None) == []
    script.write_text(SCRIPT.replace("numbers below", "whole numbers below"), encoding="utf-8")
    assert main(["lessons", "check", "--folder", str(script.parent)]) == 1
    assert "00_sum cell 0: 00_sum.py and its .ipynb differ: run `tinyds41 lessons run 00" in capsys.readouterr().out


def test_several_lessons_can_be_named_and_one_is_taken_once(tmp_path, capsys):
    for name in ("00_a", "01_b", "02_c"):
        (tmp_path / f"{name}.py").write_text("# %%\nx = 1\n", encoding="utf-8")
        notebook = notebooks.read_script(tmp_path / f"{name}.py")
        notebook["cells"][0]["execution_count"] = 1
        (tmp_path / f"{name}.ipynb").write_text(notebooks.as_text(notebook), encoding="utf-8")
    found = notebooks.lessons(tmp_path, ["02_c", "00_a.py", "notebooks/02_c.ipynb"])
    assert [path.name for path in found] == ["02_c.py", "00_a.py"]
    main(["lessons", "check", "02_c", "00_a", "--folder", str(tmp_path)])
    assert {line.split()[0] for line in capsys.readouterr().out.splitlines()} == {"02_c", "00_a"}
    assert main(["lessons", "check", "00_a", "05_d", "--folder", str(tmp_path)]) == 2
    assert "no lesson '05_d': the lessons are 00_a, 01_b, 02_c" in capsys.readouterr().err


def test_the_command_finds_a_lesson_by_name_and_names_those_there_are(executed, capsys):
    folder = str(executed[0].parent)
    assert main(["lessons", "check", "00_sum", "--folder", folder]) == 0
    assert capsys.readouterr().out == "00_sum: sound\n"
    assert main(["lessons", "check", "07", "--folder", folder]) == 2
    assert capsys.readouterr().err == "tinyds41: error: no lesson '07': the lessons are 00_sum\n"


def test_a_folder_without_lessons_and_a_missing_or_broken_notebook_are_named(tmp_path, capsys):
    assert main(["lessons", "check", "--folder", str(tmp_path)]) == 2
    assert f"no lessons in {tmp_path}" in capsys.readouterr().err
    (tmp_path / "00_sum.py").write_text(SCRIPT, encoding="utf-8")
    assert main(["lessons", "check", "--folder", str(tmp_path)]) == 2
    assert "`tinyds41 lessons run 00_sum` makes it" in capsys.readouterr().err
    for broken in ("{", "[]", '{"cells": 3}'):
        (tmp_path / "00_sum.ipynb").write_text(broken, encoding="utf-8")
        assert main(["lessons", "check", "--folder", str(tmp_path)]) == 2
        assert "00_sum.ipynb is not a notebook" in capsys.readouterr().err


@pytest.mark.parametrize("action", ["run", "check", "time"])
@pytest.mark.parametrize(("content", "message"), [
    (SCRIPT.replace("total = sum(range(100))", "total = sum(range(100)").encode(), r"line 21: '\(' was never closed"),
    (SCRIPT.encode().replace(b"4950", b"4950  # gr\xfc\xdf"), "line 25: byte 0xfc is not UTF-8"),
    (SCRIPT.replace("total = sum", "total = = sum").encode(), "line 21: invalid syntax"),
    (b"# %%\nx\0y = 1\n", "01_bad.py: .*null bytes"),
])  # fmt: skip
def test_a_script_that_is_no_python_is_named_with_its_line(tmp_path, capsys, action, content, message):
    (tmp_path / "01_bad.py").write_bytes(content)
    (tmp_path / "01_bad.ipynb").write_text('{"cells": []}')
    assert main(["lessons", action, "--folder", str(tmp_path)]) == 2
    printed = capsys.readouterr().err
    assert "01_bad.py" in printed and re.search(message, printed) and printed.count("\n") == 1


def test_magics_and_waiting_cells_are_no_syntax_errors(tmp_path):
    script = tmp_path / "01_magic.py"
    script.write_bytes(b"# %%\r\n%matplotlib inline\r\nif True:\r\n    !ls\r\nawait x\r\n")
    [cell] = notebooks.read_script(script)["cells"]
    assert notebooks.source(cell) == "%matplotlib inline\nif True:\n    !ls\nawait x"


def test_cell_ids_follow_from_the_text_and_differ_where_the_text_repeats(tmp_path):
    script = tmp_path / "a.py"
    script.write_text("# %%\nx = 1\n\n# %%\nx = 1\n\n# %%\ny = 1\n", encoding="utf-8")
    before = [cell["id"] for cell in notebooks.read_script(script)["cells"]]
    script.write_text("# %%\nz = 1\n\n# %%\nx = 1\n\n# %%\nx = 1\n\n# %%\ny = 1\n", encoding="utf-8")
    after = [cell["id"] for cell in notebooks.read_script(script)["cells"]]
    assert len(set(after)) == 4 and after[1:] == before


def test_check_changes_nothing(lesson):
    script, changed = lesson
    changed(lambda cells: None)
    notebook = notebooks.read_notebook(script.with_suffix(".ipynb"))
    before = copy.deepcopy(notebook)
    notebook_rules.check(script)
    assert notebooks.read_notebook(script.with_suffix(".ipynb")) == before
