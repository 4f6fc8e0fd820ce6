"""Drafts beside plain decoding: what the table counts, and the scheduler's ratios."""

from __future__ import annotations

import json
import time

import pytest

from tinyds41.bench import schedule, speculate
from tinyds41.bench.speculate import distinct
from tinyds41.infer.simulate import BLOCKS
from tinyds41.infer.step_curve import StepCurve

CONTEXTS = (8, 12)


@pytest.fixture(scope="module")
def measured() -> dict:
    """The shipped drafter, a moment long."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speculate, "NEW_TOKENS", 6)
        patch.setattr(speculate, "step_costs", lambda model, prompt, rounds: {k: 1 + k / 4 for k in range(6)})
        return json.loads(json.dumps(speculate.bench_speculate(1, contexts=CONTEXTS, rows=1)))


def only(table: list[dict], **wanted) -> list[dict]:
    return [row for row in table if all(row[name] == value for name, value in wanted.items())]


def test_every_way_is_measured_at_every_context_and_temperature(measured):
    ways = [("plain", 0), *(("drafter", k) for k in range(1, 6)), *(("n-gram", k) for k in range(1, 6))]
    assert [(row["context"], row["temperature"], row["by"], row["depth"]) for row in measured["rows"]] == [
        (context, temperature, *way) for context in CONTEXTS for temperature in (0.0, 0.7, 1.0) for way in ways]
    for row in only(measured["rows"], by="drafter"):
        assert row["drafts"] > 0 and len(row["stood"]) <= row["depth"]
        assert row["break_even"] == pytest.approx(1 + row["depth"] / 4)
        shares = row["accepted_length"] / row["break_even"]
        assert row["of_accepted_over_cost"] == pytest.approx(row["times_plain"] / shares, rel=0.01)


def test_a_run_is_not_charged_for_the_time_that_others_take(monkeypatch):
    def interrupted(session, ids, **options) -> list[list[int]]:
        time.sleep(0.3)
        return [[1, 2, 3, 4]]

    monkeypatch.setattr(speculate, "generate_ids", interrupted)
    written = speculate.write(speculate.example("draft"), [[5] * 8], 1.0)
    assert all(0 < result.seconds < 0.2 for result in written.values())  # threads of the model may still be spinning


def test_a_step_is_not_charged_for_the_time_that_others_take(monkeypatch):
    clocks = []
    monkeypatch.setattr(speculate, "alternate",
                        lambda runs, rounds, clock: clocks.append(clock) or dict.fromkeys(runs, 2))  # fmt: skip
    assert speculate.step_costs(speculate.example("draft"), [5] * 8, 1) == dict.fromkeys(range(6), 1.0)
    assert clocks == [time.process_time]


def test_greedy_texts_are_the_same_whoever_drafts(measured):
    for context in CONTEXTS:
        assert len({tuple(row["distinct"]) for row in only(measured["rows"], context=context, temperature=0.0)}) == 1


def test_speeds_are_those_of_the_same_prompt_without_drafts(measured):
    for row in measured["rows"]:
        (plain,) = only(measured["rows"], context=row["context"], temperature=row["temperature"], by="plain")
        assert row["times_plain"] == pytest.approx(row["tokens_per_second"] / plain["tokens_per_second"], rel=0.02)


def made_up(context: int, by: str, depth: int, drafts: int, length: float, speed: float = 1.0) -> dict:
    return {"context": context, "temperature": 1.0, "by": by, "depth": depth, "drafts": drafts,
            "accepted_length": length, "times_plain": speed, "of_accepted_over_cost": speed / 2}  # fmt: skip


def test_ratios_weigh_drafts_and_compare_equal_depths(monkeypatch):
    monkeypatch.setattr(speculate, "TEMPERATURES", (1.0,))
    table = [made_up(8, "drafter", 1, 30, 1.5, 0.8), made_up(8, "drafter", 2, 10, 2.0, 1.0),
             made_up(9, "drafter", 1, 10, 1.1, 0.8), made_up(9, "drafter", 2, 10, 2.5, 1.4),
             made_up(8, "n-gram", 1, 10, 1.0), made_up(8, "n-gram", 2, 10, 1.5)]  # fmt: skip
    ratios = speculate._ratios(table)
    assert list(ratios.values()) == pytest.approx([1.4, 1.5, 0.4, 1.25, 1.2])
    assert [name.split(":")[0] for name in ratios] == ["T=1, depth 1", "T=1, depth 2", "T=1", "T=1, depth 2", "T=1"]
    assert "9 over 8" in list(ratios)[3] and "best depth, 2" in list(ratios)[4]


def test_distinct_n_counts_different_runs():
    assert distinct([[1, 2, 1, 2, 1]], 1) == 2 / 5 and distinct([[1, 2, 1, 2, 1]], 2) == 2 / 4
    assert distinct([[1, 2, 3], [1, 1, 1]], 1) == pytest.approx((1 + 1 / 3) / 2)
    with pytest.raises(ValueError, match="2 tokens has no 3"):
        distinct([[1, 2]], 3)


def test_prompts_stand_apart_and_end_inside_the_text():
    assert speculate._prompts(range(20), 4, 2) == [[0, 1, 2, 3], [8, 9, 10, 11]]
    with pytest.raises(ValueError, match="3 prompts of 18 tokens: the held-out text has 20"):
        speculate._prompts(range(20), 18, 3)


def test_a_step_is_drafted_verified_and_taken_back():
    model = speculate.example("draft")
    cost = speculate.step_costs(model, [5] * 12, 1)
    assert cost[0] == 1.0 and list(cost) == list(range(6)) and cost[5] > 1


def test_the_schedule_is_compared_at_each_load(monkeypatch):
    for name, value in {"LENGTH": 40, "START": 16, "EVERY": 8, "REQUESTS": (1, 3)}.items():
        monkeypatch.setattr(schedule, name, value)
    curve = StepCurve((1, 8, 64), (0.03, 0.05, 0.09))
    monkeypatch.setattr(schedule, "measure_curve", lambda model, tokens, rounds: curve)
    result = json.loads(json.dumps(schedule.bench_schedule(1, rows=2, blocks=BLOCKS // 64)))
    assert result["drafts"] == 2 * 3 and list(result["drafting_seconds"]) == ["1", "3"]
    for load, ratio in zip((1, 3), result["ratios"].values(), strict=True):
        rows = only(result["rows"], requests=load)
        best = max(row["tokens_per_second"] for row in rows if row["kind"] == "fixed")
        (own,) = only(rows, kind="scheduler")
        assert own["setting"] is None and ratio == pytest.approx(own["tokens_per_second"] / best, rel=1e-3)

