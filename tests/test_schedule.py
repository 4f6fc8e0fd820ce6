"""How many drafted tokens a step verifies: against enumeration, and without a look at what comes later."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from tinyds41.infer.schedule import choose_lengths, survival
from tinyds41.infer.step_curve import StepCurve

SEEDS = range(40)


def linear(n_tokens: int = 64, start: float = 8.0) -> StepCurve:
    """Seconds that grow with each token: tokens per second rise, then fall, once."""
    return StepCurve(tuple(range(1, n_tokens)), tuple(start + n for n in range(1, n_tokens)))


def bumpy(seed: int, n_tokens: int = 16) -> StepCurve:
    """Seconds as a noisy machine measures them: more tokens may take less time."""
    rng = np.random.default_rng(seed)
    return StepCurve(tuple(range(1, n_tokens)), tuple((4 + rng.random(n_tokens - 1) * 3).tolist()))


def drawn(seed: int, requests: int = 3, depth: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).random((requests, depth)) ** 0.3  # mostly high


def admitted(confidence, lengths) -> float:
    """The sum of survivals of so many positions of each request, in plain Python."""
    return sum(math.prod(row[: k + 1]) for row, n in zip(confidence.tolist(), lengths, strict=True) for k in range(n))


def speed(confidence, lengths, curve) -> float:
    """Expected tokens per second."""
    return (len(confidence) + admitted(confidence, lengths)) / curve.seconds(len(confidence) + sum(lengths))


def all_lengths(confidence) -> list[tuple[int, ...]]:
    return list(itertools.product(range(confidence.shape[1] + 1), repeat=len(confidence)))


def enumerated(confidence, curve) -> tuple[int, ...]:
    """Of all lengths with n tokens those that keep most; n grows until that is slower than n - 1 was."""
    by_total: dict[int, list[tuple[int, ...]]] = {}
    for lengths in all_lengths(confidence):
        by_total.setdefault(sum(lengths), []).append(lengths)
    best = [max(by_total[n], key=lambda lengths: admitted(confidence, lengths)) for n in sorted(by_total)]
    for shorter, longer in itertools.pairwise(best):
        if speed(confidence, longer, curve) <= speed(confidence, shorter, curve):
            return shorter
    return best[-1]


# --- Survival, trap S8.


def test_survival_is_the_running_product():
    np.testing.assert_allclose(survival([[0.5, 0.5, 1.0], [0.9, 0.0, 1.0]]), [[0.5, 0.25, 0.25], [0.9, 0, 0]])
    found = survival(np.random.default_rng(0).random((50, 6)) ** 0.01)
    assert (np.diff(found) <= 0).all()  # in every bit: positions are admitted after those before them


@pytest.mark.parametrize("bad", [-0.1, 1.1, math.nan])
def test_a_confidence_is_a_chance(bad):
    with pytest.raises(ValueError, match=f"confidence {bad}: between 0 and 1"):
        survival([[0.5, bad]])


def test_a_confident_token_behind_a_doubtful_one_is_not_taken_for_likely():
    """Trap S8: 0.1 then 1.0 is a chance of 0.1 for the second; the other request's 0.5 comes first."""
    curve = StepCurve((1, 2, 3, 4), (1.0, 1.0, 1.0, 9.0))  # one drafted token is free
    assert choose_lengths([[0.1, 1.0], [0.5, 0.1]], curve).tolist() == [0, 1]


# --- The rule of spec 10.6.


@pytest.mark.parametrize("seed", SEEDS)
def test_lengths_are_those_of_enumeration_up_to_the_first_fall(seed):
    confidence = drawn(seed)
    for curve in (bumpy(seed), linear(start=3.0), linear(start=12.0)):
        assert tuple(choose_lengths(confidence, curve).tolist()) == enumerated(confidence, curve)


def test_enumeration_sees_all_kinds_of_ends():
    """The cases above stop at once, in between and never, and some stop where going on would have been faster."""
    totals, missed = set(), 0
    for seed in SEEDS:
        confidence, curve = drawn(seed), bumpy(seed)
        lengths = enumerated(confidence, curve)
        totals.add(sum(lengths))
        best = max(speed(confidence, other, curve) for other in all_lengths(confidence))
        missed += speed(confidence, lengths, curve) < best
    assert {0, 1, 2} < totals and missed > 10
    assert {sum(enumerated(drawn(seed), linear(start=40.0))) for seed in SEEDS} >= {7, 8, 9}


