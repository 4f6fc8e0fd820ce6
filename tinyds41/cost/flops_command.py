"""`tinyds41 flops`: what one generated token costs at a context, and what a prompt of that length costs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from tinyds41.config import Config
from tinyds41.cost import source
from tinyds41.cost.flops import ACCOUNTINGS, DecodeCurve, decode_cost
from tinyds41.cost.generations import GENERATIONS, Generation, max_context
from tinyds41.cost.prefill import MODES, prefill_cost
from tinyds41.tables import aligned

DECODE = ("linear", "index_full", "index_pool", "attention", "total")
PREFILL = ("encoder", "boundary", "decoder", "head", "index_full", "index_pool", "attention", "total")


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser("flops", description="Work per generated token and per prompt, by component.")
    source.add_arguments(parser)
    parser.add_argument("--accounting", choices=ACCOUNTINGS, help="what a FLOP counts (default: both, one by one)")


def run(args: argparse.Namespace) -> int:
    name, model = source.chosen(args)
    accountings = [args.accounting] if args.accounting else list(ACCOUNTINGS)
    content = describe(name, model, args.context, accountings)
    print(json.dumps(content, indent=1) if args.json else "\n".join(_lines(content)))
    return 0


def describe(name: str, model: Config | Generation | None, asked: int | None, accountings: Sequence[str]) -> dict:
    """Decode rows of one model or all generations and, of a config, prefill rows. Units: FLOPs."""
    if isinstance(model, Config):
        costs: list[DecodeCurve] = [decode_cost(model, name)]
        contexts = source.contexts(asked, model.max_position_embeddings, model.sliding_window)
    else:
        costs = [one.decode_cost() for one in ([model] if model else GENERATIONS.values())]
        contexts = source.contexts(asked, max_context(), window=1)
    content: dict[str, Any] = {"model": name, "accountings": {}}
    for accounting in accountings:
        found: dict[str, Any] = {"decode": [_decode(cost, contexts, accounting) for cost in costs]}
        if isinstance(model, Config):
            found["prefill"] = _prefill(model, name, contexts, accounting)
        content["accountings"][accounting] = found
    return content


def _decode(cost: DecodeCurve, contexts: Sequence[int], accounting: str) -> dict[str, Any]:
    rows = [{**asdict(row), "total": row.total} for row in cost.curve(contexts, accounting)]
    return {
        "model": rows[0]["model"],
        "meaning": cost.rates[accounting].meaning,
        "growth": rows[-1]["total"] / rows[0]["total"],
        "rows": rows,
    }


def _prefill(config: Config, name: str, contexts: Sequence[int], accounting: str) -> list[dict[str, Any]]:
    cost = prefill_cost(config, name)
    works = [cost.at(tokens, mode, accounting) for tokens in contexts for mode in MODES]
    full = {work.tokens: work.total for work in works if work.mode == "full"}
    return [{**asdict(work), "layer_token_share": work.layer_token_share, "total": work.total,
             "share_of_full": work.total / full[work.tokens]} for work in works]  # fmt: skip


def _lines(content: dict[str, Any]) -> list[str]:
    lines = []
    for accounting, found in content["accountings"].items():
        lines += ["", *_meanings(accounting, found["decode"]), ""]
        rows = [[row["model"], f"{row['context']:,}", *(metric(row[part]) for part in DECODE)]
                for cost in found["decode"] for row in cost["rows"]]  # fmt: skip
        lines += aligned(("one generated token", "context", *map(_words, DECODE)), rows)
        grown = [f"{cost['model']} {cost['growth']:.2f}" for cost in found["decode"] if len(cost["rows"]) > 1]
        lines += [f"growth from shortest to longest: {', '.join(grown)}"] if grown else []
        if "prefill" in found:
            rows = [[work["mode"], f"{work['tokens']:,}", f"{work['layer_token_share']:.3f}",
                     *(metric(work[part]) for part in PREFILL), f"{work['share_of_full']:.3f}"]
                    for work in found["prefill"]]  # fmt: skip
            lines += ["", *aligned(("prompt", "tokens", "layer-tokens", *map(_words, PREFILL), "of full"), rows)]
    if any("prefill" in found for found in content["accountings"].values()):
        lines += ["", *(f"{mode}: {meaning}" for mode, meaning in MODES.items())]
    return [*lines[1:], "", "FLOPs, a multiply-add being 2. The reports do not print their own accounting."]


def _meanings(accounting: str, costs: Sequence[dict[str, Any]]) -> list[str]:
    """What a FLOP counts; where models differ, with their names."""
    by_meaning: dict[str, list[str]] = {}
    for cost in costs:
        by_meaning.setdefault(cost["meaning"], []).append(cost["model"])
    if len(by_meaning) == 1:
        return [f"{accounting}: {meaning}" for meaning in by_meaning]
    return [f"{accounting}: {meaning}: {', '.join(models)}" for meaning, models in by_meaning.items()]


def _words(part: str) -> str:
    return part.replace("_", " ")


def metric(count: float) -> str:
    """A count for people: 32.26G, 8.19K, 512."""
    for unit, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("K", 1e3)):
        if count >= size:
            return f"{count / size:,.2f}{unit}"
    return f"{count:,.0f}"
