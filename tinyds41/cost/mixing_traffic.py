"""Memory traffic of hyper-connections, counted while three plain schedules of one step run (TR 2.4.1)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tinyds41.sinkhorn import sinkhorn

TILE = 8  # channels of every stream that fast memory holds at a time


class Memory:
    """Slow memory: arrays by name, read and written a tile of channels at a time, all of it counted.

    A schedule is made of passes over the channels. From tile to tile a pass keeps sums and one row of D channels, never
    the N rows of the streams: those are what fast memory has no room for. The small numbers of a token (mix, post,
    comb) and the weights, which all tokens share, are not counted.

    Shapes: arrays [n,N,D] or [n,D] for n tokens.
    """

    def __init__(self, **arrays: Tensor):
        self.arrays = {name: array.clone() for name, array in arrays.items()}
        self.shape = next(iter(arrays.values())).shape
        self._numbers = 0

    @property
    def moved(self) -> float:
        """What was read and written, per token. Units: rows of D channels."""
        return self._numbers / (self.shape[0] * self.shape[-1])

    def tiles(self) -> Iterator[slice]:
        """One pass over the channels."""
        for start in range(0, self.shape[-1], TILE):
            yield slice(start, min(start + TILE, self.shape[-1]))

    def read(self, name: str, tile: slice) -> Tensor:
        part = self.arrays[name][..., tile]
        self._numbers += part.numel()
        return part

    def write(self, name: str, tile: slice, value: Tensor) -> None:
        if name not in self.arrays:
            self.arrays[name] = value.new_full((*value.shape[:-1], self.shape[-1]), torch.nan)
        self.arrays[name][..., tile] = value
        self._numbers += value.numel()


@dataclass(frozen=True)
class Step:
    """The small numbers of one step, from a sub-layer's output to the next one's input.

    Shapes: post [n,N], comb [n,N,N] (source, target), mix [n,N]: of the sub-layer before; fn [(2+N)N,N,D], scale [3],
        base [(2+N)N]: of the coefficients of the next one; norm [D]: in front of it.
    """

    post: Tensor
    comb: Tensor
    mix: Tensor
    fn: Tensor
    scale: Tensor
    base: Tensor
    norm: Tensor
    n_iters: int = 20
    eps: float = 1e-6
    norm_eps: float = 1e-20


Coefficients = tuple[Tensor, Tensor, Tensor]  # pre, post, comb


def v4_kernels(memory: Memory, step: Step) -> Coefficients:
    """Four passes: update, coefficients, input mix by the new coefficients, norm."""
    for tile in memory.tiles():
        memory.write("streams", tile, _updated(memory, tile, step))
    sums = _Sums(step)
    for tile in memory.tiles():
        sums.add(memory.read("streams", tile), tile)
    coefficients = sums.coefficients()
    for tile in memory.tiles():
        memory.write("mixed", tile, _mixed(memory.read("streams", tile), coefficients[0]))
    _write_normed(memory, [memory.read("mixed", tile) for tile in memory.tiles()], step)
    return coefficients


def two_pass(memory: Memory, step: Step) -> Coefficients:
    """Update with coefficients, then input mix with norm: the same result."""
    sums = _Sums(step)
    for tile in memory.tiles():
        new_nNd = _updated(memory, tile, step)
        memory.write("streams", tile, new_nNd)
        sums.add(new_nNd, tile)
    coefficients = sums.coefficients()
    _write_normed(memory, [_mixed(memory.read("streams", tile), coefficients[0]) for tile in memory.tiles()], step)
    return coefficients


def single_pass(memory: Memory, step: Step) -> Coefficients:
    """All in one, because the mix is known before the pass begins: it is that of the sub-layer before.

    The new coefficients are known when the last tile has passed, too late for this input; they serve the next step.
    """
    sums, row = _Sums(step), []
    for tile in memory.tiles():
        new_nNd = _updated(memory, tile, step)
        memory.write("streams", tile, new_nNd)
        sums.add(new_nNd, tile)
        row.append(_mixed(new_nNd, step.mix))
    _write_normed(memory, row, step)
    return sums.coefficients()


# By name; each leaves "streams" and "input" in memory and returns the coefficients of the next sub-layer.
SCHEDULES: dict[str, Callable[[Memory, Step], Coefficients]] = {
    "V4 kernels": v4_kernels, "two-pass": two_pass, "single-pass": single_pass,
}  # fmt: skip


def mixing_traffic(schedule: str, n_streams: int = 4) -> float:
    """Runs a schedule on random arrays and returns what it moved per token. Units: rows of D channels.

    Raises: ValueError for an unknown schedule, naming the known, or no stream.
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"unknown schedule {schedule!r}: the schedules are {', '.join(SCHEDULES)}")
    if n_streams < 1:
        raise ValueError(f"n_streams={n_streams}: there is at least one stream")
    memory, step = random_step(n_streams)
    SCHEDULES[schedule](memory, step)
    return memory.moved


