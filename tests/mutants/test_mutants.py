"""`pytest --mutants`: every mutant is killed by the tests that claim to see its rule."""

from itertools import groupby
from pathlib import Path

import pytest
from mutation import check_killed, read_mutants

ROOT = Path(__file__).parents[2]
TOGETHER = 20  # mutants of a file whose tests are run in one go on the sound package, by one worker


def groups():
    """(mutant, all tests of its group), with the group's mark for workers."""
    for stem, own in groupby(read_mutants(), key=lambda pair: pair[0]):
        mutants = [mutant for _, mutant in own]
        for first in range(0, len(mutants), TOGETHER):
            part = mutants[first : first + TOGETHER]
            tests = tuple(sorted({test for mutant in part for test in mutant.tests}))
            for mutant in part:
                yield pytest.param(mutant, tests, id=f"{stem}-{mutant.name}",
                                   marks=pytest.mark.xdist_group(f"{stem} {first}"))  # fmt: skip


@pytest.mark.parametrize(("mutant", "among"), list(groups()))
def test_the_mutant_is_killed(mutant, among):
    check_killed(ROOT, mutant, among)
