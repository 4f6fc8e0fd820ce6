"""pytest plugin: writes which tests passed and by which exception others failed, to $MUTANT_OUTCOME."""

import json
import os
import sys
from pathlib import Path

import pytest

passed: list[str] = []
failed: list[tuple[str, str]] = []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.when == "call" and report.passed:
        passed.append(report.nodeid)
    if report.failed and report.when != "teardown" and call.excinfo is not None:
        failed.append((report.nodeid, call.excinfo.typename))
    return report


def pytest_sessionfinish():
    # Errors in collecting a file are not among the failures: they show that the mutant, not the rule, is broken.
    package = sys.modules.get("tinyds41")
    folder = str(Path(package.__file__).parent) if package else ""
    content = {"imported_from": folder, "passed": passed, "failed": failed}
    Path(os.environ["MUTANT_OUTCOME"]).write_text(json.dumps(content))
