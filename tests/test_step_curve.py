"""Steps per second against tokens: what lies between points, how they are measured, and when a file is not used."""

from __future__ import annotations

import json
import logging

import numpy as np
import pytest
import torch
from models import NANO, scattered
from sessions import SHORT, fed_session

from tinyds41.infer import step_curve
from tinyds41.infer.draft import Sampling
from tinyds41.infer.dspark_drafter import DSparkDrafter
from tinyds41.infer.step_curve import StepCurve, cached_curve, default_folder, measure_curve
from tinyds41.model.transformer import Model

CURVE = StepCurve((1, 4, 8), (1.0, 1.0, 3.0))


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(SHORT)


# --- The curve.


def test_seconds_are_interpolated_between_points():
    assert CURVE.seconds([1, 2, 4, 5, 6, 8]).tolist() == [1, 1, 1, 1.5, 2, 3]
    assert CURVE.seconds(5) == 1.5 and CURVE.steps_per_second(6) == 0.5
    np.testing.assert_allclose(CURVE.steps_per_second([1, 8]), [1, 1 / 3])
    assert StepCurve((1, 3), (2.0, 1.0)).seconds(2) == 1.5  # it may fall: nothing is forced


def test_beyond_its_points_it_promises_nothing():
    """Fewer tokens take as long as the fewest that were measured, more take their share of the most."""
    curve = StepCurve((4, 8), (2.0, 3.0))
    assert curve.seconds([1, 3]).tolist() == [2, 2]
    assert curve.seconds([16, 80]).tolist() == [6, 30]


def test_what_every_step_takes_besides_is_added_once():
    """Behind the last point too, where the seconds of tokens grow in proportion."""
    curve = CURVE.slower(0.5).slower(0.25)
    assert curve.seconds([1, 5, 8, 16]).tolist() == [1.75, 2.25, 3.75, 6.75] and CURVE.seconds(8) == 3
    for bad in (-1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match=f"overhead={bad}"):
            CURVE.slower(bad)


@pytest.mark.parametrize(("tokens", "seconds", "message"), [
    ((), (), "no points"), ((1, 2), (1.0,), "2 counts of tokens, 1 times"),
    ((2, 2), (1.0, 1.0), r"tokens \[2, 2\]: rising"), ((0, 2), (1.0, 1.0), r"tokens \[0, 2\]: .* from 1 on"),
    ((1.5, 2), (1.0, 1.0), "whole numbers"), ((1, True), (1.0, 1.0), "whole numbers"),
    ((1, 2), (1.0, 0.0), r"seconds 0\.0: a positive"), ((1,), (float("nan"),), "seconds nan"),
    ((1,), ("1",), "seconds '1'"), ((1,), (True,), "seconds True"),
])  # fmt: skip
def test_points_that_cannot_be_are_refused(tokens, seconds, message):
    with pytest.raises(ValueError, match=message):
        StepCurve(tokens, seconds)


@pytest.mark.parametrize("n_tokens", [0, -1])
def test_a_step_has_a_token(n_tokens):
    with pytest.raises(ValueError, match=f"{n_tokens} tokens: a step has at least 1"):
        CURVE.seconds(n_tokens)


# --- Measuring.


class Clock:
    """Time that passes only inside `extend`: as many seconds as columns were read, and more for some calls."""

    def __init__(self, monkeypatch, late: dict[int, float]):
        self.now, self.calls, self.shapes = 0.0, 0, []
        extend = step_curve.Session.extend

        def timed(session, ids, **options):
            self.shapes.append((tuple(ids.shape), session.lengths[0], ids.tolist()))
            self.calls += 1
            self.now += ids.shape[1] + late.get(self.calls, 0.0)
            return extend(session, ids, **options)

        monkeypatch.setattr(step_curve.Session, "extend", timed)
        monkeypatch.setattr(step_curve, "perf_counter", lambda: self.now)


def test_each_count_is_extended_by_turns_at_one_length_and_its_median_kept(model, monkeypatch):
    clock = Clock(monkeypatch, late={5: 100.0})  # a call is disturbed
    curve = measure_curve(model, tokens=(2, 4), rows=2, context=9, rounds=3)
    assert curve == StepCurve((2, 4), (1.0, 2.0))
    assert [shape for shape, *_ in clock.shapes] == [(2, 1), (2, 2)] * 4  # the first of each is a warm-up
    assert {length for _, length, _ in clock.shapes} == {9}
    assert clock.shapes[0][2] == clock.shapes[2][2] == clock.shapes[4][2]  # the same ids each time


def test_the_model_decides_what_can_be_measured(model):
    for options, message in (({"tokens": (1, 3), "rows": 2}, "1 tokens in 2 rows"),
                             ({"rounds": 0}, "rounds=0"), ({"tokens": ()}, "no points"),
                             ({"rows": 0}, "rows=0"), ({"context": 10**6}, "max_position_embeddings")):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            measure_curve(model, **options)


def test_a_session_elsewhere_and_random_numbers_are_left_alone(model):
    session = fed_session(model, torch.tensor([[5, 6, 7]]))
    before, state = session.fingerprint(), torch.get_rng_state()
    curve = measure_curve(model, tokens=(1, 3), context=5, rounds=1)
    assert curve.tokens == (1, 3) and min(curve.times) > 0
    assert session.fingerprint() == before and torch.equal(torch.get_rng_state(), state)


