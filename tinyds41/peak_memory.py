"""How much memory a process held at most, without torch."""

from __future__ import annotations

import resource
import sys
from pathlib import Path


def peak_bytes() -> int:
    """Largest resident size of this process so far, in bytes."""
    # rusage comes second: on Linux it would still show the peak of the process that started this one.
    found = peak_bytes_of("self")
    if found is not None:
        return found
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def peak_bytes_of(process: int | str) -> int | None:
    """The same for a running process, by its id; None where the system does not tell, as outside Linux."""
    try:
        for line in Path(f"/proc/{process}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None
