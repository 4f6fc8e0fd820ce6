"""Low-precision rows: one codec per cache format, as fake quantisation and as packed bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tinyds41 import few_codec
from tinyds41.elements import (
    ELEMENTS,
    block_scales,
    from_e4m3_bytes,
    from_exponent_bytes,
    pack_nibbles,
    round_to_grid_,
    to_e4m3_bytes,
    to_exponent_bytes,
    unpack_nibbles,
)
from tinyds41.few_tokens import are_few, numpy_may_compute

# Smallest amax a block may claim, by (element, scale): it keeps the scale of a zero block representable.
AMAX_FLOORS = {("e4m3", "ue8m0"): 1e-4, ("e2m1", "ue8m0"): 6 * 2.0**-126, ("e2m1", "e4m3"): 6 * 2.0**-9}


@dataclass(frozen=True)
class Format:
    """How one row of channels becomes codes and block scales, and comes back.

    `decode(encode(x))` equals `fake_quant(x)` bit for bit, the sign of a zero included: a negative value that
    rounds to zero, and -0.0 itself, keep their sign. A block that holds a NaN or an infinity becomes NaN as a
    whole, in both faces: its scale has no meaning, and a saturated infinity would hide the fault.
    Finite values beyond the format saturate; one that rounds up past the largest of its dtype becomes infinite.

    Units: `block` in channels.
    Raises: ValueError naming row width and block when the block does not divide the row.
    Source: spec 3, row bytes spec 4.9.
    """

    name: str
    element: str  # "e4m3" or "e2m1"
    block: int  # channels that share one scale
    scale: str  # "ue8m0" (a power of two) or "e4m3"

    def __post_init__(self):
        if (self.element, self.scale) not in AMAX_FLOORS:
            raise ValueError(f"{self.name}: no format with element {self.element!r} and scale {self.scale!r}")
        if self.block < 2 or self.block % 2:  # two E2M1 codes share a byte
            raise ValueError(f"{self.name}: block={self.block} is not a positive even number")

    def code_bytes(self, width: int) -> int:
        """Bytes of one row's codes, without its scales."""
        if width % self.block:
            raise ValueError(f"{self.name}: block {self.block} does not divide a row of width {width}")
        return width if self.element == "e4m3" else width // 2

    def row_bytes(self, width: int) -> int:
        """Bytes of one packed row, codes and scales: the stride of every store."""
        return self.code_bytes(width) + width // self.block

    def fake_quant(self, x: Tensor) -> Tensor:
        """The values a row has after storage, differentiable: the gradient passes straight through.

        Shapes: x [..., width], any float dtype; same shape and dtype back. The quantiser sees fp32.
        """
        return _StraightThrough.apply(x, self) if x.requires_grad else self._rounded(x)

    def encode(self, x: Tensor) -> Tensor:
        """Packed bytes of each row.

        Codes first, low nibble = even channel, then scales in block order.

        Shapes: x [..., width], any float dtype -> uint8 [..., row_bytes(width)].
        """
        return torch.cat(self.to_codes(x), dim=-1)

    def decode(self, rows: Tensor, width: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Values of packed rows. Shapes: uint8 [..., row_bytes(width)] -> dtype [..., width]."""
        if rows.dtype != torch.uint8 or rows.shape[-1] != self.row_bytes(width):
            raise ValueError(
                f"{self.name}: a row of width {width} is {self.row_bytes(width)} bytes of uint8, "
                f"got {rows.shape[-1]} of {rows.dtype}")
        split = self.code_bytes(width)
        return self.from_codes(rows[..., :split], rows[..., split:], dtype)

    def to_codes(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Codes and scales as separate uint8 tensors, the form in which weights are released.

        Shapes: x [..., width] -> [..., code_bytes(width)], [..., width / block].
        """
        if self._is_few(x):
            few = few_codec.to_codes(x, self.element, self.block, self.scale, AMAX_FLOORS[self.element, self.scale])
            if few is not None:
                return torch.from_numpy(few[0]), torch.from_numpy(few[1])
        values, scales = self._quantise(x.detach())
        codes = pack_nibbles(values.flatten(-2)) if self.element == "e2m1" else to_e4m3_bytes(values.flatten(-2))
        scales = scales.squeeze(-1)
        return codes, to_e4m3_bytes(scales) if self.scale == "e4m3" else to_exponent_bytes(scales)

    def from_codes(self, codes: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """The inverse of `to_codes`.

        Shapes: [..., code bytes], [..., blocks] uint8 -> dtype [..., width].
        """
        if 0 < codes.numel() <= few_codec.FEW_VALUES and numpy_may_compute(codes):
            few = few_codec.from_codes(codes.numpy(), scales.numpy(), self.element, self.scale)
            return torch.from_numpy(few).to(dtype)
        values = unpack_nibbles(codes) if self.element == "e2m1" else from_e4m3_bytes(codes)
        scales = from_e4m3_bytes(scales) if self.scale == "e4m3" else from_exponent_bytes(scales)
        blocks = values.unflatten(-1, (scales.shape[-1], self.block))
        return blocks.mul_(scales.unsqueeze(-1)).flatten(-2).to(dtype)

    def _is_few(self, x: Tensor) -> bool:
        return 0 < x.numel() <= few_codec.FEW_VALUES and are_few(1, x) and x.ndim > 0 and x.shape[-1] % self.block == 0

    def _rounded(self, x: Tensor) -> Tensor:
        if self._is_few(x):
            few = few_codec.rounded(x, self.element, self.block, self.scale, AMAX_FLOORS[self.element, self.scale])
            if few is not None:
                return few.to(x.dtype)
        values, scales = self._quantise(x)
        return values.mul_(scales).flatten(-2).to(x.dtype)

    def _quantise(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Grid values [..., blocks, block] and their scales [..., blocks, 1], both still fp32."""
        if x.ndim == 0:
            raise ValueError(f"{self.name}: expected rows [..., width], got a single number")
        if not x.is_floating_point():
            raise ValueError(f"{self.name}: expected a float tensor, got {x.dtype}")
        self.code_bytes(x.shape[-1])  # refuses a width that the block does not divide
        blocks = x.float().unflatten(-1, (x.shape[-1] // self.block, self.block))
        mantissa_bits, min_exponent, largest = ELEMENTS[self.element]
        scales = block_scales(blocks, largest, AMAX_FLOORS[self.element, self.scale], self.scale)
        values = (blocks / scales).clamp_(-largest, largest)
        return round_to_grid_(values, mantissa_bits, min_exponent), scales


class _StraightThrough(torch.autograd.Function):
    """Rounding with the gradient of the identity; exact, unlike `x + (q - x).detach()`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, form: Format) -> Tensor:
        return form._rounded(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


WINDOW = Format("window", "e4m3", 32, "ue8m0")
GLOBAL = Format("global", "e2m1", 16, "e4m3")
INDEX = Format("index", "e2m1", 32, "ue8m0")
ENGRAM = Format("engram", "e4m3", 32, "ue8m0")


class Rows:
    """One store of rows, packed or plain, read by entry number.

    Only the rows asked for are decoded.

    Shapes: data uint8 [B, T, row_bytes] with a format and a width, or floats [B, T, C] without; `shape` is
    (B, T, C) in both cases. Plain rows are differentiable.
    Raises: ValueError for data that does not fit the format; IndexError for an entry outside the store.
    """

    def __init__(self, data: Tensor, format: Format | None = None, width: int | None = None,
                 dtype: torch.dtype | None = None):
        if data.dim() != 3:
            raise ValueError(f"expected data [B, T, C], got {tuple(data.shape)}")
        if format is None:
            width, dtype = data.shape[-1] if width is None else width, dtype or data.dtype
            expected, kind = width, dtype
        elif width is None:
            raise ValueError(f"packed {format.name} rows need their width")
        else:
            dtype = dtype or torch.float32
            expected, kind = format.row_bytes(width), torch.uint8
        if data.shape[-1] != expected or data.dtype != kind or not dtype.is_floating_point:
            raise ValueError(f"expected rows of {expected} x {kind}, got {data.shape[-1]} x {data.dtype}")
        self.data, self.format, self.width, self.dtype = data, format, width, dtype

    @property
    def shape(self) -> tuple[int, int, int]:
        return (self.data.shape[0], self.data.shape[1], self.width)

    def narrow(self, start: int, length: int) -> Rows:
        """Entries start..start+length-1 of every batch row, as a view."""
        return Rows(self.data.narrow(1, start, length), self.format, self.width, self.dtype)

    def all(self) -> Tensor:
        """Every row, decoded. Shapes: [B, T, C]."""
        return self._decode(self.data)

    def take(self, index: Tensor) -> Tensor:
        """The rows an index names; -1 names none and gives zeros. Shapes: [B, S, K] -> [B, S, K, C]."""
        if index.dim() != 3 or index.shape[0] != self.data.shape[0]:
            raise ValueError(f"expected index [{self.data.shape[0]}, S, K], got {tuple(index.shape)}")
        if index.numel() == 0:
            return self.data.new_zeros((*index.shape, self.width), dtype=self.dtype)
        lowest, highest = (int(bound) for bound in index.aminmax())
        # Checked here, because in the flat store the next batch row's entries follow: a silent leak.
        if lowest < -1 or highest >= self.shape[1]:
            raise IndexError(f"entries {lowest}..{highest} are not in a store of {self.shape[1]}")
        return self._decode(self._gather(index, has_missing=lowest < 0))

    def _gather(self, index: Tensor, has_missing: bool) -> Tensor:
        flat, stride = flat_rows(self.data)
        rows_BSK = index + torch.arange(index.shape[0], device=index.device)[:, None, None] * stride
        # An embedding throughout: its backward is one loop that adds rows.
        if not has_missing:
            return F.embedding(rows_BSK, flat)
        zero_row = flat.shape[0]
        if self.data.requires_grad or zero_row == 0:
            # A zero row costs a copy of the store, and saves masking the far larger result and its gradient.
            padded = torch.cat([flat, flat.new_zeros(1, flat.shape[1])])
            return F.embedding(rows_BSK.masked_fill(index < 0, zero_row), padded, padding_idx=zero_row)
        # Zero bytes decode to zeros in every format, so missing rows are blanked while they are still small.
        return F.embedding(rows_BSK.clamp_(min=0), flat).masked_fill_(index[..., None] < 0, 0)

    def _decode(self, rows: Tensor) -> Tensor:
        return rows if self.format is None else self.format.decode(rows, self.width, self.dtype)


def flat_rows(data: Tensor) -> tuple[Tensor, int]:
    """A view of data [B, T, C] as flat rows, and the flat distance between batch rows.

    Copies only at need.
    """
    batch, entries, width = data.shape
    step = data.stride(0)
    # A narrowed store keeps its capacity's stride: read around the gap instead of copying the whole store.
    if batch and entries and data.stride()[1:] == (width, 1) and step % width == 0 and step >= width * entries:
        stride = step // width
        return data.as_strided(((batch - 1) * stride + entries, width), (width, 1)), stride
    return data.reshape(batch * entries, width), entries