def random_step(n_streams: int, n_tokens: int = 3, width: int = 20, seed: int = 0) -> tuple[Memory, Step]:
    """Streams, a sub-layer's output and the numbers of a step, in float64."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    rows = (2 + n_streams) * n_streams
    memory = Memory(streams=draw(n_tokens, n_streams, width), output=draw(n_tokens, width))
    step = Step(
        post=draw(n_tokens, n_streams), comb=draw(n_tokens, n_streams, n_streams), mix=draw(n_tokens, n_streams),
        fn=draw(rows, n_streams, width), scale=draw(3), base=draw(rows), norm=draw(width))  # fmt: skip
    return memory, step


def _updated(memory: Memory, tile: slice, step: Step) -> Tensor:
    """X_k = post_k y + sum_j comb[j,k] X_j, for a tile of channels. Reads N + 1 rows."""
    output_nd, streams_nNd = memory.read("output", tile), memory.read("streams", tile)
    return step.post.unsqueeze(-1) * output_nd.unsqueeze(1) + step.comb.mT @ streams_nNd


def _mixed(streams_nNd: Tensor, mix_nN: Tensor) -> Tensor:
    """u = sum_i mix_i X_i"""
    return (mix_nN.unsqueeze(-1) * streams_nNd).sum(1)


def _write_normed(memory: Memory, row: list[Tensor], step: Step) -> None:
    """w u / rms(u), from the one row that fast memory holds. Writes 1 row."""
    u_nD = torch.cat(row, -1)
    normed_nD = step.norm * u_nD * (u_nD.square().mean(-1, keepdim=True) + step.norm_eps).rsqrt()
    for tile in memory.tiles():
        memory.write("input", tile, normed_nD[..., tile])


class _Sums:
    """What coefficients need of the streams: fn X and the sum of squares, added up tile by tile."""

    def __init__(self, step: Step):
        self._step = step
        self._n_streams = step.post.shape[1]
        self._product_nY = step.post.new_zeros(step.post.shape[0], step.fn.shape[0])
        self._squares_n1 = step.post.new_zeros(step.post.shape[0], 1)
        self._channels = step.fn.shape[1] * step.fn.shape[2]

    def add(self, streams_nNd: Tensor, tile: slice) -> None:
        self._product_nY += torch.einsum("nsd,ysd->ny", streams_nNd, self._step.fn[..., tile])
        self._squares_n1 += streams_nNd.square().sum((1, 2)).unsqueeze(-1)

    def coefficients(self) -> Coefficients:
        """t = fn (X / rms(X)); pre, post and comb from its parts. Source: spec 7."""
        step, n = self._step, self._n_streams
        t_nY = self._product_nY * (self._squares_n1 / self._channels + step.norm_eps).rsqrt()
        pre_nN, post_nN, comb_nX = t_nY.split([n, n, n * n], -1)
        base_pre, base_post, base_comb = step.base.split([n, n, n * n])
        logits_nNN = (comb_nX * step.scale[2] + base_comb).unflatten(-1, (n, n))
        return (
            torch.sigmoid(pre_nN * step.scale[0] + base_pre) + step.eps,
            2 * torch.sigmoid(post_nN * step.scale[1] + base_post),
            sinkhorn(logits_nNN, step.n_iters, step.eps),
        )
