"""Runs an ablation row by row. Each finished row is in the file at once, so that a run may stop and go on."""

from __future__ import annotations

import datetime
import json
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from tinyds41.config import Config
from tinyds41.infer.cache import Cache
from tinyds41.model.transformer import Model
from tinyds41.tokenizer import Tokenizer
from tinyds41.train.ablations import ABLATIONS, Ablation, Variant
from tinyds41.train.corpus import data_folder
from tinyds41.train.replay_distance import replay_distances
from tinyds41.train.run_options import Subject, TaskSubject, TextSubject
from tinyds41.train.train_config import TrainConfig
from tinyds41.train.trainer import train
from tinyds41.whole_file import write_whole

TEXTS = ["plays", "jargon"]
KEYS = ("variant", "seed", "trained_for")  # all else in a row is a number
MEASURED = 64  # tokens in a cache whose bytes per token are read


def ablate(
    name: str, path: Path, seeds: Sequence[int] = (0, 1, 2), *, steps: int | None = None,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:  # fmt: skip
    """Trains every variant with every seed, and returns what the file then holds: recipe, rows, summary.

    Rows that the file has already are not trained again, nor are those that another ablation's file in the same folder
    has of the same training: a row names that other under `trained_for`. steps: of each training, for a trial.
    Raises: ValueError for an unknown name, and for a file of another recipe, naming what differs; OSError where the
        file cannot be written, before anything is trained.
    """
    if name not in ABLATIONS:
        raise ValueError(f"no ablation {name!r}: there are {', '.join(ABLATIONS)}")
    ablation = ABLATIONS[name]
    content = _opened(path, name, json.loads(json.dumps({**ablation.to_dict(), "steps": steps})))
    _write(path, content)
    for seed in seeds:
        for variant in ablation.variants:
            if any((row["variant"], row["seed"]) == (variant.name, seed) for row in content["rows"]):
                continue
            numbers = _borrowed(path, content, variant.name, seed) or one_row(ablation, variant, seed, steps)
            content["rows"].append({"variant": variant.name, "seed": seed, **numbers})
            content["summary"] = summary(content["rows"])
            _write(path, content)
            say(json.dumps(content["rows"][-1]))
    return content


def one_row(ablation: Ablation, variant: Variant, seed: int, steps: int | None = None) -> dict[str, Any]:
    """One training, and what it measured. Units: bytes_per_token of the global cache, seconds of all steps."""
    changes = {**ablation.train, **variant.train, **({} if steps is None else {"steps": steps})}
    config = TrainConfig(seed=seed, snapshot_every=0, **changes)
    tokenizer = Tokenizer.load(data_folder()) if ablation.subject == "text" else None
    subject: Subject = TaskSubject(ablation.subject, config.length) if tokenizer is None else TextSubject(
        tokenizer, TEXTS, config.length)  # fmt: skip
    sizes = subject.config(None, None).replace(**{**ablation.config, **variant.config})
    model = Model(sizes, tokenizer=tokenizer, seed=seed)
    history = train(model, subject.taught, config, progress=False)
    if history.interrupted:
        raise KeyboardInterrupt
    asked = {key: value for key, value in subject.ask(model).items() if isinstance(value, int | float)}
    kept = [recall for record in history.records[-1:] for recall in record["recall"].values()]
    masses = {f"mass_in_{what}": _mean([one[what] for one in kept if one[what] is not None])
              for what in ("selection", "pool")}  # fmt: skip
    distances = {}
    if ablation.replays and isinstance(subject, TextSubject):
        distances = replay_distances(model, subject.held_out)
    return {
        **asked, **{key: value for key, value in masses.items() if value is not None}, **distances,
        "parameters": sum(p.numel() for p in model.parameters()),
        "bytes_per_token": _bytes_per_token(sizes), "seconds": round(sum(history.seconds), 1),
    }  # fmt: skip


def _borrowed(path: Path, content: dict[str, Any], variant: str, seed: int) -> dict[str, Any] | None:
    """What another file of the folder has measured in the same training, with the same torch and threads."""
    wanted = _training(content, variant)
    for other in sorted({*path.parent.glob("*.json")} - {path}):
        try:
            there = json.loads(other.read_text(encoding="utf-8"))
            same = [row for row in there["rows"] if row["seed"] == seed and _training(there, row["variant"]) == wanted]
        except (ValueError, KeyError, TypeError, StopIteration):
            continue  # not a file of an ablation
        if same:
            numbers = {key: value for key, value in same[0].items() if key not in KEYS}
            return {"trained_for": same[0].get("trained_for", there["name"]), **numbers}
    return None


def _training(content: dict[str, Any], name: str) -> dict[str, Any]:
    """Everything that decides a variant's numbers, but the seed."""
    recipe = content["recipe"]
    variant = next(one for one in recipe["variants"] if one["name"] == name)
    merged = {part: {**recipe[part], **variant[part]} for part in ("config", "train")}
    return {**merged, **{key: recipe[key] for key in ("subject", "replays", "steps")},
            **{key: content[key] for key in ("threads", "torch")}}  # fmt: skip


def _bytes_per_token(config: Config) -> float:
    """Of the global rows that a cache holds."""
    cache = Cache(config)
    cache.fill(MEASURED)
    return cache.report().bytes_per_token


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, dict[str, float]]]:
    """Mean and spread (the sample's standard deviation, 0 of one seed) of every number, by variant."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for variant in dict.fromkeys(row["variant"] for row in rows):
        own = [row for row in rows if row["variant"] == variant]
        measured = dict.fromkeys(key for row in own for key in row if key not in KEYS)  # a seed may lack one
        found[variant] = {key: _spread([row[key] for row in own if key in row]) for key in measured}
    return found


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"mean": statistics.fmean(values), "spread": statistics.stdev(values) if len(values) > 1 else 0.0}


def _mean(values: Sequence[float]) -> float | None:
    return round(statistics.fmean(values), 4) if values and math.isfinite(sum(values)) else None


def _opened(path: Path, name: str, recipe: dict[str, Any]) -> dict[str, Any]:
    """A file that is there, with its rows, or a new one."""
    here = {"name": name, "threads": torch.get_num_threads(), "torch": str(torch.__version__), "recipe": recipe}
    if not path.is_file():
        return {**here, "date": datetime.date.today().isoformat(), "device": "cpu",
                "command": f"tinyds41 ablate {name} --out {path.as_posix()}", "rows": [], "summary": {}}  # fmt: skip
    try:
        there = json.loads(path.read_text(encoding="utf-8"))
        before = {**{key: there[key] for key in here}, "recipe": {**there["recipe"]}}
        rows = there["rows"] + []  # an error of anything but a list
        there["summary"] = summary([{**row, "seed": row["seed"]} for row in rows])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is no file of an ablation: {error!r}") from None
    changed = [f"{key}={before[key]!r} there and {value!r} here" for key, value in here.items()
               if key != "recipe" and before[key] != value]  # fmt: skip
    changed += [f"the recipe's {key}" for key in sorted({*recipe, *before["recipe"]})
                if recipe.get(key) != before["recipe"].get(key)]  # fmt: skip
    if changed:
        raise ValueError(f"{path} was made otherwise: {'; '.join(changed)}")
    return there


def _write(path: Path, content: dict[str, Any]) -> None:
    write_whole(path, json.dumps(content, indent=1) + "\n")
