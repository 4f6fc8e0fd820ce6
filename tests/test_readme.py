"""What the README says in numbers and code is what comes out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tinyds41.config import Config, preset_names
from tinyds41.infer.cache import Cache

README = (Path(__file__).parents[1] / "README.md").read_text("utf-8")
ROWS = re.findall(r"^\| (\w+) \| ([\d,]+) \| ([\d.,]+) \| ([\d,]+) \|$", README, re.MULTILINE)


def test_every_preset_has_a_row():
    assert [name for name, *_ in ROWS] == list(preset_names())


@pytest.mark.parametrize(("name", "tokens", "per_token", "windows"), ROWS, ids=[row[0] for row in ROWS])
def test_cache_bytes_are_those_of_a_filled_cache(name, tokens, per_token, windows):
    cache = Cache(Config.preset(name))
    cache.fill(int(tokens.replace(",", "")))
    report = cache.report()
    assert report.bytes_per_token == float(per_token.replace(",", ""))
    assert report.window_bytes == int(windows.replace(",", ""))


def test_the_examples_in_python_run(capsys, tmp_path, monkeypatch):
    """The block as it stands, in an empty folder."""
    (code,) = re.findall(r"## In Python\n\n```python\n(.*?)```", README, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "README.md", "exec"), {})
    assert "bytes per token" in capsys.readouterr().out
