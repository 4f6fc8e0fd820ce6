"""Compares what a model needs with what its files hold; everything that is wrong comes in one error."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from tinyds41.checkpoint.headers import ModelFolder, Stored, some
from tinyds41.checkpoint.layout import PLAIN, SCALE_DTYPE, format_on_disk, scale_name
from tinyds41.checkpoint.names import DRAFT, LAYER, OPTIONAL, SKIPPED

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Match:
    """The tensors of a model by released name, as they are stored; optional ones may be absent."""

    stored: dict[str, Stored]
    scales: dict[str, Stored]  # by the name of their weight, quantised weights only
    skipped: list[str]

    def skipped_text(self) -> str:
        """What was left out, for a notice."""
        kinds = Counter(prefix for name in self.skipped for prefix in SKIPPED if name.startswith(prefix))
        return ", ".join(f"{count} of {prefix}*" for prefix, count in kinds.items())


def match_tensors(files: ModelFolder, shapes: Mapping[str, Shape], n_layers: int) -> Match:
    """Finds each tensor of `shapes` (released names) in the files.

    Opens only the shards that hold them.

    n_layers: of the model that is built; further layers of the files are no surprise.
    Raises: ValueError naming all missing, unexpected, misshaped and unreadable tensors.
    """
    names = [name for name in files.shard_of if not n_layers <= _layer(name) < files.config.num_hidden_layers]
    wanted = {name for name in names if name in shapes}
    stored = files.headers(wanted | ({scale_name(name) for name in wanted} & set(names)))
    drafts = any(name.startswith(DRAFT) for name in shapes)  # then strict with draft blocks too
    skipped = [name for name in names if name.startswith(SKIPPED) and not (drafts and name.startswith(DRAFT))]
    scales = {name: stored[scale_name(name)] for name in wanted
              if format_on_disk(name, stored[name].dtype) and scale_name(name) in stored}  # fmt: skip

    problems: dict[str, list[str]] = {kind: [] for kind in ("missing", "unexpected", "misshaped", "unreadable")}
    problems["missing"] = [name for name in shapes if name not in wanted and not OPTIONAL.search(name)]
    explained = wanted | set(skipped) | {scale.name for scale in scales.values()}
    problems["unexpected"] = [name for name in names if name not in explained]
    for name in wanted:
        problem = _problem(stored[name], scales.get(name), shapes[name])
        if problem is not None:
            problems[problem[0]].append(problem[1])
    _raise_all(files, problems)
    return Match({name: stored[name] for name in wanted}, scales, skipped)


def _layer(name: str) -> int:
    match = LAYER.match(name)
    return int(match[1]) if match else -1


def _problem(weight: Stored, scale: Stored | None, shape: Shape) -> tuple[str, str] | None:
    """The first thing wrong with one tensor, as (kind, text)."""
    name, form = weight.name, format_on_disk(weight.name, weight.dtype)
    if form is None:
        if weight.dtype not in PLAIN:
            return "unreadable", f"{name} is {weight.dtype}, which is no weight format"
        return _shape_problem(weight, shape)
    if not form.fits(shape):
        return "unreadable", f"{name} is {form.name} ({weight.dtype}), which {shape} cannot be"
    if scale is None:
        return "missing", f"{scale_name(name)} beside the quantised {name} ({weight.dtype})"
    if scale.dtype != SCALE_DTYPE:
        return "unreadable", f"{scale.name} is {scale.dtype}, expected {SCALE_DTYPE}"
    return _shape_problem(weight, form.code_shape(shape)) or _shape_problem(scale, form.scale_shape(shape))


def _shape_problem(tensor: Stored, expected: Shape) -> tuple[str, str] | None:
    if tensor.shape == expected:
        return None
    return "misshaped", f"{tensor.name} is {tensor.shape}, expected {expected}"


def _raise_all(files: ModelFolder, problems: Mapping[str, list[str]]) -> None:
    lines = [f"{kind} ({len(texts)}): {some(texts)}" for kind, texts in problems.items() if texts]
    if lines:
        raise ValueError("\n  ".join([f"{files.path} does not hold the tensors that its config asks for:", *lines]))
