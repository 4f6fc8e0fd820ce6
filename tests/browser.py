"""A notebook in JupyterLab, in a browser without a window: what a reader sees and moves."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = ("--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage",
         "--disable-quic", "--disable-sync", "--no-first-run")  # fmt: skip
SECONDS = 60  # for any one step; all of them together take about fifteen
SETTINGS = {
    # Otherwise cells that are scrolled out of sight leave the page, and nothing finds them.
    "notebook-extension/tracker": {"windowingMode": "none"},
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
}
# The word alone also stands there before a kernel is attached; the bar puts the kernel's name and | before it later.
IDLE = "() => /\\| Idle/.test(document.querySelector('#jp-bottom-panel')?.innerText || '')"
PROMPTS = "[...document.querySelectorAll('.jp-CodeCell .jp-InputPrompt')].map(one => one.textContent)"


def require_browser() -> str:
    """The path of a browser; the test is skipped where there is none, or nothing to drive it with."""
    for package in ("jupyterlab", "ipywidgets", "playwright"):
        pytest.importorskip(package, reason=f"needs {package}: pip install 'tinyds41[all]'")
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    return found or pytest.skip(f"needs a browser: none of {', '.join(BROWSERS)} is installed")


@contextmanager
def open_notebook(cells: list[str], folder: Path, browser: str) -> Iterator:
    """A page that shows a notebook of these code cells, executed; server, kernel and browser end with it.

    folder: an empty one; whatever JupyterLab and the browser write stays in it.
    """
    root = folder / "root"
    root.mkdir()
    (root / "try.ipynb").write_text(json.dumps(_notebook(cells)))
    with _server(folder, root) as address, _page(browser, folder) as page:
        page.goto(address.format("doc/tree/try.ipynb"))
        page.wait_for_selector(".jp-Notebook .jp-Cell")
        page.wait_for_function(IDLE)
        _run_all(page, len(cells))
        yield page


def _notebook(cells: list[str]) -> dict:
    python = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    written = [{"cell_type": "code", "id": f"cell-{number}", "metadata": {}, "source": text, "outputs": [],
                "execution_count": None} for number, text in enumerate(cells)]  # fmt: skip
    return {"nbformat": 4, "nbformat_minor": 5, "metadata": python, "cells": written}


@contextmanager
def _server(folder: Path, root: Path) -> Iterator[str]:
    """JupyterLab on a free port of this machine, without any settings of the user. Yields its address, with a {}."""
    for name, content in SETTINGS.items():
        file = folder / "settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(content))
    homes = {"JUPYTER_CONFIG_DIR": "config", "JUPYTER_DATA_DIR": "data", "JUPYTER_RUNTIME_DIR": "runtime",
             "JUPYTERLAB_SETTINGS_DIR": "settings", "JUPYTERLAB_WORKSPACES_DIR": "workspaces",
             "IPYTHONDIR": "ipython"}  # fmt: skip
    environment = os.environ | {name: str(folder / home) for name, home in homes.items()}
    port, token = _free_port(), secrets.token_hex(16)
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--ip=127.0.0.1", f"--port={port}",
               f"--IdentityProvider.token={token}", f"--ServerApp.root_dir={root}", "--ServerApp.port_retries=0",
               "--allow-root", "--LabApp.news_url="]  # fmt: skip
    with (folder / "server.log").open("w") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        try:
            address = f"http://127.0.0.1:{port}/{{}}?token={token}"
            _await_answer(server, address.format("api"), folder / "server.log")
            yield address
        finally:
            server.terminate()  # it ends its kernels
            try:
                server.wait(15)
            except subprocess.TimeoutExpired:
                server.kill()


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def _await_answer(server: subprocess.Popen, url: str, log: Path) -> None:
    end = time.monotonic() + SECONDS
    while time.monotonic() < end and server.poll() is None:
        try:
            urllib.request.urlopen(url, timeout=1)
            return
        except OSError:
            time.sleep(0.1)
    pytest.fail(f"JupyterLab does not answer:\n{log.read_text()[-2000:]}")


@contextmanager
def _page(browser: str, folder: Path) -> Iterator:
    from playwright.sync_api import Error, sync_playwright

    root = ("--no-sandbox",) if hasattr(os, "geteuid") and os.geteuid() == 0 else ()
    with sync_playwright() as driver:
        try:
            context = driver.chromium.launch_persistent_context(
                str(folder / "profile"), executable_path=browser, headless=True, args=[*FLAGS, *root],
                viewport={"width": 1000, "height": 1100})  # fmt: skip
        except Error as error:  # a wrapper that only says how to install it; one that may not write here
            pytest.skip(f"{browser} does not start: {str(error).splitlines()[0]}")
        context.set_default_timeout(1000 * SECONDS)
        yield context.pages[0]
        context.close()


def _run_all(page, n_cells: int) -> None:
    from playwright.sync_api import TimeoutError as TooLate

    started = f"() => {PROMPTS}.some(text => /\\[(\\*|\\d+)\\]/.test(text))"
    for attempt in range(5):
        page.get_by_role("menuitem", name="Run", exact=True).click()
        page.get_by_text("Run All Cells", exact=True).click()
        try:
            page.wait_for_function(started, timeout=4000)
            break
        except TooLate:  # the menu can be there before what it calls
            assert attempt < 4, "Run All Cells has no effect"
    page.wait_for_function(f"() => {PROMPTS}.filter(text => /\\[\\d+\\]/.test(text)).length >= {n_cells}")
    page.wait_for_function(IDLE)
