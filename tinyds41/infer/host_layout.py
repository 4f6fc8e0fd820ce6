"""How a file of Engram rows is laid out: a header page that says what the table is for, then the packed rows."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from tinyds41.config import Config
from tinyds41.formats import ENGRAM
from tinyds41.model.engram import checked_primes

VERSION = 1
HEADER_BYTES = 4096  # rows begin on a page of their own
MAGIC = b"tinyds41 engram rows"
CHUNK_ROWS = 1 << 16  # encoded, decoded or hashed at a time
# What decides, beside layer, rows and width, which n-gram a row belongs to.
_HASHED = ("vocab_size", "engram_vocab_size", "engram_max_ngram_size", "engram_n_heads",
           "engram_compressed_vocab_size", "engram_pad_token_id")  # fmt: skip


def table_fields(config: Config, table: int) -> dict[str, int]:
    """What a table's file must agree with: numbers, rather than a hash of them, so that an error can name both.

    Raises: ValueError for a table that the config does not have, or when engram_num_embeddings is not what the primes
        add up to.
    """
    if not 0 <= table < len(config.engram_layer_ids):
        raise ValueError(f"table={table}: the config has {len(config.engram_layer_ids)}, counted from 0")
    checked_primes(config, table)
    fields = {"layer": config.engram_layer_ids[table], "rows": config.engram_num_embeddings[table],
              "width": config.engram_head_dim}  # fmt: skip
    return {**fields, **{name: getattr(config, name) for name in _HASHED}}


def file_bytes(fields: dict[str, int]) -> int:
    """Units: bytes of a table's file, the header page included."""
    return HEADER_BYTES + fields["rows"] * ENGRAM.row_bytes(fields["width"])


def header_page(fields: dict[str, int], digest: str | None) -> bytes:
    """The first page of a file: JSON and its checksum. digest: SHA-256 of all packed rows, where it is known."""
    text = json.dumps({"version": VERSION, **fields, "sha256": digest}).encode()
    page = b"\n".join([MAGIC, text, hashlib.sha256(text).hexdigest().encode(), b""])
    return page.ljust(HEADER_BYTES, b"\0")


def read_header(path: Path, page: bytes) -> dict[str, Any]:
    """What a header page says. Raises: ValueError for a page that is none, or is damaged; `path` is named."""
    magic, *rest = page.split(b"\n", 3)
    if magic != MAGIC or len(rest) != 3:
        raise ValueError(f"{path} is no table of Engram rows: it begins with {page[:24]!r}")
    text, digest, padding = rest
    if hashlib.sha256(text).hexdigest().encode() != digest or padding.strip(b"\0") or len(page) != HEADER_BYTES:
        raise ValueError(f"{path}: its header is damaged")
    return json.loads(text)


def require_fields(path: Path, header: dict[str, Any], wanted: dict[str, int]) -> None:
    """Raises: ValueError for a table of another version or config, naming what it has and what is needed."""
    wrong = [f"{name} {header.get(name)}, needed {value}" for name, value in {"version": VERSION, **wanted}.items()
             if header.get(name) != value]  # fmt: skip
    if wrong:
        raise ValueError(f"{path} is another table: it has {'; '.join(wrong)}")
