"""Whether a step drafts at all, and how many of its drafted tokens are verified: the rule with a memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tinyds41.infer.schedule import choose_common_length, choose_lengths, survival
from tinyds41.infer.step_curve import StepCurve

WASTE = 0.01  # of the time, at most, goes into drafts that see whether drafting pays again
MEMORY = 64  # drafts, over which what they bring is averaged
FEWEST = 16  # drafts that are seen before it is given up


class Scheduler:
    """Decides in every step of all requests whether tokens are drafted, and how many of these are verified.

    How many is the rule of `choose_lengths`. It sees confidences, so the drafts are made and their time is spent,
    however few it admits. Whether to draft is therefore decided before, from what earlier drafts at about this load
    would bring: expected tokens over seconds, against a step without drafts. Both decisions know nothing of the tokens
    that they admit, so what is written keeps the chances of the model.

    curve: seconds of a step by the tokens of all requests. drafting: seconds that making drafts takes, by the number of
    requests; None: nothing, then every step drafts.

    Source: spec 10.6; whether to draft is ours.
    """

    def __init__(self, curve: StepCurve, drafting: StepCurve | None = None):
        self.curve, self.drafting = curve, drafting
        self._seen: dict[int, _Gain] = {}

    def begin(self, n_requests: int) -> bool:
        """Whether the step that begins now drafts. Raises: ValueError for fewer than 1 request."""
        return self._gain(n_requests).pays()

    def lengths(self, confidence: ArrayLike) -> NDArray[np.intp]:
        """How many drafted tokens of each request are verified. Shapes: [R,k] -> [R]. Raises: as `choose_lengths`."""
        lengths = choose_lengths(confidence, self._dearer(confidence))
        verified = np.arange(np.shape(confidence)[1]) < lengths[:, None]
        self._note(len(lengths), float((survival(confidence) * verified).sum()), int(lengths.sum()))
        return lengths

    def common_length(self, confidence: ArrayLike) -> int:
        """The same for steps that read equally many tokens of each request. Shapes: [R,k] -> 0..k."""
        length = choose_common_length(confidence, self._dearer(confidence))
        n_requests = len(np.asarray(confidence))
        self._note(n_requests, float(survival(confidence)[:, :length].sum()), n_requests * length)
        return length

    def seconds(self, n_requests: int) -> float:
        """Of making drafts."""
        return 0.0 if self.drafting is None else float(self.drafting.seconds(n_requests))

    def _dearer(self, confidence: ArrayLike) -> StepCurve:
        return self.curve.slower(self.seconds(max(1, len(np.asarray(confidence)))))

    def _note(self, n_requests: int, kept: float, n_verified: int) -> None:
        """Adds what a step with drafts is expected to bring and to take, over what one without does."""
        seconds = float(self.curve.seconds(n_requests + n_verified)) + self.seconds(n_requests)
        self._gain(n_requests).add(1 + kept / n_requests, seconds / float(self.curve.seconds(n_requests)), n_requests)

    def _gain(self, n_requests: int) -> _Gain:
        """Of this load: 1, 2 to 3, 4 to 7, and so on."""
        if n_requests < 1:
            raise ValueError(f"{n_requests} requests: at least one is needed")
        return self._seen.setdefault(n_requests.bit_length(), _Gain())


@dataclass
class _Gain:
    """What drafts bring at one load: running means of tokens and seconds, both over those of a plain step."""

    tokens: float = 0.0
    seconds: float = 0.0
    n_drafts: int = 0
    waited: int = 0

    def add(self, tokens: float, seconds: float, n_drafts: int) -> None:
        self.n_drafts += n_drafts
        weight = min(1.0, n_drafts / min(self.n_drafts, MEMORY))
        self.tokens += weight * (tokens - self.tokens)
        self.seconds += weight * (seconds - self.seconds)

    def pays(self) -> bool:
        loss = self.seconds - self.tokens  # of a step with drafts, in plain steps
        if self.n_drafts < FEWEST or loss <= self.waited * WASTE:
            self.waited = 0
            return True
        self.waited += 1
        return False
