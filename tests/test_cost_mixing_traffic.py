"""Hyper-connection traffic is counted by running the schedules, which compute what the model's operations do."""

from dataclasses import replace

import pytest
import torch

from tinyds41 import ops
from tinyds41.cost.mixing_traffic import SCHEDULES, TILE, Memory, Step, mixing_traffic, random_step
from tinyds41.mixing import collapse

N = 4


def run(schedule: str, step_change=lambda step: step, width: int = 20):
    """The memory after one step, and the coefficients it returned."""
    memory, step = random_step(N, width=width)
    return memory, SCHEDULES[schedule](memory, step_change(step))


def normed(u, step: Step):
    return step.norm * torch.nn.functional.rms_norm(u, u.shape[-1:], eps=step.norm_eps)


@pytest.mark.parametrize(("schedule", "at_four"), [("V4 kernels", 20), ("two-pass", 14), ("single-pass", 10)])
def test_traffic_at_four_streams_is_the_published(schedule, at_four):
    assert mixing_traffic(schedule) == at_four


@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_traffic_grows_with_the_streams_as_published(n):
    assert [mixing_traffic(schedule, n) for schedule in SCHEDULES] == [4 * n + 4, 3 * n + 2, 2 * n + 2]


@pytest.mark.parametrize("width", [1, TILE, 3 * TILE + 5])
def test_traffic_per_channel_does_not_depend_on_the_width(width):
    for schedule in SCHEDULES:
        assert run(schedule, width=width)[0].moved == mixing_traffic(schedule)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_computes_what_the_models_operations_do(schedule):
    """float64: the tiles only change the order of sums."""
    memory, coefficients = run(schedule)
    before, step = random_step(N)
    pre, post, comb, _ = ops.hyper_coefficients(
        memory.arrays["streams"][None], step.fn.flatten(1), step.scale, step.base,
        n_iters=step.n_iters, eps=step.eps, norm_eps=step.norm_eps)  # fmt: skip
    mix = step.mix if schedule == "single-pass" else pre[0]
    streams, u = ops.hyper_step(
        *(x[None] for x in (before.arrays["streams"], before.arrays["output"], step.post, step.comb, mix)))  # fmt: skip
    torch.testing.assert_close(memory.arrays["streams"], streams[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(memory.arrays["input"], normed(u[0], step), rtol=0, atol=1e-12)
    torch.testing.assert_close(coefficients, (pre[0], post[0], comb[0]), rtol=0, atol=1e-12)


def test_the_schedules_agree_where_they_mean_the_same():
    """Streams and coefficients always; the input too, when the single pass is told the mix that it cannot know."""
    memory, (pre, post, comb) = run("V4 kernels")
    for schedule in ("two-pass", "single-pass"):
        other, coefficients = run(schedule, lambda step: replace(step, mix=pre))
        torch.testing.assert_close(coefficients, (pre, post, comb), rtol=0, atol=1e-12)
        for name in ("streams", "input"):
            torch.testing.assert_close(other.arrays[name], memory.arrays[name], rtol=0, atol=1e-12)


def test_the_single_pass_takes_the_mix_of_the_sub_layer_before():
    """The shift is what one pass costs: its input is another one than V4's."""
    shifted, _ = run("single-pass")
    _, step = random_step(N)
    u = collapse(shifted.arrays["streams"][None], step.mix[None])[0]
    torch.testing.assert_close(shifted.arrays["input"], normed(u, step), rtol=0, atol=1e-12)
    assert (shifted.arrays["input"] - run("V4 kernels")[0].arrays["input"]).abs().max() > 0.1


def test_memory_counts_what_is_read_and_written():
    memory = Memory(streams=torch.zeros(5, 3, 10))
    for tile in memory.tiles():
        memory.write("row", tile, memory.read("streams", tile).sum(1))
    assert memory.moved == 3 + 1
    assert memory.arrays["row"].tolist() == torch.zeros(5, 10).tolist()


def test_a_part_of_an_array_that_was_never_written_is_nan():
    memory = Memory(streams=torch.zeros(1, 1, 3 * TILE))
    first, *_ = memory.tiles()
    memory.write("row", first, memory.read("streams", first)[:, 0])
    assert memory.arrays["row"].isnan().sum() == 2 * TILE


def test_an_unknown_schedule_and_no_streams_are_named():
    with pytest.raises(ValueError, match=r"'fast'.*V4 kernels, two-pass, single-pass"):
        mixing_traffic("fast")
    with pytest.raises(ValueError, match="n_streams=0"):
        mixing_traffic("two-pass", 0)
