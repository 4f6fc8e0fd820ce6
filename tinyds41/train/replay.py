"""Replay in training: some batches are read as a server reads a prompt whose beginning lies in a store."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tinyds41.config import Config
from tinyds41.infer.prefill_modes import decoder_tokens
from tinyds41.infer.replay import first_replayed
from tinyds41.model.context import Sequence
from tinyds41.model.transformer import Model
from tinyds41.ops import Window
from tinyds41.trace import Trace
from tinyds41.train.losses import IGNORED, TRACED


@dataclass(frozen=True)
class Hits:
    """How the prompt of each row was read: its first `found` tokens are in a store, its windows are not.

    The rest of a row are tokens made behind the prompt. Shapes: found, prompt [B] int64, tokens counted in the row;
    nothing found is a prefill of mode "bounded".
    """

    found: Tensor
    prompt: Tensor

    def served(self, wanted: Tensor) -> Tensor:
        """Targets of the prompt's last token and of those behind it alone: a server says nothing before.

        Shapes: [B,S] -> [B,S], IGNORED elsewhere.
        """
        token = torch.arange(wanted.shape[1], device=wanted.device)
        return wanted.masked_fill(token < self.prompt.to(wanted.device).unsqueeze(1) - 1, IGNORED)

    def rows(self, rows: slice) -> Hits:
        """Those of some rows."""
        return Hits(self.found[rows], self.prompt[rows])

    def check(self, shape: torch.Size) -> None:
        """Raises: ValueError naming a row whose prompt is empty, longer than the row, or shorter than what is found."""
        for b, (found, prompt) in enumerate(zip(self.found.tolist(), self.prompt.tolist(), strict=True)):
            if not 1 <= prompt <= shape[1]:
                raise ValueError(f"row {b}: a prompt of {prompt} tokens in a row of {shape[1]}")
            if not 0 <= found <= prompt:
                raise ValueError(f"row {b}: {found} tokens found of a prompt of {prompt}")


def draw_hits(config: Config, step: int, shape: torch.Size | tuple[int, int], share: float, seed: int) -> Hits | None:
    """What a step simulates, None for the part 1 - share of the steps that are read as a whole.

    Prompts end anywhere, with 0 to 2 W tokens behind the hit: further on, windows of the found tokens matter less and
    less, and a prompt that is no longer than that is not found at all. It all depends on (seed, step) alone.
    """
    # The 2 keeps this stream apart from the corpus and the sampled queries, which draw from [seed, step] and from
    # [seed, step, 1].
    generator = np.random.default_rng([seed, step, 2])
    if generator.random() >= share:
        return None
    prompt = generator.integers(1, shape[1] + 1, shape[0])
    new = generator.integers(0, 2 * config.sliding_window + 1, shape[0])
    return Hits(torch.from_numpy((prompt - new).clip(0)), torch.from_numpy(prompt))


def run_replayed(model: Model, ids: Tensor, documents: Tensor | None, hits: Hits) -> tuple[Tensor, Sequence]:
    """Logits as `Session.resume` and the tokens behind it give them, with gradients, and the context of the losses.

    The encoder runs twice: once to write the stored entries, which gradients reach as well, and once with windows cut
    at each row's segment. Logits before a prompt's last token are those of no server: see `Hits.served`.

    Shapes: ids [B,S], documents [B,S] -> [B,S,V]. Raises: ValueError as `Hits.check` and `Model.forward`.
    Source: spec 5, 6. Differs: a server runs on the segments alone; here what no segment holds runs too, unseen.
    """
    model.check(ids)
    hits.check(ids.shape)
    writer = Writer(model.config, ids, documents)
    model.encode(ids, writer)
    ctx = Replayed(writer, ids, documents, hits, Trace(*TRACED, detach=False))
    return model.logits(model.decode(model.encode(ids, ctx), ctx)), ctx


Groups = tuple[Tensor, Tensor | None, Tensor]


class Writer(Sequence):
    """A cold reading that remembers of what its entries were made."""

    def __init__(self, config: Config, ids: Tensor, documents: Tensor | None):
        super().__init__(config, ids, documents)
        self.written: dict[int, Groups] = {}

    def groups(self, source: int, c: Tensor, z: Tensor | None) -> Groups:
        self.written[source] = super().groups(source, c, z)
        return self.written[source]


class Replayed(Sequence):
    """A reading whose first tokens were found: their entries are the writer's, windows begin at a segment.

    Groups, not entries, are taken over: what is made of them then is the same in the run and in the losses.
    """

    def __init__(self, writer: Writer, ids: Tensor, documents: Tensor | None, hits: Hits, trace: Trace):
        super().__init__(writer.config, ids, documents, trace)
        self.written, self.found = writer.written, hits.found.to(ids.device).unsqueeze(1)
        n_decoder = decoder_tokens(self.config, "bounded") or ids.shape[1]
        starts = {"encoder": self._first_replayed(hits.found),
                  "decoder": (hits.prompt.to(ids.device) - n_decoder).clamp(min=0)}  # fmt: skip
        # Tokens before a segment keep their windows.
        self.segment = {half: start.unsqueeze(1) * (self.token >= start.unsqueeze(1)) for half, start in starts.items()}

    def _first_replayed(self, found: Tensor) -> Tensor:
        """Where each row's encoder runs again, within the document of the last found token. Shapes: [B] -> [B]."""
        starts = []
        for b, n in enumerate(found.tolist()):
            before = int(self.start[b, n - 1]) if n else 0
            starts.append(before + first_replayed(self.config, n - before, 0, "bounded"))
        return torch.tensor(starts, device=self.token.device)

    def add_window(self, layer: int, kv: Tensor) -> Window:
        window = super().add_window(layer, kv)
        return Window(window.rows, torch.maximum(window.first, self.segment[self.plan[layer].half]), window.size)

    def groups(self, source: int, c: Tensor, z: Tensor | None) -> Groups:
        c, z, positions = super().groups(source, c, z)
        old_c, old_z, _ = self.written[source]
        # A group whose last token comes behind the hit was not stored: it waits in tokens that run again.
        stored_BG11 = (self.group_ends(source) < self.found)[..., None, None]
        c = torch.where(stored_BG11, old_c, c)
        return c, None if z is None or old_z is None else torch.where(stored_BG11, old_z, z), positions
