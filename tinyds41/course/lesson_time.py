"""How long lessons run and how much memory they take, beside what a reader's machine must be able to give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from tinyds41.tables import aligned

MOST_SECONDS, MEAN_SECONDS, MOST_BYTES = 120, 60, 2_000_000_000


@dataclass(frozen=True)
class LessonTime:
    """One execution of a lesson. Units: seconds; bytes resident in its kernel, at most."""

    lesson: str
    seconds: float
    peak_bytes: int | None  # None where the system does not tell


def broken_limits(times: Sequence[LessonTime]) -> list[str]:
    """One line for each limit that is passed; empty when all is well."""
    lines = []
    for time in times:
        if time.seconds > MOST_SECONDS:
            lines.append(f"{time.lesson} took {time.seconds:.1f} s, at most {MOST_SECONDS} are allowed")
        if time.peak_bytes is not None and time.peak_bytes > MOST_BYTES:
            lines.append(f"{time.lesson} held {_gb(time.peak_bytes)}, at most {_gb(MOST_BYTES)} are allowed")
    if times and _mean(times) > MEAN_SECONDS:
        lines.append(f"lessons took {_mean(times):.1f} s in the mean, at most {MEAN_SECONDS} are allowed")
    return lines


def table(times: Sequence[LessonTime]) -> list[str]:
    """Lessons, their mean and the limits, as aligned lines."""
    rows = [(time.lesson, f"{time.seconds:.1f}", "-" if time.peak_bytes is None else _gb(time.peak_bytes))
            for time in times]  # fmt: skip
    rows.append(("mean", f"{_mean(times):.1f}" if times else "-", ""))
    rows.append(("limit, each", str(MOST_SECONDS), _gb(MOST_BYTES)))
    rows.append(("limit, mean", str(MEAN_SECONDS), ""))
    return aligned(("lesson", "seconds", "peak memory"), rows)


def as_json(times: Sequence[LessonTime]) -> dict[str, Any]:
    rows = [{"lesson": time.lesson, "seconds": round(time.seconds, 2), "peak_bytes": time.peak_bytes} for time in times]
    limits = {"seconds": MOST_SECONDS, "mean_seconds": MEAN_SECONDS, "peak_bytes": MOST_BYTES}
    return {"lessons": rows, "mean_seconds": round(_mean(times), 2), "threads": 1, "limits": limits,
            "broken": broken_limits(times)}  # fmt: skip


def _mean(times: Sequence[LessonTime]) -> float:
    return mean(time.seconds for time in times)


def _gb(n_bytes: int) -> str:
    return f"{n_bytes / 1e9:.2f} GB"
