"""Each check of lesson 06 accepts what is right and refuses the mistakes that readers make."""

from exercise_checks import three_tests

from tinyds41.course.lesson_06 import check_decode, check_row_bytes, check_worst

LEVELS = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def unpack(packed, *, low_first=True, bias=127, block=32, scales_reversed=False, signed=True):
    n_blocks = len(packed) // 17
    pairs = [(byte & 15, byte >> 4) for byte in packed[: 16 * n_blocks]]
    codes = [code for low, high in pairs for code in ((low, high) if low_first else (high, low))]
    scales = [2.0 ** (byte - bias) for byte in packed[16 * n_blocks :]]
    scales = scales[::-1] if scales_reversed else scales
    values = [-LEVELS[code & 7] if code & 8 and signed else LEVELS[code & 7] for code in codes]
    return [value * scales[channel // block] for channel, value in enumerate(values)]
RIGHT = [
    (check_row_bytes, 264), (check_decode, unpack), (check_worst, lambda scale: scale),
]  # fmt: skip
WRONG = [
    (check_row_bytes, 520, "two codes share a byte"),
    (check_row_bytes, 256, "the scales are stored, too"),
    (check_row_bytes, 288, "288 bytes is wrong"),
    (check_decode, lambda packed: unpack(packed)[:-1], "holds 32 numbers, you returned 31"),
    (check_decode, lambda packed: unpack(packed, low_first=False), "channel 0 of a row of 32"),
    (check_decode, lambda packed: unpack(packed, bias=128), "is wrong"),
    (check_decode, lambda packed: unpack(packed, scales_reversed=True), "of a row of 64"),
    (check_decode, lambda packed: unpack(packed, signed=False), "is wrong"),
    (check_decode, lambda packed: unpack(packed, block=16), "cannot be used: IndexError"),
    (check_worst, lambda scale: 0.25 * scale, "scale 0.125: 0.03125 is wrong"),
    (check_worst, lambda scale: 2 * scale, "is wrong"),
    (check_worst, lambda scale: 1.0, "scale 0.125: 1.0 is wrong"),
]  # fmt: skip

(test_a_right_answer_is_accepted, test_an_open_exercise_is_neither_right_nor_wrong,
 test_a_wrong_answer_is_refused_with_a_reason) = three_tests(RIGHT, WRONG)  # fmt: skip
