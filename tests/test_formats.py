"""Bit-level claims about the cache formats, against goldens and a slow encoder of its own."""

import hashlib
import json
import math
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from slow_codec import VALUES, encode_row, golden_row

from tinyds41.formats import ENGRAM, GLOBAL, INDEX, WINDOW, Format, Rows, flat_rows

GOLDEN = Path(__file__).parent / "golden" / "quantisers.safetensors"
FORMATS = [WINDOW, GLOBAL, INDEX, ENGRAM]
GOLDEN_NAMES = [(WINDOW, "fp8_nemo"), (ENGRAM, "fp8_nemo"), (INDEX, "mxfp4_nemo"), (GLOBAL, "nvfp4_nemo")]
BITS = {torch.float64: torch.int64, torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
each_format = pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)


def same_bits(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Equal dtype, shape and bits: unlike torch.equal this tells -0.0 from 0.0."""
    return got.dtype == want.dtype and torch.equal(got.view(BITS[got.dtype]), want.view(BITS[want.dtype]))


def spread_values(seed: int, rows: int = 7, width: int = 96, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Random rows whose blocks differ by many powers of two, with both zeros among them."""
    torch.manual_seed(seed)
    x = torch.randn(rows, width // 16, 16) * torch.exp2(torch.randint(-30, 20, (rows, width // 16, 1)).float())
    x[torch.rand_like(x) < 0.05] = 0.0
    x[torch.rand_like(x) < 0.05] = -0.0
    return x.flatten(-2).to(dtype)


# ---- values ----


@pytest.mark.parametrize("suffix", ["", "_bf16"])
@pytest.mark.parametrize(("form", "name"), GOLDEN_NAMES, ids=lambda value: getattr(value, "name", value))
def test_fake_quant_equals_the_reference_bit_for_bit(form, name, suffix):
    golden = load_file(GOLDEN)
    with safe_open(GOLDEN, "pt") as file:
        row_names = json.loads(file.metadata()["row_names"])
    x, want = golden[f"input{suffix}"], golden[f"{name}{suffix}"]
    got = form.fake_quant(x)
    wrong = [row for row in range(len(x)) if not same_bits(got[row], want[row])]
    assert not wrong, [row_names[row] for row in wrong]


@pytest.mark.parametrize("seed", range(3))
@each_format
def test_bytes_and_values_equal_the_slow_encoder(form, seed):
    x = spread_values(seed)
    packed, values = form.encode(x), form.fake_quant(x)
    for row in range(len(x)):
        want_bytes, want_values = encode_row(x[row].tolist(), form.element, form.block, form.scale)
        assert bytes(packed[row].tolist()) == want_bytes
        assert same_bits(values[row], torch.tensor(want_values, dtype=torch.float32))


@pytest.mark.parametrize("form", [INDEX, GLOBAL], ids=lambda form: form.name)
def test_e2m1_midpoints_go_to_the_even_code(form):
    midpoints = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    want = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    x = torch.zeros(32)
    x[:7], x[7] = torch.tensor(midpoints), 6.0  # 6 makes the scale 1
    x[16:23], x[23] = -torch.tensor(midpoints), -6.0
    got = form.fake_quant(x)
    assert got[:8].tolist() == [*want, 6.0] and got[16:24].tolist() == [*(-value for value in want), -6.0]
    assert math.copysign(1, got[16]) == -1  # -0.25 keeps its sign
    above = torch.nextafter(x, x * 2)
    above[7], above[23] = 6.0, -6.0
    assert form.fake_quant(above)[:7].tolist() == [0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def test_e4m3_ties_go_to_the_even_code_down_to_the_subnormals():
    step = 2.0**-9  # with 448 in the block the scale is 1 and this is the smallest E4M3 value
    x = torch.zeros(32)
    x[:7] = torch.tensor([448.0, 0.5 * step, 1.5 * step, 7.5 * step, 17.0, 19.0, -0.5 * step])
    got = WINDOW.fake_quant(x)
    assert got[:6].tolist() == [448.0, 0.0, 2 * step, 8 * step, 16.0, 20.0]
    assert math.copysign(1, got[6]) == -1


def test_both_divisions_are_true_fp32_divisions():
    """Products with a reciprocal differ for E4M3 scales alone: here in one amax of 2^23, and at three midpoints."""
    below_a_tie = 7.125 - 2.0**-21  # one fp32 step; 7.125 / 6 = 1.1875
    assert GLOBAL.encode(torch.full((16,), below_a_tie))[-1] == 0x39  # 1.125; a reciprocal gives the tie, 1.25
    x = torch.tensor([1.25, 2.5, 5.0, 6.0] * 4) * 1.875
    assert GLOBAL.fake_quant(x)[:4].tolist() == [1.0 * 1.875, 2.0 * 1.875, 4.0 * 1.875, 6.0 * 1.875]


@each_format
def test_zero_tiny_huge_and_outlier_blocks_stay_finite(form):
    x = torch.zeros(6, 64)
    x[1], x[2], x[3], x[4] = 1e-30, 1e30, 2.0**127, 2.0**-149
    x[5, 40] = 1e30
    got = form.fake_quant(x)
    assert got.isfinite().all()
    assert (got[0] == 0).all() and (got[5].nonzero() == 40).all()
    if form.scale == "ue8m0":  # a power of two reaches 1e30; an E4M3 scale saturates at 448 * 6
        assert (got[2] / 1e30 - 1).abs().max() < 0.34
    else:
        assert (got[2] == 2688.0).all()


def test_scales_of_zero_and_floor_blocks_are_golden():
    """Exponent bytes: 1e-4/448 -> 2^-22, 2^-126, and the smallest E4M3 number."""
    zeros = torch.zeros(64)
    assert WINDOW.encode(zeros)[-2:].tolist() == [127 - 22] * 2
    assert INDEX.encode(zeros)[-2:].tolist() == [1] * 2
    assert GLOBAL.encode(zeros)[-4:].tolist() == [1] * 4


@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf])
@each_format
def test_a_non_finite_channel_makes_its_block_nan_and_no_other(form, bad):
    x = spread_values(0, rows=2, width=64).clamp(-100, 100)
    x[1, 1] = bad
    for got in (form.fake_quant(x), form.decode(form.encode(x), 64)):
        assert got[1, : form.block].isnan().all()
        got[1, : form.block] = 0
        x_clean = x.clone()
        x_clean[1, : form.block] = 0
        assert same_bits(got, form.fake_quant(x_clean))


def test_a_number_that_rounds_up_past_fp32_is_infinite_in_both_faces():
    """The largest fp32 is nearest to 2^128, which the codes can say and fp32 cannot."""
    x = torch.full((32,), torch.finfo(torch.float32).max)
    for form in (WINDOW, INDEX):
        assert form.fake_quant(x).isposinf().all() and form.decode(form.encode(x), 32).isposinf().all()


def test_a_float64_beyond_fp32_counts_as_infinite():
    assert WINDOW.fake_quant(torch.full((32,), 1e300, dtype=torch.float64)).isnan().all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@each_format
def test_the_quantiser_sees_fp32_whatever_the_dtype(form, dtype):
    x = spread_values(1, dtype=torch.float64).clamp(-6e4, 6e4).to(dtype)
    x[0, :2] = torch.tensor([1 + 2.0**-40, 1.25 + 2.0**-40]).to(dtype)
    assert same_bits(form.fake_quant(x), form.fake_quant(x.float()).to(dtype))


def test_a_float64_value_just_above_a_tie_is_rounded_to_fp32_first():
    x = torch.zeros(32, dtype=torch.float64)
    x[0], x[1] = 6.0, 2.5 + 2.0**-40
    assert INDEX.fake_quant(x)[1] == 2.0


# ---- bytes ----


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(4))
@each_format
def test_decoded_bytes_equal_fake_quant_bit_for_bit(form, dtype, seed):
    x = spread_values(seed, dtype=dtype)
    packed = form.encode(x)
    assert packed.dtype == torch.uint8 and packed.shape == (7, form.row_bytes(96))
    assert same_bits(form.decode(packed, 96, dtype), form.fake_quant(x))
    golden = load_file(GOLDEN)["input"].to(dtype)
    assert same_bits(form.decode(form.encode(golden), 64, dtype), form.fake_quant(golden))


