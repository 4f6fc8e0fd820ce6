"""`tinyds41 lessons`: execute the lessons again, check that the stored ones are sound, or take their time."""

from __future__ import annotations

import argparse
import json
import tempfile
from importlib.util import find_spec
from pathlib import Path

from tinyds41.course import fast_lessons, lesson_time, notebook_rules, notebooks
from tinyds41.course.lesson_time import LessonTime


def add_parser(subparsers) -> None:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("names", nargs="*", metavar="NAME", help="lessons, such as 00_tour (default: all)")
    common.add_argument("--folder", type=Path, default=Path("notebooks"), help="where they are (default %(default)s)")
    common.add_argument("--debug", action="store_true", default=argparse.SUPPRESS,
                        help="show the traceback of an error")  # fmt: skip
    parser = subparsers.add_parser("lessons", description="Execute lessons from their .py, check or time them.")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    run = actions.add_parser("run", parents=[common], help="execute on one thread and store")
    run.add_argument("--fast", action="store_true",
                     help="a tenth of the training steps, failed assertions are only reported, and the notebooks go to "
                          "a new temporary folder")  # fmt: skip
    actions.add_parser("check", parents=[common], help="verify what is stored")
    timed = actions.add_parser("time", parents=[common],
                               help="execute, store nothing, compare seconds and memory with the limits")  # fmt: skip
    timed.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    missing = [name for name in ("jupytext", "nbclient", "nbformat") if find_spec(name) is None]
    if missing:
        raise ValueError(f"lessons need {', '.join(missing)}: pip install 'tinyds41[notebooks]'")
    scripts = notebooks.lessons(args.folder, args.names)
    if args.action == "time":
        return time(scripts, as_json=args.json)
    if args.action == "run" and args.fast:
        return run_fast(scripts)
    return run_or_check(scripts, execute=args.action == "run")


def run_or_check(scripts: list[Path], *, execute: bool) -> int:
    wrong = []
    for script in scripts:
        if execute:
            print(f"{script.stem}: executed, stored in {notebooks.run(script)}")
        found = notebook_rules.check(script)
        print("\n".join(found or [f"{script.stem}: sound"]))
        wrong += found
    return 1 if wrong else 0


def run_fast(scripts: list[Path]) -> int:
    """Lessons with few steps, in a temporary folder. What does not hold there says nothing about the lesson."""
    folder = Path(tempfile.mkdtemp(prefix="tinyds41-lessons-"))
    for script in scripts:
        path, not_held = fast_lessons.run_fast(script, folder)
        print(f"{script.stem}: executed with a tenth of its steps, stored in {path}")
        for test in not_held:
            print(f"  does not hold: {test}")
    return 0


def time(scripts: list[Path], *, as_json: bool) -> int:
    """Every lesson once, from its .py; 1 when a limit is broken."""
    times = []
    for script in scripts:
        done = notebooks.execute(notebooks.read_script(script), script.name, script.parent)
        times.append(LessonTime(script.stem, done.seconds, done.peak_bytes))
    broken = lesson_time.broken_limits(times)
    if as_json:
        print(json.dumps(lesson_time.as_json(times), indent=1))
    else:
        print("\n".join([*lesson_time.table(times), *broken]))
    return 1 if broken else 0
