"""The checks of lesson 03. What they expect is found by walking through layers and tokens, not by a formula."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from tinyds41.config import Config
from tinyds41.course.exercises import judge

# Window, decoder layers, tokens on which the decoder ran.
DECODERS = ((1, 3, 1), (4, 1, 1), (4, 1, 4), (4, 2, 1), (4, 2, 6), (4, 2, 7), (5, 3, 4), (5, 3, 40), (32, 4, 32))
SPLIT = 30  # exercise 3: the first decoder layer
SCHEDULE = ("compress_ratios", "kv_source_layer_ids", "index_source_layer_ids", "candidate_source_layer_id")


def check_mended(answer: Callable[[int, int, int], int]) -> None:
    """Exercise 1: tokens to read on until all decoder windows hold what they would hold after a full prefill."""

    def complaint(answer: Callable[[int, int, int], int]) -> str | None:
        for window, layers, n in DECODERS:
            found = answer(window, layers, n)
            if found != mended(window, layers, n):
                return f"windows of {window}, {layers} layers, decoder on {n}: {found} is wrong"
        return None

    judge(answer, complaint)


def check_trapezoid(answer: Callable[[int, int], int]) -> None:
    """Exercise 2: layer-tokens of a decoder whose layers run only where the last token's logits need their rows."""

    def complaint(answer: Callable[[int, int], int]) -> str | None:
        for window, layers in ((1, 3), (4, 1), (4, 2), (32, 4), (128, 20)):
            found, expected = answer(window, layers), sum(int(mask.sum()) for mask in wanted_rows(window, layers))
            if found != expected:
                return f"windows of {window}, {layers} layers: {found:,} layer-tokens is wrong"
        return None

    judge(answer, complaint)


def check_later_split(answer: Config) -> None:
    """Exercise 3: flash with its decoder from layer 30 on, one writer in it, all else as released."""

    def complaint(answer: Config) -> str | None:
        flash, plan = Config.preset("flash"), answer.plan()
        if changed := [field.name for field in dataclasses.fields(Config) if field.name not in SCHEDULE
                       and getattr(answer, field.name) != getattr(flash, field.name)]:  # fmt: skip
            return f"{changed[0]} differs from the released one: only the schedule may"
        if plan.boundary != SPLIT:
            return f"the decoder begins at layer {plan.boundary}"
        encoder = flash.compress_ratios[: flash.plan().n_encoder]
        wanted = [*encoder, *encoder[-1:] * (SPLIT - len(encoder))]
        if list(answer.compress_ratios[:SPLIT]) != wanted:
            return f"the encoder's ratios are {list(answer.compress_ratios[:SPLIT])}"
        if strangers := [layer.layer for layer in plan[SPLIT:] if layer.kv_source != SPLIT]:
            return f"decoder layers {strangers} read no entries of layer {SPLIT}"
        return None if answer.candidate_source_layer_id == SPLIT else f"layer {SPLIT} forms no pool"

    judge(answer, complaint)


def mended(window: int, layers: int, n: int) -> int:
    """Reads token after token and follows which rows are right, until the next token can meet no wrong one."""
    length, prompt = n + layers * window + 1, layers * window  # tokens before `prompt` saw no decoder
    right_S = torch.arange(length + prompt) >= 0  # the encoder was never wrong
    ran_S = torch.arange(length + prompt) >= prompt
    stored = []
    for _ in range(layers):
        stored.append(right_S & ran_S)  # a row is right if its token ran on right input
        right_S = ran_S & _all_in_window(stored[-1], window)
    end = prompt + n
    while any(not bool(row_S[end - window + 1 : end].all()) for row_S in stored):
        end += 1
    return end - prompt - n


def wanted_rows(window: int, layers: int) -> list[Tensor]:
    """Per layer, the last one first, of which tokens of a long prompt the last token's logits need rows."""
    length, masks = layers * window + 1, []
    wanted_S = torch.arange(length) == length - 1
    for _ in range(layers):
        wanted_S = torch.stack([wanted_S.roll(-back) for back in range(window)]).any(0)
        masks.append(wanted_S)
    return masks


def _all_in_window(right_S: Tensor, window: int) -> Tensor:
    """Whether all rows in the window of each token are right; rows before the first count as wrong."""
    padded = torch.cat([right_S.new_zeros(window - 1), right_S])
    return padded.unfold(0, window, 1).all(-1)
