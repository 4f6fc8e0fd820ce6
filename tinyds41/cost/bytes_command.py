"""`tinyds41 bytes`: what a model's cache holds, and what one generated token reads."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from typing import Any

from tinyds41.config import Config
from tinyds41.cost import source
from tinyds41.cost.generations import GENERATIONS, Generation, max_context
from tinyds41.cost.kv_bytes import KVBytes, plain_number
from tinyds41.cost.mixing_traffic import SCHEDULES, mixing_traffic
from tinyds41.cost.traffic import DecodeBytes, DecodeTraffic, generation_bytes
from tinyds41.tables import aligned

CACHE = ("window_rows", "global_rows", "index_keys")


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser("bytes", description="Cache bytes by store, and bytes read per generated token.")
    source.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    name, model = source.chosen(args)
    content = _compare(args.context) if model is None else _describe(name, model, args.context)
    lines = _comparison(content) if model is None else _description(model, content)
    print(json.dumps(content, indent=1) if args.json else "\n".join(lines))
    return 0


def _compare(asked: int | None) -> dict[str, Any]:
    """All generations at the same contexts."""
    contexts = source.contexts(asked, max_context(), window=1)
    models = [
        {"model": model.name, "assumed": model.assumed, **_totals(cache := model.kv_bytes()),
         "at": [_at(cache, generation_bytes(model, n)) for n in contexts]}
        for model in GENERATIONS.values()
    ]  # fmt: skip
    return {"models": models}


def _comparison(content: dict[str, Any]) -> list[str]:
    contexts = [at["context"] for at in content["models"][0]["at"]]
    head = ["model", "bytes per token", "windows", *(f"held at {n:,}" for n in contexts),
            *(f"read at {n:,}" for n in contexts)]  # fmt: skip
    rows = [
        [row["model"], f"{row['bytes_per_token']:,.9g}", f"{row['window_bytes']:,}",
         *(f"{at['held']:,}" for at in row["at"]), *(f"{at['read']['cache']:,}" for at in row["at"])]
        for row in content["models"]
    ]  # fmt: skip
    assumed = [f"{row['model']}, assumed: {row['assumed']}" for row in content["models"] if row["assumed"]]
    return [
        *aligned(head, rows), "",
        "bytes per token: global KV and index keys of a longer context; windows: constant per sequence",
        "held: the cache of one sequence; read: what one generated token reads of it", *assumed,
    ]  # fmt: skip


def _totals(cache: KVBytes) -> dict[str, Any]:
    return {"bytes_per_token": plain_number(cache.bytes_per_token), "window_bytes": cache.window_bytes}


def _at(cache: KVBytes, read: DecodeBytes) -> dict[str, Any]:
    return {"context": read.context, "held": cache.bytes_at(read.context), "read": read.to_dict()}


def _describe(name: str, model: Config | Generation, asked: int | None) -> dict[str, Any]:
    """One model: its stores, what they hold, and what a generated token reads."""
    cache = DecodeTraffic(model).cache if isinstance(model, Config) else model.kv_bytes()
    window = max((row.max_rows or 1 for row in cache.of("window")), default=1)
    contexts = source.contexts(asked, cache.max_position_embeddings, window)
    if isinstance(model, Config):
        traffic = DecodeTraffic(model, name)
        reads = [traffic.at(n) for n in contexts]
        more = {"mixing_rows": {schedule: mixing_traffic(schedule, model.hc_mult) for schedule in SCHEDULES}}
    else:
        reads = [generation_bytes(model, n) for n in contexts]
        more = {"assumed": model.assumed}
    return {"model": name, **cache.to_dict(), "at": [_at(cache, read) for read in reads], **more}


def _description(model: Config | Generation, content: dict[str, Any]) -> list[str]:
    lines = [str(DecodeTraffic(model).cache)] if isinstance(model, Config) else _stores(model)
    known = content["at"][0]["read"]["weights"] is not None
    shown = ("weights", *CACHE, "engram_rows", "total") if known else (*CACHE, "cache")
    read = "with weights in their released formats, batch of one" if known else "of the cache"
    rows = [[f"{at['context']:,}", f"{at['held']:,}", *(f"{at['read'][part]:,}" for part in shown)]
            for at in content["at"]]  # fmt: skip
    lines += ["", *aligned(("context", "held", *(part.replace("_", " ") for part in shown)), rows, left=()),
              f"held: the cache of one sequence; the rest: read for one generated token, {read}"]  # fmt: skip
    if "mixing_rows" in content:
        moved = ", ".join(f"{rows:g} ({schedule})" for schedule, rows in content["mixing_rows"].items())
        lines += ["", f"hyper-connections move rows of hidden_size per token and sub-layer: {moved}"]
    return lines


def _stores(model: Generation) -> list[str]:
    """The stores of an earlier generation, equal layers in one line, and what a row of each is made of."""
    cache = model.kv_bytes()
    counted = Counter((row.store, row.row_bytes, row.tokens_per_row, row.max_rows) for row in cache.rows)
    rows = [
        (store, str(n), f"{size:,}", str(tokens), f"{limit:,}" if limit else "", _growth(n * size, tokens, limit))
        for (store, size, tokens, limit), n in counted.items()
    ]
    rows.append(("all", "", "", "", "", f"{plain_number(cache.bytes_per_token):,.9g}"))
    lines = aligned(("store", "layers", "bytes per row", "tokens per row", "most rows", "bytes per token"), rows)
    lines += ["", f"a row of KV: {model.entry}"]
    lines += [f"an index key: {model.indexer.key}"] if model.indexer else []
    return lines + ([f"assumed: {model.assumed}"] if model.assumed else [])


def _growth(row_bytes: int, tokens: int, limit: int | None) -> str:
    return "" if limit else f"{row_bytes / tokens:,.9g}"
