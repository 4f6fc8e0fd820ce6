"""Ablations as a page: `python -m tinyds41.show.ablation_figures` writes docs/ablations.md and its figures.

It reads what `tinyds41 ablate NAME --out docs/results/ablate_NAME.json` has measured.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from tinyds41.show.ablation_plot import plot_ablation, plot_right_by_mass
from tinyds41.show.save import save_figure
from tinyds41.train.ablations import ABLATIONS
from tinyds41.whole_file import write_whole

# Heading of each column, and how its numbers are printed. What a summary has beyond these depends on the machine or is
# the same in all rows.
COLUMNS = {
    "right": ("right answers", ".3f"), "held_out_loss": ("held-out loss, nats", ".3f"),
    "bits_per_character": ("bits per character", ".3f"), "mass_in_selection": ("mass in the choice", ".3f"),
    "mass_in_pool": ("mass in the pool", ".3f"), "kl_bounded_prefill": ("KL of a bounded prefill, nats", ".1e"),
    "kl_resumed": ("KL of a resumed prompt, nats", ".1e"), "bytes_per_token": ("cache bytes per token", "g"),
    "parameters": ("parameters", ",.0f"),
}  # fmt: skip
SHOWN = {"text": "held_out_loss", "replay": "kl_resumed"}  # by name or subject; of tasks the right answers
WITH_MASS = ("top-k", "pool")
HEAD = """# What each part buys

Each row is a training of a toy with one thing changed, and its mean over the seeds with the sample's standard
deviation. A row is shared by all questions that ask for the same training. Written by
`python -m tinyds41.show.ablation_figures` from the files in [results](results), which hold every seed.

A difference smaller than the spread is none that this page shows. Seeds are few and trainings short: nothing here says
what the parts buy in a model of released size. The mass is the share of the attention that a query would give to all
entries it may see, over what it may choose or what the pool holds; mean of the sources at the last record of a run.
"""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Write docs/ablations.md and its figures from docs/results.")
    parser.add_argument("--docs", type=Path, default=Path("docs"), metavar="FOLDER")
    docs = parser.parse_args(arguments).docs
    found = {name: docs / "results" / f"ablate_{name}.json" for name in ABLATIONS}
    contents = {name: json.loads(path.read_text(encoding="utf-8")) for name, path in found.items() if path.is_file()}
    if not contents:
        raise FileNotFoundError(f"{docs} has no results/ablate_NAME.json: `tinyds41 ablate NAME --out ...` makes one")
    for name, content in contents.items():
        draw(name, content, docs / "figures")
    write_whole(docs / "ablations.md", "\n".join([HEAD, *map(section, contents.values())]))


def draw(name: str, content: dict[str, Any], folder: Path) -> None:
    """One figure of each ablation, and for sizes of choice and pool a second."""
    shown = SHOWN.get(name) or SHOWN.get(content["recipe"]["subject"], "right")
    variants = list(content["summary"])
    values = {variant: [row[shown] for row in content["rows"] if row["variant"] == variant] for variant in variants}
    save_figure(plot_ablation(values, quantity=COLUMNS[shown][0], title=f"Ablation: {name}"),
                folder, f"ablation_{name}", _columns(content["rows"], ("variant", "seed", shown)))  # fmt: skip
    if name in WITH_MASS:
        mass = "mass_in_selection" if name == "top-k" else "mass_in_pool"
        measured = [row for row in content["rows"] if mass in row]  # of some runs no query had to leave anything out
        points = {variant: [(row[mass], row["right"]) for row in measured if row["variant"] == variant]
                  for variant in dict.fromkeys(row["variant"] for row in measured)}  # fmt: skip
        ax = plot_right_by_mass(points, quantity=f"{COLUMNS[mass][0]}, share", title=f"Ablation: {name}")
        save_figure(ax, folder, f"ablation_{name}_mass", _columns(measured, ("variant", "seed", mass, "right")))
    plt.close("all")


def section(content: dict[str, Any]) -> str:
    """An ablation in Markdown: question, table, figures, what it cannot show, and the command."""
    name, recipe, summary = content["name"], content["recipe"], content["summary"]
    keys = [key for key in COLUMNS if any(key in numbers for numbers in summary.values())]
    seeds = sorted({row["seed"] for row in content["rows"]})
    lines = [f"## {name}", "", f"{recipe['question']}", "",
             "| variant | " + " | ".join(COLUMNS[key][0] for key in keys) + " |",
             "| --- |" + " ---: |" * len(keys)]  # fmt: skip
    lines += [f"| {variant} | " + " | ".join(_cell(numbers.get(key), COLUMNS[key][1]) for key in keys) + " |"
              for variant, numbers in summary.items()]  # fmt: skip
    figures = [f"ablation_{name}", *([f"ablation_{name}_mass"] if name in WITH_MASS else [])]
    lines += ["", *(f"![{name}: each seed, mean and spread](figures/{figure}.png)" for figure in figures), ""]
    settings = ", ".join(f"{key} {value}" for key, value in recipe["train"].items())
    lines += [f"Not shown: {recipe['unseen']}.", "",
              f"{recipe['subject'].capitalize()}, {settings}; seeds {', '.join(map(str, seeds))}; {content['date']}, "
              f"{content['device']}, torch {content['torch']}, threads: {content['threads']}. "
              f"`{content['command']}`", ""]  # fmt: skip
    return "\n".join(lines)


def _columns(rows: Sequence[dict[str, Any]], keys: Sequence[str]) -> list[dict[str, Any]]:
    return [{key: row[key] for key in keys} for row in rows]


def _cell(numbers: dict[str, float] | None, form: str) -> str:
    if numbers is None:
        return ""
    mean, spread = format(numbers["mean"], form), numbers["spread"]
    return f"{mean} ± {format(spread, form)}" if spread else mean


if __name__ == "__main__":
    main()
