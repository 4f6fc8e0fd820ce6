"""What no plot can show is refused by its name and value; a name is shown as it is written."""

import math

import pytest

from tinyds41.config import Config
from tinyds41.cost.flops import DecodeWork
from tinyds41.cost.parameters import Parameters
from tinyds41.show.accuracy_plot import Curve, plot_accuracy
from tinyds41.show.cost_plots import plot_decode_work, plot_parameters
from tinyds41.show.distance_plots import plot_by_distance
from tinyds41.show.flow_plot import plot_data_flow
from tinyds41.show.gate_plot import plot_engram_gates
from tinyds41.show.generation_plots import (
    GenerationBytes,
    plot_generation_bytes,
    plot_work_by_component,
    plot_work_by_generation,
)  # fmt: skip
from tinyds41.show.index_observations import AttentionShare, Candidate, Overlap
from tinyds41.show.index_plots import plot_attention_shares, plot_candidates, plot_selection_overlap
from tinyds41.show.observations import ExpertLoad, Span
from tinyds41.show.plan_plot import plot_layer_plan
from tinyds41.show.run_plots import LossPoint, plot_curves, plot_expert_load, plot_loss, plot_selection
from tinyds41.show.setting_plots import plot_loss_by_setting, plot_quality_by_setting
from tinyds41.show.stream_observations import StreamMix, TokenGate
from tinyds41.show.stream_plots import plot_stream_mixes

NAN, INF = math.nan, math.inf
PLAN = Config.preset("nano").plan()


def work(context, linear):
    return DecodeWork("a", context, "raw", linear, 0.0, 0.0, 0.0)


def candidate(score):
    return Candidate(4, 9, 0, 0, 1, 0, score, in_pool=True, newest=True, selected=True)


def mix(**changes):
    return StreamMix(**{"layer": 1, "sublayer": "ffn", "pre": (0.5,), "post": (1.0,), "comb": ((1.0,),), **changes})


def curves(values):
    return plot_curves(values, xlabel="step", ylabel="load", model="x")


def losses(values, trained=4):
    return plot_loss_by_setting(values, setting="k", trained=trained, model="x")


def distances(values, **options):
    return plot_by_distance(values, title="t", ylabel="y", **options)


def flow(tokens, in_decoder=0):
    return plot_data_flow(PLAN, model="x", tokens=tokens, in_decoder=in_decoder, mode="full")


def shares(values, log=False):
    return plot_accuracy([Curve("a", {1: 0.5}), Curve("b", values)], setting="steps", model="x", log=log)


