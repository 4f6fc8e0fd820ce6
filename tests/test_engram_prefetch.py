"""Rows sent for ahead: matched by their addresses alone (E6), counted, and never more than a matter of time."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
import threading

import pytest
import torch
from host_tables import moved, random_table, reads, threads
from models import random_ids, scattered, traced
from sessions import SHORT
from test_engram_host import BOTH_HALVES

from tinyds41.formats import ENGRAM
from tinyds41.infer.engram_host import host_rows
from tinyds41.infer.host_rows import MOST_WAITING, HostRows, RowReads, total
from tinyds41.infer.host_table import HostTable
from tinyds41.infer.session import Session


def addresses(*numbers):
    return torch.tensor(numbers).view(1, 1, -1)


class Gate:
    """Holds the reading thread back until it is told to go on, or makes it fail."""

    def __init__(self, monkeypatch):
        self.go, self.begun, self.error = threading.Event(), threading.Event(), None
        take = HostTable.take

        def gated(table, index):
            if threading.current_thread().name.startswith("engram rows"):
                self.begun.set()
                assert self.go.wait(20)
                if self.error is not None:
                    raise self.error
            return take(table, index)

        monkeypatch.setattr(HostTable, "take", gated)


@pytest.fixture
def gate(monkeypatch):
    gate = Gate(monkeypatch)
    yield gate
    gate.go.set()


@pytest.fixture
def reader(tmp_path):
    """A reader that sends for any number of rows, and its table's numbers."""
    table, weight = random_table(tmp_path / "t")
    reader = HostRows(table, least=1)
    yield reader, ENGRAM.fake_quant(weight)
    reader.close()


def settle(reader):
    """Waits until all that was sent for has been read."""
    for order in reader._waiting:
        order.read.result()


# ---- E6 ----


@pytest.mark.parametrize(("rows", "chunk"), [(3, 1), (1, 3), (3, 3), (2, 100)])
def test_prefetched_equals_recomputed(tmp_path, rows, chunk):
    """Batch and chunk sizes: every row was sent for, none in vain, and the logits are those of memory."""
    model = scattered(BOTH_HALVES)
    host, ids = moved(model, tmp_path), random_ids(rows, 7)
    sessions = Session(model), Session(host)
    mask = torch.arange(7) >= torch.arange(rows).unsqueeze(1) * 3
    # In the second prompt padding stands between what is known and the first new token.
    for part in (ids, ids.flip(1)):
        here, there = (session.prefill(part, chunk=chunk, mask=mask) for session in sessions)
        assert torch.equal(here, there)
    found = reads(host)
    assert host_rows(host)[1].reads.rows == 2 * rows * 7 * 6
    assert found.direct == found.unused == found.failed == 0
    assert found.read_bytes == 33 * found.rows


def test_addresses_that_do_not_lie_in_a_row_are_met_by_their_numbers(reader):
    """Every second one of a tensor, and a turned one; and no rows at all."""
    reader, weight = reader
    for rows in (torch.arange(12).view(2, 6)[:, ::2], torch.arange(12).view(2, 6).t(), torch.empty(2, 0).long()):
        reader.fetch(rows)
        settle(reader)
        assert torch.equal(reader(rows), weight[rows]) and not reader._waiting
    assert (reader.reads.ready, reader.reads.rows) == (18, 18)


def test_orders_are_met_in_any_order(reader):
    reader, weight = reader
    a, b, c = addresses(3, 4, 5), addresses(4, 3, 5), addresses(7, 8, 9)
    for rows in (a, b, c):
        reader.fetch(rows)
    settle(reader)
    for rows in (c, a, b):
        assert torch.equal(reader(rows), weight[rows])
    assert (reader.reads.ready, reader.reads.rows) == (9, 9)


@pytest.mark.parametrize("asked", [(3, 4, 6), (4, 3, 5), (3, 4), (3, 4, 5, 5)])
def test_other_rows_than_those_sent_for_are_read_directly(reader, asked):
    reader, weight = reader
    reader.fetch(addresses(3, 4, 5))
    rows = addresses(*asked)
    assert torch.equal(reader(rows), weight[rows])
    assert torch.equal(reader(rows.view(-1)), weight[rows.view(-1)])
    assert reader.reads.direct == reader.reads.rows == 2 * len(asked)


def test_addresses_that_change_after_they_were_sent_for_are_other_addresses(reader):
    reader, weight = reader
    rows = addresses(3, 4, 5)
    reader.fetch(rows)
    settle(reader)
    rows[..., 0] = 9
    assert torch.equal(reader(rows), weight[rows]) and reader.reads.direct == 3


def test_what_is_sent_for_twice_is_read_once(reader):
    reader, weight = reader
    reader.fetch(addresses(1, 2))
    reader.fetch(addresses(1, 2))
    assert torch.equal(reader(addresses(1, 2)), weight[addresses(1, 2)]) and not reader._waiting
    reader(addresses(1, 2))
    assert reader.reads.direct == 2


