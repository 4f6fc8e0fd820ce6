"""What outlives a session: blocks of global rows on disk, encoder windows in memory for minutes."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch
from torch import nn

from tinyds41.infer.host_rows import HostRows
from tinyds41.infer.store import LIFETIME_S, Store
from tinyds41.infer.window_pool import WindowPool
from tinyds41.model.transformer import Model

BLOCK_TOKENS = 64
VERSION = 2  # of the bytes in a block


def model_key(model: Model) -> str:
    """A hash of all that decides what a token's rows are: config, dtype and every weight but the drafter's.

    Reads all weights once: seconds per 10 GB.
    """
    config = json.dumps(model.config.to_dict(), sort_keys=True)
    digest = hashlib.sha256(f"tinyds41 blocks {VERSION} {model.dtype} {config}".encode())
    for name, tensor in sorted({**_backbone(model), **dict(model.named_buffers())}.items()):
        digest.update(f"{name} {tuple(tensor.shape)}".encode())
        flat = tensor.detach().contiguous().view(-1)
        for piece in flat.split(1 << 24) if flat.numel() else ():
            digest.update(piece.cpu().view(torch.uint8).numpy())
    for layer, header in _tables_in_files(model):
        digest.update(f"table of layer {layer}: {header}".encode())
    return digest.hexdigest()


def _backbone(model: Model) -> dict[str, nn.Parameter]:
    """A drafter writes no global rows and no encoder windows: it may come, go and be trained."""
    return {name: weight for name, weight in model.named_parameters() if not name.startswith("mtp.")}


def _tables_in_files(model: Model) -> list[tuple[int, str]]:
    """By layer, the header of its table's file, which holds a hash of the rows."""
    return [(layer, json.dumps(engram.embed.table.header, sort_keys=True)) for layer, engram in model.engrams.items()
            if isinstance(engram.embed, HostRows)]  # fmt: skip


def _weights(model: Model) -> tuple[tuple[int, int | str], ...]:
    """Changes with every assignment to a weight, in place or not.

    PyTorch has no public name for the number of in-place changes; `.data` escapes it.
    """
    return (*((tensor.data_ptr(), tensor._version) for tensor in _backbone(model).values()),
            *_tables_in_files(model))


class TieredStore:
    """The persistent cache of one model: which tokens were read, and what is kept of them.

    Blocks of `block_tokens` tokens, global KV and index keys alone, lie in the file under a hash of all tokens up to
    their end; windows of the encoder lie in memory. `Session.resume` reads, `Session.save` writes. Rows and windows
    that came after a bounded replay are marked, so that an exact resume passes them over.

    budget_bytes: of the file; the least recently used blocks leave first, also before their `lifetime_s`.
    window_bytes: of the pool in memory, 10 % of the machine's without it. block_tokens: a smaller block is found
        by more prompts and costs more look-ups.

    Raises: ValueError for a file of another model, version or block size.
    Source: spec 6. Lesson: 07.
    """

    def __init__(
        self, path: str | Path, model: Model, *, block_tokens: int = BLOCK_TOKENS, budget_bytes: int | None = None,
        lifetime_s: float = LIFETIME_S, window_bytes: int | None = None, window_s: float = 300,
    ):  # fmt: skip
        if not isinstance(model, Model):
            raise TypeError(f"a store needs a Model, not a {type(model).__name__}")
        self.key, self.block_tokens = model_key(model), block_tokens
        self._checked = _weights(model)
        self.blocks = Store(
            path, self.key, block_tokens=block_tokens, budget_bytes=budget_bytes, lifetime_s=lifetime_s)  # fmt: skip
        self.windows = WindowPool(budget_bytes=window_bytes, lifetime_s=window_s)

    def check(self, model: Model) -> None:
        """Raises: ValueError for another model than the store's, or weights that have changed since."""
        weights = _weights(model)
        if weights != self._checked:  # hashing them all takes long, so only where any may be another
            found = model_key(model)
            if found != self.key:
                raise ValueError(f"the store belongs to the model {self.key[:12]}, this one is {found[:12]}")
            self._checked = weights

    def close(self) -> None:
        self.blocks.close()

    def __enter__(self) -> TieredStore:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
