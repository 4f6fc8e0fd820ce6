"""The system's page cache: how to empty it for a file, and whether a reading came from the disk."""

from __future__ import annotations

import os
from pathlib import Path

try:
    import resource
except ImportError:  # not everywhere
    resource = None


def drop(path: Path) -> bool:
    """Asks the system to forget what it keeps of a file; False where it cannot be asked.

    It keeps pages that a process has mapped, and may keep others: whether it obeyed shows in `disk_bytes`.

    Raises: OSError for a file that cannot be opened.
    """
    if not hasattr(os, "posix_fadvise"):
        return False
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)  # pages not yet written stay
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
    return True


def holds(path: Path) -> bool:
    """Whether a file's first page would be served from memory; True where the system does not tell.

    Raises: OSError for a file that cannot be opened.
    """
    with path.open("rb") as file:
        try:
            os.preadv(file.fileno(), [bytearray(1)], 0, os.RWF_NOWAIT)  # fails where it would have to wait
        except BlockingIOError:
            return False
        except (AttributeError, OSError):
            return True
    return True


def disk_bytes() -> int | None:
    """Units: bytes that this process has had read from disks so far; None where the system does not count them."""
    return None if resource is None else 512 * resource.getrusage(resource.RUSAGE_SELF).ru_inblock
