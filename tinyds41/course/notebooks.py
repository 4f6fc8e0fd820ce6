"""Lessons as pairs: `NAME.py` is written by hand, `NAME.ipynb` is the same cells with the outputs of one clean run."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinyds41.peak_memory import peak_bytes_of

PERCENT = "py:percent"
KEPT_METADATA = ("jupytext", "kernelspec", "language_info", "widgets")
VIEW, STATE = "application/vnd.jupyter.widget-view+json", "application/vnd.jupyter.widget-state+json"
PROGRESS = re.compile(r"\d+%\|.*\|\s*\d+/\d+")  # what tqdm writes, as text or in place of its widget
MAGIC = re.compile(r"(?m)^( *)[%!].*$")  # lines for the notebook's kernel, which are no Python
WIDGET_ID = re.compile(r"[0-9a-f]{32}")
COLOUR = re.compile(r"\x1b\[[\d;]*m")
FAILED_LINE = re.compile(r"^-+> *\d+ (.*)$", re.MULTILINE)  # the arrow of IPython's traceback; the first is the cell's
CELL_SECONDS = 600  # a cell that takes longer hangs
Notebook = dict[str, Any]


@dataclass(frozen=True)
class Executed:
    """A lesson after one run, normalised. Units: seconds with its kernel's start and end; peak_bytes of the kernel."""

    notebook: Notebook
    seconds: float
    peak_bytes: int | None  # None where the system does not tell


def lessons(folder: Path, names: Sequence[str] = ()) -> list[Path]:
    """The .py of every lesson in a folder, or of those with the given names (with or without suffix).

    Raises: FileNotFoundError naming the folder, or the lessons that are there.
    """
    found = sorted(path for path in folder.glob("*.py") if path.name != "conftest.py")
    if not found:
        raise FileNotFoundError(f"no lessons in {folder.resolve()}: run this where notebooks/ is, or pass --folder")
    by_name = {path.stem: path for path in found}
    unknown = [name for name in names if Path(name).stem not in by_name]
    if unknown:
        raise FileNotFoundError(f"no lesson {unknown[0]!r}: the lessons are {', '.join(by_name)}")
    return [by_name[name] for name in dict.fromkeys(Path(name).stem for name in names)] or found


def read_script(script: Path) -> Notebook:
    """The cells of a .py as a notebook without outputs.

    Ids follow from the text, so that they never change alone.
    Raises: ValueError naming file and line of what is not UTF-8 or no Python.
    """
    import jupytext

    # Python 3 alone: a notebook that names its interpreter's version changes with every machine.
    notebook = json.loads(jupytext.writes(jupytext.reads(_script_text(script), fmt=PERCENT), fmt="ipynb"))
    seen: dict[str, int] = {}
    for cell in notebook["cells"]:
        text = cell["cell_type"] + source(cell)
        seen[text] = seen.get(text, 0) + 1
        cell["id"] = hashlib.sha256(f"{text}{seen[text]}".encode()).hexdigest()[:12]
    return notebook


def _script_text(script: Path) -> str:
    content = script.read_bytes()
    try:
        text = content.decode("utf-8").replace("\r\n", "\n")
        # A cell may wait at its top level, as notebooks allow.
        compile(MAGIC.sub(r"\1pass", text), script.name, "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{script.name}, line {line}: byte 0x{content[error.start]:02x} is not UTF-8") from error
    except (SyntaxError, ValueError) as error:  # of null bytes without a line, in older Pythons a ValueError
        line = getattr(error, "lineno", None)
        where = script.name if line is None else f"{script.name}, line {line}"
        raise ValueError(f"{where}: {getattr(error, 'msg', error)}") from error
    return text


def read_notebook(path: Path) -> Notebook:
    """Raises: FileNotFoundError saying how to make it; ValueError when it is no notebook."""
    if not path.is_file():
        raise FileNotFoundError(f"no {path}: `tinyds41 lessons run {path.stem}` makes it")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not a notebook: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("cells"), list):
        raise ValueError(f"{path} is not a notebook: it has no list of cells")
    for number, cell in enumerate(content["cells"]):
        if not isinstance(cell, dict) or not {"cell_type", "source", "metadata"} <= set(cell):
            raise ValueError(f"{path} is not a notebook: cell {number} lacks its type, source or metadata")
    return content


def source(cell: dict[str, Any]) -> str:
    """A cell's text; the file may hold it as one string or as lines."""
    return "".join(cell["source"])


