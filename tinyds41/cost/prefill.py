"""How much work a prompt is, and what running the decoder on its last tokens alone saves."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from tinyds41.config import Config
from tinyds41.cost.flops import flops_per_row, known_accounting, multiplies, tokens_per_use
from tinyds41.cost.limits import check_context
from tinyds41.cost.parameters import Share, shares
from tinyds41.cost.rows import chosen, near, scored
from tinyds41.infer import prefill_modes
from tinyds41.model.transformer import Model
from tinyds41.plan import LayerPlan, Plan

MODES = {
    "full": "every layer on every token",
    "exact": "the decoder on all tokens that its windows can reach from the last one",
    "bounded": "the decoder on one window of tokens, windows cut where it starts",
}

LINEAR: tuple[str, ...] = ("encoder", "boundary", "decoder", "head")


@dataclass(frozen=True)
class PrefillWork:
    """Work on a prompt.

    Units: FLOPs under `accounting`, a multiply-add being 2; layer_tokens a count, a layer on a token being 1.

    encoder, boundary, decoder, head: matrices; boundary is what the decoder's first layer makes of every token, head
    the output head for the last one. index_full, index_pool, attention: as in `DecodeWork`, summed over positions.
    """

    model: str
    tokens: int
    mode: str  # one of MODES
    accounting: str
    layer_tokens: int
    all_layer_tokens: int  # of mode "full"
    encoder: float
    boundary: float
    decoder: float
    head: float
    index_full: float
    index_pool: float
    attention: float

    @property
    def layer_token_share(self) -> float:
        """Part of the layer-tokens of mode "full" that is run."""
        return self.layer_tokens / self.all_layer_tokens

    @property
    def linear(self) -> float:
        return sum(getattr(self, part) for part in LINEAR)

    @property
    def total(self) -> float:
        return self.linear + self.index_full + self.index_pool + self.attention


@dataclass(frozen=True)
class PrefillCost:
    """Prefill work of one model: `at(tokens, mode)`, `share(tokens, mode)` of the work of mode "full".

    Differs: as `DecodeCost`; hyper-connections as in mhc_mode "single_pass" (a boundary layer of "multi_pass" takes
        the coefficients of every token); masked scores that a kernel computes beside the visible ones are not
        counted; a prompt stands alone (nothing of it was cached) and is one document.
    Source: spec 5, TR 2.2, 3.2.2.
    """

    config: Config
    name: str
    matrices: tuple[Share, ...]

    def at(self, tokens: int, mode: str = "bounded", accounting: str = "raw") -> PrefillWork:
        """Raises: ValueError for a length that the model cannot have, an unknown mode or accounting."""
        rates, raw = known_accounting(accounting), self._raw(tokens, mode)
        linear = {part: rates.linear * getattr(raw, part) for part in LINEAR}
        return replace(
            raw, accounting=accounting, **linear, index_full=rates.index * raw.index_full,
            index_pool=rates.index * raw.index_pool, attention=rates.attention * raw.attention,
        )  # fmt: skip

    def share(self, tokens: int, mode: str = "bounded", accounting: str = "raw") -> float:
        return self.at(tokens, mode, accounting).total / self.at(tokens, "full", accounting).total

    def _raw(self, tokens: int, mode: str) -> PrefillWork:
        plan, in_decoder = self.config.plan(), decoder_tokens(self.config, tokens, mode)
        linear = dict.fromkeys(LINEAR, 0.0)
        for share in self.matrices:
            part, runs = _place(share, plan, tokens, in_decoder)
            linear[part] += 2 * share.decode * (runs // tokens_per_use(share, plan))
        runs = {layer: tokens if layer.half == "encoder" else in_decoder for layer in plan}
        per_entry, per_row = flops_per_row(self.config)
        index_full, index_pool, attended = (
            sum(count(self.config, layer, tokens, n) for layer, n in runs.items())
            for count in (_scored_everywhere, _scored_in_pool, _attended)
        )
        return PrefillWork(
            self.name, tokens, mode, "raw", sum(runs.values()), len(plan) * tokens, **linear,
            index_full=per_entry * index_full, index_pool=per_entry * index_pool, attention=per_row * attended,
        )  # fmt: skip


def prefill_cost(config: Config, name: str = "model") -> PrefillCost:
    """Builds the model from shapes alone, once."""
    matrices = (share for share in shares(Model(config, device="meta")) if multiplies(share))
    return PrefillCost(config, name, tuple(matrices))


def decoder_tokens(config: Config, tokens: int, mode: str) -> int:
    """On how many of a prompt's tokens the decoder layers run: `prefill_modes.decoder_tokens`, of so many tokens.

    Raises: ValueError for a length that the model cannot have, or an unknown mode.
    """
    check_context(tokens, config.max_position_embeddings)
    if mode not in MODES:
        raise ValueError(f"unknown prefill mode {mode!r}: the modes are {', '.join(MODES)}")
    if not config.plan().n_decoder:
        return 0
    last = prefill_modes.decoder_tokens(config, mode)
    return tokens if last is None else min(tokens, last)


def _place(share: Share, plan: Plan, tokens: int, in_decoder: int) -> tuple[str, int]:
    """The line that a matrix belongs to, and how many tokens of the prompt meet it."""
    top, _, rest = share.name.partition(".")
    if top != "layers":
        return "head", 1
    layer, _, inside = rest.partition(".")
    if int(layer) < plan.n_encoder:
        return "encoder", tokens
    # Every token leaves its global entry in the boundary layer; what adds to the streams before it has to run first.
    if int(layer) == plan.boundary and inside.startswith(("compressor.", "indexer.wk.", "engram.")):
        return "boundary", tokens
    return "decoder", in_decoder


def _scored_everywhere(config: Config, layer: LayerPlan, tokens: int, runs: int) -> int:
    return _scored(config, layer, tokens, runs) if layer.selects and not layer.pooled else 0


def _scored_in_pool(config: Config, layer: LayerPlan, tokens: int, runs: int) -> int:
    return _scored(config, layer, tokens, runs) if layer.pooled else 0


def _scored(config: Config, layer: LayerPlan, tokens: int, runs: int) -> int:
    return int(scored(config, layer, _contexts(tokens, runs)).sum())


def _attended(config: Config, layer: LayerPlan, tokens: int, runs: int) -> int:
    """Global rows by the position in the prompt, window rows by how far the layer's own run goes back."""
    return int(chosen(config, layer, _contexts(tokens, runs)).sum() + near(config, _contexts(runs, runs)).sum())


def _contexts(tokens: int, runs: int) -> torch.Tensor:
    """The context, itself included, of each of the last `runs` tokens."""
    return torch.arange(tokens - runs + 1, tokens + 1)