@pytest.mark.parametrize("seed", SEEDS)
def test_where_each_token_costs_no_less_than_the_one_before_it_is_the_best_of_all(seed):
    confidence = drawn(seed)
    for start in (1.0, 4.0, 16.0):
        curve = linear(start=start)
        lengths = choose_lengths(confidence, curve).tolist()
        best = max(speed(confidence, other, curve) for other in all_lengths(confidence))
        assert speed(confidence, lengths, curve) == pytest.approx(best, rel=1e-12)


def test_equal_survivals_go_to_the_lower_request_and_position():
    free = [StepCurve((1, 3 + n, 4 + n), (1.0, 1.0, 100.0)) for n in range(7)]  # 3 requests, n drafted tokens are free
    lengths = [choose_lengths([[0.5, 1.0], [0.5, 0.5], [0.5, 1.0]], curve).tolist() for curve in free]
    assert lengths == [[0, 0, 0], [1, 0, 0], [2, 0, 0], [2, 1, 0], [2, 1, 1], [2, 1, 2], [2, 2, 2]]


def test_what_raises_nothing_is_not_drafted():
    """Spec 10.6: while it still rises. A token that is never accepted is none, even where more tokens take less."""
    flat, falling = StepCurve((1,), (1.0,)), StepCurve((1, 2, 3, 4), (4.0, 3.0, 2.0, 1.0))
    assert choose_lengths([[0.5, 0.0, 1.0]], falling).tolist() == [1]
    assert choose_lengths([[1.0, 1.0]], StepCurve((1, 2, 3), (1.0, 2.0, 2.5))).tolist() == [0]  # as fast with one more
    assert choose_lengths(np.zeros((2, 0)), flat).tolist() == [0, 0]


def test_more_requests_leave_less_to_drafts():
    confidence = np.full((64, 4), 0.8)
    curve = linear(512)
    totals = [choose_lengths(confidence[:n], curve).mean() for n in (1, 4, 16, 64)]
    assert totals == sorted(totals, reverse=True) and totals[0] > totals[-1]


@pytest.mark.parametrize(("confidence", "message"), [
    ([0.5, 0.5], r"confidence is \(2,\): \[R,k\]"), (np.zeros((0, 2)), r"confidence is \(0, 2\)"),
    ([[0.5, 2.0]], r"confidence 2\.0"),
])  # fmt: skip
def test_confidences_that_cannot_be_are_refused(confidence, message):
    with pytest.raises(ValueError, match=message):
        choose_lengths(confidence, linear())


# --- Non-anticipating. Confidence j of a request follows from its tokens before j. So whether position k is verified
# --- may depend on confidences 1..k of its request, which know nothing of token k, and on other requests; never on
# --- confidences behind k, which know token k: the tokens that are verified would be drawn from another distribution
# --- than the one they are judged by.


@pytest.mark.parametrize("seed", SEEDS)
def test_a_position_is_admitted_whatever_the_confidences_behind_it(seed):
    confidence, rng = drawn(seed), np.random.default_rng(seed + 1000)
    for curve in (bumpy(seed), linear(start=4.0)):
        lengths = choose_lengths(confidence, curve)
        for r, k in itertools.product(range(3), range(1, 4)):
            for later in (0.0, 1.0, rng.random(3 - k)):
                changed = confidence.copy()
                changed[r, k:] = later
                assert min(choose_lengths(changed, curve)[r], k) == min(lengths[r], k)


def revealed(confidence, curve) -> list[int]:
    """The rule token by token: a confidence is looked up once the token before it is admitted, and no other is."""
    lengths, kept = [0] * len(confidence), 1.0 * len(confidence)
    reach = {r: float(row[0]) for r, row in enumerate(confidence)}  # survival of each request's next position
    while reach:
        r = max(reach, key=lambda r: (reach[r], -r))
        before, after = (curve.seconds(len(confidence) + sum(lengths) + more) for more in (0, 1))
        if (kept + reach[r]) / after <= kept / before:
            break
        kept += reach[r]
        lengths[r] += 1
        a = reach.pop(r)
        if lengths[r] < confidence.shape[1]:
            reach[r] = a * float(confidence[r, lengths[r]])
    return lengths


