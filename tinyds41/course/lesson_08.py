"""The checks of lesson 08. What they expect is computed by the library's counted schedules, Sinkhorn and collapse."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tinyds41.config import Config
from tinyds41.cost.mixing_traffic import mixing_traffic
from tinyds41.course.exercises import judge
from tinyds41.mixing import collapse
from tinyds41.sinkhorn import sinkhorn

STREAMS = 8  # exercise 1
CLOSE = 1e-5  # float64 beside our eps of 1e-6, which an answer may leave out


def check_moved_bytes(answer: int) -> None:
    """Exercise 1: bytes that a token's streams move in flash with 8 streams, single-pass, in 16-bit numbers."""

    def complaint(answer: int) -> str | None:
        flash = Config.preset("flash", hc_mult=STREAMS)
        rows = 2 * flash.num_hidden_layers * mixing_traffic("single-pass", STREAMS)
        if answer != rows * flash.hidden_size * torch.bfloat16.itemsize:
            return f"{answer:,} bytes is wrong"
        return None

    judge(answer, complaint)


def check_balanced(answer: Callable[[list[list[float]], int], Sequence[Sequence[float]]]) -> None:
    """Exercise 2: Sinkhorn on a list of rows, for a number of rounds."""

    def complaint(answer: Callable[[list[list[float]], int], Sequence[Sequence[float]]]) -> str | None:
        generator = torch.Generator().manual_seed(8)
        for n_streams, rounds in ((1, 1), (2, 1), (3, 2), (4, 3), (4, 20)):
            logits = torch.randn(n_streams, n_streams, generator=generator).double()
            found = torch.tensor([list(row) for row in answer(logits.tolist(), rounds)]).double()
            if found.shape != logits.shape or not torch.allclose(found, sinkhorn(logits, rounds, 1e-6), atol=CLOSE):
                shown = [[round(value, 2) for value in row] for row in logits.tolist()]
                return f"logits {shown}, {rounds} rounds: {found.tolist()} is wrong"
        return None

    judge(answer, complaint)


def check_inputs(answer: Callable[[Tensor, Tensor], Sequence[Tensor]]) -> None:
    """Exercise 3: what each sub-layer reads, and last what the output head reads, under the single-pass shift."""

    def complaint(answer: Callable[[Tensor, Tensor], Sequence[Tensor]]) -> str | None:
        generator = torch.Generator().manual_seed(9)
        for n_sublayers, n_streams, width in ((1, 2, 3), (4, 3, 5), (6, 4, 2)):
            streams = torch.randn(n_sublayers + 1, n_streams, width, generator=generator).double()
            pres = torch.rand(n_sublayers, n_streams, generator=generator).double()
            first = torch.eye(n_streams).double()[:1]
            expected = collapse(streams[None], torch.cat([first, pres])[None])[0]
            found = torch.stack([torch.as_tensor(row) for row in answer(streams.clone(), pres.clone())])
            if found.shape != expected.shape:
                return f"{n_sublayers} sub-layers: shape {list(found.shape)}, expected {list(expected.shape)}"
            wrong = [k for k in range(n_sublayers + 1) if not torch.allclose(found[k], expected[k], atol=CLOSE)]
            if wrong:
                return f"{n_sublayers} sub-layers: what is read at {wrong} is wrong ({n_sublayers} is the head)"
        return None

    judge(answer, complaint)
