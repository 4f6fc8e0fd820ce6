"""Where the parameters sit, and how many of them one token uses: counted from real shapes, by component."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from tinyds41.checkpoint.names import component, released_name
from tinyds41.config import Config
from tinyds41.model.transformer import Model
from tinyds41.tables import aligned

# Name (as in `checkpoint.names`) and meaning of every line of the table, in its order.
COMPONENTS = {
    "token embedding": "a table of the vocabulary; looking one row up is no work, so it counts as never active",
    "attention": "queries, window keys, grouped output projection and sinks, in every layer",
    "compressor": "Full layers: turns m tokens into one global KV entry",
    "indexer": "Full and Reindex layers: index queries and head weights, in Full layers also index keys",
    "hyper-connections": "what mixes the residual streams around each attention and each mixture of experts",
    "router": "scores the experts of a layer",
    "routed experts": "E experts per layer, of which a token visits A",
    "shared expert": "one per layer, visited by every token",
    "norms": "in front of each sub-layer and of the output head",
    "output head": "used where a token is predicted: in decode, not in prefill",
    "Engram projections": "keys, values and their weights; a line of their own",
    "Engram rows": "the n-gram tables; reading a few rows is no work, so they count as never active",
    "draft blocks": "the drafter runs once per draft of several tokens, so it counts in no token's work",
}
OUTSIDE_BACKBONE = ("Engram projections", "Engram rows", "draft blocks")


@dataclass(frozen=True)
class Share:
    """One parameter and its part in the work on one token. Units: counts of weights."""

    name: str
    component: str
    shape: tuple[int, ...]
    stored: int
    prefill: int  # used for a prompt token
    decode: int  # used for a generated token


@dataclass(frozen=True)
class Component:
    """One line of the table. Units: counts of weights."""

    name: str
    stored: int
    prefill: int
    decode: int


@dataclass(frozen=True)
class Parameters:
    """All components of one model; `print(parameters)` shows the table.

    backbone: everything but Engram and draft blocks: layers, norms, token embedding and output head.
    active_prefill: what the encoder half uses for one prompt token, Engram projections of its layers included.
        Not in it: the boundary layer's global projections (left to the decoder), output head, look-ups in token
        embedding and Engram rows. Without a decoder every layer counts.
    active_decode: what all layers and the output head use for one generated token, Engram projections included,
        look-ups not.
    In both a token visits A of the E routed experts, and a router's second bias (images only) is idle.

    Differs: the report rounds to 552B backbone, 196B Engram, 8B active in prefill and 16B in decode, and does not
        say what it includes; this reading gives 551.57B, 196.61B (rows), 7.89B and 16.13B.
    """

    components: tuple[Component, ...]
    has_decoder: bool

    def __getitem__(self, name: str) -> Component:
        return next(part for part in self.components if part.name == name)

    @property
    def backbone(self) -> int:
        return sum(part.stored for part in self.components if part.name not in OUTSIDE_BACKBONE)

    @property
    def engram_rows(self) -> int:
        return self["Engram rows"].stored

    @property
    def engram_projections(self) -> int:
        return self["Engram projections"].stored

    @property
    def draft_blocks(self) -> int:
        """0 for a model that is counted without them."""
        return self["draft blocks"].stored

    @property
    def total(self) -> int:
        return sum(part.stored for part in self.components)

    @property
    def active_prefill(self) -> int:
        return sum(part.prefill for part in self.components)

    @property
    def active_decode(self) -> int:
        return sum(part.decode for part in self.components)

    def to_dict(self) -> dict[str, Any]:
        """Raw counts, for JSON."""
        totals = ("backbone", "engram_rows", "engram_projections", "draft_blocks", "total", "active_prefill",
                  "active_decode")  # fmt: skip
        return {**{name: getattr(self, name) for name in totals}, "components": [asdict(c) for c in self.components]}

    def __str__(self) -> str:
        return "\n".join(_table(self))

    __repr__ = __str__


def count_parameters(config: Config, *, draft: bool = False) -> Parameters:
    """Counts a model that is built from shapes alone: no weight is allocated, whatever its size.

    draft: with its draft blocks.
    """
    model = Model(config, device="meta", draft=draft)
    parts = shares(model)
    lines = []
    for name in COMPONENTS:
        mine = [part for part in parts if part.component == name]
        sums = [sum(getattr(part, kind) for part in mine) for kind in ("stored", "prefill", "decode")]
        lines.append(Component(name, *sums))
    return Parameters(tuple(lines), has_decoder=model.plan.boundary is not None)


def shares(model: Model) -> list[Share]:
    """Every parameter of a model with what one token uses of it. See `Parameters` for the rules."""
    found = []
    for name, parameter in model.named_parameters():
        kind = component_of(name)
        used = _used(name, kind, parameter, model.config)
        prefill = used if _in_encoder(name, model) else 0
        found.append(Share(name, kind, tuple(parameter.shape), parameter.numel(), prefill, used))
    return found


def component_of(name: str) -> str:
    """The component of a parameter of ours. Raises: ValueError for a name that has none."""
    found = component(released_name(name))
    if found not in COMPONENTS:
        raise ValueError(f"parameter {name!r} belongs to no component")
    return found


def _used(name: str, kind: str, parameter: nn.Parameter, config: Config) -> int:
    if kind in ("token embedding", "Engram rows", "draft blocks") or name.endswith("bias_vl"):
        return 0
    if kind == "routed experts":  # stacked: the first axis is the expert
        return config.num_experts_per_tok * parameter[0].numel()
    return parameter.numel()


def _in_encoder(name: str, model: Model) -> bool:
    """Whether a prompt token that never reaches the decoder uses this parameter."""
    head, _, rest = name.partition(".")
    return head == "layers" and int(rest.split(".")[0]) < model.plan.n_encoder


def short(count: float) -> str:
    """A count for people: 551.57B, 314.65M, 8.19K, 512."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if count >= size:
            return f"{count / size:,.2f}{unit}"
    return f"{count:,.0f}"


