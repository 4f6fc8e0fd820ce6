"""Reads a model folder in the released layout, strictly, tensor by tensor into the model's own memory."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from tinyds41 import weight_formats
from tinyds41.checkpoint.cut import first_layers, missing_targets
from tinyds41.checkpoint.expected import Match, match_tensors
from tinyds41.checkpoint.headers import ModelFolder, Stored
from tinyds41.checkpoint.layout import CONFIG, FP4, ROWS, TILES, TOKENIZER, format_on_disk
from tinyds41.checkpoint.names import DRAFT, to_released
from tinyds41.config import Config
from tinyds41.model.dspark import DSpark
from tinyds41.model.transformer import Model
from tinyds41.ops import Ops
from tinyds41.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_DECODERS = {
    TILES: weight_formats.decode_tiles,
    FP4: weight_formats.decode_fp4_weight,
    ROWS: weight_formats.decode_fp8_rows,
}
# Values read at once: a table of 98 billion must not pass through memory as a whole. A multiple of every block.
_CHUNK_VALUES = 2**24


def load(
    folder: str | Path, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu",
    layers: range | None = None, ops: Ops | None = None, token_map: Tensor | None = None,
    engram: Mapping[int, nn.Module] | None = None, draft: bool = False,
) -> Model:  # fmt: skip
    """The model of a folder that `save` wrote or that was released, with its tokenizer.

    dtype: by default the narrowest that holds every tensor of the files exactly, and float32 at least where some are
        quantised.
    layers: `range(0, n)` builds a model of the first n layers, with embedding, final norm and head, and opens only
        the shards that these need.
    token_map: for a model with Engram whose folder has no tokenizer.json.
    engram: as of `Model`; the folder's tables of these layers are not read (`infer.engram_host.load_on_host`).

    draft: with the draft blocks of the folder (`mtp.*`), every tensor of them.

    Vision (`vision.*`, `aligner.*`, `image_*`), and draft blocks that are not asked for, are skipped with one notice in
    the log of this module: unlike a warning it carries no path, so that it may stand in a notebook.
    Raises: ValueError naming all missing, unexpected and misshaped tensors at once, or the file that is unsound, or the
        target layers of the draft blocks that `layers` leaves out; FileNotFoundError; MemoryError before allocating.
    Source: spec 13.
    """
    files = ModelFolder(folder)
    config = files.config if layers is None else first_layers(files.config, layers)
    missing = missing_targets(files.config, config.num_hidden_layers)
    if draft and missing:
        raise ValueError(f"layers={layers} with draft=True: its target layers {missing} are missing")
    tokenizer = _tokenizer(files.path / TOKENIZER, config, required=token_map is None)
    match = match_tensors(files, _shapes(files, config, draft), config.num_hidden_layers)
    if match.skipped:
        logger.warning("%s: skipped %s", files.path.name, match.skipped_text())
    model = Model(
        config, tokenizer=tokenizer, token_map=token_map, ops=ops, dtype=dtype or _widest(match.stored.values()),
        device=device, seed=None, engram=engram, draft=draft)  # fmt: skip
    _fill(to_released(model.state_dict()), match, files.path)
    return model


def load_draft(model: Model, folder: str | Path) -> DSpark:
    """Gives a backbone the drafter that `save_draft` wrote, and its temperatures.

    Raises: ValueError where the folder's config is not the model's, naming the fields, and as `load`, for tensors of
        the drafter; FileNotFoundError; MemoryError before allocating.
    Source: spec 13 for the names; a folder of a drafter alone is ours.
    """
    files = ModelFolder(folder)
    differ = [f"{field.name}={theirs!r} there and {mine!r} here" for field in dataclasses.fields(Config)
              if (theirs := getattr(files.config, field.name)) != (mine := getattr(model.config, field.name))
              and field.name not in ("dspark_temperatures", "extra")]  # fmt: skip
    if differ:
        raise ValueError(f"the drafter in {files.path} belongs to another model: {', '.join(differ)}")
    shapes = {name: shape for name, shape in _shapes(files, files.config, draft=True).items() if name.startswith(DRAFT)}
    match = match_tensors(files, shapes, 0)
    draft = model.add_draft()
    own = {name: tensor for name, tensor in to_released(model.state_dict()).items() if name.startswith(DRAFT)}
    _fill(own, match, files.path)
    model.config = model.config.replace(dspark_temperatures=files.config.dspark_temperatures)
    return draft


@contextmanager
def stored_table(
    folder: str | Path, layer: int, *, dtype: torch.dtype | None = None, layers: range | None = None
) -> Iterator[Callable[[int, int], Tensor]]:  # fmt: skip
    """A function that reads rows start..stop-1 of a folder's Engram table, as `load` with these options holds them.

    Raises: as `load`.
    """
    files = ModelFolder(folder)
    config = files.config if layers is None else first_layers(files.config, layers)
    match = match_tensors(files, _shapes(files, config), config.num_hidden_layers)
    dtype = dtype or _widest(match.stored.values())
    with ExitStack() as stack:
        open_shard = functools.cache(lambda shard: stack.enter_context(_open(files.path / shard)))
        name = f"layers.{layer}.engram.embed.weight"
        yield lambda start, stop: _piece(name, match, open_shard, start, stop).to(dtype)


def _shapes(files: ModelFolder, config: Config, draft: bool = False) -> dict[str, tuple[int, ...]]:
    """Released names and shapes of all parameters."""
    try:
        skeleton = Model(config, device="meta", draft=draft)
    except ValueError as error:
        raise ValueError(f"{files.path / CONFIG}: {error}") from error
    return {name: tuple(tensor.shape) for name, tensor in to_released(skeleton.state_dict()).items()}


def _tokenizer(file: Path, config: Config, *, required: bool) -> Tokenizer | None:
    """The folder's tokenizer, if it is the model's.

    Engram files its rows under that tokenizer's compressed ids.
    """
    compressed = config.engram_compressed_vocab_size if config.engram_layer_ids else None
    if not file.is_file():
        if required and compressed not in (None, config.vocab_size):
            raise FileNotFoundError(
                f"{file} is missing: with engram_compressed_vocab_size={compressed} and vocab_size="
                f"{config.vocab_size} the model needs its tokenizer (or a token_map)")
        return None
    tokenizer = Tokenizer.load(file)
    if tokenizer.vocab_size > config.vocab_size:
        raise ValueError(f"{file} has {tokenizer.vocab_size} ids, vocab_size is {config.vocab_size}")
    if compressed is not None and tokenizer.compressed_vocab_size != compressed:
        raise ValueError(
            f"{file} compresses to {tokenizer.compressed_vocab_size} ids, engram_compressed_vocab_size is "
            f"{compressed}: it is not this model's tokenizer")
    return tokenizer


def _widest(stored: Iterable[Stored]) -> torch.dtype:
    return functools.reduce(torch.promote_types, {_DTYPES.get(tensor.dtype, torch.float32) for tensor in stored})


@torch.no_grad()
def _fill(targets: dict[str, Tensor], match: Match, path: Path) -> None:
    """Copies every tensor into its parameter."""
    with ExitStack() as stack:
        open_shard = functools.cache(lambda shard: stack.enter_context(_open(path / shard)))
        for name, target in targets.items():
            if name not in match.stored:
                target.zero_()  # optional, and not there
                continue
            for start, rows in _rows(name, match, open_shard):
                target[start : start + rows.shape[0]].copy_(rows)


def _open(file: Path):
    try:
        return safe_open(file, "pt")
    except SafetensorError as error:
        raise ValueError(f"{file} is not a sound safetensors file: {error}") from error


def _rows(name: str, match: Match, open_shard) -> Iterator[tuple[int, Tensor]]:
    """A tensor in pieces along its first axis, decoded, each with its first row."""
    stored = match.stored[name]
    per_row = max(1, stored.n_bytes // stored.shape[0])
    step = max(32, _CHUNK_VALUES // per_row // 32 * 32)
    for start in range(0, stored.shape[0], step):
        yield start, _piece(name, match, open_shard, start, min(start + step, stored.shape[0]))


def _piece(name: str, match: Match, open_shard, start: int, stop: int) -> Tensor:
    """Rows start..stop-1, decoded; `start` is a multiple of the rows that share a scale."""
    stored = match.stored[name]
    form = format_on_disk(name, stored.dtype)
    values = open_shard(stored.shard).get_slice(name)[start:stop]
    if form is None:
        return values
    scales = match.scales[name]
    block = form.scale_rows
    scale = open_shard(scales.shard).get_slice(scales.name)[start // block : -(-stop // block)]
    return _DECODERS[form](values, scale)
