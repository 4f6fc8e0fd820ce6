"""The small floats E4M3, E2M1 and UE8M0: rounding to their grids, and their bits, in few tensor passes."""

from __future__ import annotations

import functools
import struct

import torch
from torch import Tensor

EXPONENT_MASK = 0x7F80_0000  # the exponent field of an fp32; on its own also the bits of infinity
MANTISSA_BITS = 23
# (mantissa bits, exponent of the smallest normal, largest value)
E4M3 = (3, -6, 448.0)
E2M1 = (1, 0, 6.0)
ELEMENTS = {"e4m3": E4M3, "e2m1": E2M1}
E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by code; the fourth bit is the sign


def block_scales(blocks: Tensor, largest: float, floor: float, scale: str) -> Tensor:
    """One fp32 scale per block (last axis, kept as 1), rounded to what its byte can hold.

    A block with a NaN or an infinity gets a non-finite scale, and with it only NaN values.
    """
    # Bits of non-negative floats order as the floats do, with NaN above infinity; integer amax is also faster.
    amax_bits = (blocks.view(torch.int32) & 0x7FFF_FFFF).amax(-1, keepdim=True)
    floor_bits = struct.unpack("<i", struct.pack("<f", floor))[0]
    amax = amax_bits.clamp_(floor_bits, EXPONENT_MASK).view(torch.float32)
    # Dividing by a tensor: on a GPU a Python number would turn this into a product with an inexact reciprocal.
    ratio = amax / amax.new_full((), largest)
    if scale == "e4m3":
        return round_to_grid_(ratio, *E4M3[:2]).clamp_(max=E4M3[2])
    # 2^ceil(log2(ratio)) from the bits: any mantissa bit carries into the exponent. A logarithm would miss by one.
    return (ratio.view(torch.int32) + 0x7F_FFFF).bitwise_and_(EXPONENT_MASK).view(torch.float32)


def round_to_grid_(x: Tensor, mantissa_bits: int, min_exponent: int) -> Tensor:
    """Round fp32 in place to the nearest value of a small float, ties to even.

    Zero keeps its sign.

    step = 2^(max(floor(log2 |x|), min_exponent) - mantissa_bits);  x = round(x / step) * step
    Every step is a power of two, so only the rounding itself loses bits.
    """
    power = (x.view(torch.int32) & EXPONENT_MASK).view(torch.float32)  # 2^floor(log2 |x|)
    step = power.clamp_(min=2.0**min_exponent).mul_(2.0**-mantissa_bits)
    return x.div_(step).round_().mul_(step)


def to_e4m3_bytes(values: Tensor) -> Tensor:
    """E4M3 codes of fp32 values that are already on the grid.

    The cast rounds and clamps nothing.
    """
    return values.to(torch.float8_e4m3fn).view(torch.uint8)


def to_exponent_bytes(scales: Tensor) -> Tensor:
    """UE8M0 bytes of powers of two: the exponent field alone.

    Infinity becomes 255, the NaN of UE8M0.
    """
    return (scales.view(torch.int32) >> MANTISSA_BITS).to(torch.uint8)


def pack_nibbles(values: Tensor) -> Tensor:
    """Two E2M1 codes a byte from fp32 grid values, even channel low.

    Shapes: [..., W] -> uint8 [..., W/2].
    """
    # Divided by 2^6, the E2M1 grid is a part of E4M3's: E4M3 bits s0eemm00 hold the E2M1 code s eem.
    bytes_ = to_e4m3_bytes(values * 2.0**-6)
    codes = ((bytes_ >> 2) & 0b0111) | ((bytes_ >> 4) & 0b1000)
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def from_e4m3_bytes(codes: Tensor) -> Tensor:
    """fp32 values of E4M3 codes, by table: a CPU cast takes five times as long."""
    return e4m3_table(codes.device).index_select(0, codes.reshape(-1).int()).view(codes.shape)


def from_exponent_bytes(codes: Tensor) -> Tensor:
    """fp32 powers of two of UE8M0 bytes; 0 is 2^-127 and 255 is NaN, as its cast defines."""
    return codes.contiguous().view(torch.float8_e8m0fnu).float()


def unpack_nibbles(codes: Tensor) -> Tensor:
    """fp32 values of packed E2M1 codes. Shapes: uint8 [..., W/2] -> [..., W]."""
    pairs = e2m1_pair_table(codes.device).index_select(0, codes.reshape(-1).int())
    return pairs.view(torch.float32).view(*codes.shape[:-1], 2 * codes.shape[-1])


@functools.cache
def e4m3_table(device: torch.device) -> Tensor:
    """The fp32 value of each byte."""
    return torch.arange(256, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn).float()


@functools.cache
def e2m1_pair_table(device: torch.device) -> Tensor:
    """Both values of each byte, as one 8-byte number: one look-up instead of two."""
    magnitudes = torch.tensor(E2M1_MAGNITUDES)
    values = torch.cat([magnitudes, -magnitudes])
    codes = torch.arange(256)
    pairs = torch.stack([values[codes & 15], values[codes >> 4]], dim=-1)
    return pairs.view(torch.float64).squeeze(-1).to(device)
