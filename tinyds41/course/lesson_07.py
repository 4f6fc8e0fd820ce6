"""Measurements and checks of lesson 07: how far a resumed prompt is from one read anew."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from tinyds41.config import Config
from tinyds41.cost.kv_bytes import kv_bytes
from tinyds41.course.exercises import judge
from tinyds41.infer.replay import first_replayed
from tinyds41.infer.session import Session
from tinyds41.infer.tiered_store import TieredStore
from tinyds41.model.transformer import Model
from tinyds41.train.note import Note


def known_after_hit(
    model: Model, task: Note, replay: str | int | None, distances: Sequence[int], *, new: int = 2, n_texts: int = 6,
    length: int = 40,
) -> dict[int, float]:  # fmt: skip
    """Share of texts whose last token says the note, by its distance, when all but `new` tokens come from a store.

    replay: as in `Session.resume`; None reads every text anew.
    """
    found = {}
    for distance in distances:
        texts = _texts(task, distance, n_texts, length)
        with tempfile.TemporaryDirectory() as at, _one_block(Path(at), model, length - new) as store:
            said = torch.cat([_answer(model, text, replay, store, new) for text in texts.unsqueeze(1)]).argmax(-1)
        found[distance] = float((said == texts[:, -1 - distance]).float().mean())
    return found


def _one_block(folder: Path, model: Model, n_tokens: int) -> TieredStore:
    return TieredStore(folder / "store", model, block_tokens=n_tokens)


def _texts(task: Note, distance: int, n_texts: int, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(distance)
    texts = torch.randint(task.first_filler, task.vocab_size, (n_texts, length), generator=generator)
    texts[:, -1 - distance] = torch.randint(task.first_note, task.first_filler, (n_texts,), generator=generator)
    return texts


def _answer(model: Model, text: Tensor, replay: str | int | None, store: TieredStore, new: int) -> Tensor:
    """Logits [1,V] behind one text [1,S]."""
    if replay is None:
        return Session(model).prefill(text)
    writer, reader = Session(model), Session(model)
    writer.prefill(text[:, :-new])
    writer.save(store)
    store.windows.clear()
    return reader.resume(text, store, replay=replay)


def check_found(answer: Callable[[int, int], int]) -> None:
    """Exercise 1: tokens found of a prompt that shares its first n tokens with a stored text, in blocks of b."""

    def complaint(answer: Callable[[int, int], int]) -> str | None:
        for shared, block in ((0, 64), (63, 64), (64, 64), (150, 64), (1000, 1), (999, 32), (4096, 256)):
            blocks = {tuple(range(start + block)) for start in range(0, shared + 1 - block, block)}
            expected = max(map(len, blocks), default=0)
            if answer(shared, block) != expected:
                return f"{shared} shared tokens in blocks of {block}: {answer(shared, block)} is wrong"
        return None

    judge(answer, complaint)


def check_exact(answer: int) -> None:
    """Exercise 2: tokens that flash's encoder runs again, exactly, when the decoder wants no output of them."""

    def complaint(answer: int) -> str | None:
        flash = Config.preset("flash")
        found = 1_000_000
        expected = found - first_replayed(flash, found, 0, "exact")
        if answer == expected:
            return None
        return f"{answer} is not how far the windows of {flash.plan().n_encoder} encoder layers reach"

    judge(answer, complaint)


def check_at_par(answer: Callable[[Config], float]) -> None:
    """Exercise 3: after how many tokens global rows take as many bytes as the encoder's windows, for any config."""

    def complaint(answer: Callable[[Config], float]) -> str | None:
        for name in ("flash", "small", "toy"):
            config = Config.preset(name)
            from_rows = encoder_window_bytes(config) / kv_bytes(config).bytes_per_token
            if abs(answer(config) / from_rows - 1) > 1e-6:
                return f"{name}: {answer(config):.1f} tokens is wrong"
        return None

    judge(answer, complaint)


def encoder_window_bytes(config: Config) -> int:
    """Of one sequence, once they are full."""
    encoder = {layer.layer for layer in config.plan() if layer.half == "encoder"}
    windows = kv_bytes(config).of("window")
    return sum(row.row_bytes * (row.max_rows or 0) for row in windows if row.layer in encoder)
