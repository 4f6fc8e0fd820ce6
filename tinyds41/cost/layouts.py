"""What one row of an earlier generation's cache is made of, bit by bit."""

from __future__ import annotations

from dataclasses import dataclass

BILLION = 10**9


@dataclass(frozen=True)
class Part:
    """`count` values of `bits` bits each inside a row."""

    what: str
    count: int
    bits: int


@dataclass(frozen=True)
class Layout:
    """One row: its parts, one behind the other.

    Raises: ValueError for parts that are not whole bytes together.
    """

    parts: tuple[Part, ...]

    def __post_init__(self) -> None:
        if self._bits % 8:
            raise ValueError(f"a row of {self._bits} bits is no whole number of bytes: {self}")

    @property
    def _bits(self) -> int:
        return sum(part.count * part.bits for part in self.parts)

    @property
    def row_bytes(self) -> int:
        return self._bits // 8

    def __str__(self) -> str:
        return " + ".join(f"{part.count} x {part.bits} bit {part.what}" for part in self.parts)


# Grouped-query attention: a key and a value of 128 channels for each of 8 heads.
GROUPED_KV = Layout((Part("keys", 8 * 128, 16), Part("values", 8 * 128, 16)))
# Latent attention: keys and values come from one latent; rotary channels of the key stand beside it.
BF16_LATENT = Layout((Part("latent", 512, 16), Part("rotary", 64, 16)))
FP8_LATENT = Layout((Part("latent", 512, 8), Part("scales", 4, 32), Part("rotary", 64, 16)))
# One shared vector is key and value; its rotary channels stay in BF16.
FP8_SHARED_KV = Layout((Part("codes", 448, 8), Part("rotary", 64, 16), Part("scales", 8, 8)))
FP8_INDEX_KEY = Layout((Part("codes", 128, 8), Part("scale", 1, 32)))
FP4_INDEX_KEY = Layout((Part("codes", 128, 4), Part("scales", 4, 8)))
