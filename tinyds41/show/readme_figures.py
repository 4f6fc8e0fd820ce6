"""The figures of README.md: `python -m tinyds41.show.readme_figures` writes docs/figures."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from tinyds41.config import Config
from tinyds41.cost.flops import ACCOUNTINGS, decode_cost
from tinyds41.show.cost_plots import plot_decode_work
from tinyds41.show.plan_plot import plot_layer_plan
from tinyds41.show.save import save_figure

CONTEXTS = [2**power for power in range(12, 21)]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Write the figures that README.md shows, with their numbers.")
    parser.add_argument("--out", type=Path, default=Path("docs/figures"))
    out = parser.parse_args(arguments).out
    config = Config.preset("flash")
    cost = decode_cost(config, "flash")
    curves = {name: cost.curve(CONTEXTS, name) for name in ACCOUNTINGS}
    rows = [row for curve in curves.values() for row in curve]
    save_figure(plot_decode_work(curves, model="flash"), out, "decode_work", rows)
    save_figure(plot_layer_plan(config.plan(), model="flash"), out, "layer_plan", config.plan())


if __name__ == "__main__":
    main()
