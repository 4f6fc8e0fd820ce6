"""What computes here, by name: times of one machine say nothing about another."""

from __future__ import annotations

import platform
from pathlib import Path

import torch


def device_name(device: torch.device | str = "cpu") -> str:
    """The graphics card, or the processor as the system calls it."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    return _processor() or platform.machine()


def _processor() -> str | None:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or None
