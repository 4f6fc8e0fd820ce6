"""Steps per second against the tokens of a step: measured where the model runs, and kept in a file."""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from tinyds41.infer.draft import Drafter, Sampling
from tinyds41.infer.session import Session
from tinyds41.machine import device_name
from tinyds41.model.transformer import Model
from tinyds41.whole_file import write_whole

logger = logging.getLogger(__name__)
POINTS = (1, 2, 3, 4, 6, 8, 12, 16, 32, 64, 128, 256)
CONTEXT = 128  # tokens that the measured steps look back on
ROUNDS = 5


@dataclass(frozen=True)
class StepCurve:
    """How long a step takes by its tokens, of all requests together.

    Between two measured points the seconds lie on a line. More tokens may take less time, as measured. Fewer than the
    fewest measured take as long as those; more than the most take their share of them, as if nothing were gained.

    tokens: rising counts; times: seconds of a step with so many; overhead: seconds that every step takes besides.
    Raises: ValueError for points that cannot be.
    Source: spec 10.6.
    """

    tokens: tuple[int, ...]
    times: tuple[float, ...]
    overhead: float = 0.0

    def __post_init__(self) -> None:
        _check_counts(self.tokens)
        if len(self.tokens) != len(self.times):
            raise ValueError(f"{len(self.tokens)} counts of tokens, {len(self.times)} times")
        for seconds in self.times:
            if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < math.inf:
                raise ValueError(f"seconds {seconds!r}: a positive number is needed")
        if not 0 <= self.overhead < math.inf:
            raise ValueError(f"overhead={self.overhead}: 0 or a positive finite number of seconds is needed")

    def seconds(self, n_tokens: ArrayLike) -> NDArray[np.float64]:
        """Of a step with so many tokens. Raises: ValueError for a count below 1."""
        counts = np.asarray(n_tokens)
        if (counts < 1).any():
            raise ValueError(f"{counts.min()} tokens: a step has at least 1")
        return np.interp(counts, self.tokens, self.times) * np.maximum(1, counts / self.tokens[-1]) + self.overhead

    def steps_per_second(self, n_tokens: ArrayLike) -> NDArray[np.float64]:
        """Raises: as `seconds`."""
        return 1 / self.seconds(n_tokens)

    def slower(self, seconds: float) -> StepCurve:
        """The curve where every step takes so much longer, whatever its tokens: by the making of drafts."""
        return replace(self, overhead=self.overhead + seconds)