@pytest.mark.parametrize("seed", SEEDS)
def test_tokens_could_be_drawn_as_they_are_admitted(seed):
    """Over all requests at once: nothing follows from a token that is not verified, nor from what comes behind it."""
    confidence = drawn(seed, requests=5, depth=4)
    if seed % 2:
        confidence = confidence.round(1)  # equal survivals
    for curve in (bumpy(seed, 40), linear(start=6.0)):
        assert choose_lengths(confidence, curve).tolist() == revealed(confidence, curve)


def test_a_draft_as_drafters_give_it_is_taken():
    confidence = torch.tensor([[0.9, 0.5], [0.2, 0.9]], dtype=torch.float64)
    assert choose_lengths(confidence, linear()).tolist() == choose_lengths(confidence.tolist(), linear()).tolist()


def the_fastest(confidence, curve) -> np.ndarray:
    """What the rule would be if it looked at all confidences: not lossless."""
    confidence = np.asarray(confidence)
    return np.array(max(all_lengths(confidence), key=lambda lengths: speed(confidence, lengths, curve)))


P = {"": (0.25, 0.75), "a": (0.5, 0.5), "b": (0.125, 0.875)}  # of a and b behind a token, by the model
Q = {"": (0.5, 0.5), "a": (0.25, 0.75), "b": (0.75, 0.25)}  # by the drafter
CONFIDENCE = {"": 0.75, "a": 0.96875, "b": 0.125}  # of the next token, behind a drafted one
VALLEY = StepCurve((1, 2, 3, 4), (1.0, 1.875, 1.9375, 2.5))  # with one token nearly twice as long, with two hardly more
SLOPE = StepCurve((1, 2, 3, 4), (1.0, 1.25, 1.5, 1.75))


def chance(table, before: str, token: str) -> Fraction:
    return Fraction(table[before[-1:]]["ab".index(token)])


def written(choose, curve) -> tuple[dict[str, Fraction], set[int]]:
    """Exact chances of the first three tokens written, and how many drafted ones were verified over all drafts."""
    found, lengths = {"".join(text): Fraction(0) for text in itertools.product("ab", repeat=3)}, set()

    def verify(done: str, rest: str, weight: Fraction) -> None:
        if not rest:  # from here on the model writes for itself
            for text in found:
                if text.startswith(done):
                    found[text] += weight * math.prod(chance(P, text[:i], text[i]) for i in range(len(done), 3))
            return
        p, q = ({x: chance(table, done, x) for x in "ab"} for table in (P, Q))
        accept = min(Fraction(1), p[rest[0]] / q[rest[0]])
        verify(done + rest[0], rest[1:], weight * accept)
        residual = {x: max(p[x] - q[x], Fraction(0)) for x in "ab"}
        for x in "ab" if accept < 1 else "":
            verify(done + x, "", weight * (1 - accept) * residual[x] / sum(residual.values()))

    for draft in found:
        confidence = [CONFIDENCE[draft[:i][-1:]] for i in range(3)]
        n = int(choose([confidence], curve)[0])
        lengths.add(n)
        verify("", draft[:n], math.prod((chance(Q, draft[:i], draft[i]) for i in range(3)), start=Fraction(1)))
    return found, lengths


@pytest.mark.parametrize("curve", [VALLEY, SLOPE])
def test_what_is_written_has_the_chances_of_the_model(curve):
    texts = ["".join(text) for text in itertools.product("ab", repeat=3)]
    wanted = {text: math.prod(chance(P, text[:i], text[i]) for i in range(3)) for text in texts}
    found, lengths = written(choose_lengths, curve)
    assert found == wanted and sum(wanted.values()) == 1
    assert len(lengths) > 1 or curve is VALLEY  # drafts are verified to different depths


def test_a_rule_that_looks_ahead_writes_something_else():
    """In the valley it verifies where an a was drafted, so that a's are judged and b's are not: too many a's."""
    found, lengths = written(the_fastest, VALLEY)
    assert len(lengths) > 1
    assert sum(weight for text, weight in found.items() if text[0] == "a") == Fraction(3, 8) > Fraction(1, 4)
