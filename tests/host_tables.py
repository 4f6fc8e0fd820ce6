"""Models whose Engram tables lie in files, and a file system that is asked what it can."""

from __future__ import annotations

import copy
import os
import threading
from pathlib import Path

import pytest
import torch
from models import NANO

from tinyds41.config import Config
from tinyds41.infer.engram_host import engram_to_host, host_rows
from tinyds41.infer.host_rows import RowReads, total
from tinyds41.infer.host_table import HostTable
from tinyds41.infer.host_writer import leaves_holes
from tinyds41.model.transformer import Model

FLASH = Config.preset("flash")
# Nano with two tables of the released sizes: 203 GB that nobody could hold.
LARGE = NANO.replace(**{name: getattr(FLASH, name) for name in (
    "engram_vocab_size", "engram_n_heads", "engram_head_dim", "engram_num_embeddings")})  # fmt: skip


def moved(model: Model, folder: Path, *, least: int = 1) -> Model:
    """A copy of a model with its tables in files, which sends for any number of rows."""
    twin = copy.deepcopy(model)
    for reader in engram_to_host(twin, folder).values():
        reader.least = least
    return twin


def reads(model: Model) -> RowReads:
    """What was read from all tables of a model."""
    return total(reader.reads for reader in host_rows(model).values())


def threads() -> list[threading.Thread]:
    """The threads that read ahead."""
    return [thread for thread in threading.enumerate() if thread.name.startswith("engram rows")]


def random_table(path: Path, config: Config = NANO, table: int = 0, seed: int = 0) -> tuple[HostTable, torch.Tensor]:
    """A table of random numbers and the numbers; a zero row and a negative zero among them."""
    shape = config.engram_num_embeddings[table], config.engram_head_dim or 0
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    weight[1], weight[2, 3] = 0, -0.0
    return HostTable.create(path, weight, config, table), weight


def require_sparse_files(folder: Path, n_bytes: int) -> None:
    """Skips the test where a file that is only made long takes room, or cannot be so long."""
    if not leaves_holes(folder):
        pytest.skip(f"no sparse files in {folder}")
    probe = folder / "probe"
    try:
        probe.touch()
        os.truncate(probe, n_bytes)
    except OSError as error:
        pytest.skip(f"no file of {n_bytes:,} bytes in {folder}: {error}")
    finally:
        probe.unlink(missing_ok=True)