def measure_curve(
    model: Model, *, tokens: Sequence[int] | None = None, rows: int = 1, context: int = CONTEXT, rounds: int = ROUNDS
) -> StepCurve:
    """Times `Session.extend` with each count of tokens, spread over so many rows: medians, in turns.

    The past is random rows, the ids are the same each time, and the tokens are taken back after each step.

    tokens: None is POINTS for each row. context: tokens of each row before the step.
    Raises: ValueError for counts that are not rising or that rows do not divide, for rows or rounds below 1, for more
        tokens than max_position_embeddings.
    """
    for name, value in (("rows", rows), ("rounds", rounds)):
        if value < 1:
            raise ValueError(f"{name}={value}: at least one is needed")
    tokens = _counts(tokens, rows)
    _check_counts(tokens)
    for count in tokens:
        if count % rows:
            raise ValueError(f"{count} tokens in {rows} rows: each row has as many as the others")
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (rows, tokens[-1] // rows), generator=generator).to(model.device)
    session = Session(model, rollback=ids.shape[1])
    session.start(rows).fill(context)
    seconds: dict[int, list[float]] = {count: [] for count in tokens}
    for _ in range(rounds + 1):  # by turns, so that what disturbs the machine disturbs all counts
        for count, times in seconds.items():
            times.append(_timed(model.device, lambda count=count: session.extend(ids[:, : count // rows])))
            session.truncate(context)
    medians = (statistics.median(times[1:]) for times in seconds.values())  # the first of each is a warm-up
    return StepCurve(tokens, tuple(medians))


def measure_drafting(
    drafter: Drafter, model: Model, *, requests: Sequence[int], sampling: Sampling | None = None,
    context: int = CONTEXT, rounds: int = ROUNDS,
) -> StepCurve:  # fmt: skip
    """Times `drafter.propose` for each number of requests: medians, in turns. Its `tokens` are requests.

    Raises: ValueError for counts that are not rising or below 1, for rounds below 1.
    """
    if rounds < 1:
        raise ValueError(f"rounds={rounds}: at least one is needed")
    _check_counts(requests)
    sampling, sessions = sampling or Sampling(), {count: Session(model) for count in requests}
    for count, session in sessions.items():
        session.start(count).fill(context)

    def draft(count: int) -> None:
        generators = [torch.Generator().manual_seed(row) for row in range(count)]
        anchors = torch.zeros(count, dtype=torch.long, device=model.device)
        drafter.propose(sessions[count], anchors, drafter.depth, sampling, generators)

    seconds: dict[int, list[float]] = {count: [] for count in requests}
    for _ in range(rounds + 1):
        for count, times in seconds.items():
            times.append(_timed(model.device, lambda count=count: draft(count)))
    return StepCurve(tuple(requests), tuple(statistics.median(times[1:]) for times in seconds.values()))


def cached_curve(
    model: Model, folder: str | Path | None = None, *, tokens: Sequence[int] | None = None, rows: int = 1,
    context: int = CONTEXT,
) -> StepCurve:  # fmt: skip
    """The curve of this machine, model and dtype: from its file in `folder`, or measured and written there.

    A file that is damaged or speaks of another machine is measured anew; why is in the log.

    folder: None is `default_folder()`.
    Raises: ValueError as `measure_curve`.
    """
    tokens = _counts(tokens, rows)
    of = _identity(model, tokens, rows, context)
    digest = hashlib.sha256(json.dumps(of, sort_keys=True).encode()).hexdigest()
    path = (default_folder() if folder is None else Path(folder)) / f"steps-{digest[:16]}.json"
    try:
        return _read(path, of)
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        logger.warning("steps per second are measured anew: %s: %s", path, error)
    curve = measure_curve(model, tokens=tokens, rows=rows, context=context)
    try:
        write_whole(path, json.dumps({"of": of, "tokens": curve.tokens, "seconds": curve.times}, indent=1) + "\n")
    except OSError as error:
        logger.warning("the curve of steps per second is not kept: %s: %s", path, error)
    return curve


def default_folder() -> Path:
    """Where curves are kept, under the user's home."""
    return Path.home() / ".cache" / "tinyds41" / "steps"


def _counts(tokens: Sequence[int] | None, rows: int) -> tuple[int, ...]:
    return tuple(count * rows for count in POINTS) if tokens is None else tuple(tokens)


def _check_counts(tokens: Sequence[int]) -> None:
    if not len(tokens):
        raise ValueError("no points: at least one count of tokens is needed")
    if not all(isinstance(count, int) and not isinstance(count, bool) for count in tokens):
        raise ValueError(f"tokens {list(tokens)}: whole numbers are needed")
    if tokens[0] < 1 or any(count >= following for count, following in itertools.pairwise(tokens)):
        raise ValueError(f"tokens {list(tokens)}: rising counts from 1 on are needed")


def _timed(device: torch.device, work: Callable[[], Any]) -> float:
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.synchronize(device)
    started = perf_counter()
    work()
    if cuda:  # the call returns before the device is done
        torch.cuda.synchronize(device)
    return perf_counter() - started


def _identity(model: Model, tokens: Sequence[int], rows: int, context: int) -> dict[str, Any]:
    """What decides how long a step takes. Temperatures and unknown fields of a file do not."""
    config = model.config.replace(dspark_temperatures=(), extra={}).to_dict()
    return {
        "machine": f"{model.device}: {device_name(model.device)}", "threads": torch.get_num_threads(),
        "torch": torch.__version__, "dtype": str(model.dtype),
        "drafts": getattr(model, "mtp", None) is not None,  # a drafter's windows are written too
        "config": hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest(),
        "tokens": list(tokens), "rows": rows, "context": context,
    }  # fmt: skip


def _read(path: Path, of: Mapping[str, Any]) -> StepCurve:
    """Raises: OSError, ValueError where the file is not there, not whole, or not about `of`."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"no JSON in UTF-8: {error}") from error
    if not isinstance(content, dict):
        raise ValueError("it holds no object")
    if content.get("of") != dict(of):
        raise ValueError("it is of another machine, model or setting")
    tokens, seconds = content.get("tokens"), content.get("seconds")
    if not isinstance(tokens, list) or not isinstance(seconds, list):
        raise ValueError("it lacks the lists tokens and seconds")
    curve = StepCurve(tuple(tokens), tuple(seconds))
    if list(curve.tokens) != of["tokens"]:
        raise ValueError(f"its points are {list(curve.tokens)}, not {of['tokens']}")
    return curve
