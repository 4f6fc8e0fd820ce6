"""Notebook kernels run on one thread each, also where only notebooks are tested."""

import os

os.environ["OMP_NUM_THREADS"] = "1"


def pytest_ignore_collect(collection_path, config):
    """Lessons stay out of `pytest --mutants`, which would also spread the cells of one over both processes."""
    return True if config.getoption("mutants", False) and collection_path.suffix == ".ipynb" else None
