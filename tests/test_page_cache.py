"""What the system keeps of a file: asked for, and given up on request."""

from __future__ import annotations

import os

import pytest
import torch
from host_tables import random_table

from tinyds41.bench import page_cache


def test_pages_of_a_file_are_dropped_without_harm(tmp_path, monkeypatch):
    table, weight = random_table(tmp_path / "t")
    before = table.take(torch.arange(5))
    assert page_cache.drop(tmp_path / "t") == hasattr(os, "posix_fadvise")
    assert torch.equal(table.take(torch.arange(5)), before) and before.any() and weight.any()
    monkeypatch.delattr(os, "posix_fadvise", raising=False)
    assert not page_cache.drop(tmp_path / "t")


def test_whether_a_file_is_held_is_asked_without_waiting(tmp_path, monkeypatch):
    """A reading that would wait says no; a system that cannot be asked is taken to hold it."""
    (tmp_path / "f").write_bytes(b"x" * 5000)
    assert page_cache.holds(tmp_path / "f")  # just written

    def fails_with(error):
        def preadv(*_):
            raise error

        monkeypatch.setattr(os, "preadv", preadv, raising=False)
        monkeypatch.setattr(os, "RWF_NOWAIT", 8, raising=False)
        return page_cache.holds(tmp_path / "f")

    assert not fails_with(BlockingIOError())
    assert fails_with(OSError("not here"))
    monkeypatch.delattr(os, "RWF_NOWAIT")
    assert page_cache.holds(tmp_path / "f")


def test_a_missing_file_is_an_error(tmp_path):
    for ask in (page_cache.holds, page_cache.drop) if hasattr(os, "posix_fadvise") else (page_cache.holds,):
        with pytest.raises(FileNotFoundError, match="nowhere"):
            ask(tmp_path / "nowhere")


def test_what_came_from_disks_is_counted_in_bytes(monkeypatch):
    found = page_cache.disk_bytes()
    assert found is None or found >= 0
    monkeypatch.setattr(page_cache, "resource", None)
    assert page_cache.disk_bytes() is None
