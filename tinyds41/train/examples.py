"""Models that come with the package, trained by a recorded command: a lesson need not train its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tinyds41.checkpoint.layout import is_model_folder
from tinyds41.checkpoint.read import load, load_draft
from tinyds41.model.transformer import Model
from tinyds41.train.corpus import data_folder

# And the steps that each was trained.
EXAMPLES = {"text": 300, "needle": 260, "choosers": 190, "facts": 180, "relay": 120, "entries": 70, "replay": 260,
            "draft": 600}  # fmt: skip
DRAFT = "draft"  # a drafter alone, for the backbone of "text"
FOLDER = "examples"  # inside the data folder
RECORD = "example.json"  # beside the model's files: the command that made it, and what it measured


def example(name: str) -> Model:
    """A trained toy: `example("text")` has read plays and jargon for some minutes, and has its tokenizer.

    Its weights are in the released FP8 and FP4 formats on disk, and float32 once loaded. The others have learned a
    made-up task or its beginning and have no tokenizer: needle (lesson 05), choosers (lesson 04), facts (lesson 10),
    relay (lesson 07), entries (lesson 02) and replay (dialogues that go on from a store). `example("draft")` is the
    text's model, bit for bit, with a drafter: `generate(model, ..., speculate=True)`.
    Raises: ValueError for an unknown name, naming those there are; FileNotFoundError when its files are not there.
    """
    folder = example_folder(name)
    if name != DRAFT:
        return load(folder)
    model = load(example_folder("text"))
    load_draft(model, folder)
    return model


def example_folder(name: str) -> Path:
    """Where an example lies, in a wheel as in a checkout. Raises: as `example`."""
    require_known(name)
    folder = data_folder() / FOLDER / name
    if not is_model_folder(folder):
        raise FileNotFoundError(f"the example {name!r} is not in {folder}: reinstall tinyds41, or make it with "
                                f"`{command(name)}`")  # fmt: skip
    return folder


def example_record(name: str) -> dict[str, Any]:
    """How an example was made: the command, the date, what was measured. Raises: as `example`."""
    return json.loads((example_folder(name) / RECORD).read_text(encoding="utf-8"))


def require_known(name: str) -> None:
    """Raises: ValueError naming the examples there are."""
    if name not in EXAMPLES:
        raise ValueError(f"no example {name!r}: the examples are {', '.join(EXAMPLES)}")


def command(name: str, steps: int | None = None, seed: int = 0, out: Path | None = None) -> str:
    """What makes an example, to be typed at the root of a checkout."""
    steps = EXAMPLES[name] if steps is None else steps
    chosen = f" --seed {seed}" if seed else ""
    folder = Path("data", FOLDER, name) if out is None else out
    return f"python -m tinyds41.train.make_example {name} --steps {steps}{chosen} --out {folder.as_posix()}"