def test_making_drafts_is_timed_by_turns_for_each_number_of_requests(monkeypatch):
    drafting, now, seen = scattered(draft=True), [0.0], []
    drafter = DSparkDrafter(drafting)

    class Watched:
        depth = drafter.depth

        def propose(self, session, anchors, depth, sampling, generators):
            seen.append((len(anchors), session.lengths[0], depth, len(generators), sampling))
            now[0] += len(anchors) + (50.0 if len(seen) == 5 else 0.0)
            return drafter.propose(session, anchors, depth, sampling, generators)

    monkeypatch.setattr(step_curve, "perf_counter", lambda: now[0])
    curve = step_curve.measure_drafting(Watched(), drafting, requests=(1, 3), context=7, rounds=3)
    assert curve == StepCurve((1, 3), (1.0, 3.0))
    assert seen == [(1, 7, drafter.depth, 1, Sampling()), (3, 7, drafter.depth, 3, Sampling())] * 4
    with pytest.raises(ValueError, match="rounds=0"):
        step_curve.measure_drafting(drafter, drafting, requests=(1,), rounds=0)
    with pytest.raises(ValueError, match="rising counts"):
        step_curve.measure_drafting(drafter, drafting, requests=(3, 1))


# --- The file.


@pytest.fixture
def counted(monkeypatch):
    """Each measurement gives another curve, and is counted."""
    made = []

    def measured(model, *, tokens, **options):
        made.append(options)
        return StepCurve(tokens, (1.0,) * (len(tokens) - 1) + (1.0 + len(made),))

    monkeypatch.setattr(step_curve, "measure_curve", measured)
    return made


def test_a_curve_is_measured_once(model, counted, tmp_path):
    first = cached_curve(model, tmp_path, tokens=(1, 2))
    assert cached_curve(model, tmp_path, tokens=(1, 2)) == first and len(counted) == 1
    [file] = tmp_path.iterdir()
    assert first.tokens == (1, 2) and cached_curve(model, tmp_path, rows=3).tokens[:3] == (3, 6, 9)
    assert json.loads(file.read_text())["seconds"] == [1.0, 2.0]


def test_another_machine_model_or_setting_is_measured_for_itself(model, counted, tmp_path, monkeypatch):
    cached_curve(model, tmp_path)
    cached_curve(Model(SHORT.replace(index_topk=2)), tmp_path)
    cached_curve(Model(SHORT, dtype=torch.float64), tmp_path)
    cached_curve(model, tmp_path, context=32)
    cached_curve(model, tmp_path, rows=2)
    cached_curve(model, tmp_path, tokens=(1, 2))
    monkeypatch.setattr(step_curve.torch, "get_num_threads", lambda: 77)
    cached_curve(model, tmp_path)
    monkeypatch.setattr(step_curve, "device_name", lambda device: "another processor")
    cached_curve(model, tmp_path)
    assert len(counted) == len(list(tmp_path.iterdir())) == 8


def test_a_drafter_makes_a_step_longer_so_it_counts(counted, tmp_path):
    """Its windows are written for every token that is read."""
    model = Model(SHORT)
    cached_curve(model, tmp_path)
    model.mtp = torch.nn.Identity()
    cached_curve(model, tmp_path)
    assert len(counted) == 2


def test_what_does_not_change_a_step_is_not_measured_again(counted, tmp_path):
    cached_curve(Model(NANO), tmp_path)
    cached_curve(Model(NANO.replace(dspark_temperatures=[2.0] * 5, extra={"text": {"bos": 1}})), tmp_path)
    assert len(counted) == 1


@pytest.mark.parametrize(("damage", "reason"), [
    (lambda text: text[:-9], "no JSON"),
    (lambda text: "", "no JSON"),
    (lambda text: "[1, 2]", "no object"),
    (lambda text: "\udcff", "no JSON in UTF-8: 'utf-8'"),
    (lambda text: text.replace('"seconds"', '"minutes"'), "lacks the lists"),
    (lambda text: text.replace("2.0", "-2.0"), "seconds -2.0"),
    (lambda text: text.replace("[\n  1,\n  2\n ]", "[1, 2, 3]"), "3 counts of tokens"),
    (lambda text: text.replace("[\n  1,\n  2\n ]", "[1, 9]"), r"points are [1, 9]"),
    (lambda text: text.replace("threads", "yarns"), "another machine"),
])  # fmt: skip
def test_a_damaged_or_foreign_file_is_measured_anew_with_the_reason(model, counted, tmp_path, caplog, damage, reason):
    cached_curve(model, tmp_path, tokens=(1, 2))
    [file] = tmp_path.iterdir()
    file.write_bytes(damage(file.read_text()).encode("utf-8", "surrogateescape"))
    with caplog.at_level(logging.WARNING, logger="tinyds41"):
        assert cached_curve(model, tmp_path, tokens=(1, 2)).times == (1.0, 3.0)
    [record] = caplog.records
    assert str(file) in record.getMessage() and reason in record.getMessage()
    assert cached_curve(model, tmp_path, tokens=(1, 2)).times == (1.0, 3.0) and len(counted) == 2  # and is whole again


def test_a_folder_that_cannot_be_written_costs_the_measurement_alone(model, counted, tmp_path, caplog):
    folder = tmp_path / "a file"
    folder.write_text("")
    with caplog.at_level(logging.WARNING, logger="tinyds41"):
        assert cached_curve(model, folder, tokens=(1, 2)).times == (1.0, 2.0)
    assert "is not kept" in caplog.text


def test_by_default_it_lies_in_the_cache_folder_of_the_user(model, counted, tmp_path, monkeypatch):
    monkeypatch.setattr(step_curve.Path, "home", lambda: tmp_path)
    assert default_folder() == tmp_path / ".cache" / "tinyds41" / "steps"
    cached_curve(model)
    assert len(list(default_folder().iterdir())) == 1