@each_format
def test_every_code_byte_decodes_to_what_its_bits_say(form):
    magnitudes = [float(value) for value in VALUES[form.element]]
    width = 256 if form.element == "e4m3" else 512
    one = 127 if form.scale == "ue8m0" else 0x38
    row = torch.tensor([*range(256), *[one] * (width // form.block)], dtype=torch.uint8)
    if form.element == "e4m3":
        want = [*magnitudes, math.nan, *[-value for value in magnitudes], math.nan]
    else:
        signed = [*magnitudes, *[-value for value in magnitudes]]
        want = [signed[nibble] for byte in range(256) for nibble in (byte & 15, byte >> 4)]
    got, want = form.decode(row, width), torch.tensor(want)
    assert torch.equal(got.isnan(), want.isnan())
    assert same_bits(got.nan_to_num(9e9), want.nan_to_num(9e9))


@pytest.mark.parametrize(("form", "width", "row_bytes", "head", "tail", "digest"), [
    (GLOBAL, 512, 288, "728cc76edc50946e", "416a7e224b727e2a", "c6fa49a4f28327c1"),
    (INDEX, 128, 68, "8088800008808888", "dd5b4460808a818b", "091e6826002bccdc"),
    (WINDOW, 512, 528, "384fc1804ec3cb4a", "7e837f8380858186", "848c765ab9445309"),
    (ENGRAM, 256, 264, "d7d8468050ca3d52", "79847b857c867d87", "96c596ac2455458c"),
], ids=lambda value: getattr(value, "name", None))
def test_whole_rows_have_golden_bytes(form, width, row_bytes, head, tail, digest):
    """Bytes made by the slow encoder once; two rows, so that the row stride includes the scales."""
    first = golden_row(width)
    packed = form.encode(torch.tensor([first, first[::-1]]))
    assert packed.is_contiguous() and packed.shape == (2, row_bytes) and form.row_bytes(width) == row_bytes
    raw = bytes(packed.flatten().tolist())
    assert raw[:8].hex() == head and raw[row_bytes - 8 : row_bytes].hex() == tail
    assert hashlib.sha256(raw).hexdigest()[:16] == digest
    assert raw[:row_bytes] == encode_row(first, form.element, form.block, form.scale)[0]


def test_low_nibble_is_the_even_channel_and_scales_follow_in_block_order():
    x = torch.zeros(64)
    x[0], x[1], x[32], x[63] = 6.0, -1.5, 12.0, -12.0
    packed = INDEX.encode(x).tolist()
    assert packed == [0xB7, *[0] * 15, 0x07, *[0] * 14, 0xF0, 127, 128]


# ---- shapes, gradients, errors ----


@each_format
def test_shape_dtype_and_input_survive(form):
    for shape in [(64,), (0, 64), (3, 2, 5, 64), (2, 0)]:
        x = torch.randn(shape)
        kept = x.clone()
        got = form.fake_quant(x)
        assert got.shape == x.shape and same_bits(x, kept)
        assert same_bits(form.decode(form.encode(x), shape[-1]), got)


@each_format
def test_strided_inputs_give_the_values_of_their_copies(form):
    x = spread_values(3, rows=64, width=64)
    for view in (x.t(), x[::2], x[:, :32], x.view(4, 16, 64).transpose(0, 1)):
        assert same_bits(form.fake_quant(view), form.fake_quant(view.contiguous()))
        assert same_bits(form.encode(view).float(), form.encode(view.contiguous()).float())
    wide = torch.cat([form.encode(x), form.encode(x)], -1)
    assert same_bits(form.decode(wide[:, form.row_bytes(64) :], 64), form.fake_quant(x))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@each_format
def test_the_gradient_passes_straight_through_an_exact_value(form, dtype):
    x = spread_values(2, dtype=dtype).requires_grad_()
    y = form.fake_quant(x)
    assert same_bits(y.detach(), form.fake_quant(x.detach()))
    weights = torch.randn_like(y)
    (grad,) = torch.autograd.grad(y, x, weights)
    assert same_bits(grad, weights)


def test_quantising_twice_changes_nothing_for_power_of_two_scales():
    for form in (WINDOW, INDEX):
        once = form.fake_quant(spread_values(5))
        assert same_bits(form.fake_quant(once), once)


@each_format
def test_a_width_the_block_does_not_divide_is_named(form):
    for call in (form.fake_quant, form.encode):
        with pytest.raises(ValueError, match=rf"block {form.block} .* width 40"):
            call(torch.zeros(2, 40))
    with pytest.raises(ValueError, match=rf"block {form.block} .* width 40"):
        form.row_bytes(40)


def test_wrong_bytes_and_wrong_dtypes_are_refused():
    with pytest.raises(ValueError, match="width 64 is 66 bytes of uint8, got 64"):
        WINDOW.decode(torch.zeros(2, 64, dtype=torch.uint8), 64)
    with pytest.raises(ValueError, match=r"got 66 of torch\.int8"):
        WINDOW.decode(torch.zeros(2, 66, dtype=torch.int8), 64)
    with pytest.raises(ValueError, match=r"float tensor, got torch\.int64"):
        WINDOW.fake_quant(torch.zeros(2, 64, dtype=torch.int64))
    with pytest.raises(ValueError, match="'e4m3' and scale 'e4m3'"):
        Format("odd", "e4m3", 16, "e4m3")
    with pytest.raises(ValueError, match="block=7"):
        Format("odd", "e2m1", 7, "ue8m0")


# ---- Rows ----


def make_rows(form: Format | None, batch: int = 2, entries: int = 9) -> Rows:
    x = spread_values(7, rows=batch * entries, width=64).view(batch, entries, 64)
    return Rows(x) if form is None else Rows(form.encode(x), form, 64)


@pytest.mark.parametrize("form", [None, *FORMATS], ids=lambda form: getattr(form, "name", "plain"))
def test_take_equals_a_loop_over_all_rows(form):
    rows = make_rows(form)
    everything = rows.all()
    index = torch.tensor([[[0, 8, 8, -1], [-1, -1, 3, 0]], [[-1, 0, 1, 2], [5, 4, 8, -1]]])
    for choice in (index, index.clamp(min=0), index[:, :, :1], index[:, :0], index.int()):
        got = rows.take(choice)
        assert got.shape == (*choice.shape, 64)
        for b, s, k in torch.cartesian_prod(*(torch.arange(size) for size in choice.shape)).tolist():
            entry = int(choice[b, s, k])
            want = torch.zeros(64) if entry < 0 else everything[b, entry]
            assert same_bits(got[b, s, k], want)


@pytest.mark.parametrize("form", [None, GLOBAL], ids=["plain", "packed"])
@pytest.mark.parametrize("batch", [1, 2])
def test_a_narrowed_store_reads_its_own_entries_without_a_copy(form, batch):
    rows = make_rows(form, batch)
    part = rows.narrow(2, 5)
    assert part.shape == (batch, 5, 64) and same_bits(part.all(), rows.all()[:, 2:7])
    index = torch.tensor([[[0, 4, -1]]] * batch)
    assert same_bits(part.take(index), rows.take(torch.where(index < 0, -1, index + 2)))
    assert flat_rows(part.data)[0].untyped_storage().data_ptr() == rows.data.untyped_storage().data_ptr()
    with pytest.raises(IndexError, match=r"-1\.\.5 are not in a store of 5"):
        part.take(torch.tensor([[[5, -1]]] * batch))


@pytest.mark.parametrize("entry", [9, 17, -2])
@pytest.mark.parametrize("form", [None, INDEX], ids=["plain", "packed"])
def test_an_entry_outside_the_store_is_an_index_error_even_inside_the_next_row(form, entry):
    with pytest.raises(IndexError, match=rf"{entry}.* not in a store of 9"):
        make_rows(form).take(torch.tensor([[[0, entry]], [[1, 2]]]))


@pytest.mark.parametrize("form", [None, GLOBAL], ids=["plain", "packed"])
def test_an_empty_store_answers_missing_entries_with_zeros(form):
    rows = make_rows(form).narrow(0, 0)
    assert rows.shape == (2, 0, 64) and rows.all().shape == (2, 0, 64)
    assert same_bits(rows.take(torch.full((2, 3, 4), -1)), torch.zeros(2, 3, 4, 64))


@pytest.mark.parametrize("missing", [True, False])
@pytest.mark.parametrize("narrowed", [True, False])
def test_plain_rows_send_gradients_to_the_rows_that_were_read(missing, narrowed):
    torch.manual_seed(0)
    data = torch.randn(2, 9, 4, dtype=torch.float64, requires_grad=True)
    entries = 6 if narrowed else 9
    index = torch.randint(-1 if missing else 0, entries, (2, 5, 7))
    rows = Rows(data).narrow(1, entries) if narrowed else Rows(data)
    got = rows.take(index)
    weights = torch.randn_like(got)
    (grad,) = torch.autograd.grad(got, data, weights)
    want = torch.zeros_like(data)
    for b, s, k in torch.cartesian_prod(*(torch.arange(size) for size in index.shape)).tolist():
        if index[b, s, k] >= 0:
            want[b, index[b, s, k] + (1 if narrowed else 0)] += weights[b, s, k]
    torch.testing.assert_close(grad, want, rtol=0, atol=1e-14)  # sums of at most 70 numbers near 1, in any order
    assert (got[index < 0] == 0).all()


def test_a_missing_entry_is_zero_even_where_the_store_holds_nan():
    data = torch.full((2, 3, 32), math.nan)
    assert (Rows(data).take(torch.full((2, 1, 2), -1)) == 0).all()
    data.requires_grad_()
    rows = Rows(data).take(torch.full((2, 1, 2), -1))
    (grad,) = torch.autograd.grad(rows, data, torch.full_like(rows, math.nan))
    assert (rows == 0).all() and (grad == 0).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_rows_decode_to_the_dtype_they_were_given(dtype):
    x = spread_values(1, rows=6, width=64, dtype=dtype).view(1, 6, 64)
    rows = Rows(GLOBAL.encode(x), GLOBAL, 64, dtype)
    assert rows.dtype == rows.narrow(0, 2).dtype == dtype and Rows(x).dtype == dtype
    assert same_bits(rows.all(), GLOBAL.fake_quant(x))
    assert same_bits(rows.take(torch.tensor([[[5, 1]]])), GLOBAL.fake_quant(x[:, None, [5, 1]]))
    assert rows.take(torch.zeros(1, 0, 3, dtype=torch.int64)).dtype == dtype


def test_data_that_does_not_fit_its_format_is_refused():
    packed = GLOBAL.encode(torch.zeros(1, 3, 64))
    for arguments, message in [
        ((packed, GLOBAL), "packed global rows need their width"),
        ((packed, GLOBAL, 128), "expected rows of 72 x torch.uint8, got 36"),
        ((packed, INDEX, 64), "expected rows of 34"),
        ((packed.float(), GLOBAL, 64), "got 36 x torch.float32"),
        ((packed,), "got 36 x torch.uint8"),
        ((torch.zeros(1, 3, 64), None, 32), "expected rows of 32"),
        ((packed[0], GLOBAL, 64), r"expected data \[B, T, C\]"),
    ]:
        with pytest.raises(ValueError, match=message):
            Rows(*arguments)
    with pytest.raises(ValueError, match=r"expected index \[1, S, K\], got \(2, 1, 1\)"):
        Rows(packed, GLOBAL, 64).take(torch.zeros(2, 1, 1, dtype=torch.int64))


def test_a_single_number_is_no_row():
    with pytest.raises(ValueError, match=r"window: expected rows \[\.\.\., width\]"):
        WINDOW.fake_quant(torch.tensor(1.0))
