"""Ctrl-C during a training run: it ends between two steps, with all that was learned."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass
class Interrupt:
    """Whether Ctrl-C was pressed."""

    requested: bool = False


@contextmanager
def interrupt_as_flag() -> Iterator[Interrupt]:
    """Ctrl-C sets a flag that is read between steps: half an update is never saved.

    A second one stops at once.
    """
    interrupt = Interrupt()

    def remember(number: int, frame: Any) -> None:
        if interrupt.requested:
            raise KeyboardInterrupt
        interrupt.requested = True

    try:
        before = signal.signal(signal.SIGINT, remember)
    except ValueError:  # not the main thread: signals are not ours to catch
        yield interrupt
        return
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, before)
