"""Token ids in a file mapped into memory: of a text of any size, a batch reads its own windows and no more."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from tinyds41.tokenizer import BOS, EOS, Tokenizer
from tinyds41.train.corpus import documents
from tinyds41.whole_file import whole_file

FORMAT, VERSION = "tinyds41 tokens", 1
HEADER_BYTES = 4096  # JSON, filled up with spaces and ended by a line end: `head -n 1` shows it
COUNTS = {"tokens": 2, "documents": 1, "characters": 0}  # fields of the header, and the least each can be


class MappedIds:
    """Ids in a file, read where they are sliced. Shapes: [T]; a slice is an int64 tensor of its own."""

    def __init__(self, numbers: np.ndarray):
        self.numbers = numbers
        self.shape = numbers.shape

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, window: slice) -> Tensor:
        return torch.from_numpy(self.numbers[window].astype(np.int64))


class MappedDocuments:
    """The number of each token's document, from where documents start. Shapes: [T]; a slice is an int64 tensor."""

    def __init__(self, starts: np.ndarray, tokens: int):
        self.starts = starts  # ascending, the first is 0
        self.shape = (tokens,)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, window: slice) -> Tensor:
        places = np.arange(*window.indices(len(self)))
        return torch.from_numpy(np.searchsorted(self.starts, places, side="right") - 1)


@dataclass(frozen=True)
class TokenFile:
    """An open token file: what its header says, and its mapped ids and documents."""

    header: Mapping[str, Any]
    ids: MappedIds
    documents: MappedDocuments


def token_dtype(vocab_size: int) -> str:
    """The narrowest of the two widths that holds every id."""
    return "uint16" if vocab_size <= 2**16 else "uint32"


def write_tokens(path: str | Path, tokenizer: Tokenizer, texts: Iterable[str]) -> dict[str, Any]:
    """Writes `<bos> text <eos>` of each text in turn; returns the header.

    Texts are taken one at a time; of those before, a start of 8 bytes each is held. The file appears under its name
    when it is whole: what was there before stays until then, and when writing fails.

    The file: a JSON header of `HEADER_BYTES`; ids, little-endian, as wide as `token_dtype` says; zeros up to a multiple
    of 8 bytes; and where each document starts, int64. sha256 is that of everything behind the header, followed by the
    header's other fields.
    Raises: ValueError when there is no text; OSError when the file cannot be written.
    """
    with whole_file(Path(path)) as partial, partial.open("wb") as out:
        return _write(out, tokenizer, texts)


def _write(out: BinaryIO, tokenizer: Tokenizer, texts: Iterable[str]) -> dict[str, Any]:
    digest, starts, n_tokens, characters = hashlib.sha256(), array("q"), 0, 0

    def put(data: bytes) -> None:
        out.write(data)
        digest.update(data)

    dtype = token_dtype(tokenizer.vocab_size)
    out.write(bytes(HEADER_BYTES))  # filled in at the end, when the counts are known
    for text in texts:
        row = np.array([BOS, *tokenizer.encode(text), EOS], dtype)
        put(_little(row))
        starts.append(n_tokens)
        n_tokens, characters = n_tokens + len(row), characters + len(text)
        del text
    if not starts:
        raise ValueError("no documents to make a token file of")
    put(bytes(-out.tell() % 8))
    put(_little(np.array(starts, np.int64)))
    header = {
        "format": FORMAT, "version": VERSION, "dtype": dtype, "tokens": n_tokens, "documents": len(starts),
        "characters": characters, "vocab_size": tokenizer.vocab_size, "tokenizer": tokenizer.fingerprint,
    }  # fmt: skip
    header["sha256"] = _seal(digest, header)
    out.seek(0)
    out.write(json.dumps(header).encode().ljust(HEADER_BYTES - 1) + b"\n")
    return header


def _little(numbers: np.ndarray) -> bytes:
    return numbers.astype(numbers.dtype.newbyteorder("<")).tobytes()


def _seal(digest: Any, header: Mapping[str, Any]) -> str:
    """The hash of a file's body and of what its header says beside the hash."""
    others = {name: value for name, value in header.items() if name != "sha256"}
    digest.update(json.dumps(others, sort_keys=True).encode())
    return digest.hexdigest()


def write_text(
    path: str | Path, tokenizer: Tokenizer, name_or_path: str | Path, split: str = "train"
) -> dict[str, Any]:  # fmt: skip
    """A token file of a shipped text's split, or of a user's UTF-8 file's; returns the header.

    The text itself is read whole: for one that memory does not hold, give `write_tokens` its documents one by one.
    Raises: as `corpus.documents` and `write_tokens`.
    """
    return write_tokens(path, tokenizer, documents(name_or_path, split))


def open_tokens(path: str | Path, tokenizer: Tokenizer) -> TokenFile:
    """Maps a token file; of its ids nothing is read, so damage among them is for `verify_tokens` to find.

    Raises: FileNotFoundError naming the file; ValueError for one that is none, that is cut or longer than its header
        says (naming both sizes), or that another tokenizer or version made (naming both).
    """
    path = Path(path)
    header = _header(path)
    expected = {"version": VERSION, "tokenizer": tokenizer.fingerprint, "vocab_size": tokenizer.vocab_size,
                "dtype": token_dtype(tokenizer.vocab_size), "sha256": str(header.get("sha256"))}  # fmt: skip
    for name, value in expected.items():
        if header.get(name) != value:
            raise ValueError(f"{path}: {name}={header.get(name)!r}, expected {value!r}")
    for name, least in COUNTS.items():
        value = header.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"{path}: {name}={value!r}, expected a whole number of at least {least}")
    tokens, dtype = header["tokens"], np.dtype(header["dtype"]).newbyteorder("<")
    starts_at = (HEADER_BYTES + tokens * dtype.itemsize + 7) // 8 * 8
    size, wanted = path.stat().st_size, starts_at + 8 * header["documents"]
    if size != wanted:
        raise ValueError(f"{path} has {size} bytes, its header says {wanted}: it was cut or something was added")
    ids = np.memmap(path, dtype, "r", HEADER_BYTES, (tokens,))
    starts = np.memmap(path, "<i8", "r", starts_at, (header["documents"],))
    return TokenFile(header, MappedIds(ids), MappedDocuments(starts, tokens))


def _header(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"no token file at {path}")
    with path.open("rb") as file:
        head = file.read(HEADER_BYTES)
    try:
        header = json.loads(head)
    except ValueError:  # also bytes that are not UTF-8
        header = None
    if len(head) < HEADER_BYTES or not isinstance(header, dict) or header.get("format") != FORMAT:
        raise ValueError(f"{path} is not a token file: it does not begin with {HEADER_BYTES} bytes of JSON that say "
                         f"{FORMAT!r}")  # fmt: skip
    return header


def verify_tokens(path: str | Path, tokenizer: Tokenizer) -> None:
    """Reads a token file whole and compares it with its hash.

    Raises: as `open_tokens`; ValueError naming both hashes.
    """
    header, digest = open_tokens(path, tokenizer).header, hashlib.sha256()
    with Path(path).open("rb") as file:
        file.seek(HEADER_BYTES)
        while part := file.read(2**20):
            digest.update(part)
    found = _seal(digest, header)
    if found != header["sha256"]:
        raise ValueError(f"{path} is damaged: its sha256 is {found}, its header says {header['sha256']}")
