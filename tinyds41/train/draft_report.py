"""What a trained drafter does on texts that it never read, temperatures fitted on that, and their error."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from tinyds41.infer.record_drafts import RecordedDrafts, record_drafts
from tinyds41.model.transformer import Model
from tinyds41.train.calibrate import Blocks, bootstrap_interval, errors, fit_temperatures
from tinyds41.train.corpus import Corpus, documents

LENGTH = 256  # tokens of a recorded row
OTHER = "devil"  # a domain that neither training nor temperatures have seen
START, EVERY = 32, 8  # the first anchor of a row, and the tokens from one to the next


def rows_of(corpus: Corpus, length: int = LENGTH, most: int | None = None) -> Tensor:
    """A text as rows, one behind the other, without the rest; `most` of them, spread over it. Shapes: -> [B,length].

    Raises: ValueError for a text shorter than a row.
    """
    n_rows = len(corpus) // length
    if not n_rows:
        raise ValueError(f"a text of {len(corpus)} tokens has no row of {length}")
    rows = corpus.ids[: n_rows * length].long().view(n_rows, length)
    return rows if most is None or most >= n_rows else rows[torch.arange(most) * n_rows // most]


def drafts_on(model: Model, rows: Tensor, *, batch: int = 64, every: int = EVERY, seed: int = 0) -> RecordedDrafts:
    """`record_drafts` of all rows at temperature 1, some rows at a time. Passages are the numbers of the rows."""
    parts = []
    for first in range(0, len(rows), batch):
        part = record_drafts(model, rows[first : first + batch], start=START, every=every, seed=seed + first)
        parts.append(part)
    return joined(parts)


def joined(parts: Sequence[RecordedDrafts]) -> RecordedDrafts:
    """One behind the other, with passages of their own."""
    shifted, n_before = [], 0
    for part in parts:
        shifted.append(dataclasses.replace(part, passages=part.passages + n_before))
        n_before += 1 + int(part.passages.max())
    names = [field.name for field in dataclasses.fields(RecordedDrafts)]
    return RecordedDrafts(**{name: torch.cat([getattr(part, name) for part in shifted]) for name in names})


def held_out_drafts(model: Model, names: Sequence[str], most: int | None = None, every: int = EVERY) -> RecordedDrafts:
    """Drafts along the held-out parts of texts, in rows of `LENGTH`, of each text `most` spread over it.

    Shorter texts are asked more often, so that each counts about the same, however long it is.
    """
    assert model.tokenizer is not None
    texts = [rows_of(Corpus.from_texts(model.tokenizer, documents(name, "held_out")), LENGTH, most) for name in names]
    longest = max(len(rows) for rows in texts)
    return joined([drafts_on(model, rows, every=max(1, round(every * len(rows) / longest))) for rows in texts])


def blocks_of(recorded: RecordedDrafts) -> Blocks:
    """With the chance min(1, p[x]/q[x]) of each drawn token as what became of it."""
    return Blocks(recorded.logits.numpy(), recorded.chances.numpy())


def acceptance(recorded: RecordedDrafts) -> dict[str, Any]:
    """Acceptance of a position once those before it stood, and tokens per step with the bonus token, by depth."""
    survived = recorded.chances.cumprod(-1).mean(0)
    reached = torch.cat([survived.new_ones(1), survived[:-1]])
    return {"blocks": len(recorded.chances), "by_position": _rounded((survived / reached).tolist()),
            "accepted_length": _rounded((1 + survived.cumsum(0)).tolist()),
            "as_drawn": round(1 + float(recorded.accepted.double().mean()), 4)}  # fmt: skip


def calibration(recorded: RecordedDrafts, temperatures: Sequence[float], draws: int = 500) -> dict[str, Any]:
    """Calibration error before and after, with 95 % intervals over passages, and what chance alone would show."""
    blocks, passages = blocks_of(recorded), recorded.passages.numpy()
    found: dict[str, Any] = {"blocks": len(blocks.logits), "passages": len(set(passages.tolist()))}
    for name, chosen in (("before", ()), ("after", tuple(temperatures))):
        low, high = bootstrap_interval(
            blocks, lambda drawn, chosen=chosen: errors(drawn, chosen).overall, passages=passages, draws=draws)
        measured = errors(blocks, chosen)
        found[name] = {"error": round(measured.overall, 5), "interval": _rounded((low, high), 5),
                       "by_position": _rounded(measured.by_position, 5)}  # fmt: skip
    return found


def calibrate(model: Model, recorded: RecordedDrafts) -> tuple[float, ...]:
    """Fits temperatures on recorded drafts and enters them in the model's config."""
    temperatures = fit_temperatures(blocks_of(recorded))
    model.config = model.config.replace(dspark_temperatures=temperatures)
    return temperatures


def _rounded(values: Iterable[float], digits: int = 4) -> list[float]:
    return [round(float(value), digits) for value in values]
