"""Mutants: the package with one line made wrong on purpose; a test that passes all the same proves nothing.

Each `tests/mutants/*.toml` holds tables of this form:

    [[mutant]]
    name = "kv-source-of-any-ratio"                   # unique among all files
    rule = "spec 1: same ratio"                       # the section or trap that the line implements
    file = "tinyds41/plan.py"
    old = "if s <= layer and ratio_of(s) == ratio"    # exact text, must occur exactly once
    new = "if s <= layer"
    tests = ["tests/test_config.py::test_a_source_has_the_same_ratio"]
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from pathlib import Path

HERE = Path(__file__).parent
TIMEOUT_SECONDS = 300  # a named test takes seconds; a mutant that hangs has to be written differently
# Python could not run the mutant as meant: that shows a mistake in the mutant, not that a test looks at the rule.
NOT_A_KILL = ("ImportError", "ModuleNotFoundError", "SyntaxError", "IndentationError", "NameError")


@dataclass(frozen=True)
class Mutant:
    """One wrong line and the tests that have to notice it."""

    name: str
    rule: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


@dataclass(frozen=True)
class Outcome:
    """What the named tests did, as `outcome_plugin` saw it from inside."""

    exit_code: int
    imported_from: str  # folder of the tinyds41 that was tested, empty when it was never imported
    passed: tuple[str, ...]
    failed: tuple[tuple[str, str], ...]  # (test, name of the exception)
    output: str


class MutantError(AssertionError):
    """A mutant that cannot be judged: its text does not apply, its tests do not run, or fail without it."""


def read_mutants(folder: Path = HERE) -> list[tuple[str, Mutant]]:
    """(file stem, mutant) for each table of each file. Raises MutantError on a malformed or repeated one."""
    found: dict[str, tuple[str, Mutant]] = {}
    for path in sorted(folder.glob("*.toml")):
        for row in tomllib.loads(path.read_text(encoding="utf-8")).get("mutant", []):
            mutant = _mutant(path, row)
            if mutant.name in found:
                raise MutantError(f"{path.name}: a mutant {mutant.name!r} is already in {found[mutant.name][0]}.toml")
            found[mutant.name] = (path.stem, mutant)
    return list(found.values())


def _mutant(path: Path, row: dict) -> Mutant:
    wanted = {field.name for field in fields(Mutant)}
    if set(row) != wanted:
        raise MutantError(f"{path.name}: a mutant has the keys {sorted(wanted)}, got {sorted(row)}")
    tests = row["tests"]
    if not isinstance(tests, list) or not tests:
        raise MutantError(f"{path.name}: {row['name']}: tests is a list of at least one test")
    return Mutant(**{**row, "tests": tuple(tests)})


def mutated(root: Path, mutant: Mutant) -> str:
    """The text of the mutant's file with its one change. Raises MutantError where it does not apply."""
    path = root / mutant.file
    if not mutant.file.startswith("tinyds41/") or not path.is_file():
        raise MutantError(f"{mutant.name}: {mutant.file} is not a file of the package")
    for test in mutant.tests:
        if not (root / test.split("::")[0]).is_file():
            raise MutantError(f"{mutant.name}: {test.split('::')[0]} does not exist")
    if mutant.new == mutant.old:
        raise MutantError(f"{mutant.name}: old and new are the same text")
    text = path.read_text(encoding="utf-8")
    times = text.count(mutant.old)
    if times != 1:
        raise MutantError(f"{mutant.name}: old must occur once in {mutant.file}, it occurs {times} times")
    return text.replace(mutant.old, mutant.new)


@contextmanager
def _copy(root: Path) -> Iterator[Path]:
    """A folder like the repository, the package copied and everything else linked.

    Tests run inside it: pytest puts the folder it is started in, or the tests' one, before any installed package.
    """
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        copy = Path(folder)
        # With its bytecode, which stays valid for every file that keeps its time: half a second of each run.
        shutil.copytree(root / "tinyds41", copy / "tinyds41")
        for entry in root.iterdir():
            if entry.name != "tinyds41" and not entry.name.startswith("."):
                (copy / entry.name).symlink_to(entry)
        yield copy


def run_tests(copy: Path, tests: tuple[str, ...]) -> Outcome:
    """Runs the tests in a process of its own, up to the first failure, without notebooks and workers."""
    report = copy / ".outcome.json"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(copy), str(HERE)]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "MUTANT_OUTCOME": str(report),
    }
    for name in [name for name in environment if name.startswith("PYTEST_")]:
        del environment[name]  # the outer pytest's worker number and options
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # no workers, no notebooks: half the start-up time
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-o", "addopts=", "-p", "no:cacheprovider",
               "-p", "outcome_plugin", *tests]  # fmt: skip
    done = subprocess.run(command, cwd=copy, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                          timeout=TIMEOUT_SECONDS, check=False)  # fmt: skip
    seen = json.loads(report.read_text()) if report.exists() else {"imported_from": "", "passed": [], "failed": []}
    return Outcome(done.returncode, seen["imported_from"], tuple(seen["passed"]),
                   tuple((test, error) for test, error in seen["failed"]), done.stdout + done.stderr)  # fmt: skip


_healthy: dict[tuple[Path, tuple[str, ...]], Outcome] = {}


def check_healthy(root: Path, tests: tuple[str, ...], among: tuple[str, ...] = ()) -> None:
    """The tests pass on the package as it is; each set is run once per process. Raises MutantError.

    among: a larger set that has them, run in one go in their place: only if that fails they run on their own.
    """
    with suppress(subprocess.TimeoutExpired):  # many tests, a busy machine
        if among and _sound(_outcome(root, among)):
            return
    outcome = _outcome(root, tests)
    if not _sound(outcome):
        raise MutantError(f"{', '.join(tests)} do not pass without a mutant:\n{outcome.output[-3000:]}")


def _outcome(root: Path, tests: tuple[str, ...]) -> Outcome:
    key = (root, tests)
    if key not in _healthy:
        with _copy(root) as copy:
            _healthy[key] = run_tests(copy, tests)
    return _healthy[key]


def _sound(outcome: Outcome) -> bool:
    return outcome.exit_code == 0 and bool(outcome.passed)


def check_killed(root: Path, mutant: Mutant, among: tuple[str, ...] = ()) -> Outcome:
    """One of the named tests fails under the mutant, by what it checks. Raises MutantError, AssertionError.

    among: see `check_healthy`.
    """
    text = mutated(root, mutant)
    check_healthy(root, mutant.tests, among)
    with _copy(root) as copy:
        (copy / mutant.file).write_text(text, encoding="utf-8")
        try:
            outcome = run_tests(copy, mutant.tests)
        except subprocess.TimeoutExpired as error:
            raise MutantError(f"{mutant.name}: still running after {TIMEOUT_SECONDS} s") from error
        if outcome.imported_from and Path(outcome.imported_from) != copy / "tinyds41":
            raise MutantError(f"{mutant.name}: the tests imported {outcome.imported_from}, not the mutated copy")
    if outcome.exit_code == 0:
        raise AssertionError(f"SURVIVED: {mutant.name} ({mutant.rule}): {', '.join(mutant.tests)} pass all the same")
    if not any(error not in NOT_A_KILL for _, error in outcome.failed):
        raise MutantError(f"{mutant.name}: no test failed by what it checks:\n{outcome.output[-3000:]}")
    return outcome
