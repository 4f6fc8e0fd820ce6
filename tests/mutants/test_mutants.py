"""`pytest --mutants`: every mutant is killed by the tests that claim to see its rule."""

from pathlib import Path

import pytest
from mutation import check_killed, read_mutants

ROOT = Path(__file__).parents[2]
MUTANTS = read_mutants()


@pytest.mark.parametrize("mutant", [m for _, m in MUTANTS], ids=[f"{stem}-{m.name}" for stem, m in MUTANTS])
def test_the_mutant_is_killed(mutant):
    check_killed(ROOT, mutant)
