"""Run times of lessons: measured in a kernel of their own, compared with the limits, printed after a test run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tinyds41.cli import main
from tinyds41.course import lesson_time, notebooks
from tinyds41.course.lesson_time import LessonTime, as_json, broken_limits, table

REPOSITORY = Path(__file__).parents[1]
GB = 1_000_000_000
# The held memory is touched, page by page; the kernel alone takes 50 to 100 MB.
SCRIPT = """\
# %% [markdown]
# # Who holds 200 MB for half a second?

# %%
import os
import time

# %%
held = bytearray(200_000_000)
for start in range(0, len(held), 4096):
    held[start] = 1
time.sleep(0.5)
print("threads:", os.environ["OMP_NUM_THREADS"])
assert len(held) == 200_000_000
"""


@pytest.fixture
def folder(tmp_path):
    for name in ("00_first", "01_second"):
        (tmp_path / f"{name}.py").write_text(SCRIPT, encoding="utf-8")
    return tmp_path


def test_within_the_limits_nothing_is_said():
    assert broken_limits([LessonTime("00", 120.0, 2 * GB), LessonTime("01", 0.0, None)]) == []
    assert broken_limits([]) == []


MEAN = "lessons took {} s in the mean, at most 60 are allowed"


@pytest.mark.parametrize(("times", "lines"), [
    ([LessonTime("00", 120.1, GB), *[LessonTime("01", 0.0, GB)] * 2], ["00 took 120.1 s, at most 120 are allowed"]),
    ([LessonTime("00", 1.0, 2 * GB + 10**7)], ["00 held 2.01 GB, at most 2.00 GB are allowed"]),
    ([LessonTime("00", 61.0, GB), LessonTime("01", 63.0, GB)], [MEAN.format("62.0")]),
    ([LessonTime("00", 61.0, GB), LessonTime("01", 58.0, GB)], []),
])  # fmt: skip
def test_each_limit_that_is_passed_is_named_with_its_value(times, lines):
    assert broken_limits(times) == lines


def test_the_table_has_a_line_per_lesson_their_mean_and_the_limits():
    lines = table([LessonTime("00_tour", 80.04, 780 * 10**6), LessonTime("05", 40.0, None)])
    assert [" ".join(line.split()) for line in lines] == [
        "lesson seconds peak memory", "00_tour 80.0 0.78 GB", "05 40.0 -", "mean 60.0",
        "limit, each 120 2.00 GB", "limit, mean 60"]  # fmt: skip


def test_json_holds_what_the_table_holds():
    assert as_json([LessonTime("00", 130.123, GB)]) == {
        "lessons": [{"lesson": "00", "seconds": 130.12, "peak_bytes": GB}], "mean_seconds": 130.12, "threads": 1,
        "limits": {"seconds": 120, "mean_seconds": 60, "peak_bytes": 2 * GB},
        "broken": ["00 took 130.1 s, at most 120 are allowed",
                   "lessons took 130.1 s in the mean, at most 60 are allowed"]}  # fmt: skip


def test_time_executes_from_the_script_in_a_kernel_of_its_own_and_stores_nothing(folder, capsys):
    assert main(["lessons", "time", "01_second", "--json", "--folder", str(folder)]) == 0
    (row,) = json.loads(capsys.readouterr().out)["lessons"]
    assert row["lesson"] == "01_second" and 0.5 < row["seconds"] < 120
    # What this process holds besides, torch for one, is not the kernel's.
    assert row["peak_bytes"] is None or 200_000_000 < row["peak_bytes"] < 400_000_000
    assert not list(folder.glob("*.ipynb"))


def test_a_broken_limit_makes_the_command_fail(folder, capsys, monkeypatch):
    monkeypatch.setattr(lesson_time, "MOST_SECONDS", 0.1)
    assert main(["lessons", "time", "00_first", "--folder", str(folder)]) == 1
    assert "at most 0.1 are allowed" in capsys.readouterr().out


def test_a_test_run_prints_a_table_of_lessons(folder):
    """Also where cells run in another process than the one that prints; a passed limit is no failure."""
    for script in notebooks.lessons(folder):
        notebooks.run(script)
    (folder / "conftest.py").write_text((REPOSITORY / "notebooks" / "conftest.py").read_text(encoding="utf-8"))
    command = [sys.executable, "-m", "pytest", "-q", "--nbval-lax", "--nbval-current-env", "-n", "1", "-p",
               "no:cacheprovider", "--rootdir", str(folder), str(folder)]  # fmt: skip
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["PYTHONPATH"] = str(REPOSITORY)
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines() if "GB" in line or "mean" in line}
    for name in ("00_first", "01_second"):
        assert 0.5 < float(rows[name][0]) < 120
        assert 0.2 < float(rows[name][1]) < 0.4 or rows[name][1] == "-"
    assert "mean" in rows
