"""How much work one generated token is, against the context: the curve that stays nearly flat."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tinyds41.config import Config
from tinyds41.cost.limits import check_context
from tinyds41.cost.parameters import shares
from tinyds41.model.transformer import Model


@dataclass(frozen=True)
class Rates:
    """What one FLOP of each kind counts under an accounting."""

    linear: float
    index: float
    attention: float
    meaning: str


ACCOUNTINGS = {
    "raw": Rates(1, 1, 1, "every multiply-add is 2 FLOPs, whatever its precision"),
    # The report weighs BF16 : FP8 : FP4 as 1 : 0.5 : 0.25 but does not print what it counts where.
    "weighted": Rates(0.5, 0.25, 1, "BF16 1 (attention core), FP8 0.5 (linear), FP4 0.25 (index scores)"),
}


@dataclass(frozen=True)
class DecodeWork:
    """Work on one generated token at one context.

    Units: FLOPs under `accounting`, a multiply-add being 2.

    linear: all matrices a token passes. index_full: scores against every visible entry. index_pool: scores inside
    the candidate pool. attention: scores and weighted sums over window and selected rows.
    """

    model: str
    context: int
    accounting: str
    linear: float
    index_full: float
    index_pool: float
    attention: float

    @property
    def total(self) -> float:
        return self.linear + self.index_full + self.index_pool + self.attention


@dataclass(frozen=True)
class DecodeCost:
    """Decode work of one model.

    `at(context)` and `curve(contexts)` give rows, `growth(a, b)` their ratio.

    A context of N tokens includes the one being decoded: N // m entries are visible to it.
    Differs: left out are norms, RoPE, softmax, quantisation and the mixing of streams (constant per token) and the sum
        over index heads and top-k (1/J of the index scores, and comparisons).
    Source: TR 2.2-2.3; the accounting is our reading of the report, which does not print its own.
    """

    config: Config
    name: str
    linear: float  # raw FLOPs per token

    def at(self, context: int, accounting: str = "raw") -> DecodeWork:
        """Raises: ValueError for a context that the model cannot have, or an unknown accounting."""
        if accounting not in ACCOUNTINGS:
            raise ValueError(f"unknown accounting {accounting!r}: the accountings are {', '.join(ACCOUNTINGS)}")
        rates, config = ACCOUNTINGS[accounting], self.config
        full, pool = scored_entries(config, context)
        # One index row: I dot products of J channels. One attended row: H scores and H sums of C channels.
        per_entry = 2 * config.index_n_heads * config.index_head_dim
        per_row = 2 * 2 * config.num_attention_heads * config.head_dim
        return DecodeWork(
            self.name, context, accounting,
            linear=rates.linear * self.linear,
            index_full=rates.index * per_entry * sum(full.values()),
            index_pool=rates.index * per_entry * sum(pool.values()),
            attention=rates.attention * per_row * sum(attended_rows(config, context).values()),
        )  # fmt: skip

    def curve(self, contexts: Iterable[int], accounting: str = "raw") -> list[DecodeWork]:
        return [self.at(context, accounting) for context in contexts]

    def growth(self, start: int, stop: int, accounting: str = "raw") -> float:
        """How many times the work at `start` the work at `stop` is."""
        return self.at(stop, accounting).total / self.at(start, accounting).total


def decode_cost(config: Config, name: str = "model") -> DecodeCost:
    """Builds the model from shapes alone, once, and adds up its matrices."""
    return DecodeCost(config, name, linear_flops(config))


def linear_flops(config: Config) -> float:
    """Raw FLOPs of all matrix products with weights, for one generated token.

    2 per weight it meets.
    """
    model = Model(config, device="meta")
    total = 0.0
    for share in shares(model):
        # Vectors, and Engram's key and query weights, multiply element by element.
        if len(share.shape) < 2 or share.name.endswith(("q_weight", "k_weight")):
            continue
        # One index key per finished group, so m tokens share its product.
        tokens = model.plan[int(share.name.split(".")[1])].ratio if share.name.endswith("indexer.wk.weight") else 1
        total += 2 * share.decode / tokens
    return total


def scored_entries(config: Config, context: int) -> tuple[dict[int, int], dict[int, int]]:
    """Entries that one token's indexers score, by layer.

    Against everything visible, and inside the pool.

    A pool is scored in whole blocks, also where its newest block is only partly full. Source: spec 4.4, 4.5.
    """
    check_context(config, context)
    full, pool = {}, {}
    for layer in config.plan():
        if not layer.selects:
            continue
        visible = context // layer.ratio
        if layer.pooled:
            blocks = -(-visible // config.candidate_block_size)
            pool[layer.layer] = min(config.candidate_topk_blocks, blocks) * config.candidate_block_size
        else:
            full[layer.layer] = visible
    return full, pool


def attended_rows(config: Config, context: int) -> dict[int, int]:
    """Rows that one token's attention works on, by layer.

    Its window and, where it has one, its selection.

    Slots that a selection leaves empty are worked on too; that happens only where a pool holds fewer than K.
    Source: spec 4.1, 4.7.
    """
    check_context(config, context)
    window = min(config.sliding_window, context)
    return {
        layer.layer: window + (min(config.index_topk, context // layer.ratio) if layer.ratio else 0)
        for layer in config.plan()
    }
