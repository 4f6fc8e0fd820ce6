"""Decoding with drafts beside decoding without: accepted tokens, tokens per second, and where drafts pay."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tinyds41.bench.measure import alternate, circumstances
from tinyds41.infer.draft import Sampling
from tinyds41.infer.dspark_drafter import DSparkDrafter
from tinyds41.infer.generate import generate_ids
from tinyds41.infer.ngram_drafter import NGramDrafter
from tinyds41.infer.session import Session
from tinyds41.infer.speculate import Speculation
from tinyds41.model.transformer import Model
from tinyds41.train.corpus import documents
from tinyds41.train.examples import example

CONTEXTS = (64, 256, 1024, 2048)  # tokens of a prompt
TEMPERATURES = (0.0, 0.7, 1.0)
PROMPTS = 4  # at each length, from places all over the held-out play
NEW_TOKENS = 64
LONGEST = 4  # n-grams, in distinct-n


@dataclass
class Written:
    """What one way of decoding wrote at one context and temperature. Units: CPU seconds of all its runs."""

    texts: list[list[int]] = field(default_factory=list)
    seconds: float = 0.0
    counts: Speculation = field(default_factory=Speculation)

    @property
    def speed(self) -> float:
        """Tokens per CPU second: those of one thread, whoever else uses the machine."""
        return sum(map(len, self.texts)) / self.seconds


def bench_speculate(rounds: int = 3, *, contexts: tuple[int, ...] = CONTEXTS, rows: int = PROMPTS) -> dict[str, Any]:
    """The shipped text model with its drafter, one row at a time, on a play that neither has read.

    Every prompt is continued in all ways in turn: plain, by the model's drafter at each depth, by an n-gram drafter.
    What a step costs is measured apart, in `rounds` turns: that accepted tokens come out as tokens per second is a
    result, not an identity. Runs are timed by the CPU time of this process, as one run of each is too few for medians
    of a clock; several threads add up.

    rows: prompts at each context.
    """
    model = example("draft")
    ids = [token for text in documents("plays", "held_out") for token in model.tokenizer.encode(text)]
    table: list[dict[str, Any]] = []
    for context in contexts:
        cost = step_costs(model, ids[:context], rounds)
        for temperature in TEMPERATURES:
            written = write(model, _prompts(ids, context, rows), temperature)
            table += [_row(context, temperature, by, depth, result, written["plain", 0], cost)
                      for (by, depth), result in written.items()]  # fmt: skip
    return {"name": "speculate", **circumstances(), "rows": table, "ratios": _ratios(table)}


def step_costs(model: Model, prompt: Sequence[int], rounds: int) -> dict[int, float]:
    """Seconds of drafting k tokens at temperature 1 and verifying them, over those of a plain step, by k."""
    drafter, sampling, session = DSparkDrafter(model), Sampling(1.0), Session(model)
    session.prefill(torch.tensor([prompt]))
    length, anchor = session.lengths[0], torch.tensor([5])
    generator = torch.Generator().manual_seed(0)

    def step(depth: int) -> None:
        columns = [anchor.unsqueeze(1)]
        if depth:
            columns.append(drafter.propose(session, anchor, depth, sampling, [generator]).tokens)
        session.extend(torch.cat(columns, 1))
        session.truncate(length)

    seconds = alternate({str(k): lambda k=k: step(k) for k in range(drafter.depth + 1)}, max(15, rounds))
    return {k: seconds[str(k)] / seconds["0"] for k in range(drafter.depth + 1)}


def write(model: Model, prompts: Sequence[Sequence[int]], temperature: float) -> dict[tuple[str, int], Written]:
    """Continues each prompt in every way; by name and depth."""
    drafter, clock = DSparkDrafter(model), time.process_time
    ways: dict[tuple[str, int], Any] = {("plain", 0): False}
    ways |= {("drafter", depth): drafter for depth in range(1, drafter.depth + 1)}
    ways |= {("n-gram", depth): NGramDrafter(depth) for depth in range(1, drafter.depth + 1)}
    found = {way: Written() for way in ways}
    for number, prompt in enumerate(prompts):
        read = Session(model)
        read.prefill(torch.tensor([prompt[:-1]]))
        for (by, depth), speculate in ways.items():
            result, session = found[by, depth], read.fork()
            options = {"draft_tokens": depth, "speculate": speculate} if depth else {}
            started = clock()
            (text,) = generate_ids(session, torch.tensor([prompt[-1:]]), max_new_tokens=NEW_TOKENS, seed=number,
                                   temperature=temperature, speculation=result.counts, **options)  # fmt: skip
            result.seconds += clock() - started
            result.texts.append(text)
    return found


def distinct(texts: Sequence[Sequence[int]], n: int) -> float:
    """Different n-grams of a text over all of them, the mean over texts: 1 where nothing comes twice.

    Raises: ValueError for a text shorter than n.
    """
    shares = []
    for text in texts:
        grams = [tuple(text[i : i + n]) for i in range(len(text) - n + 1)]
        if not grams:
            raise ValueError(f"a text of {len(text)} tokens has no {n} in a row")
        shares.append(len(set(grams)) / len(grams))
    return statistics.mean(shares)


def _prompts(ids: Sequence[int], context: int, n: int) -> list[list[int]]:
    apart = (len(ids) - context) // n
    if apart < 1:
        raise ValueError(f"{n} prompts of {context} tokens: the held-out text has {len(ids)}")
    return [list(ids[i * apart : i * apart + context]) for i in range(n)]


def _row(
    context: int, temperature: float, by: str, depth: int, result: Written, plain: Written, cost: dict[int, float]
) -> dict[str, Any]:
    counts, step = result.counts, cost[depth] if by == "drafter" else None
    return {
        "context": context, "temperature": temperature, "by": by, "depth": depth,
        "drafts": counts.proposed_at[0] if depth else 0, "accepted_length": round(counts.accepted_length, 3),
        "stood": [round(share, 3) for share in counts.acceptance], "tokens_per_second": round(result.speed, 1),
        "times_plain": round(result.speed / plain.speed, 3), "break_even": None if step is None else round(step, 3),
        "of_accepted_over_cost": None if step is None else round(
            result.speed / plain.speed / (counts.accepted_length / step), 3),
        "distinct": [round(distinct(result.texts, n), 3) for n in range(1, LONGEST + 1)],
    }  # fmt: skip


def _ratios(table: Sequence[dict[str, Any]]) -> dict[str, float]:
    """At temperature 1 over all contexts, and the best speed at each temperature."""
    depth = max(row["depth"] for row in table)
    hot = [row for row in table if row["temperature"] == TEMPERATURES[-1]]
    ratios = {f"T=1, depth {k}: accepted length over the n-gram drafter's":
              _length(hot, "drafter", k) / _length(hot, "n-gram", k) for k in range(1, depth + 1)}  # fmt: skip
    ratios["T=1: tokens/s over plain, over accepted length / cost, at the worst depth"] = min(
        _mean(hot, k, "of_accepted_over_cost") for k in range(1, depth + 1))
    ends = min(row["context"] for row in hot), max(row["context"] for row in hot)
    first, last = (_length([row for row in hot if row["context"] == end], "drafter", depth) for end in ends)
    ratios[f"T=1, depth {depth}: accepted length at {ends[1]} over {ends[0]}"] = last / first
    for temperature in TEMPERATURES:
        own = [row for row in table if row["temperature"] == temperature]
        speeds = {k: _mean(own, k, "times_plain") for k in range(1, depth + 1)}
        best = max(speeds, key=lambda k: speeds[k])
        ratios[f"T={temperature:g}: tokens/s over plain at the best depth, {best}"] = speeds[best]
    return ratios


def _mean(table: Sequence[dict[str, Any]], depth: int, column: str) -> float:
    """Of the drafter, over contexts."""
    return statistics.mean(row[column] for row in table if (row["by"], row["depth"]) == ("drafter", depth))


def _length(table: Sequence[dict[str, Any]], by: str, depth: int) -> float:
    """Tokens per draft of all such rows together."""
    rows = [row for row in table if (row["by"], row["depth"]) == (by, depth)]
    return sum(row["accepted_length"] * row["drafts"] for row in rows) / sum(row["drafts"] for row in rows)
