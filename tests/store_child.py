"""`python store_child.py SCENARIO FOLDER`: what needs processes of its own, reported as JSON. It forks: no torch."""

from __future__ import annotations

import json
import mmap
import os
import random
import resource
import signal
import sqlite3
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from store_texts import BLOCK, opened, payloads, rows, text, write

N_TEXTS, N_BYTES = 12, 9000  # of killed writers; a block takes more than one page of the file
BUDGET = 40 * N_BYTES  # of 66 blocks: something is removed all the time


def forked(run: Callable[..., None], *values: Any) -> int:
    """The number of a process that runs this and ends without returning."""
    number = os.fork()
    if number:
        return number
    try:
        run(*values)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


# ---- kill -9 ----


def write_without_end(path: Path, seed: int, last: mmap.mmap) -> None:
    """Notes the statement that it is about to run."""
    connect, draw = sqlite3.connect, random.Random(seed)

    def traced(*args: Any, **kwargs: Any) -> sqlite3.Connection:
        connection = connect(*args, **kwargs)
        connection.set_trace_callback(lambda statement: last.__setitem__(slice(0, 6), statement[:6].ljust(6).encode()))
        return connection

    sqlite3.connect = traced
    store = opened(path, budget_bytes=BUDGET)
    while True:
        number = draw.randrange(N_TEXTS)
        write(store, text(number, number), n_bytes=N_BYTES)


def killed(folder: Path, n_kills: int = 200) -> dict[str, Any]:
    """Kills writers at random moments; after each, the file is sound and every text has a whole beginning."""
    last, moments, hits, draw = mmap.mmap(-1, 6), Counter(), 0, random.Random(0)
    for number in range(n_kills):
        path = folder / f"{number // 5}.db"  # every fifth also creates its file
        last[:] = b"begin "
        child = forked(write_without_end, path, number, last)
        while last[:] == b"begin ":
            assert os.waitpid(child, os.WNOHANG)[0] == 0, "the writer ended before its first statement"
            time.sleep(0.0002)
        time.sleep(draw.uniform(0.0, 0.015))
        os.kill(child, signal.SIGKILL)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL, "the writer ended by itself"
        moments[last[:].decode().strip()] += 1
        hits += check_sound(path)
    return {"kills": n_kills, "moments": moments, "hits": hits}


@cache
def expected(number: int) -> list[bytes]:
    return payloads(text(number, number), N_BYTES)


def check_sound(path: Path) -> int:
    """How many blocks are found."""
    n_blocks = 0
    with opened(path, budget_bytes=BUDGET) as store:
        stored = rows(path)
        for number in range(N_TEXTS):
            ids = text(number, number)
            present = [key in stored for key in store.keys(ids)]
            n = store.find(ids) // BLOCK
            assert present == [True] * n + [False] * (number - n), f"text {number} has holes: {present}"
            assert store.read(ids) == expected(number)[:n]
            n_blocks += n
        assert store.counters.damaged == 0 and n_blocks == len(stored)
        assert store.bytes_stored() <= BUDGET
    return n_blocks


# ---- two at once ----


def write_and_report(path: Path, ids: list[int], gate: int, report: int) -> None:
    """Begins when a byte comes through the gate."""
    os.read(gate, 1)
    with opened(path) as store:
        n_bytes = write(store, ids)
        seen = {"n_bytes": n_bytes, **vars(store.counters), "read": store.read(ids) == payloads(ids)}
    os.write(report, json.dumps(seen).encode().ljust(1000))


def together(folder: Path, n_rounds: int = 20) -> list[dict[str, Any]]:
    """In each round two processes create a file and write the same text into it."""
    reports = []
    for number in range(n_rounds):
        path, gate, results = folder / f"{number}.db", os.pipe(), os.pipe()
        children = [forked(write_and_report, path, text(number, 12), gate[0], results[1]) for _ in range(2)]
        os.write(gate[1], b"gg")
        assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
        pair = [json.loads(os.read(results[0], 1000)) for _ in children]
        for end in (*gate, *results):
            os.close(end)
        reports.append({"pair": pair, "blocks": len(rows(path))})
    return reports


# ---- what the system refuses ----


def full(folder: Path) -> dict[str, Any]:
    """No file may grow beyond a limit, then it may again."""
    ids, others = text(1, 40), text(2, 3)
    store, report = opened(folder / "store.db"), {}
    write(store, others, n_bytes=N_BYTES)
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, hard))
    report["bytes"] = [write(store, ids, n_bytes=N_BYTES), write(store, ids, n_bytes=N_BYTES)]
    report["found"], report["failed"] = store.find(ids), store.counters.failed_writes
    report["read"] = store.read(ids) == payloads(ids, N_BYTES)[: report["found"] // BLOCK]
    report["others"] = store.read(others) == payloads(others, N_BYTES)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    report["later"] = write(store, ids, n_bytes=N_BYTES)
    report["all"] = store.read(ids) == payloads(ids, N_BYTES)
    store.close()
    report["sound"] = len(rows(folder / "store.db"))
    return report


def full_from_the_start(folder: Path) -> dict[str, Any]:
    """Not even the tables can be written."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    return used_all_the_same(folder / "store.db")


def read_only(folder: Path) -> dict[str, Any]:
    """As a user who may read the folder; `kept.db` lies there."""
    if os.geteuid() == 0:
        os.setuid(65534)  # root may write anywhere
    names = ("kept.db", "open/kept.db", "new.db", "none/new.db")
    return {name: used_all_the_same(folder / name) for name in names}


def used_all_the_same(path: Path) -> dict[str, Any]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        store = opened(path)
        at_opening = len(seen)
        known, new = text(1, 3), text(2, 3)
        report = {
            "found": store.find(known), "read": store.read(known) == payloads(known), "bytes": store.bytes_stored(),
            "written": [write(store, new), write(store, new)], "new": store.read(new), "at_opening": at_opening,
            "failed": store.counters.failed_writes,
        }  # fmt: skip
        store.close()
    return {**report, "warnings": [str(warning.message) for warning in seen]}


if __name__ == "__main__":
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = globals()[sys.argv[1]](Path(sys.argv[2]))
    print(json.dumps({"result": result, "warnings": [str(warning.message) for warning in caught],
                      "torch": "torch" in sys.modules}))  # fmt: skip
