"""How much memory is left, so that what cannot fit is refused before anything is allocated."""

from __future__ import annotations

import os
from pathlib import Path

import torch


def require_device(name: torch.device | str) -> torch.device:
    """Raises: ValueError naming a device that torch does not know or does not have."""
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, TypeError) as error:  # which of them depends on how torch was built
        raise ValueError(f"device {name!r} cannot be used: {str(error).splitlines()[0]}") from error
    return device


def available_bytes(device: torch.device) -> int | None:
    """Free memory of a device in bytes; None where the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    limits = [value for value in (_system_available(), _container_available()) if value is not None]
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
    try:  # no /proc: physical memory is the best bound there is
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def _container_available() -> int | None:
    """What a control group leaves, on systems that have them."""
    root = Path("/sys/fs/cgroup")
    try:
        limit = (root / "memory.max").read_text().strip()
        used = int((root / "memory.current").read_text())
    except (OSError, ValueError):
        return None
    return None if limit == "max" else max(0, int(limit) - used)
