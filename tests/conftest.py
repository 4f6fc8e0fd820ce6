"""One thread per process, one seed per test, and `pytest --mutants`."""

import os
import random
import sys
from pathlib import Path

import pytest

# Set before torch is imported, and inherited by notebook kernels: four threads on two cores wait for each other.
for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[name] = "1"

MUTANTS = Path(__file__).parent / "mutants"


def pytest_addoption(parser):
    parser.addoption("--mutants", action="store_true",
                     help="run only tests/mutants: break each rule once, the named tests must notice")  # fmt: skip


def pytest_configure(config):
    if config.getoption("mutants") and config.getoption("dist", "no") == "loadfile":
        config.option.dist = "loadgroup"  # the mutants stand in one file, in groups


def pytest_ignore_collect(collection_path, config):
    """Mutants run alone or not at all; None leaves the decision to pytest."""
    if collection_path.is_dir() and collection_path != MUTANTS:
        return None
    inside = collection_path == MUTANTS or MUTANTS in collection_path.parents
    return True if inside != config.getoption("mutants") else None


@pytest.fixture(autouse=True)
def closed_figures():
    """No figure outlives its test, in those that draw."""
    yield
    if "matplotlib.pyplot" in sys.modules:
        sys.modules["matplotlib.pyplot"].close("all")


@pytest.fixture(autouse=True)
def seeded():
    """Every test starts from the same seed, whatever ran before it in the process."""
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "torch" in sys.modules:  # tests of config and plan do without, which keeps their mutants fast
        sys.modules["torch"].manual_seed(0)
