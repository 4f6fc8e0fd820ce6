"""The formats of released weights: FP8 in tiles, packed FP4 expert rows, FP8 Engram rows."""

from __future__ import annotations

import torch
from torch import Tensor

from tinyds41.elements import E4M3, block_scales, round_to_grid_, to_exponent_bytes
from tinyds41.formats import AMAX_FLOORS, ENGRAM, INDEX, Format

TILE = 32  # rows and columns that share one scale in a dense FP8 matrix
# Expert weights use the element, block and scale of index keys; only codes and scales lie in two tensors.
FP4_WEIGHT = Format("fp4 weight", INDEX.element, INDEX.block, INDEX.scale)


def encode_tiles(weight: Tensor) -> tuple[Tensor, Tensor]:
    """FP8 codes and one power-of-two scale per 32x32 tile; edge tiles cover what is left.

    Shapes: floats [R, C] -> float8_e4m3fn [R, C], float8_e8m0fnu [ceil(R/32), ceil(C/32)].
    Source: spec 3, 13.
    """
    _check_matrix(weight)
    rows, columns = weight.shape
    tiles_across = -(-columns // TILE)
    # Zeros fill the edge tiles: they change no maximum.
    padded = torch.nn.functional.pad(weight.detach().float(), (0, -columns % TILE, 0, -rows % TILE))
    blocks = padded.unflatten(0, (-1, TILE)).unflatten(-1, (tiles_across, TILE)).transpose(1, 2).flatten(-2)
    scales = block_scales(blocks, E4M3[2], AMAX_FLOORS["e4m3", "ue8m0"], "ue8m0").squeeze(-1)
    values = (weight.detach().float() / _spread(scales, rows, columns)).clamp_(-E4M3[2], E4M3[2])
    codes = round_to_grid_(values, *E4M3[:2]).to(torch.float8_e4m3fn)
    return codes, to_exponent_bytes(scales).view(torch.float8_e8m0fnu)


def decode_tiles(codes: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The matrix of FP8 codes and tile scales.

    Shapes: float8_e4m3fn [R, C], float8_e8m0fnu [ceil(R/32), ceil(C/32)] -> dtype [R, C].
    """
    _check_matrix(codes)
    rows, columns = codes.shape
    expected = (-(-rows // TILE), -(-columns // TILE))
    if tuple(scale.shape) != expected:
        raise ValueError(f"a matrix {(rows, columns)} has tile scales {expected}, got {tuple(scale.shape)}")
    return (codes.float() * _spread(scale.float(), rows, columns)).to(dtype)


def encode_fp4_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Packed FP4 codes of an expert matrix, with row-block scales; even column = low nibble.

    Shapes: floats [R, C] -> int8 [R, C/2], float8_e8m0fnu [R, C/32].
    Raises: ValueError when 32 does not divide C.
    """
    _check_matrix(weight)
    codes, scale = FP4_WEIGHT.to_codes(weight)
    return codes.view(torch.int8), scale.view(torch.float8_e8m0fnu)


def decode_fp4_weight(codes: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The matrix of packed FP4 codes.

    Shapes: int8 [R, C/2], float8_e8m0fnu [R, C/32] -> dtype [R, C].
    """
    return _decode_rows(FP4_WEIGHT, codes, scale, 2 * codes.shape[-1], dtype)


def encode_fp8_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """FP8 codes of an Engram table, one scale per row and 32 columns, so that rows load alone.

    Shapes: floats [R, C] -> float8_e4m3fn [R, C], float8_e8m0fnu [R, C/32].
    Raises: ValueError when 32 does not divide C.
    """
    _check_matrix(weight)
    codes, scale = ENGRAM.to_codes(weight)
    return codes.view(torch.float8_e4m3fn), scale.view(torch.float8_e8m0fnu)


def decode_fp8_rows(codes: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The Engram table of FP8 codes.

    Shapes: float8_e4m3fn [R, C], float8_e8m0fnu [R, C/32] -> dtype [R, C].
    """
    return _decode_rows(ENGRAM, codes, scale, codes.shape[-1], dtype)


def _decode_rows(form: Format, codes: Tensor, scale: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    _check_matrix(codes)
    form.code_bytes(width)  # refuses a width that the block does not divide
    expected = (codes.shape[0], width // form.block)
    if tuple(scale.shape) != expected:
        raise ValueError(f"{form.name}: width {width} has row scales {expected}, got {tuple(scale.shape)}")
    return form.from_codes(codes.view(torch.uint8), scale.view(torch.uint8), dtype)


def _spread(scales: Tensor, rows: int, columns: int) -> Tensor:
    """Tile scales repeated over their tiles, cut to the matrix."""
    return scales.repeat_interleave(TILE, 0)[:rows].repeat_interleave(TILE, 1)[:, :columns]


def _check_matrix(weight: Tensor):
    if weight.dim() != 2:
        raise ValueError(f"expected a matrix, got shape {tuple(weight.shape)}")
