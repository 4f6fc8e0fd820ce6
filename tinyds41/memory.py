"""How much memory is left, so that what cannot fit is refused before anything is allocated."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # what asks for host memory alone starts without torch
    import torch

MOST_THREADS = 1024  # far more of them than a machine can start would end the process without a word
CONTROL_GROUP = Path("/sys/fs/cgroup")  # of a container, on systems that have them


def require_device(name: torch.device | str) -> torch.device:
    """Raises: ValueError naming a device that torch does not know or does not have."""
    import torch

    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, TypeError) as error:  # which of them depends on how torch was built
        raise ValueError(f"device {name!r} cannot be used: {str(error).splitlines()[0]}") from error
    return device


def set_threads(count: int) -> None:
    """Of torch. Raises: ValueError naming a count that is not from 1 to `MOST_THREADS`."""
    import torch

    if not 1 <= count <= MOST_THREADS:
        raise ValueError(f"--threads {count}: 1 to {MOST_THREADS} are possible")
    torch.set_num_threads(count)


def available_bytes(device: torch.device) -> int | None:
    """Free memory of a device in bytes; None where the system does not tell."""
    if device.type == "cuda":
        import torch

        return torch.cuda.mem_get_info(device)[0]
    limits = [value for value in (_system_available(), _container_available()) if value is not None]
    return min(limits, default=None)


def total_bytes() -> int | None:
    """Host memory of the machine, or of the container it runs in; None where the system does not tell."""
    limits = [value for value in (_physical(), _container_limit()) if value is not None]
    return min(limits, default=None)


def require_bytes(needed: int, device: torch.device, what: str) -> None:
    """Raises: MemoryError naming the bytes needed and the bytes there."""
    available = available_bytes(device)
    if available is not None and needed > available:
        raise MemoryError(f"{what} needs {needed:,} bytes, {device} has {available:,} bytes available")


def _system_available() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return _physical()  # no /proc: the best bound there is


def _physical() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def _container_available() -> int | None:
    """What a control group leaves, on systems that have them."""
    limit = _container_limit()
    try:
        return None if limit is None else max(0, limit - int((CONTROL_GROUP / "memory.current").read_text()))
    except (OSError, ValueError):
        return None


def _container_limit() -> int | None:
    try:
        limit = (CONTROL_GROUP / "memory.max").read_text().strip()
        return None if limit == "max" else int(limit)
    except (OSError, ValueError):
        return None
