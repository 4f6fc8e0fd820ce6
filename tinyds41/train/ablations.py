"""The ablations: one training, one thing changed, several seeds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Variant:
    """What is changed: fields of the model's config and of the TrainConfig."""

    name: str
    config: Mapping[str, Any] = field(default_factory=dict)
    train: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Ablation:
    """A question, and the trainings that answer it as far as a toy can.

    subject: "text", or a task's name. replays: whether what bounded replays change is measured too. `unseen` says what
    the numbers cannot show.
    """

    question: str
    subject: str
    variants: tuple[Variant, ...]
    train: Mapping[str, Any]
    config: Mapping[str, Any] = field(default_factory=dict)
    replays: bool = False
    unseen: str

    def to_dict(self) -> dict[str, Any]:
        """Everything that decides the numbers."""
        return asdict(self)


# The rate is the best of the sweep in docs/LOG.md.
TEXT = {"steps": 150, "batch_size": 8, "length": 128, "learning_rate": 4e-3}
NEEDLE = {"steps": 320, "batch_size": 32, "length": 32, "learning_rate": 3e-3}
LONG = {**NEEDLE, "batch_size": 2, "length": 512}  # as many tokens: short rows come in greater number
OWN_IN_DECODER = {"kv_source_layer_ids": (2, 4, 5, 6, 7), "index_source_layer_ids": (2, 4, 5, 6, 7)}
OWN_EVERYWHERE = {"kv_source_layer_ids": (2, 3, 4, 5, 6, 7), "index_source_layer_ids": (2, 3, 4, 5, 6, 7)}
SHORT_TEXT = "150 steps of 1,024 tokens: a difference may vanish, or appear, with more training or a larger model"

ABLATIONS = {
    "ced": Ablation(
        question="What does it cost that the decoder's layers share entries made of the encoder's output?",
        subject="text", train=TEXT,
        variants=(Variant(name="encoder-decoder"), Variant(name="decoder alone", config=OWN_IN_DECODER)),
        unseen=SHORT_TEXT + ", and the saved half of a prefill is no matter of loss"),
    "sharing": Ablation(
        question="Shared entries against entries of each layer's own: loss, and bytes per token",
        subject="text", train=TEXT,
        variants=(Variant(name="shared"), Variant(name="of each layer", config=OWN_EVERYWHERE)), unseen=SHORT_TEXT),
    "top-k": Ablation(
        question="How many entries must a query choose? Right answers beside the attention mass that is kept",
        subject="long-needle", train=LONG,
        variants=tuple(Variant(name=f"{k} of 252", config={"index_topk": k}) for k in (2, 4, 8, 16, 32)),
        unseen="one kind of question, whose answer is a single entry"),
    "pool": Ablation(
        question="How many blocks must the pool hold? Right answers beside the attention mass that is kept",
        subject="long-needle", train=LONG,
        variants=tuple(Variant(name=f"{n} of 63 blocks", config={"candidate_topk_blocks": n}) for n in (1, 4, 16, 63)),
        unseen="one layer forms the pool and one is restricted to it; the first may answer alone"),
    "streams": Ablation(
        question="Single-pass against multi-pass hyper-connections, and a plain residual",
        subject="text", train=TEXT,
        variants=(Variant(name="single-pass"), Variant(name="multi-pass", config={"mhc_mode": "multi_pass"}),
                  Variant(name="plain residual", config={"mhc_mode": "residual"})),
        unseen=SHORT_TEXT + "; eight layers are few for streams to matter"),
    "engram": Ablation(
        question="What is Engram worth on text?", subject="text", train=TEXT,
        variants=(Variant(name="with"),
                  Variant(name="without", config={"engram_layer_ids": (), "engram_num_embeddings": ()})),
        unseen=SHORT_TEXT + "; without its tables the model has fewer numbers"),
    "engram-facts": Ablation(
        question="What is Engram worth for facts that no text tells?",
        subject="facts", train={**NEEDLE, "steps": 200, "length": 64},
        variants=(Variant(name="with"),
                  Variant(name="without", config={"engram_layer_ids": (), "engram_num_embeddings": ()})),
        unseen="a made-up book of names; without its tables the model has fewer numbers"),
    "formats": Ablation(
        question="FP4 caches: never, from the start, or from half of the training on?", subject="text", train=TEXT,
        variants=(Variant(name="from the start"), Variant(name="from half", train={"quantize_from": 75}),
                  Variant(name="never", config={"quantize_cache": False})),
        unseen=SHORT_TEXT),
    "optimizers": Ablation(
        question="The report's optimisers against AdamW alone, each at the best rate of a sweep",
        subject="text", train=TEXT,
        variants=(Variant(name="AdamW"), Variant(name="report", train={"optimizer": "report"})), unseen=SHORT_TEXT),
    "replay": Ablation(
        question="Does training with simulated replays bring resumed prompts nearer to prompts read anew?",
        subject="text", train=TEXT, replays=True,
        variants=(Variant(name="never"), Variant(name="a quarter of the steps", train={"replay_share": 0.25})),
        unseen=SHORT_TEXT + "; this toy makes little use of what lies behind its windows"),
}  # fmt: skip
