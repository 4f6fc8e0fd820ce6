"""What a layer may know of other tokens: the `Context`, and `Sequence`, the one-shot differentiable kind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from tinyds41.config import Config
from tinyds41.formats import GLOBAL, INDEX, WINDOW, Rows
from tinyds41.model.rope import Rope
from tinyds41.ops import Window
from tinyds41.trace import Counters, Trace

PADDING = -1  # document id of padding


@dataclass
class Entries:
    """The global entries of one kv source as the present queries see them.

    Shapes: kv T rows of C, keys T rows of J; first, last [B,S]: a query sees entries first..last-1. `first` is a
        multiple of the candidate block size, so that blocks of the store are blocks of the document.
    """

    kv: Rows
    keys: Rows
    first: Tensor
    last: Tensor


class Context(Protocol):
    """All that attention, indexer, compressor and Engram see beside their own tokens.

    Training and inference differ only here (spec 4, 5). Shapes: positions [B,S], counted within a document.
    """

    positions: Tensor
    alive: Tensor  # [B,S], False at padding
    counters: Counters
    trace: Trace | None

    def rotation(self, rope: Rope, dtype: torch.dtype) -> Tensor:
        """The complex rotation [B,S,R/2] of the present positions."""
        ...

    def add_window(self, layer: int, kv: Tensor) -> Window:
        """Takes the new rows [B,S,C], rounds them to their format and returns the rows around them."""
        ...

    def groups(self, source: int, c: Tensor, z: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor]:
        """Groups that are now full: c, z [B,G,m,C] and their first positions [B,G]; the rest waits."""
        ...

    def add_entries(self, source: int, kv: Tensor, keys: Tensor) -> None:
        """Rounds and stores the entries [B,G,C] and index keys [B,G,J] of the groups last returned."""
        ...

    def entries(self, source: int | None) -> Entries:
        """The global entries of a source, and which of them the present queries see."""
        ...

    def look_back(self, ids: Tensor, n: int) -> Tensor:
        """Each token id with its n-1 predecessors; -1 where there is none. Shapes: [B,S] -> [B,S,n]."""
        ...

    def look_ahead(self, n: int) -> Tensor | None:
        """What `look_back` will return for the tokens after these, where they are known. Shapes: [B,S',n]."""
        ...


class Sequence:
    """Whole sequences at once, as floats with gradients.

    The context of training and of `model(ids)`.

    documents [B,S]: a document is a run of equal ids; positions, groups, windows, entries and look-back stay
    inside it (spec 4.8). Runs of id -1 are padding, on either side: alone in their documents, they change nothing
    else. Without documents a row is one document; right padding then changes nothing before it.

    Raises: ValueError when documents and ids differ in shape, and as `check_documents`.
    """

    def __init__(self, config: Config, ids: Tensor, documents: Tensor | None = None, trace: Trace | None = None):
        if documents is not None:
            check_documents(documents)
        if documents is not None and documents.shape != ids.shape:
            raise ValueError(f"documents have shape {tuple(documents.shape)}, ids {tuple(ids.shape)}")
        self.config, self.plan = config, config.plan()
        self.counters, self.trace = Counters(), trace
        token = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)
        self.token, self.packed = token, documents is not None
        if documents is None:
            self.start, self.alive = torch.zeros_like(token), torch.ones_like(token, dtype=torch.bool)
        else:
            # The start of a token's document: the last place where the id changed.
            changed = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)
            self.start = (token * changed).cummax(1).values
            self.alive = documents != PADDING
        self.positions = token - self.start if self.packed else token
        self._layouts = {ratio: self._layout(ratio) for ratio in set(config.compress_ratios) if ratio}
        self._entries: dict[int, Entries] = {}
        self._rotations: dict[bool, Tensor] = {}

    def rotation(self, rope: Rope, dtype: torch.dtype) -> Tensor:
        if rope.compressed not in self._rotations:
            self._rotations[rope.compressed] = rope.rotation(self.positions, dtype)
        return self._rotations[rope.compressed]

    def add_window(self, layer: int, kv: Tensor) -> Window:
        size = self.config.sliding_window
        kv = WINDOW.fake_quant(kv) if self.config.quantize_cache else kv
        return Window(Rows(kv), torch.maximum(self.start, self.token - size + 1), size)

    def groups(self, source: int, c: Tensor, z: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor]:
        layout = self._layouts[self.plan[source].ratio]
        return layout.group(c), None if z is None else layout.group(z), layout.positions

    def group_ends(self, source: int) -> Tensor:
        """The last token of each group of a source. Shapes: [B,G], token numbers in the row."""
        return self._layouts[self.plan[source].ratio].ends

    def add_entries(self, source: int, kv: Tensor, keys: Tensor) -> None:
        layout = self._layouts[self.plan[source].ratio]
        if self.config.quantize_cache:
            kv, keys = GLOBAL.fake_quant(kv), INDEX.fake_quant(keys)
        self._entries[source] = Entries(Rows(kv), Rows(keys), layout.first, layout.last)

    def entries(self, source: int | None) -> Entries:
        assert source is not None
        return self._entries[source]

    def look_back(self, ids: Tensor, n: int) -> Tensor:
        steps = [ids]
        for i in range(1, n):
            earlier = F.pad(ids, (i, 0), value=-1)[:, : ids.shape[1]]
            steps.append(earlier.masked_fill(self.positions < i, -1))
        return torch.stack(steps, -1)

    def look_ahead(self, n: int) -> None:
        return None

    def _layout(self, ratio: int) -> _Layout:
        if self.packed:
            return _packed_layout(self.positions, self.start, ratio, self.config.candidate_block_size)
        n_groups = self.token.shape[1] // ratio
        positions = torch.arange(n_groups, device=self.token.device).expand(self.token.shape[0], -1) * ratio
        return _Layout(ratio, None, positions, torch.zeros_like(self.token), (self.token + 1) // ratio)


def check_documents(documents: Tensor) -> None:
    """Raises: ValueError for what is no tensor of whole numbers, or a document id below the one of padding."""
    found = documents.dtype if isinstance(documents, Tensor) else type(documents).__name__
    if found not in (torch.int64, torch.int32):
        raise ValueError(f"documents are {found}, expected a tensor [B, S] of int64 or int32")
    lowest = int(documents.min()) if documents.numel() else 0
    if lowest < PADDING:
        raise ValueError(f"document id {lowest} is negative: only {PADDING} is, for padding")


@dataclass
class _Layout:
    """Where the groups of one ratio lie in a row of tokens.

    Shapes: tokens [B,G,m] token numbers of each group (None: groups follow each other without gaps), positions
        [B,G] of the first tokens, first and last [B,S] visible entries of each query.
    """

    ratio: int
    tokens: Tensor | None
    positions: Tensor
    first: Tensor
    last: Tensor

    @property
    def ends(self) -> Tensor:
        """[B,G]"""
        return self.positions + self.ratio - 1 if self.tokens is None else self.tokens[..., -1]

    def group(self, x_BSC: Tensor) -> Tensor:
        """[B,S,C] -> [B,G,m,C]"""
        n_groups = self.positions.shape[1]
        if self.tokens is None:
            return x_BSC[:, : n_groups * self.ratio].unflatten(1, (n_groups, self.ratio))
        flat = self.tokens.flatten(1).unsqueeze(-1).expand(-1, -1, x_BSC.shape[-1])
        return x_BSC.gather(1, flat).unflatten(1, (n_groups, self.ratio))


def _packed_layout(positions_BS: Tensor, start_BS: Tensor, ratio: int, block_size: int) -> _Layout:
    """Groups of packed documents.

    Each document's entries begin at a block border; gaps are never visible.
    """
    n_tokens = positions_BS.shape[1]
    token = torch.arange(n_tokens, device=positions_BS.device)
    ends_BS = positions_BS % ratio == ratio - 1
    opens_BS = start_BS == token
    # Entries of a document, rounded up to whole blocks, are charged to the document's first token.
    length_BS = torch.zeros_like(start_BS).scatter_add_(1, start_BS, torch.ones_like(start_BS))
    slots_BS = torch.where(opens_BS, -(-(length_BS // ratio) // block_size) * block_size, 0)
    first_BS = (slots_BS.cumsum(1) - slots_BS).gather(1, start_BS)
    last_BS = first_BS + (positions_BS + 1) // ratio
    n_slots = int(slots_BS.sum(1).max())
    # Slot -> last token of its group; unused slots point at token 0 and are seen by nobody.
    end_BG = torch.zeros(positions_BS.shape[0], n_slots + 1, dtype=torch.long, device=token.device)
    slot_BS = torch.where(ends_BS, last_BS - 1, n_slots)
    end_BG = end_BG.scatter_(1, slot_BS, token.expand_as(slot_BS))[:, :n_slots]
    tokens_BGm = (end_BG.unsqueeze(-1) - torch.arange(ratio - 1, -1, -1, device=token.device)).clamp(min=0)
    return _Layout(ratio, tokens_BGm, positions_BS.gather(1, tokens_BGm[..., 0]), first_BS, last_BS)
