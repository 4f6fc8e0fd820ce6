"""How right the confidences of the shipped drafter are on a domain that neither training nor temperatures have seen.

    python -m tinyds41.train.calibrate_example --out docs/results/calibration.json

Temperatures are fitted anew on held-out plays and jargon, each of the two as much as the other, and the error is
measured on all of `devil`, before and after, with an interval over its passages. Outcomes are the chances min(1, p/q)
of drawn tokens, whose noise counts as error, so the error that exactly right confidences would show stands beside it.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tinyds41.model.transformer import Model
from tinyds41.train.calibrate import noise_floor, pooled_reliability
from tinyds41.train.draft_report import OTHER, acceptance, blocks_of, calibrate, calibration, held_out_drafts
from tinyds41.train.examples import DRAFT, example
from tinyds41.train.fit_tokenizer import TRAINED_ON
from tinyds41.whole_file import write_whole

ASKED_EVERY = 4  # more drafts than temperatures are fitted on: their noise counts as error
LARGEST_ERROR = 0.015  # or half of what it is without temperatures, whichever is larger


def measure(model: Model, most: int | None = None) -> dict[str, Any]:
    """Fits on texts of the training's kind, asks another domain. The model gets the temperatures."""
    fitted, asked = held_out_drafts(model, TRAINED_ON, most), held_out_drafts(model, (OTHER,), most, ASKED_EVERY)
    temperatures = calibrate(model, fitted)
    blocks, error = blocks_of(asked), calibration(asked, temperatures)
    allowed = max(LARGEST_ERROR, error["before"]["error"] / 2)
    floor = noise_floor(blocks, temperatures)
    return {
        "fitted_on": {"texts": list(TRAINED_ON), **acceptance(fitted), **calibration(fitted, temperatures)},
        "temperatures": list(temperatures), "asked": {"texts": [OTHER], **acceptance(asked), **error},
        "floor_of_drawn_outcomes": round(floor.overall, 5), "allowed": round(allowed, 5),
        "met": error["after"]["error"] <= allowed,
        "reliability": {name: [dataclasses.asdict(part) for part in pooled_reliability(blocks, chosen)]
                        for name, chosen in (("before", ()), ("after", temperatures))},
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Calibrate the shipped drafter, and ask another domain.")
    parser.add_argument("--rows", type=int, help="of each text, all by default")
    parser.add_argument("--out", type=Path, help="also write the result here as JSON")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    command = "python -m tinyds41.train.calibrate_example"
    content = {"name": "calibration", "command": command + (f" --rows {args.rows}" if args.rows else ""),
               "date": datetime.date.today().isoformat(), "device": "cpu", "threads": torch.get_num_threads(),
               "torch": torch.__version__, **measure(example(DRAFT), args.rows)}  # fmt: skip
    print(json.dumps({name: value for name, value in content.items() if name != "reliability"}, indent=1))
    if args.out is not None:
        write_whole(args.out, json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
