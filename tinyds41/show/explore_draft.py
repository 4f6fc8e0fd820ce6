"""The draft stepper: a speculative generation, one step after the other, with what each drafted token went through."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tinyds41.infer.draft import Draft, Drafter, Sampling
from tinyds41.infer.session import Session
from tinyds41.infer.speculate import Writer, drafter_of
from tinyds41.model.transformer import Model
from tinyds41.show.explorer import explorer, require_widgets
from tinyds41.show.gate_plot import readable
from tinyds41.tables import aligned

HEAD = ("place", "token", "confidence", "q", "p", "drawn u", "stands if u < p/q")
TAIL = 40  # characters of the text before the anchor


@dataclass(frozen=True)
class DraftedToken:
    """One drafted token: its chance q of being drafted and p by the model, and the number u drawn to judge it.

    confidence: None where the drafter gives none. stands: None behind a token that fell, where nothing is judged.
    """

    token: int
    q: float
    p: float
    u: float
    confidence: float | None
    stands: bool | None


@dataclass(frozen=True)
class WatchedStep:
    """One run of the model: what was drafted behind the anchor, what it wrote, and what the session held.

    text: ids up to and with the anchor, which no session has read before the step. next_token: the model's own, behind
    the last token that stands. tokens: of the session before the step, with the draft, after the rollback.
    stores: rows by kind of store at these three moments.
    """

    text: tuple[int, ...]
    drafted: tuple[DraftedToken, ...]
    next_token: int
    tokens: tuple[int, int, int]
    stores: dict[str, tuple[int, int, int]]

    @property
    def accepted(self) -> int:
        return sum(token.stands is True for token in self.drafted)

    @property
    def next_kind(self) -> str:
        """Where the last written token comes from."""
        if not self.drafted:
            return "plain: nothing was drafted"
        return "bonus: the whole draft stands" if self.accepted == len(self.drafted) else (
            "correction: drawn from max(0, p - q)")  # fmt: skip


class _Watched(Writer):
    """A writer of one row that remembers what its last step judged."""

    judged: tuple[Draft, Tensor, Tensor] | None = None

    def _judged(self, b: int, p: Tensor, draft: Draft) -> list[int]:
        again = torch.Generator()
        again.set_state(self.generators[b].get_state())
        self.judged = draft, p, torch.rand(len(p) - 1, generator=again, dtype=p.dtype)
        return super()._judged(b, p, draft)


def draft_steps(
    model: Model, prompt: str | Sequence[int], *, max_new_tokens: int = 24, temperature: float = 1.0, seed: int = 0,
    speculate: bool | Drafter = True, draft_tokens: int | None = None,
) -> list[WatchedStep]:  # fmt: skip
    """The steps of `generate` with these options, which writes the same text. The first token comes from the prefill.

    prompt: a text, or token ids.
    Raises: ValueError as `generate`, and for a model without a tokenizer and a prompt that is no ids.
    Source: spec 10.7.
    """
    session = Session(model)
    drafter, depth = drafter_of(session, speculate, draft_tokens)
    writer, text, steps = _Watched(session, Sampling(temperature), [seed], drafter, depth), _ids(model, prompt), []
    if max_new_tokens < 2:
        raise ValueError(f"max_new_tokens={max_new_tokens}: the first token is the prefill's, a step writes the second")
    ids = session.checked(text)
    written = writer.first(session.prefill(ids))[0]
    text, left = [*text, *written], max_new_tokens - 1
    while left:
        writer.judged, held = None, [_held(session)]
        written = writer.step([text[-1]], [left])[0]
        held.append(_held(session))
        writer.settle([len(written)])
        held.append(_held(session))
        steps.append(_step(text, writer.judged, written, held))
        text, left = [*text, *written], left - len(written)
    return steps


def _held(session: Session) -> dict[str, int]:
    """Tokens and rows by kind of store."""
    rows = {"tokens": session.lengths[0]}
    for store in session.report().stores:
        rows[store.kind] = rows.get(store.kind, 0) + store.rows
    return rows


def _step(
    text: Sequence[int], judged: tuple[Draft, Tensor, Tensor] | None, written: Sequence[int],
    held: Sequence[dict[str, int]],
) -> WatchedStep:  # fmt: skip
    kinds = {kind: (held[0][kind], held[1][kind], held[2][kind]) for kind in held[0]}
    drafted = () if judged is None else tuple(
        _drafted(*judged, place, accepted=len(written) - 1) for place in range(len(judged[2])))  # fmt: skip
    return WatchedStep(tuple(text), drafted, written[-1], kinds.pop("tokens"), kinds)


def _drafted(draft: Draft, p: Tensor, u: Tensor, place: int, accepted: int) -> DraftedToken:
    token = int(draft.tokens[0, place])
    return DraftedToken(
        token, 1.0 if draft.chances is None else float(draft.chances[0, place, token]), float(p[place, token]),
        float(u[place]), None if draft.confidence is None else float(draft.confidence[0, place]),
        None if place > accepted else place < accepted)  # fmt: skip


def draft_view(model: Model, steps: Sequence[WatchedStep], step: int = 1) -> str:
    """One step as text: the draft token by token, what was written, and the stores before and after the rollback.

    step: from 1.
    Raises: ValueError for a step that is not there.
    Source: spec 10.7. Lesson: 11.
    """
    if not 1 <= step <= len(steps):
        raise ValueError(f"step={step} is outside 1..{len(steps)}")
    now, written = steps[step - 1], [one.accepted + 1 for one in steps[:step]]
    before = _text(model, now.text[:-1])[-TAIL:]
    stood = [one.token for one in now.drafted[: now.accepted]]
    lines = [f"step {step} of {len(steps)}; tokens a step so far {sum(written) / step:.2f}",
             f"text ...{readable_line(before)}", f"anchor {_word(model, now.text[-1])}: written, not yet read", "",
             *aligned(HEAD, (_cells(model, place, one) for place, one in enumerate(now.drafted, 1)), left=(1, 6)), "",
             f"writes {' '.join(_word(model, token) for token in (*stood, now.next_token))}",
             f"the last one is a {now.next_kind}", "",
             *aligned(("rows of", "before", "draft read", "rolled back"),
                      ((kind, *map(str, rows)) for kind, rows in {"tokens": now.tokens, **now.stores}.items()))]
    return "\n".join(lines)


def _cells(model: Model, place: int, one: DraftedToken) -> tuple[str, ...]:
    verdict = {True: "stands", False: "falls", None: "not judged"}[one.stands]
    confidence = "-" if one.confidence is None else f"{one.confidence:.2f}"
    shown = (f"{one.q:.3f}", f"{one.p:.3f}", f"{one.u:.3f}")
    return str(place), _word(model, one.token), confidence, *shown, f"{min(1.0, one.p / one.q):.3f}: {verdict}"


def _ids(model: Model, prompt: str | Sequence[int]) -> list[int]:
    if not isinstance(prompt, str):
        return [int(token) for token in prompt]
    if model.tokenizer is None:
        raise ValueError("this model has no tokenizer: the prompt must be token ids")
    return model.tokenizer.encode(prompt)


def _text(model: Model, ids: Sequence[int]) -> str:
    return " ".join(map(str, ids)) if model.tokenizer is None else model.tokenizer.decode(list(ids))


def _word(model: Model, token: int) -> str:
    return str(token) if model.tokenizer is None else readable(model.tokenizer.decode([token]))


def readable_line(text: str) -> str:
    """A text on one line."""
    return text.replace("\n", "↵")


def explore_draft(
    model: Model, prompt: str | Sequence[int], *, max_new_tokens: int = 24, temperature: float = 1.0, seed: int = 0
) -> Any:
    """A slider for the step and a choice of the seed, above `draft_view`: the text is written once per seed.

    Raises: ImportError without ipywidgets; ValueError as `draft_steps`.
    Lesson: 11.
    """
    widgets = require_widgets()
    options = {"max_new_tokens": max_new_tokens, "temperature": temperature}
    known = {seed: draft_steps(model, prompt, seed=seed, **options)}
    look = {"continuous_update": False, "layout": {"width": "45%"}}
    controls = {"step": widgets.IntSlider(1, 1, len(known[seed]), description="step", **look),
                "seed": widgets.IntText(seed, description="seed", layout={"width": "160px"})}  # fmt: skip

    def view(step: int, seed: int) -> str:
        if seed not in known:
            known[seed] = draft_steps(model, prompt, seed=seed, **options)
        controls["step"].max = len(known[seed])
        return draft_view(model, known[seed], min(step, len(known[seed])))

    return explorer(partial(view), controls)
