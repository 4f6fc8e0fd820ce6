"""Notebook kernels run on one thread each, also where only notebooks are tested; their times are printed at the end."""

import os
from collections import defaultdict
from pathlib import PurePath

import pytest

from tinyds41.course.lesson_time import LessonTime, broken_limits, table
from tinyds41.course.notebooks import kernel_peak_bytes

os.environ["OMP_NUM_THREADS"] = "1"
PEAK = "kernel_peak_bytes"


def pytest_ignore_collect(collection_path, config):
    """Lessons stay out of `pytest --mutants`, which would also spread the cells of one over both processes."""
    return True if config.getoption("mutants", False) and collection_path.suffix == ".ipynb" else None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item):
    """What the kernel held so far goes into the cell's report: the last cell's teardown ends the kernel."""
    manager = getattr(getattr(item.parent, "kernel", None), "km", None)
    if manager is not None:  # a kernel that nbval has given up has none
        item.user_properties.append((PEAK, kernel_peak_bytes(manager)))


def pytest_terminal_summary(terminalreporter):
    """A table of lessons; a slow machine is told of a passed limit and fails nothing by it."""
    times = _lesson_times(terminalreporter)
    if times:
        terminalreporter.section("lessons")
        for line in [*table(times), *broken_limits(times)]:
            terminalreporter.write_line(line)


def _lesson_times(terminalreporter) -> list[LessonTime]:
    """From the reports of all cells; each comes once per phase: set-up, which starts the kernel, call, teardown."""
    seconds, peaks = defaultdict(float), defaultdict(list)
    for report in (report for reports in terminalreporter.stats.values() for report in reports):
        path = PurePath(getattr(report, "nodeid", "").split("::")[0])
        if path.suffix == ".ipynb" and hasattr(report, "duration"):
            seconds[path.stem] += report.duration
            peaks[path.stem] += [n_bytes for name, n_bytes in report.user_properties if name == PEAK and n_bytes]
    return [LessonTime(name, seconds[name], max(peaks[name], default=None)) for name in sorted(seconds)]
