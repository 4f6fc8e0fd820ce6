"""Text to token ids and back, and the coarser ids under which Engram files its memories."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path

import tokenizers
import torch
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
from torch import Tensor

from tinyds41.whole_file import write_whole

SPECIAL_TOKENS = ("<bos>", "<eos>", "<pad>", "<noise>")
BOS, EOS, PAD, NOISE = range(4)
FILE_NAME = "tokenizer.json"
SMALLEST_VOCABULARY = len(SPECIAL_TOKENS) + 256  # every byte is an entry, so any text has ids


class Tokenizer:
    """Byte-level BPE: every text encodes, every id decodes, text never becomes a special id.

    `encode` reads "<eos>" in a text as five characters, so what a user types cannot end or pad a document;
    special ids are put between texts by the code that lays out documents.
    Source: spec 9.1.
    """

    def __init__(self, backend: tokenizers.Tokenizer):
        # Despite its name this makes special tokens *ordinary* text for encode.
        backend.encode_special_tokens = True
        self.backend = backend

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> Tokenizer:
        """Learn merges from `texts`; a text too small for `vocab_size` gives fewer entries.

        Raises: ValueError if `vocab_size` leaves no room for the special tokens and the 256 bytes.
        """
        if vocab_size < SMALLEST_VOCABULARY:
            raise ValueError(f"vocab_size={vocab_size} is below {SMALLEST_VOCABULARY}: 4 special tokens and 256 bytes")
        backend = tokenizers.Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=list(SPECIAL_TOKENS),
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        backend.train_from_iterator(texts, trainer)
        return cls(backend)

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """Read a tokenizer.json, or the one in a folder.

        Raises: FileNotFoundError naming the file; ValueError naming it if it holds no tokenizer.
        """
        file = tokenizer_file(path)
        if not file.is_file():
            raise FileNotFoundError(f"no tokenizer at {file}")
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the Rust side raises bare Exception for any malformed file
            raise ValueError(f"{file} is not a tokenizer: {error}") from None
        return cls(backend)

    def save(self, path: str | Path) -> Path:
        """Write tokenizer.json into the folder `path` (or to `path` itself if it ends in .json)."""
        file = tokenizer_file(path)
        write_whole(file, self.backend.to_str(pretty=True) + "\n")
        return file

    @property
    def vocab_size(self) -> int:
        """V, special tokens included."""
        return self.backend.get_vocab_size()

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of entries and merges in their order: equal for tokenizers that give the same ids the same meaning.

        The layout of tokenizer.json, which the tokenizers library changes now and then, does not enter.
        """
        words = self.backend.get_vocab()
        merges = json.loads(self.backend.to_str())["model"].get("merges", [])
        pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in merges]  # old files: one string
        content = json.dumps([sorted(words, key=words.__getitem__), pairs])
        return hashlib.sha256(content.encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, without any special id; `decode` gives the same text back.

        Raises: UnicodeEncodeError (a ValueError) naming the place of a lone surrogate.
        """
        text.encode("utf-8")  # the backend would only say that this is not a str
        return self.backend.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int] | Tensor, *, special: bool = True) -> str:
        """Text of any ids; bytes that are not UTF-8 become U+FFFD.

        `special=False` leaves special tokens out.

        Shapes: ids [S].
        Raises: ValueError naming an id outside the vocabulary.
        """
        if isinstance(ids, Tensor) and (ids.ndim != 1 or (ids.numel() and ids.is_floating_point())):
            raise ValueError(f"expected ids [S] of whole numbers, got {ids.dtype} of shape {tuple(ids.shape)}")
        plain_ids = ids.tolist() if isinstance(ids, Tensor) else [int(i) for i in ids]
        # The backend drops unknown ids silently, which would hide a model with a larger vocabulary.
        vocab_size = self.vocab_size
        outside = [i for i in plain_ids if not 0 <= i < vocab_size]
        if outside:
            raise ValueError(f"token id {outside[0]} is outside the vocabulary of {vocab_size}")
        return self.backend.decode(plain_ids, skip_special_tokens=not special)

    def compressed_map(self) -> Tensor:
        """Token id to compressed id: entries that differ only in case, accents or spacing share one.

        Shapes: [V], int64, in [0, compressed_vocab_size); ids are numbered by first appearance.
        Source: spec 9.1.
        """
        return torch.tensor(self._compressed_ids, dtype=torch.int64)

    @property
    def compressed_vocab_size(self) -> int:
        """Number of distinct compressed ids."""
        return max(self._compressed_ids) + 1

    @cached_property
    def _compressed_ids(self) -> list[int]:
        seen: dict[str, int] = {}
        return [seen.setdefault(self._compression_key(i), len(seen)) for i in range(self.vocab_size)]

    def _compression_key(self, token_id: int) -> str:
        """What a token is filed under.

        A token that is part of a character is filed under its own name.
        """
        text = self.decode([token_id])
        if "\ufffd" in text:
            return self.backend.id_to_token(token_id) or text
        return normalised(text)


# The rules of the tokenizers library, not of Python's unicodedata: those change with the Python version.
_FOLD = normalizers.Sequence([
    normalizers.NFKC(),
    normalizers.NFD(),
    normalizers.StripAccents(),
    normalizers.Lowercase(),
    normalizers.Replace(tokenizers.Regex(r"[ \t\r\n]+"), " "),
])
_STRIP = normalizers.Strip()


def normalised(text: str) -> str:
    """`text` without case, accents, width and outer space.

    A lone space, or nothing left, keeps what it was.

    Source: spec 9.1.
    """
    folded = _FOLD.normalize_str(text)
    if folded == " ":
        return folded
    return _STRIP.normalize_str(folded) or text


def tokenizer_file(path: str | Path) -> Path:
    """The tokenizer.json that `path`, a folder or a .json file, stands for."""
    path = Path(path)
    return path if path.suffix == ".json" else path / FILE_NAME