def run(script: Path) -> Path:
    """Executes a .py and writes the .ipynb beside it.

    The .ipynb is written at the end: a run that fails leaves the old one as it was.
    Raises: ValueError as `execute`.
    """
    done = execute(read_script(script), script.name, script.parent)
    path = script.with_suffix(".ipynb")
    path.write_text(as_text(done.notebook), encoding="utf-8")
    return path


def execute(unexecuted: Notebook, name: str, folder: Path) -> Executed:
    """Runs all cells in a fresh kernel on one thread, in `folder`.

    Raises: ValueError naming the lesson, the line that failed and its error.
    """
    import nbformat
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

    notebook = nbformat.reads(json.dumps(unexecuted), as_version=4)
    client = NotebookClient(notebook, timeout=CELL_SECONDS, kernel_name="python3", coalesce_streams=True,
                            resources={"metadata": {"path": str(folder)}})  # fmt: skip
    peak = None

    def ask_peak(**_: Any) -> None:  # after each cell: the kernel is gone when the last one is done
        nonlocal peak
        peak = kernel_peak_bytes(client.km)

    client.on_cell_executed = ask_peak
    started = time.perf_counter()
    try:
        client.execute(env=os.environ | {"OMP_NUM_THREADS": "1"})
    except CellTimeoutError as error:
        raise ValueError(f"{name}: a cell took longer than {CELL_SECONDS} seconds") from error
    except DeadKernelError as error:
        raise ValueError(f"{name}: its kernel died, perhaps for want of memory") from error
    except CellExecutionError as error:
        line = FAILED_LINE.search(COLOUR.sub("", error.traceback))
        raise ValueError(f"{name}: {line[1] if line else '?'}: {error.ename} {error.evalue}".strip()) from error
    seconds = time.perf_counter() - started
    return Executed(normalised(json.loads(nbformat.writes(notebook))), seconds, peak)


def kernel_peak_bytes(manager: Any) -> int | None:
    """Largest resident size of a running kernel so far, from its manager; None where the system does not tell."""
    return peak_bytes_of(manager.provisioner.pid)


def as_text(notebook: Notebook) -> str:
    """One form for one content: sorted keys, one space, characters as they are."""
    return json.dumps(notebook, ensure_ascii=False, indent=1, sort_keys=True) + "\n"


def normalised(notebook: Notebook) -> Notebook:
    """The notebook without what differs between two runs.

    Out go times, progress bars, random widget ids, versions.
    """
    cells = [_normalised_cell(cell) for cell in notebook["cells"]]
    metadata = {name: value for name, value in notebook["metadata"].items() if name in KEPT_METADATA}
    for name, detail in (("language_info", "version"), ("jupytext", "text_representation")):
        metadata[name] = {key: value for key, value in metadata.get(name, {}).items() if key != detail}
    states = metadata.pop("widgets", {}).get(STATE, {}).get("state", {})
    text, kept = _rename_widgets(cells, states)
    if kept:
        metadata["widgets"] = {STATE: {"state": kept, "version_major": 2, "version_minor": 0}}
    return {**notebook, "cells": json.loads(text), "metadata": metadata}


def _normalised_cell(cell: dict[str, Any]) -> dict[str, Any]:
    metadata = {name: value for name, value in cell["metadata"].items() if name not in ("execution", "ExecuteTime")}
    cell = {**cell, "metadata": metadata}
    if cell["cell_type"] == "code":
        cell["outputs"] = [output for output in cell["outputs"] if not _is_progress(output)]
    return cell


def _is_progress(output: dict[str, Any]) -> bool:
    text = output.get("text") or output.get("data", {}).get("text/plain", "")
    return bool(PROGRESS.search("".join(text)))


def _rename_widgets(cells: list, states: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Cells as JSON and the states they show, ids counted in the order in which they are met."""
    names: dict[str, str] = {}

    def meet(text: str) -> None:
        for found in WIDGET_ID.findall(text):
            if found in states and found not in names:
                names[found] = f"{len(names) + 1:032x}"
                meet(json.dumps(states[found], sort_keys=True))

    def renamed(text: str) -> str:
        return WIDGET_ID.sub(lambda match: names.get(match[0], match[0]), text)

    for view in _views(cells):
        meet(view["model_id"])
    kept = {names[name]: json.loads(renamed(json.dumps(states[name]))) for name in names}
    return renamed(json.dumps(cells)), kept


def _views(cells: list) -> Iterator[dict[str, Any]]:
    for cell in cells:
        for output in cell.get("outputs", []):
            if VIEW in output.get("data", {}):
                yield output["data"][VIEW]
