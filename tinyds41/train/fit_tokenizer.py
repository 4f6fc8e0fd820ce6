"""Fit the shipped tokenizer on the training split of the shipped texts.

    python -m tinyds41.train.fit_tokenizer --vocab-size 1024 --out data

Prints how many bytes a token stands for on the held-out parts; with --out it also writes tokenizer.json, and into the
shipped data folder the new checksum in the manifest. The same texts and size give the same file.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tinyds41.tokenizer import FILE_NAME, Tokenizer
from tinyds41.train.corpus import MANIFEST, data_folder, documents
from tinyds41.whole_file import write_whole

TRAINED_ON = ("plays", "jargon")
MEASURED_ON = ("plays", "jargon", "devil")
VOCAB_SIZE = 1024


def fit(vocab_size: int, names: Sequence[str] = TRAINED_ON) -> Tokenizer:
    """Merges learnt from the training documents of the named texts or files, in their order."""
    return Tokenizer.train((text for name in names for text in documents(name)), vocab_size)


def bytes_per_token(tokenizer: Tokenizer, name: str, split: str = "held_out") -> float:
    """Units: UTF-8 bytes of the text per id."""
    texts = documents(name, split)
    n_tokens = sum(len(tokenizer.encode(text)) for text in texts)
    return sum(len(text.encode()) for text in texts) / n_tokens


def enter_in_manifest(folder: Path, files: Sequence[Path], description: str) -> None:
    """Replace the entries of files that were made here in the manifest of a data folder."""
    path = folder / MANIFEST
    content = json.loads(path.read_text("utf-8"))
    made = [_entry(folder, file, description) for file in files]
    names = {entry["file"] for entry in made}
    content["files"] = [other for other in content["files"] if other["file"] not in names] + made
    write_whole(path, json.dumps(content, indent=2) + "\n")


def _entry(folder: Path, file: Path, description: str) -> dict[str, Any]:
    data = file.read_bytes()
    return {
        "file": file.relative_to(folder).as_posix(),
        "bytes": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
        "source": description,
        "licence": "MIT, as tinyds41",
        "cut": [],
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Fit, save, measure."""
    parser = argparse.ArgumentParser(prog="python -m tinyds41.train.fit_tokenizer", description=fit.__doc__)
    parser.add_argument("--vocab-size", type=int, default=VOCAB_SIZE)
    parser.add_argument("--text", nargs="+", default=TRAINED_ON, help="shipped texts or UTF-8 files")
    parser.add_argument("--out", type=Path, help=f"folder for {FILE_NAME} (default: print the measurement only)")
    options = parser.parse_args(arguments)
    tokenizer = fit(options.vocab_size, options.text)
    for name in dict.fromkeys([*options.text, *MEASURED_ON]):
        print(f"{name}: {bytes_per_token(tokenizer, name):.3f} bytes per token on the held-out part")
    print(f"{tokenizer.vocab_size} entries, {tokenizer.compressed_vocab_size} compressed ids")
    if options.out:
        file = tokenizer.save(options.out)
        print(f"wrote {file}")
        if file.resolve().parent == data_folder():
            trained_on = ", ".join(options.text)
            description = f"tinyds41.train.fit_tokenizer, {tokenizer.vocab_size} entries, from {trained_on}"
            enter_in_manifest(data_folder(), [file.resolve()], description)


if __name__ == "__main__":
    main()