def test_orders_that_nobody_comes_for_are_given_up(reader):
    reader, _ = reader
    for row in range(MOST_WAITING + 3):
        reader.fetch(addresses(row, row))
    assert len(reader._waiting) == MOST_WAITING and reader.reads.unused == 6
    reader(addresses(0, 0))
    assert reader.reads.direct == 2
    reader.reset()
    assert not reader._waiting and reader.reads == RowReads()


# ---- who waits ----


def test_rows_that_are_there_are_counted_as_ready(reader):
    reader, weight = reader
    rows = addresses(5, 5, 6)
    reader.fetch(rows)
    settle(reader)
    reader.reads.read_seconds = 10.0
    assert torch.equal(reader(rows), weight[rows])
    assert (reader.reads.ready, reader.reads.waited, reader.reads.direct, reader.reads.read_bytes) == (3, 0, 0, 99)
    assert reader.reads.read_seconds > 10 and 0 < reader.reads.stood_seconds < 1 and reader.reads.hidden > 0.9
    assert 0 < reader.reads.send_seconds < 1


def test_a_layer_that_comes_too_early_waits(reader, gate):
    reader, weight = reader
    rows = addresses(5, 6)
    reader.fetch(rows)
    assert gate.begun.wait(60)
    threading.Timer(0.05, gate.go.set).start()
    assert torch.equal(reader(rows), weight[rows])
    assert (reader.reads.ready, reader.reads.waited) == (0, 2) and reader.reads.stood_seconds > 0.03


def test_what_has_not_begun_is_read_directly(reader, gate):
    reader, weight = reader
    reader.fetch(addresses(1, 2))
    assert gate.begun.wait(60)
    reader.fetch(addresses(3, 4))
    assert torch.equal(reader(addresses(3, 4)), weight[addresses(3, 4)])
    assert (reader.reads.late, reader.reads.rows, reader.reads.failed, reader.reads.hidden) == (2, 2, 0, 0)


@pytest.mark.parametrize("error", [OSError("disk"), SystemExit(3)])
def test_a_reading_that_fails_is_done_again_by_the_layer(reader, gate, error):
    reader, weight = reader
    gate.error = error
    gate.go.set()
    reader.fetch(addresses(1, 2))
    settled = reader._waiting[0].read
    assert settled.exception() is error
    assert torch.equal(reader(addresses(1, 2)), weight[addresses(1, 2)])
    assert (reader.reads.direct, reader.reads.failed) == (2, 2)
    gate.error = None
    reader.fetch(addresses(3, 4))
    settle(reader)
    reader(addresses(3, 4))
    assert reader.reads.ready == 2  # the thread lives on


def test_an_error_that_lasts_reaches_the_model(tmp_path):
    host = moved(scattered(SHORT), tmp_path)
    os.truncate(host_rows(host)[1].table.path, 5000)
    with pytest.raises(ValueError, match="has 5,000 bytes"):
        host(random_ids(1, 5))
    assert reads(host).failed == 0 and reads(host).rows == 0


def test_counts_of_several_tables_add_up():
    one = RowReads(ready=1, waited=2, late=4, direct=3, read_bytes=4, read_seconds=2.0, stood_seconds=0.5)
    both = total([one, one])
    assert (both.rows, both.read_bytes, both.hidden) == (20, 8, 0.75)
    assert total([]) == RowReads() and RowReads().hidden is None
    assert RowReads(read_seconds=1.0, stood_seconds=1.5).hidden == 0


# ---- when rows are sent for ----


def test_all_layers_rows_are_sent_for_before_the_first_layer_runs(tmp_path, monkeypatch):
    """And those of the next chunk before this one is computed; a decoder layer's when the decoder begins."""
    host, events = moved(scattered(BOTH_HALVES), tmp_path), []
    for layer, reader in host_rows(host).items():
        monkeypatch.setattr(reader, "fetch", lambda rows, layer=layer: events.append(("fetch", layer, rows)))
        reader.register_forward_pre_hook(lambda module, args, layer=layer: events.append(("read", layer, args[0])))
    host.layers[0].register_forward_pre_hook(lambda *_: events.append(("layer 0", 0, None)))
    Session(host).prefill(random_ids(2, 20), mode="bounded", chunk=8)
    kinds = [(kind, layer) for kind, layer, _ in events]
    chunk = [("fetch", 1), ("fetch", 1), ("layer 0", 0), ("read", 1)]
    assert kinds == chunk * 2 + chunk[1:] + [("fetch", 3), ("read", 3)]
    sent = [rows for kind, _, rows in events if kind == "fetch"]
    used = [rows for kind, _, rows in events if kind == "read"]
    for order, use in zip((0, 1, 1, 3, 4, 5), (0, 1, 1, 2, 2, 3), strict=True):
        assert torch.equal(sent[order], used[use]), (order, use)


def test_a_whole_sequence_sends_for_all_its_tables(tmp_path):
    host, ids = moved(scattered(BOTH_HALVES), tmp_path), random_ids(2, 9)
    trace = traced(host, ids, "*.rows")
    found = reads(host)
    assert found.direct == 0 and found.rows == sum(trace[f"layers.{n}.engram.rows"].numel() for n in (1, 3))


