"""The checks of lesson 06. What they expect is computed by the library's own codec."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tinyds41.course.exercises import judge
from tinyds41.formats import GLOBAL, INDEX, WINDOW, Format

BLOCK = 64  # exercise 1: channels per scale of a changed global row
FORMATS = (WINDOW, GLOBAL, INDEX)


def check_row_bytes(answer: int) -> None:
    """Exercise 1: bytes of a global row of 512 channels with one scale per 64."""

    def complaint(answer: int) -> str | None:
        expected = Format("changed", "e2m1", BLOCK, "e4m3").encode(torch.zeros(512)).nbytes
        if answer == expected:
            return None
        for wrong, why in ((512 + 512 // BLOCK, "two codes share a byte"), (256, "the scales are stored, too")):
            if answer == wrong:
                return f"{answer} bytes: {why}"
        return f"{answer!r} bytes is wrong"

    judge(answer, complaint)


def check_decode(answer: Callable[[list[int]], list[float]]) -> None:
    """Exercise 2: the values of a packed index row, from its bytes."""

    def complaint(answer: Callable[[list[int]], list[float]]) -> str | None:
        generator = torch.Generator().manual_seed(6)
        for width, size in ((32, 1.0), (64, 100.0), (128, 0.01)):
            # Blocks of different sizes, so that a wrong order of scales shows.
            sizes = size * 4.0 ** torch.arange(width // INDEX.block)
            row = (torch.randn(width // INDEX.block, INDEX.block, generator=generator) * sizes[:, None]).flatten()
            packed = INDEX.encode(row)
            expected, found = INDEX.decode(packed, width).tolist(), list(answer(packed.tolist()))
            if len(found) != width:
                return f"a row of {len(packed)} bytes holds {width} numbers, you returned {len(found)}"
            for channel, (want, got) in enumerate(zip(expected, found, strict=True)):
                if want != got:
                    byte = packed[channel // 2]
                    return f"channel {channel} of a row of {width}: {got!r} is wrong; its codes share byte {byte:#04x}"
        return None

    judge(answer, complaint)


def check_worst(answer: Callable[[float], float]) -> None:
    """Exercise 3: the largest error that a number of a global block can have, by the block's scale.

    Only numbers that the scale was made for: at most 6 times the scale.
    """

    def complaint(answer: Callable[[float], float]) -> str | None:
        for scale in (0.125, 1.0, 10.0):
            row = torch.linspace(-6 * scale, 6 * scale, 6001).unsqueeze(-1)
            # One number at a time beside 6 times the scale, which fixes the scale.
            blocks = torch.cat([row, torch.full((len(row), GLOBAL.block - 1), 6 * scale)], -1)
            worst = float((GLOBAL.fake_quant(blocks) - blocks)[:, 0].abs().max())
            found = answer(scale)
            if abs(found - worst) > 0.01 * worst:  # the finest step of the search is a 500th of a scale
                return f"scale {scale:g}: {found!r} is wrong"
        return None

    judge(answer, complaint)
