"""Moves a model's Engram tables into files, and loads models whose tables never were in memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tinyds41.checkpoint.cut import first_layers
from tinyds41.checkpoint.headers import ModelFolder
from tinyds41.checkpoint.read import load, stored_table
from tinyds41.config import Config
from tinyds41.formats import ENGRAM
from tinyds41.infer.host_layout import CHUNK_ROWS
from tinyds41.infer.host_rows import HostRows
from tinyds41.infer.host_table import HostTable
from tinyds41.infer.host_writer import new_table
from tinyds41.model.transformer import Model

SAMPLED = 64  # rows of an existing table that are compared with the model's; of one that is a single piece all


def engram_to_host(model: Model, folder: str | Path) -> dict[int, HostRows]:
    """Writes the model's tables into `folder`, frees them, and lets Engram read from there; results are the same bits.

    Rows are rounded to FP8 as the model rounds them, so a model with quantize_engram=False is refused. From then on
    they are read-only: training moves everything else, as with a frozen table. Files of the same names are replaced.
    When a table cannot be written the model stays as it was; tables written before it stay in the folder.
    Returned are the tables' readers by layer, with their counts.

    Raises: ValueError for a model that reads unrounded rows, has no tables in memory, or no weights; OSError as
        `HostTable.create`.
    Source: spec 9.4. Lesson: 10.
    """
    config = model.config
    own = {layer: engram for layer, engram in model.engrams.items() if engram.owns_table}
    if not own:
        raise ValueError(f"the model has no Engram tables in memory: engram_layer_ids={list(config.engram_layer_ids)}")
    if not config.quantize_engram:
        raise ValueError("quantize_engram=False: the model reads its rows unrounded, a file holds them in FP8")
    if model.device.type == "meta":
        raise ValueError("the model is on the meta device: it has no rows to write")
    readers = {}
    for layer, engram in own.items():
        table = config.engram_layer_ids.index(layer)
        readers[layer] = HostRows(HostTable.create(table_file(folder, layer), engram.table(), config, table))
    for layer, engram in own.items():
        engram.read_from(readers[layer])
    return readers


def load_on_host(
    model_folder: str | Path, tables_folder: str | Path, *, dtype: torch.dtype | None = None,
    layers: range | None = None, **options: Any,
) -> Model:  # fmt: skip
    """The model of a folder as `load` gives it, but its Engram tables are read from `tables_folder`, never from memory.

    Tables that are not there yet are written first, piece by piece. Those that are there are compared with the model's,
    since another model may have the same config: small ones row by row, of large ones 64 rows. `options` are those of
    `load`.

    Raises: ValueError for tables of another model or config; OSError; and as `load`.
    Source: spec 9.4. Lesson: 10.
    """
    config = ModelFolder(model_folder).config
    config = config if layers is None else first_layers(config, layers)
    for layer in config.engram_layer_ids:
        with stored_table(model_folder, layer, dtype=dtype, layers=layers) as stored:
            prepare = _compare if table_file(tables_folder, layer).exists() else _write
            prepare(table_file(tables_folder, layer), stored, config, config.engram_layer_ids.index(layer))
    readers = open_host_rows(tables_folder, config)
    return load(model_folder, dtype=dtype, layers=layers, engram=readers, **options)


def open_host_rows(folder: str | Path, config: Config, *, prefetch: bool = True) -> dict[int, HostRows]:
    """Readers of the tables of a folder by layer, for `Model(config, engram=...)`. Raises: as `HostTable`."""
    return {layer: HostRows(HostTable(table_file(folder, layer), config, table), prefetch=prefetch)
            for table, layer in enumerate(config.engram_layer_ids)}  # fmt: skip


def host_rows(model: Model) -> dict[int, HostRows]:
    """The readers of a model whose tables lie in files, by layer."""
    return {layer: engram.embed for layer, engram in model.engrams.items() if isinstance(engram.embed, HostRows)}


def table_file(folder: str | Path, layer: int) -> Path:
    """Where a folder keeps the table of a layer."""
    return Path(folder) / f"layer_{layer:02d}.engram"


def _write(path: Path, stored: Callable[[int, int], Tensor], config: Config, table: int) -> None:
    n_rows = config.engram_num_embeddings[table]
    with new_table(path, config, table, whole=True) as writer:
        for start in range(0, n_rows, CHUNK_ROWS):
            writer.write(start, stored(start, min(start + CHUNK_ROWS, n_rows)))


def _compare(path: Path, stored: Callable[[int, int], Tensor], config: Config, table: int) -> None:
    """Raises: ValueError naming the first row found that is another than the model's."""
    host = HostTable(path, config, table)
    for start, stop in _compared(host.n_rows):
        expected = ENGRAM.encode(stored(start, stop)).numpy()
        differs = (expected != host.packed(torch.arange(start, stop))).any(-1)
        if differs.any():
            row = start + int(differs.argmax())
            raise ValueError(f"{path} has the rows of another model: row {row} differs from the model folder's")


def _compared(n_rows: int) -> list[tuple[int, int]]:
    """Where the pieces begin and end that are compared: to read all of a large table would take too long."""
    if n_rows <= CHUNK_ROWS:
        return [(0, n_rows)]
    return [(row, row + 1) for row in torch.linspace(0, n_rows - 1, SAMPLED, dtype=torch.float64).long().tolist()]
