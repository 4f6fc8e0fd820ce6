"""Imports point one way: what stands lower never imports what stands higher."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import tinyds41

PACKAGE = Path(tinyds41.__file__).parent
# From low to high. A file that stands directly in the package is at the bottom, unless it is named here.
LEVELS = (("model",), ("checkpoint", "infer", "train", "kernels"), ("cost",), ("show",),
          ("course", "bench", "cli", "__main__"))  # fmt: skip
LEVEL_OF = {name: level for level, names in enumerate(LEVELS, 1) for name in names}
FILES = sorted(path for path in PACKAGE.glob("**/*.py") if path != PACKAGE / "__init__.py")


def imported(code: str) -> set[str]:
    """First names below the package of all that a file imports, wherever in the file."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and node.module == "tinyds41":
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tinyds41."):
            names.add(str(node.module).split(".")[1])
        elif isinstance(node, ast.Import):
            names |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("tinyds41.")}
    return names


def test_every_kind_of_import_is_seen():
    code = ("from tinyds41 import ops", "from tinyds41.model.rope import Rope",
            "def f():", "    import tinyds41.cost.flops, os")  # fmt: skip
    assert imported("\n".join(code)) == {"ops", "model", "cost"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_file_imports_nothing_above_it(path):
    mine = LEVEL_OF.get(path.relative_to(PACKAGE).parts[0].removesuffix(".py"), 0)
    assert [name for name in sorted(imported(path.read_text("utf-8"))) if LEVEL_OF.get(name, 0) > mine] == []
