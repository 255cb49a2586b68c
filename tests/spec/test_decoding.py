"""Every code decoded: e4m3, e2m1, int8, NF4 and the e8m0 scales."""

import numpy as np
import pytest

from tests.support.exact import e4m3_value, same_values


def test_all_256_e4m3_codes(codec):
    rows = np.full((1, 528), 127, np.uint8)
    rows[0, :512] = np.tile(np.arange(256), 2)
    decoded = codec.decode("v41_528", rows)
    assert str(decoded.dtype) == "bfloat16"
    same_values(decoded[0, :256], [e4m3_value(bits) for bits in range(256)])


@pytest.mark.parametrize(
    ("code", "value"),
    [
        (0x00, 0),
        (0x01, 2.0**-9),
        (0x07, 7 * 2.0**-9),
        (0x08, 2.0**-6),
        (0x38, 1),
        (0x58, 16),
        (0x7E, 448),
        (0xFE, -448),
    ],
)
def test_e4m3_codes_written_out(codec, code, value):
    rows = np.full((1, 528), 127, np.uint8)
    rows[0, :512] = code
    assert (codec.decode("v41_528", rows).astype(float) == value).all()


def test_all_256_e8m0_scales(codec):
    rows = np.full((16, 528), 0x38, np.uint8)  # code 0x38 is 1.0
    rows[:, 512:] = np.arange(256).reshape(16, 16)
    decoded = codec.decode("v41_528", rows)[:, ::32]
    expected = 2.0 ** (np.arange(256) - 127.0)
    expected[255] = np.nan
    same_values(decoded, expected)


def test_all_16_e2m1_codes(codec):
    rows = np.full((1, 9), 127, np.uint8)
    rows[0, :8] = [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]  # even channel in the low nibble
    expected = [0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
    same_values(codec.decode("mxfp4", rows, 16), expected)


def test_all_256_int8_codes(codec):
    rows = np.zeros((1, 260), np.uint8)
    rows[0, :256] = np.arange(256)
    rows[0, 256:] = np.array([0.5], "<f4").view(np.uint8)
    same_values(codec.decode("int8_row", rows, 256), np.arange(256, dtype=np.uint8).view(np.int8) * 0.5)


def test_all_16_nf4_codes(codec):
    rows = np.zeros((1, 12), np.uint8)
    rows[0, :8] = [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]
    rows[0, 8:] = np.array([2], "<f4").view(np.uint8)
    levels = [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
        -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
        0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
        0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ]  # fmt: skip
    same_values(codec.decode("nf4_b64", rows, 16), 2 * np.array(levels))
