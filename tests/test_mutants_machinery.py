"""The mutant machinery tells a killed mutant from a survivor and from one that proves nothing."""

from pathlib import Path

import pytest
from mutation import Mutant, MutantError, check_killed, mutated, read_mutants

ROOT = Path(__file__).parents[1]

PACKAGE = '''
def total(values):
    result = 0
    for value in values:
        result += value
    return result


def mean(values):
    return total(values) / len(values)
'''

TESTS = '''
from tinyds41.sums import mean, total


def test_total():
    assert total([1, 2, 3]) == 6


def test_mean():
    assert mean([2, 2]) == 2


def test_wrong():
    assert total([]) == 1
'''


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    """A small repository with a package of the same name, one test too weak for its rule, and one that fails."""
    root = tmp_path_factory.mktemp("scratch")
    for name, text in {"tinyds41/__init__.py": "", "tinyds41/sums.py": PACKAGE, "tests/test_sums.py": TESTS}.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(text)
    return root


def change(old, new, test="test_total"):
    return Mutant("wrong-sum", "arithmetic", "tinyds41/sums.py", old, new, (f"tests/test_sums.py::{test}",))


def test_a_mutant_that_a_test_notices_is_killed_inside_the_copy(scratch):
    outcome = check_killed(scratch, change("result = 0", "result = 1"))
    assert outcome.failed == (("tests/test_sums.py::test_total", "AssertionError"),)
    assert Path(outcome.imported_from).name == "tinyds41"
    assert not Path(outcome.imported_from).is_relative_to(scratch)
    assert (scratch / "tinyds41/sums.py").read_text() == PACKAGE


def test_a_mutant_that_no_test_notices_is_reported_as_survivor(scratch):
    # Two equal numbers: the mean of the first alone is as good.
    with pytest.raises(AssertionError, match=r"SURVIVED: wrong-sum \(arithmetic\): tests/test_sums.py::test_mean"):
        check_killed(scratch, change("total(values) / len(values)", "values[0]", "test_mean"))


@pytest.mark.parametrize("new", ["result = (", "result = nothing", "import nothing", "from tinyds41.sums import gone"])
def test_code_that_cannot_run_is_no_kill(scratch, new):
    with pytest.raises(MutantError, match="no test failed by what it checks"):
        check_killed(scratch, change("result = 0", new))


def test_a_test_that_fails_anyway_kills_nothing(scratch):
    with pytest.raises(MutantError, match="do not pass without a mutant"):
        check_killed(scratch, change("result = 0", "result = 1", "test_wrong"))


def test_a_test_that_does_not_exist_kills_nothing(scratch):
    with pytest.raises(MutantError, match="do not pass without a mutant"):
        check_killed(scratch, change("result = 0", "result = 1", "test_gone"))


@pytest.mark.parametrize(("mutant", "message"), [
    (change("result", "r"), "occurs 3 times"),
    (change("product", "r"), "occurs 0 times"),
    (change("result = 0", "result = 0"), "same text"),
    (Mutant("m", "r", "tests/test_sums.py", "6", "7", ("tests/test_sums.py",)), "not a file of the package"),
    (Mutant("m", "r", "tinyds41/sums.py", "result = 0", "", ("tests/test_gone.py",)), "test_gone.py does not exist"),
])  # fmt: skip
def test_a_mutant_that_does_not_apply_is_refused(scratch, mutant, message):
    with pytest.raises(MutantError, match=message):
        mutated(scratch, mutant)


def test_a_table_with_wrong_keys_or_a_repeated_name_is_refused(tmp_path):
    row = '[[mutant]]\nname = "a"\nrule = "r"\nfile = "f"\nold = "o"\nnew = "n"\ntests = ["t"]\n'
    (tmp_path / "one.toml").write_text(row + row)
    with pytest.raises(MutantError, match=r"'a' is already in one\.toml"):
        read_mutants(tmp_path)
    (tmp_path / "one.toml").write_text(row.replace("rule", "rulle"))
    with pytest.raises(MutantError, match="rulle"):
        read_mutants(tmp_path)
    (tmp_path / "one.toml").write_text(row.replace('["t"]', "[]"))
    with pytest.raises(MutantError, match="at least one test"):
        read_mutants(tmp_path)


def test_every_mutant_of_this_repository_still_applies():
    """Moved code and renamed test files show here at once, not in the next long run."""
    for _, mutant in read_mutants():
        assert mutated(ROOT, mutant)
