"""The shipped texts, a user's own text, and the batches that training draws from them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from tinyds41.tokenizer import BOS, EOS, Tokenizer

SEPARATOR = "\f"  # a form feed stands between documents; a text without one is a single document
MANIFEST = "manifest.json"
SPLITS = ("train", "held_out")


def data_folder() -> Path:
    """The folder of shipped texts: inside the package in a wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "data", package.parent / "data"):
        if (folder / MANIFEST).is_file():
            return folder
    raise FileNotFoundError(f"no {MANIFEST} in {package / 'data'} or {package.parent / 'data'}: reinstall tinyds41")


def manifest(folder: Path | None = None) -> dict[str, dict[str, Any]]:
    """File name to its entry: bytes, sha256, source, licence, cut.

    Texts also say what is held out.
    """
    entries = json.loads(((folder or data_folder()) / MANIFEST).read_text("utf-8"))["files"]
    return {entry["file"]: entry for entry in entries}


def verify(folder: Path | None = None) -> None:
    """Compare every shipped file with the manifest.

    Raises: ValueError naming each file that is missing or differs.
    """
    folder = folder or data_folder()
    wrong = []
    for name, entry in manifest(folder).items():
        file = folder / name
        found = hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else "no file"
        if found != entry["sha256"]:
            wrong.append(f"{name}: expected sha256 {entry['sha256']}, got {found}")
    if wrong:
        raise ValueError(f"{folder} differs from its {MANIFEST}: " + "; ".join(wrong))


def read_text(path: str | Path) -> str:
    """A UTF-8 file with its line ends as they are; a leading byte-order mark is dropped.

    Raises: ValueError naming the path, and the byte offset of what is not UTF-8; or that there is no text.
    """
    data = Path(path).read_bytes()
    try:
        text = data.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        byte = data[error.start]
        raise ValueError(f"{path} is not UTF-8: byte 0x{byte:02x} at offset {error.start} ({error.reason})") from None
    if not text.strip():
        raise ValueError(f"{path} has no text in its {len(data)} bytes")
    return text


def documents(name_or_path: str | Path, split: str = "train") -> list[str]:
    """Documents of a shipped text ("plays", "jargon", "devil") or of a user's file.

    The splits share none.

    The held-out part is always the end: as many documents as the manifest says, or the last tenth of a user's
    file (of its one document, cut at a line end).
    Raises: ValueError for an unknown split or an empty one; FileNotFoundError naming the shipped texts.
    """
    if split not in SPLITS:
        raise ValueError(f"split={split!r} is not one of {SPLITS}")
    entry = manifest().get(f"{name_or_path}.txt")
    path = data_folder() / entry["file"] if entry else Path(name_or_path)
    if not path.is_file():
        shipped = [name.removesuffix(".txt") for name in manifest() if name.endswith(".txt")]
        raise FileNotFoundError(f"no text file {path}, and not one of the shipped texts {shipped}")
    train, held_out = split_text(read_text(path), entry["held_out_documents"] if entry else None)
    chosen = held_out if split == "held_out" else train
    if not chosen:
        raise ValueError(f"{name_or_path} has no {split} documents: train {len(train)}, held out {len(held_out)}")
    return chosen