def test_few_rows_are_sent_for_only_while_the_file_is_slow(tmp_path):
    """One token's rows are read sooner than a thread wakes up, unless they come from a disk."""
    host = moved(scattered(SHORT), tmp_path, least=7)
    session, reader = Session(host), host_rows(host)[1]
    session.prefill(random_ids(1, 4))
    assert reader.reads.direct == 0
    reader.table.is_slow = False  # a clock decided that in prefill, and this machine may have been busy
    session.decode(5)
    assert reader.reads.direct == 6 and not reader._waiting
    reader.table.is_slow = True
    session.decode(5)
    assert reader.reads.direct == 6
    reader.fetch(addresses(1))
    reader.table.is_slow = False
    reader.fetch(addresses(2))
    assert len(reader._waiting) == 1


def test_addresses_that_nobody_wants_are_not_computed(tmp_path, monkeypatch):
    """In decode, where hashing costs as much as reading."""
    host = moved(scattered(SHORT), tmp_path, least=1000)
    engram, calls = host.layers[1].engram, []
    monkeypatch.setattr(engram, "rows", lambda back, rows=engram.rows: (calls.append(1), rows(back))[1])
    host(random_ids(1, 4))
    assert len(calls) == 1


# ---- threads ----


def test_the_thread_ends_with_close(reader, gate):
    reader, weight = reader
    reader.fetch(addresses(1))
    reader.fetch(addresses(2))
    assert gate.begun.wait(60) and len(threads()) == 1
    gate.go.set()
    reader.close()
    assert not threads() and reader.reads.unused == 2
    reader.fetch(addresses(3))
    assert torch.equal(reader(addresses(3)), weight[addresses(3)]) and not threads() and reader.reads.direct == 1
    reader.close()


def test_a_reader_closed_while_rows_are_sent_for_gets_no_new_thread(reader, monkeypatch):
    """Between the question whether to send and the sending: nobody would end that thread."""
    reader, weight = reader
    monkeypatch.setattr(reader, "wants", lambda n_rows: reader.close() is None)
    reader.fetch(addresses(1, 2))
    assert not threads() and not reader._waiting
    assert torch.equal(reader(addresses(1, 2)), weight[addresses(1, 2)]) and reader.reads.direct == 2


def test_the_thread_ends_with_the_model(tmp_path):
    host = moved(scattered(SHORT), tmp_path)
    host(random_ids(1, 5))
    thread, = threads()
    del host
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()


def test_two_texts_at_a_time_disturb_each_other_in_nothing_but_time(tmp_path):
    model = scattered(SHORT)
    host, failed = moved(model, tmp_path), []

    def run(seed):
        ids = random_ids(2, 7, seed=seed)
        for _ in range(3):
            if not torch.equal(Session(host).prefill(ids, chunk=3), expected[seed]):
                failed.append(seed)

    expected = [Session(model).prefill(random_ids(2, 7, seed=seed), chunk=3) for seed in range(3)]
    runs = [threading.Thread(target=run, args=(seed,)) for seed in range(3)]
    for thread in runs:
        thread.start()
    for thread in runs:
        thread.join()
    assert not failed and reads(host).rows == 3 * 3 * 2 * 7 * 6


IN_A_PROCESS_OF_ITS_OWN = """
    import os, signal, sys, torch
    sys.path.insert(0, {tests!r})
    from host_tables import moved, random_table
    from pathlib import Path
    from tinyds41.infer.host_rows import HostRows
    table, _ = random_table(Path({folder!r}) / "t")
    reader, rows = HostRows(table, least=1), torch.arange(6).view(1, 1, 6)
    expected = table.take(rows)
    reader.fetch(rows)
"""


def run_alone(folder, code):
    program = IN_A_PROCESS_OF_ITS_OWN.format(tests=os.path.dirname(__file__), folder=str(folder)) + code
    return subprocess.run([sys.executable, "-W", "ignore", "-c", textwrap.dedent(program)], capture_output=True,
                          text=True, timeout=120)  # fmt: skip


def test_the_interpreter_ends_and_a_forked_process_reads_by_itself(tmp_path):
    """The child has none of the threads, and its parent's order would never come."""
    done = run_alone(tmp_path, """
    import time
    take = type(table).take
    type(table).take = lambda self, index: (time.sleep(0.3), take(self, index))[1]
    reader.reset()
    reader.fetch(rows)                  # being read while the process forks
    child = os.fork()
    if child == 0:
        signal.alarm(20)                # rather than wait for ever
        same = torch.equal(reader(rows), expected) and reader.reads.direct == 6
        reader.fetch(rows + 1)
        same = same and torch.equal(reader(rows + 1), take(table, rows + 1)) and reader.reads.direct == 6
        os._exit(0 if same else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert torch.equal(reader(rows), expected) and reader.reads.direct == 0
    reader.fetch(rows + 2)              # still to be read when the interpreter ends
    print("end")
    """)
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")