@pytest.mark.parametrize(("draw", "message"), [
    (lambda: distances({"a": {1: 0.5}, "b": {2: NAN}}), "b at distance 2 is nan"),
    (lambda: distances({"a": {1: INF}}, log=True), "a at distance 1 is inf"),
    (lambda: distances({"a": {1: 0.5}, "b": {}}), "no values of b"),
    (lambda: distances({"a": {1: 0.5}}, baseline=("chance", NAN)), "chance is nan"),
    (lambda: curves({"a": {0: 1.0}, "b": {0: 1.0, 5: NAN}}), "b at 5 is nan"),
    (lambda: curves({"a": {0: 1.0}, "b": {}}), "no values of b"),
    (lambda: losses({4: NAN}), "loss at 4 is nan"),
    (lambda: losses({0: 1.0, 4: 1.0}), "k=0 has no place on a log axis"),
    (lambda: plot_quality_by_setting({"a": {0: 0.5, 4: 0.5}}, setting="k", trained=4, model="x"), "k=0 has no place"),
    (lambda: plot_quality_by_setting({"a": {4: NAN}}, setting="k", trained=4, model="x"), "a is nan at 4"),
    (lambda: shares({1: NAN}), "b: nan is no share"),
    (lambda: shares({}), "no shares of b"),
    (lambda: shares({0: 0.5}, log=True), "steps=0 has no place on a log axis"),
    (lambda: plot_loss([LossPoint(3, "train", NAN)], model="x"), "train loss at step 3 is nan"),
    (lambda: plot_expert_load([ExpertLoad(0, 0, 2), ExpertLoad(1, 0, 0)], model="x"), "layer 1: no tokens visited"),
    (lambda: plot_selection([Span(0, "FULL", "selected", 0, 1, 2)], model="x"), "no span of kind 'window'"),
    (lambda: plot_candidates([candidate(None)], model="x"), "no candidate has a score"),
    (lambda: plot_candidates([candidate(NAN)], model="x"), "score of entry 0 is nan"),
    (lambda: plot_selection_overlap([Overlap(2, 4, NAN)], model="x", queries="y"), "overlap of layers 2 and 4 is nan"),
    (lambda: plot_attention_shares([AttentionShare(3, "SWA", NAN, 0.0, 1.0)], model="x", queries="y"),
     "window in layer 3 is nan"),
    (lambda: plot_stream_mixes([mix(pre=(NAN,))], model="x", tokens="y"), "pre of layer 1 ffn is nan"),
    (lambda: plot_stream_mixes([mix(comb=((NAN,),))], model="x", tokens="y"), "comb of layer 1 ffn is nan"),
    (lambda: plot_engram_gates([TokenGate(1, 7, "a", (0.5, NAN))], model="x"), "gate at token 7 is nan"),
    (lambda: plot_decode_work({"raw": [work(8, 0.0)]}, model="x"), "raw at a context of 8 is 0.0: .* more than 0"),
    (lambda: plot_decode_work({"raw": [work(8, 1.0)], "weighted": []}, model="x"), "no decode work of weighted"),
    (lambda: plot_work_by_generation({"a": [work(8, NAN)]}), "a at a context of 8 is nan"),
    (lambda: plot_work_by_generation({"a": [work(8, 1.0)], "b": []}), "no decode work of b"),
    (lambda: plot_work_by_component([work(8, 0.0)]), "a at a context of 8 is 0.0: .* more than 0"),
    (lambda: plot_generation_bytes([GenerationBytes("a", 0.0, 0.0)]), "a is 0.0: .* more than 0"),
    (lambda: plot_parameters(Parameters((), has_decoder=False), model="x"), "no stored weights"),
    (lambda: flow(0), "tokens=0"),
])  # fmt: skip
def test_what_no_axis_can_show_is_refused_by_name_and_value(draw, message):
    with pytest.raises(ValueError, match=message):
        draw()


NAME = "a$b_1$c"


@pytest.mark.parametrize("draw", [
    lambda: plot_layer_plan(PLAN, model=NAME),
    lambda: plot_curves({NAME: {0: 1.0, 5: 2.0}}, xlabel="step", ylabel="load", model=NAME),
    lambda: plot_by_distance({NAME: {1: 0.5, 2: 0.1}}, title=NAME, ylabel=NAME, log=True),
    lambda: plot_generation_bytes([GenerationBytes("V1", 2.0, 0.0, f"{NAME} bytes"), GenerationBytes(NAME, 1.0, 0.0)]),
    lambda: plot_work_by_generation({NAME: [work(8, 1.0), work(16, 2.0)]}),
])  # fmt: skip
def test_a_name_with_dollars_is_no_formula(draw):
    ax = draw()
    ax.figure.draw_without_rendering()
    words = [*ax.texts, ax._left_title, ax.xaxis.label, ax.yaxis.label, *ax.get_xticklabels(), *ax.get_yticklabels()]
    named = [word for word in words if NAME in word.get_text()]
    assert named and not any(word.get_parse_math() for word in named)


def test_powers_of_ten_on_a_log_axis_stay_formulas():
    ax = plot_by_distance({"a": {1: 0.5, 2: 0.001}}, title="t", ylabel="y", log=True)
    ax.figure.draw_without_rendering()
    powers = [label for label in ax.get_yticklabels() if "$" in label.get_text()]
    assert powers and all(label.get_parse_math() for label in powers)
