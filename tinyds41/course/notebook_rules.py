"""What a committed lesson must keep: executed cleanly, in step with its .py, short cells, numbers that are computed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from tinyds41.course.notebooks import Notebook, read_notebook, read_script, source

MEDIAN_LINES, MOST_LINES, MOST_WORDS = 8, 25, 90
MACHINE_PATH = re.compile(r"(?<![\w.~])/(?:work|root|home|Users|tmp)/\w+")
# A word of Latin text, or one Chinese character: two characters make about one word.
WORD = re.compile(r"[一-鿿]|[^\s一-鿿]+")
NUMBER = re.compile(r"(?<![\w.,/])\d+(?:,\d{3})*(?:\.\d+)?")
# Digits that name something: code and links, lessons, sections, a reading time.
NAMES = re.compile(r"`[^`]*`|\]\([^)]*\)|(?i:lessons?) \d+|第 ?\d+ ?课|§\d[\d.]*|\d+ ?(?:minutes|分钟)")


def check(script: Path) -> list[str]:
    """Everything wrong with a lesson, one line each; empty when it is fine.

    Raises: FileNotFoundError when the .ipynb is missing; ValueError when it is no notebook.
    """
    notebook = read_notebook(script.with_suffix(".ipynb"))
    rules = (in_step, executed, clean_outputs, short_cells, structure, computed_numbers)
    return [f"{script.stem} {line}" for rule in rules for line in rule(notebook, script)]


def in_step(notebook: Notebook, script: Path) -> Iterator[str]:
    """The .ipynb has the cells of the .py: text, kind and tags."""
    written, executed = ([_essence(cell) for cell in cells] for cells in
                         (read_script(script)["cells"], notebook["cells"]))  # fmt: skip
    for number, (mine, theirs) in enumerate(zip(written, executed, strict=False)):
        if mine != theirs:
            yield f"cell {number}: {script.name} and its .ipynb differ: run `tinyds41 lessons run {script.stem}`"
            return
    if len(written) != len(executed):
        yield f"has {len(written)} cells in {script.name}, {len(executed)} in its .ipynb"


def _essence(cell: dict[str, Any]) -> tuple[str, str, list[str]]:
    return cell["cell_type"], source(cell).strip(), cell["metadata"].get("tags", [])


def executed(notebook: Notebook, script: Path) -> Iterator[str]:
    """Every code cell ran once, in order: counts are 1, 2, 3..."""
    for expected, (number, cell) in enumerate(_code(notebook), 1):
        count = cell.get("execution_count")
        if count != expected:
            yield f"cell {number}: execution count {count}, expected {expected}"


def clean_outputs(notebook: Notebook, script: Path) -> Iterator[str]:
    """No stored errors, no warnings, no path of one machine."""
    for number, cell in _code(notebook):
        for output in cell["outputs"]:
            if output["output_type"] == "error":
                yield f"cell {number}: stored error {output['ename']}: {output['evalue']}"
            if output.get("name") == "stderr":
                yield f"cell {number}: stored stderr: {''.join(output['text']).strip()[:100]}"
    for number, cell in enumerate(notebook["cells"]):
        path = MACHINE_PATH.search(json.dumps(cell))
        if path:
            yield f"cell {number}: a path of one machine: {path[0]}"


def short_cells(notebook: Notebook, script: Path) -> Iterator[str]:
    """Code: median at most 8 lines, none over 25, blanks and comments aside.

    Text: at most 90 words.
    """
    lengths = []
    for number, cell in _code(notebook):
        lines = [line for line in source(cell).splitlines() if line.strip() and not line.strip().startswith("#")]
        lengths.append(len(lines))
        if len(lines) > MOST_LINES:
            yield f"cell {number}: {len(lines)} lines of code, at most {MOST_LINES}"
    if lengths and median(lengths) > MEDIAN_LINES:
        yield f"has code cells of {median(lengths):g} lines (median), at most {MEDIAN_LINES}"
    for number, cell in _text(notebook):
        words = count_words(source(cell))
        if words > MOST_WORDS:
            yield f"cell {number}: {words} words of text, at most {MOST_WORDS}"


def count_words(text: str) -> int:
    """Words as a reader counts them: no marks, two Chinese characters for one word."""
    words = WORD.findall(re.sub(r"</?\w+>", " ", text))
    chinese = sum(1 for word in words if "一" <= word <= "鿿")
    return sum(1 for word in words if re.search(r"[^\W_]", word)) - chinese // 2


def structure(notebook: Notebook, script: Path) -> Iterator[str]:
    """One cell imports, and something is asserted."""
    cells = [(number, source(cell)) for number, cell in _code(notebook)]
    importing = [number for number, text in cells if re.search(r"^\s*(?:import|from) \w", text, re.MULTILINE)]
    if len(importing) != 1:
        yield f"imports in cells {importing}, one import cell is wanted"
    if not any(re.search(r"^\s*assert\b", text, re.MULTILINE) for _, text in cells):
        yield "asserts nothing"


def computed_numbers(notebook: Notebook, script: Path) -> Iterator[str]:
    """A number of two or more digits in the text stands in a code cell or in an output as well."""
    known = set()
    for _, cell in _code(notebook):
        texts = [source(cell).replace("_", ""), *(_printed(output) for output in cell["outputs"])]
        known |= {_plain(number) for text in texts for number in NUMBER.findall(text)}
    for number, cell in _text(notebook):
        for found in NUMBER.findall(NAMES.sub(" ", source(cell))):
            if len(_plain(found)) > 1 and _plain(found) not in known:
                yield f"cell {number}: {found} is neither computed nor asserted"


def _printed(output: dict[str, Any]) -> str:
    return "".join(output.get("text") or output.get("data", {}).get("text/plain", ""))


def _plain(number: str) -> str:
    return number.replace(",", "")


def _code(notebook: Notebook) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, cell in enumerate(notebook["cells"]):
        if cell["cell_type"] == "code" and source(cell).strip():
            yield number, cell


def _text(notebook: Notebook) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, cell in enumerate(notebook["cells"]):
        if cell["cell_type"] == "markdown":
            yield number, cell
