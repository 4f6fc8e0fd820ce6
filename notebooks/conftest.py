"""Notebook kernels run on one thread each, also where only notebooks are tested."""

import os

os.environ["OMP_NUM_THREADS"] = "1"
