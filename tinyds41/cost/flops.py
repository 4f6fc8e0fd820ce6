"""How much work one generated token is, against the context: the curve that stays nearly flat."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from tinyds41.config import Config
from tinyds41.cost.parameters import Share, shares
from tinyds41.cost.rows import attended_rows, scored_entries
from tinyds41.model.transformer import Model
from tinyds41.plan import Plan


@dataclass(frozen=True)
class Rates:
    """What one FLOP of each kind counts under an accounting."""

    linear: float
    index: float
    attention: float
    meaning: str


# The report's weights of a FLOP. It does not print what it counts where: that reading is ours, and it gives the
# published ratios (V4-Flash and V4-Pro to V3.2 at a context of 1M).
PRECISIONS = {"BF16": 1.0, "FP8": 0.5, "FP4": 0.25}


def weighted_rates(index: str) -> Rates:
    """All linear work at FP8, the attention core at BF16, index scores at a precision of the generation's."""
    linear, attention = "FP8", "BF16"
    return Rates(
        PRECISIONS[linear], PRECISIONS[index], PRECISIONS[attention],
        f"{attention} {PRECISIONS[attention]:g} (attention core), {linear} {PRECISIONS[linear]:g} (linear), "
        f"{index} {PRECISIONS[index]:g} (index scores)",
    )  # fmt: skip


ACCOUNTINGS = {
    "raw": Rates(1, 1, 1, "every multiply-add is 2 FLOPs, whatever its precision"),
    "weighted": weighted_rates(index="FP4"),
}


def known_accounting(accounting: str, rates: Mapping[str, Rates] = ACCOUNTINGS) -> Rates:
    """Raises: ValueError for an unknown accounting, naming the known."""
    if accounting not in rates:
        raise ValueError(f"unknown accounting {accounting!r}: the accountings are {', '.join(rates)}")
    return rates[accounting]


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
    meaning: str = ACCOUNTINGS["raw"].meaning  # of the accounting, for this model

    @property
    def total(self) -> float:
        return self.linear + self.index_full + self.index_pool + self.attention


class DecodeCurve:
    """Decode work of one model against its context.

    `at(context)` and `curve(contexts)` give rows, `growth(a, b)` their ratio. A subclass says what the raw work is.
    """

    rates: Mapping[str, Rates] = ACCOUNTINGS

    def raw(self, context: int) -> DecodeWork:
        """Raises: ValueError for a context that the model cannot have."""
        raise NotImplementedError

    def at(self, context: int, accounting: str = "raw") -> DecodeWork:
        """Raises: ValueError for a context that the model cannot have, or an unknown accounting."""
        rates, raw = known_accounting(accounting, self.rates), self.raw(context)
        return replace(
            raw, accounting=accounting, linear=rates.linear * raw.linear, attention=rates.attention * raw.attention,
            index_full=rates.index * raw.index_full, index_pool=rates.index * raw.index_pool, meaning=rates.meaning,
        )  # fmt: skip

    def curve(self, contexts: Iterable[int], accounting: str = "raw") -> list[DecodeWork]:
        return [self.at(context, accounting) for context in contexts]

    def growth(self, start: int, stop: int, accounting: str = "raw") -> float:
        """How many times the work at `start` the work at `stop` is."""
        return self.at(stop, accounting).total / self.at(start, accounting).total


@dataclass(frozen=True)
class DecodeCost(DecodeCurve):
    """Decode work of a config's model.

    A context of N tokens includes the one being decoded: N // m entries are visible to it.
    Differs: left out are norms, RoPE, softmax, quantisation and the mixing of streams (constant per token) and the sum
        over index heads and top-k (1/J of the index scores, and comparisons).
    Source: TR 2.2-2.3; the accounting is our reading of the report, which does not print its own.
    """

    config: Config
    name: str
    linear: float  # raw FLOPs per token

    def raw(self, context: int) -> DecodeWork:
        full, pool = scored_entries(self.config, context)
        per_entry, per_row = flops_per_row(self.config)
        return DecodeWork(
            self.name, context, "raw", self.linear, index_full=per_entry * sum(full.values()),
            index_pool=per_entry * sum(pool.values()),
            attention=per_row * sum(attended_rows(self.config, context).values()),
        )  # fmt: skip


def flops_per_row(config: Config) -> tuple[int, int]:
    """Raw FLOPs of scoring one index row, and of attending to one row of the cache."""
    # One index row: I dot products of J channels. One attended row: H scores and H sums of C channels.
    return (2 * config.index_n_heads * config.index_head_dim,
            2 * 2 * config.num_attention_heads * config.head_dim)  # fmt: skip


def decode_cost(config: Config, name: str = "model") -> DecodeCost:
    """Builds the model from shapes alone, once, and adds up its matrices."""
    return DecodeCost(config, name, linear_flops(config))


def linear_flops(config: Config) -> float:
    """Raw FLOPs of all matrix products with weights, for one generated token.

    2 per weight it meets.
    """
    model = Model(config, device="meta")
    met = (share for share in shares(model) if multiplies(share))
    return sum(2 * share.decode / tokens_per_use(share, model.plan) for share in met)


def multiplies(share: Share) -> bool:
    """Whether a parameter stands in a matrix product; vectors and Engram's key and query weights do not."""
    return len(share.shape) >= 2 and not share.name.endswith(("q_weight", "k_weight"))


def tokens_per_use(share: Share, plan: Plan) -> int:
    """Tokens that share one product with a weight: m for what makes an index key, for a group has one."""
    return plan[int(share.name.split(".")[1])].ratio if share.name.endswith("indexer.wk.weight") else 1
