"""Cache formats of a few short rows, computed with NumPy: bit for bit what `formats.Format` gives, in fewer calls."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tinyds41.elements import E4M3, EXPONENT_MASK, MANTISSA_BITS
from tinyds41.few_tokens import array

FEW_VALUES = 1 << 13  # of all rows together; above, PyTorch's loops win
# Between two neighbours of the E2M1 grid; a tie goes to the even code, so three borders belong to the upper one.
BORDERS = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], dtype=np.float32)
BORDERS[1::2] = np.nextafter(BORDERS[1::2], np.float32(0))
MAGNITUDES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=np.float32)
GRID = np.concatenate([MAGNITUDES, -MAGNITUDES])
# Both values of each byte as one 8-byte number: one look-up instead of two.
PAIRS = np.stack([GRID[np.arange(256) & 15], GRID[np.arange(256) >> 4]], -1).view(np.float64)[:, 0]
BYTES = torch.arange(256, dtype=torch.uint8)
E4M3_VALUES = BYTES.view(torch.float8_e4m3fn).float().numpy()
UE8M0_VALUES = BYTES.view(torch.float8_e8m0fnu).float().numpy()


def to_codes(x: Tensor, element: str, block: int, scale: str, floor: float) -> tuple[np.ndarray, np.ndarray] | None:
    """Codes [..., code bytes] and scales [..., blocks]; None where a block is not finite, which is left to PyTorch."""
    blocks = array(x).astype(np.float32, copy=False).reshape(*x.shape[:-1], -1, block)
    amax = np.abs(blocks).max(-1)
    if not np.isfinite(amax).all():
        return None
    largest = np.float32(E4M3[2] if element == "e4m3" else 6.0)
    ratio = np.maximum(amax, np.float32(floor)) / largest
    if scale == "e4m3":
        scale_codes = _e4m3(np.minimum(ratio, np.float32(E4M3[2])))
        scales = E4M3_VALUES[scale_codes]
    else:
        # 2^ceil(log2(ratio)) from the bits: any mantissa bit carries into the exponent.
        bits = (ratio.view(np.int32) + 0x7F_FFFF) & EXPONENT_MASK
        scale_codes, scales = (bits >> MANTISSA_BITS).astype(np.uint8), bits.view(np.float32)
    values = np.clip(blocks / scales[..., None], -largest, largest).reshape(*x.shape[:-1], -1)
    if element == "e4m3":
        return _e4m3(values), scale_codes
    codes = np.searchsorted(BORDERS, np.abs(values)).astype(np.uint8) | (np.signbit(values).view(np.uint8) << 3)
    return codes[..., 0::2] | (codes[..., 1::2] << 4), scale_codes


def rounded(x: Tensor, element: str, block: int, scale: str, floor: float) -> Tensor | None:
    """The values `to_codes` would store, in fp32."""
    found = to_codes(x, element, block, scale, floor)
    return None if found is None else torch.from_numpy(from_codes(*found, element, scale))


def _e4m3(values: np.ndarray) -> np.ndarray:
    """To nearest, ties to even, by the cast; the values are inside the format's range."""
    return torch.from_numpy(values).to(torch.float8_e4m3fn).view(torch.uint8).numpy()


def from_codes(codes: np.ndarray, scales: np.ndarray, element: str, scale: str) -> np.ndarray:
    """fp32 values. Shapes: [..., code bytes], [..., blocks] -> [..., width]."""
    values = PAIRS.take(codes).view(np.float32) if element == "e2m1" else E4M3_VALUES.take(codes)
    blocks = values.reshape(*scales.shape, -1)
    with np.errstate(invalid="ignore", over="ignore"):  # a block that is not a number stays one, without a warning
        blocks *= (E4M3_VALUES if scale == "e4m3" else UE8M0_VALUES).take(scales)[..., None]
    return values
