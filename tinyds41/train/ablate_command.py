"""`tinyds41 ablate NAME`: what each part buys, over seeds; a stopped run goes on."""

from __future__ import annotations

import argparse
from pathlib import Path

from tinyds41.memory import set_threads
from tinyds41.tables import aligned
from tinyds41.train.ablate import ablate
from tinyds41.train.ablations import ABLATIONS


def add_parser(subparsers) -> None:
    lines = "\n".join(f"  {name:14}{ablation.question}" for name, ablation in ABLATIONS.items())
    about = f"Train with one thing changed, over seeds. Rows that the file has are kept.\n\n{lines}"
    parser = subparsers.add_parser("ablate", formatter_class=argparse.RawDescriptionHelpFormatter, description=about)
    parser.add_argument("name", metavar="NAME", help="one of those above")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="(default 0 1 2)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="(default runs/ablate/NAME.json)")
    parser.add_argument("--steps", type=int, help="of each training, for a trial")
    parser.add_argument("--threads", type=int, default=1, help="of torch (default %(default)s)")


def run(args: argparse.Namespace) -> int:
    set_threads(args.threads)
    path = args.out or Path("runs", "ablate", f"{args.name}.json")
    content = ablate(args.name, path, args.seeds, steps=args.steps)
    names = list(dict.fromkeys(key for numbers in content["summary"].values() for key in numbers))
    rows = [(variant, *(f"{numbers[key]['mean']:.4g} ± {numbers[key]['spread']:.2g}" if key in numbers else ""
                        for key in names)) for variant, numbers in content["summary"].items()]  # fmt: skip
    print("\n".join(aligned(("variant", *names), rows, left=(0,))))
    print(f"{content['recipe']['question']}\nNot shown: {content['recipe']['unseen']}.\n{path}")
    return 0