def _percent(share: float) -> str:
    return "< 0.1 %" if share < 0.001 else f"{share:.1%}".replace("%", " %")


def _table(parameters: Parameters) -> list[str]:
    parts = [part for part in parameters.components if part.stored]
    head = ("component", "parameters", "share", "per prefill token", "per decode token")
    rows: list[tuple[str, ...]] = [
        (part.name, short(part.stored), _percent(part.stored / parameters.total),
         short(part.prefill), short(part.decode))
        for part in parts
    ]  # fmt: skip
    total = (parameters.total, parameters.active_prefill, parameters.active_decode)
    rows.append(("total", short(total[0]), "", *map(short, total[1:])))
    lines = aligned(head, rows)
    rule = "-" * max(map(len, lines))
    name_width = max(len("component"), *(len(part.name) for part in parts))
    meanings = [f"{part.name.ljust(name_width)}  {COMPONENTS[part.name]}" for part in parts]
    return [lines[0], rule, *lines[1:-1], rule, lines[-1], "", *_summary(parameters), "", *meanings]


def _summary(parameters: Parameters) -> list[str]:
    apart = "Engram and draft blocks" if parameters.draft_blocks else "Engram"
    lines = [("backbone", parameters.backbone, f"all but {apart}; token embedding and output head included")]
    if parameters.engram_rows:
        lines.append(("Engram rows", parameters.engram_rows, "tables, in host memory or on disk"))
        lines.append(("Engram projections", parameters.engram_projections, "in neither of the two above"))
    if parameters.draft_blocks:
        lines.append(("draft blocks", parameters.draft_blocks, "the drafter; embedding and head are the backbone's"))
    prefill = ("encoder half with its Engram projections; no head, no look-ups, no global KV of the boundary layer"
               if parameters.has_decoder else "every layer, for there is no decoder; no head, no look-ups")  # fmt: skip
    lines.append(("active, prefill", parameters.active_prefill, prefill))
    lines.append(("active, decode", parameters.active_decode,
                  "every layer, Engram projections and output head; no look-ups"))  # fmt: skip
    return [f"{name:<20}{short(count):>10}  {what}" for name, count, what in lines]