def split_text(text: str, n_held_out: int | None = None) -> tuple[list[str], list[str]]:
    """(train, held-out) documents: the last `n_held_out`, or the last tenth."""
    pieces = [piece.strip("\r\n") + "\n" for piece in text.split(SEPARATOR) if piece.strip()]
    if len(pieces) == 1 and n_held_out is None:
        # At the line end that comes after nine tenths, else before, else anywhere: one line still trains.
        (whole,) = pieces
        mark = len(whole) * 9 // 10
        cut = whole.find("\n", mark, -1) + 1 or whole.rfind("\n", 0, mark) + 1 or mark
        return [whole[:cut]], [whole[cut:]]
    n_train = len(pieces) - (max(1, len(pieces) // 10) if n_held_out is None else n_held_out)
    return pieces[:n_train], pieces[n_train:]


class Batch(NamedTuple):
    """Token ids, inputs and targets in one, with the documents they belong to.

    Shapes: ids [B, S+1] int64; documents [B, S+1] int64, or None if unpacked; wanted [B, S] int64, what each position
        should say (IGNORED where it does not matter), or None for the next token.
    """

    ids: Tensor
    documents: Tensor | None
    wanted: Tensor | None = None


class Numbers(Protocol):
    """A row of whole numbers that is read slice by slice: a tensor, or what `token_file` maps. Shapes: [T]."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    def __len__(self) -> int: ...
    def __getitem__(self, window: slice, /) -> Tensor: ...


@dataclass(frozen=True)
class Corpus:
    """Token ids of a text in a row, and the batches drawn from them.

    Shapes: ids [T] int32; documents [T] int32, equal numbers are one document, or None to ignore the borders.
    Units: characters is the length of the text behind the ids, for bits per character.
    """

    ids: Numbers
    documents: Numbers | None = None
    characters: int = 0

    def __post_init__(self):
        if len(self.ids.shape) != 1:
            raise ValueError(f"expected ids [T], got shape {tuple(self.ids.shape)}")
        if self.documents is not None and self.documents.shape != self.ids.shape:
            raise ValueError(f"documents {tuple(self.documents.shape)} do not match ids {tuple(self.ids.shape)}")

    @classmethod
    def from_texts(cls, tokenizer: Tokenizer, texts: Iterable[str], *, packed: bool = True) -> Corpus:
        """Lay out `<bos> text <eos>` for each document in turn; `packed` remembers the borders."""
        rows, characters = [], 0
        for text in texts:
            rows.append(np.array([BOS, *tokenizer.encode(text), EOS], dtype=np.int32))
            characters += len(text)
        if not rows:
            raise ValueError("no documents to make a corpus of")
        borders = np.repeat(np.arange(len(rows), dtype=np.int32), [len(row) for row in rows])
        ids = torch.from_numpy(np.concatenate(rows))
        return cls(ids, torch.from_numpy(borders) if packed else None, characters)

    @classmethod
    def from_file(cls, tokenizer: Tokenizer, path: str | Path, *, packed: bool = True) -> Corpus:
        """A token file's, with the batches of `from_texts`: each reads its windows from the file, no more.

        Raises: as `token_file.open_tokens`.
        """
        from tinyds41.train.token_file import open_tokens  # it imports `documents` from here

        file = open_tokens(path, tokenizer)
        return cls(file.ids, file.documents if packed else None, file.header["characters"])

    def __len__(self) -> int:
        """Tokens."""
        return len(self.ids)

    @property
    def n_documents(self) -> int:
        """1 where the borders are ignored."""
        if self.documents is None:
            return 1
        starts = getattr(self.documents, "starts", None)
        return len(self.documents[:].unique_consecutive() if starts is None else starts)

    def batch(self, step: int, batch_size: int, length: int, seed: int = 0) -> Batch:
        """Random windows of length + 1 tokens; they depend on (seed, step) alone.

        So a resumed run sees the same.

        Raises: ValueError naming tokens and length if the text is too short for one sequence.
        """
        self.require(length)
        # A generator per step, not one that runs on: nothing but the step number must be saved to resume.
        generator = np.random.default_rng([seed, step])
        starts = generator.integers(0, len(self) - length, size=batch_size)
        return self.windows(starts.tolist(), length)

    def in_order(self, batch_size: int, length: int) -> Iterable[Batch]:
        """Windows one after another, for evaluation.

        Each token is a target once, but for a last part < length.
        """
        self.require(length)
        starts = range(0, len(self) - length, length)
        for first in range(0, len(starts), batch_size):
            yield self.windows(starts[first : first + batch_size], length)

    def require(self, length: int) -> None:
        """Raises: ValueError naming tokens and length when there is not one sequence in the text."""
        if length < 1:
            raise ValueError(f"length={length}: at least 1 token is needed")
        if len(self) < length + 1:
            raise ValueError(f"a text of {len(self)} tokens is too short for a sequence of length {length} + 1 target")

    def windows(self, starts: Sequence[int], length: int) -> Batch:
        def cut(row: Numbers) -> Tensor:
            return torch.stack([row[start : start + length + 1] for start in starts]).long()

        return Batch(cut(self.ids), None if self.documents is None else cut(self.documents))
