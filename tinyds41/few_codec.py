"""Cache formats of a few short rows, computed with NumPy: bit for bit what `formats.Format` gives, in fewer calls."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tinyds41.elements import (
    E2M1_MAGNITUDES,
    E4M3,
    ELEMENTS,
    EXPONENT_MASK,
    MANTISSA_BITS,
    e2m1_pair_table,
    e4m3_table,
    from_exponent_bytes,
)
from tinyds41.few_tokens import array

FEW_VALUES = 1 << 13  # of all rows together; above, PyTorch's loops win
# Between two neighbours of the E2M1 grid; a tie goes to the even code, so three borders belong to the upper one.
BORDERS = np.convolve(E2M1_MAGNITUDES, (0.5, 0.5), "valid").astype(np.float32)
BORDERS[1::2] = np.nextafter(BORDERS[1::2], np.float32(0))
CPU = torch.device("cpu")
PAIRS, E4M3_VALUES = e2m1_pair_table(CPU).numpy(), e4m3_table(CPU).numpy()
UE8M0_VALUES = from_exponent_bytes(torch.arange(256, dtype=torch.uint8)).numpy()


def to_codes(x: Tensor, element: str, block: int, scale: str, floor: float) -> tuple[np.ndarray, np.ndarray] | None:
    """Codes [..., code bytes] and scales [..., blocks]; None where a block is not finite, which is left to PyTorch."""
    blocks = array(x).astype(np.float32, copy=False).reshape(*x.shape[:-1], -1, block)
    amax = np.abs(blocks).max(-1)
    if not np.isfinite(amax).all():
        return None
    largest = np.float32(ELEMENTS[element][2])
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
