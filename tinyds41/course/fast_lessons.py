"""A quick look at a lesson: a tenth of the training steps, and assertions that then fail are reported, not raised.

What is changed is the text of the cells, before they run: the lesson itself knows no fast mode, so nothing but the
numbers that it shows can depend on one. What comes out is no lesson, and is never stored as one.
"""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

from tinyds41.course.notebooks import Notebook, as_text, execute, read_script, source

SHARE, FEWEST_STEPS = 10, 2
# `steps=140`, or a constant STEPS that comes first in its line: `STEPS, LENGTH = 140, 128`.
STEPS = re.compile(r"(?m)(\bsteps ?= ?|^STEPS\b[^=\n]*= ?)(\d[\d_]*)")
NOT_HELD = "with so few steps this does not hold: "


def run_fast(script: Path, folder: Path) -> tuple[Path, list[str]]:
    """Executes a lesson with fewer steps; returns its notebook, which lies in `folder`, and what did not hold.

    The kernel works in `folder` too, so that nothing it writes lands among the lessons.
    Raises: ValueError as `notebooks.run`, for anything but an assertion.
    """
    done = execute(quickened(read_script(script)), script.name, folder).notebook
    path = folder / script.with_suffix(".ipynb").name
    path.write_text(as_text(done), encoding="utf-8")
    return path, [line.removeprefix(NOT_HELD) for line in _printed(done) if line.startswith(NOT_HELD)]


def quickened(notebook: Notebook) -> Notebook:
    """The notebook with fewer steps and softened assertions in its code cells; its text stays."""
    cells = []
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            cell = {**cell, "source": _softened(STEPS.sub(_fewer, source(cell)))}
        cells.append(cell)
    return {**notebook, "cells": cells}


def _fewer(match: re.Match[str]) -> str:
    steps = int(match[2])
    return match[1] + str(min(steps, max(FEWEST_STEPS, steps // SHARE)))


def _softened(code: str) -> str:
    """Each assertion that has lines of its own stands in a `try` that prints what did not hold."""
    try:
        tree = ast.parse(code)
    except SyntaxError:  # a magic of IPython: the cell stays as it is
        return code
    lines = code.split("\n")
    asserts = [node for node in ast.walk(tree) if isinstance(node, ast.Assert)]
    for node in sorted(asserts, key=lambda node: node.lineno, reverse=True):  # from below: numbers above stay right
        first, last = node.lineno - 1, node.end_lineno or node.lineno
        indent = lines[first][: node.col_offset]
        if indent.strip() or ";" in lines[last - 1]:
            continue
        said = json.dumps(NOT_HELD + ast.unparse(node.test))
        lines[first:last] = [f"{indent}try:", *(f"    {line}" for line in lines[first:last]),
                             f"{indent}except AssertionError:", f"{indent}    print({said})"]  # fmt: skip
    return "\n".join(lines)


def _printed(notebook: dict[str, Any]) -> list[str]:
    texts = ["".join(output.get("text", "")) for cell in notebook["cells"] for output in cell.get("outputs", [])]
    return [line for text in texts for line in text.splitlines()]
