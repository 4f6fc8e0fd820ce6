"""Released weight codecs: goldens, the slow encoder, edge tiles, errors."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from slow_codec import encode_row

from tinyds41.weight_formats import (
    decode_fp4_weight,
    decode_fp8_rows,
    decode_tiles,
    encode_fp4_weight,
    encode_fp8_rows,
    encode_tiles,
)

GOLDEN = Path(__file__).parent / "golden" / "units.safetensors"
E8M0 = torch.float8_e8m0fnu


def bytes_of(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(torch.uint8).flatten().tolist())


def spread_matrix(seed: int, rows: int, columns: int) -> torch.Tensor:
    torch.manual_seed(seed)
    return torch.randn(rows, columns) * torch.exp2(torch.randint(-12, 12, (rows, columns)).float())


@pytest.mark.parametrize(("name", "decode"), [
    ("fp8", decode_tiles), ("fp4", decode_fp4_weight), ("rowwise", decode_fp8_rows)])
def test_released_weights_decode_to_the_reference(name, decode):
    golden = {part: load_file(GOLDEN)[f"dequant.{name}.{part}"] for part in ("weight", "scale_u8", "out")}
    scale = golden["scale_u8"].view(E8M0)
    got = decode(golden["weight"], scale)
    # By value: the reference reads the FP4 code of -0 as +0; here it stays -0, so that load and save keep its byte.
    assert torch.equal(got, golden["out"])
    if name != "fp4":
        assert torch.equal(got.view(torch.int32), golden["out"].view(torch.int32))
    assert torch.equal(decode(golden["weight"], scale, torch.bfloat16), golden["out"].bfloat16())


@pytest.mark.parametrize("shape", [(32, 32), (64, 96), (40, 70), (1, 1), (33, 31), (65, 32)])
def test_tiles_equal_the_slow_encoder_at_sizes_no_tile_divides(shape):
    weight = spread_matrix(shape[0], *shape)
    codes, scale = encode_tiles(weight)
    assert codes.dtype == torch.float8_e4m3fn and codes.shape == shape
    assert scale.dtype == E8M0 and scale.shape == (-(-shape[0] // 32), -(-shape[1] // 32))
    decoded = decode_tiles(codes, scale)
    for r in range(0, shape[0], 32):
        for c in range(0, shape[1], 32):
            tile = weight[r : r + 32, c : c + 32]
            raw, values = encode_row(tile.flatten().tolist(), "e4m3", tile.numel(), "ue8m0")
            assert bytes_of(codes[r : r + 32, c : c + 32]) + bytes_of(scale[r // 32, c // 32].reshape(1)) == raw
            assert decoded[r : r + 32, c : c + 32].flatten().tolist() == values


@pytest.mark.parametrize(("encode", "decode", "element", "dtype"), [
    (encode_fp4_weight, decode_fp4_weight, "e2m1", torch.int8),
    (encode_fp8_rows, decode_fp8_rows, "e4m3", torch.float8_e4m3fn)])
def test_row_weights_equal_the_slow_encoder(encode, decode, element, dtype):
    weight = spread_matrix(1, 5, 96)
    codes, scale = encode(weight)
    assert codes.dtype == dtype and scale.dtype == E8M0 and scale.shape == (5, 3)
    decoded = decode(codes, scale)
    for row in range(5):
        raw, values = encode_row(weight[row].tolist(), element, 32, "ue8m0")
        assert bytes_of(codes[row]) + bytes_of(scale[row]) == raw
        assert decoded[row].tolist() == values


@pytest.mark.parametrize(("encode", "decode"), [
    (encode_tiles, decode_tiles), (encode_fp4_weight, decode_fp4_weight), (encode_fp8_rows, decode_fp8_rows)])
def test_decoded_weights_encode_to_themselves(encode, decode):
    """Saving what was loaded changes no byte's meaning, also from a bfloat16 model and a trained parameter."""
    once = decode(*encode(spread_matrix(2, 40, 64)))
    assert torch.equal(decode(*encode(once)), once)
    assert torch.equal(decode(*encode(once.bfloat16())), once)
    assert torch.equal(decode(*encode(torch.nn.Parameter(once))), once)


def test_every_released_fp4_byte_survives_load_and_save():
    """All 256 bytes, the code of -0 among them; each row holds a 6, so that its scale is the same again."""
    codes = torch.arange(256, dtype=torch.uint8).view(16, 16)  # row r: high nibble r, low nibbles all sixteen codes
    scale = torch.arange(120, 136, dtype=torch.uint8).view(16, 1)
    again, scale_again = encode_fp4_weight(decode_fp4_weight(codes.view(torch.int8), scale.view(E8M0)))
    assert torch.equal(again.view(torch.uint8), codes) and torch.equal(scale_again.view(torch.uint8), scale)


def test_a_non_finite_weight_makes_its_tile_nan_and_no_other():
    weight = spread_matrix(3, 40, 70)
    weight[33, 65] = torch.inf
    codes, scale = encode_tiles(weight)
    assert scale.view(torch.uint8)[1, 2] == 255
    isnan = decode_tiles(codes, scale).isnan()
    assert isnan[32:, 64:].all() and int(isnan.sum()) == 8 * 6


def test_sizes_that_do_not_fit_are_named():
    for encode in (encode_fp4_weight, encode_fp8_rows):
        with pytest.raises(ValueError, match="block 32 does not divide a row of width 40"):
            encode(torch.zeros(2, 40))
    codes, scale = encode_tiles(torch.zeros(40, 70))
    with pytest.raises(ValueError, match=r"\(40, 70\) has tile scales \(2, 3\), got \(2, 2\)"):
        decode_tiles(codes, scale[:, :2])
    codes, scale = encode_fp4_weight(torch.zeros(4, 64))
    with pytest.raises(ValueError, match=r"width 64 has row scales \(4, 2\), got \(4, 1\)"):
        decode_fp4_weight(codes, scale[:, :1])
    for encode in (encode_tiles, encode_fp4_weight, encode_fp8_rows):
        with pytest.raises(ValueError, match=r"expected a matrix, got shape \(2, 32, 32\)"):
            encode(torch.zeros(2, 32, 32))
