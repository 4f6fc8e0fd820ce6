"""An independent, slow encoder of one row: plain Python integers and fractions, no tensors, no casts."""

from __future__ import annotations

import struct
from bisect import bisect_left
from fractions import Fraction


def fp32(value: float) -> float:
    return struct.unpack("<f", struct.pack("<f", value))[0]


def small_float(code: int, exponent_bits: int, mantissa_bits: int, bias: int) -> Fraction:
    """The value of an unsigned code, read off its fields."""
    exponent, mantissa = code >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
    fraction = Fraction(mantissa, 1 << mantissa_bits)
    return fraction * Fraction(2) ** (1 - bias) if exponent == 0 else (1 + fraction) * Fraction(2) ** (exponent - bias)


E4M3_VALUES = [small_float(code, 4, 3, 7) for code in range(127)]  # code 127 is NaN
E2M1_VALUES = [small_float(code, 2, 1, 1) for code in range(8)]
VALUES = {"e4m3": E4M3_VALUES, "e2m1": E2M1_VALUES}
SIGN_BIT = {"e4m3": 0x80, "e2m1": 0x08}
FLOORS = {("e4m3", "ue8m0"): 1e-4, ("e2m1", "ue8m0"): 6 * 2.0**-126, ("e2m1", "e4m3"): 6 * 2.0**-9}


def nearest_code(value: float, values: list[Fraction]) -> int:
    """The code whose value is nearest to |value|; a tie goes to the even code; too large saturates."""
    wanted = abs(Fraction(value))
    above = min(bisect_left(values, wanted), len(values) - 1)
    return min({max(above - 1, 0), above}, key=lambda code: (abs(values[code] - wanted), code % 2))


def block_scale(block: list[float], element: str, scale: str) -> tuple[int, Fraction]:
    """Byte and value of the scale of one block. The fp64 quotient of fp32 numbers rounds to the fp32 one."""
    amax = max(max(abs(x) for x in block), fp32(FLOORS[element, scale]))
    ratio = Fraction(fp32(amax / float(VALUES[element][-1])))
    if scale == "e4m3":
        code = nearest_code(float(ratio), E4M3_VALUES)
        return code, E4M3_VALUES[code]
    exponent = -127
    while Fraction(2) ** exponent < ratio:
        exponent += 1
    return exponent + 127, Fraction(2) ** exponent


def encode_row(row: list[float], element: str, block: int, scale: str) -> tuple[bytes, list[float]]:
    """The packed bytes of one row of fp32 numbers, and the values they stand for."""
    codes, scales, values = [], [], []
    for start in range(0, len(row), block):
        byte, size = block_scale(row[start : start + block], element, scale)
        scales.append(byte)
        for x in row[start : start + block]:
            code = nearest_code(fp32(x / float(size)), VALUES[element])
            negative = struct.pack(">f", x)[0] >> 7
            codes.append(code | (SIGN_BIT[element] if negative else 0))
            magnitude = float(VALUES[element][code] * size)
            values.append(-magnitude if negative else magnitude)
    if element == "e2m1":
        codes = [even | odd << 4 for even, odd in zip(codes[::2], codes[1::2], strict=True)]
    return bytes(codes + scales), values


def golden_row(width: int) -> list[float]:
    """A fixed row with block sizes from 2^-9 to 2^9, ties, both zeros and both signs. Exact in fp32."""
    row, state = [], width
    for channel in range(width):
        state = (1103515245 * state + 12345) % 2**31
        whole = (state >> 16) % 257 - 128
        row.append(whole * 2.0 ** ((channel // 16 * 5) % 19 - 9))
    row[3], row[-2] = -0.0, 0.0
    return row
