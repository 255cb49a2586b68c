"""Every bf16 input encoded by every element code, against exact arithmetic."""

from functools import cache

import numpy as np
import pytest

from tests.support.exact import (
    E4M3_LEVELS,
    bf16_bits,
    e2m1_codes,
    e4m3_codes,
    every_bf16,
    power_of_two,
    product,
    quotient,
    same_values,
)

INPUTS = every_bf16()
FINITE = INPUTS[np.isfinite(INPUTS)]
LIMITS = {"v41_528": 240 * 2.0**120, "mxfp4": 3 * 2.0**126}
"""Where a group of one value is clamped: the largest number of its code's significant bits that fp32 has."""


@cache
def encoded_alone(name):
    """Expected (codes, scale bytes) of every finite bf16 value that is the only one of its group."""
    limit = np.float32(LIMITS.get(name, np.inf))
    values = np.clip(FINITE, -limit, limit)
    magnitude = np.abs(values)
    if name == "v41_528":
        exponent = power_of_two(product(np.maximum(magnitude, np.float32(1e-4)), 1 / 448))
        return e4m3_codes(values / 2.0**exponent), (exponent + 127).astype(np.uint8)
    if name == "mxfp4":
        floor = np.float32(6 * 2.0**-126)
        exponent = power_of_two(product(np.maximum(magnitude, floor), 1 / 6))
        return e2m1_codes(values / 2.0**exponent), (exponent + 127).astype(np.uint8)
    if name == "v41_fp4_288":
        scale = np.clip(product(np.maximum(magnitude, np.float32(6 * 2.0**-9)), 1 / 6), 2.0**-9, 448)
        stored = e4m3_codes(scale)
        return e2m1_codes(quotient(values, E4M3_LEVELS[stored])), stored
    scale = product(np.maximum(magnitude, np.float32(1e-4)), 1 / 127 if name == "int8_row" else 1 / 448)
    ratio = quotient(values, scale)
    if name == "int8_row":
        return np.clip(np.rint(ratio), -127, 127).astype(np.int8).view(np.uint8), scale
    return e4m3_codes(ratio), scale


@pytest.mark.parametrize(
    ("name", "width", "scale_bytes"),
    [("v41_528", 32, 1), ("mxfp4", 32, 1), ("v41_fp4_288", 16, 1), ("int8_row", 1, 4), ("fp8_row", 1, 4)],
)
def test_every_bf16_value_alone_in_its_group(codec, name, width, scale_bytes):
    """The value sets the scale; place in the group and neighbours' scales do not matter."""
    codes, scales = encoded_alone(name)
    groups = {"v41_528": 16, "mxfp4": 4, "v41_fp4_288": 32, "int8_row": 1, "fp8_row": 1}[name]
    count = len(FINITE)
    assert count == 65536 - 256
    padded = np.zeros(-(-count // groups) * groups, np.float32)
    padded[:count] = FINITE
    values = np.zeros((len(padded), width), np.float32)
    place = np.arange(len(padded)) * 7 % width
    values[np.arange(len(padded)), place] = padded
    stored = codec.encode(name, values.reshape(-1, groups * width))
    code_bytes = groups * width // (2 if "fp4" in name else 1)
    found = stored[:, :code_bytes]
    if "fp4" in name:
        found = np.stack([found & 15, found >> 4], axis=2)
    found = found.reshape(len(padded), width)[np.arange(len(padded)), place][:count]
    found_scales = stored[:, code_bytes : code_bytes + groups * scale_bytes]
    if scale_bytes == 4:
        found_scales = found_scales.copy().view("<f4")
    assert np.array_equal(found_scales.reshape(-1)[:count], scales)
    assert np.array_equal(found, codes)


@pytest.mark.parametrize(
    ("name", "anchor", "scale", "to_codes"),
    [
        pytest.param("v41_528", 448, 1, e4m3_codes, id="e4m3 at scale 1"),
        pytest.param("v41_528", 3.5, 2.0**-7, e4m3_codes, id="e4m3 at scale 2^-7"),
        pytest.param("mxfp4", 6, 1, e2m1_codes, id="e2m1 at scale 1"),
        pytest.param("mxfp4", 6.5, 2, e2m1_codes, id="e2m1 at scale 2"),
        pytest.param("v41_fp4_288", 5, 0.8125, e2m1_codes, id="e2m1 at e4m3 scale 0.8125"),
        pytest.param("fp8_row", 3, np.float32(3) * np.float32(1 / 448), e4m3_codes, id="e4m3 at fp32 scale 3/448"),
    ],
)
def test_every_bf16_value_under_an_anchor(codec, name, anchor, scale, to_codes):
    """The group's first channel fixes the scale; every bf16 value up to it is the second."""
    width = {"v41_528": 32, "mxfp4": 32, "v41_fp4_288": 16, "fp8_row": 32}[name]
    dim = 512 if name.startswith("v41") else 32
    inputs = FINITE[np.abs(FINITE) <= anchor]
    per_row = dim // width * (width - 1)
    padded = np.zeros(-(-len(inputs) // per_row) * per_row, np.float32)
    padded[: len(inputs)] = inputs
    values = np.full((len(padded) // (width - 1), width), anchor, np.float32)
    values[:, 1:] = padded.reshape(-1, width - 1)
    stored = codec.encode(name, values.reshape(-1, dim))
    found = stored[:, : dim // (2 if to_codes is e2m1_codes else 1)]
    if to_codes is e2m1_codes:
        found = np.stack([found & 15, found >> 4], axis=2)
    found = found.reshape(-1, width)
    assert np.array_equal(found[:, 0], to_codes(quotient(np.full(len(found), anchor, np.float32), scale)))
    assert np.array_equal(found[:, 1:].reshape(-1), to_codes(quotient(padded, scale)))


def test_every_bf16_value_as_nf4(codec):
    """At scale 1 the code is that of the nearest level, found here by comparing exact distances."""
    inputs = FINITE[np.abs(FINITE) <= 1].astype(np.float64)
    rows = np.arange(16, dtype=np.uint8).reshape(1, 16)
    rows = np.concatenate([rows[:, 0::2] | rows[:, 1::2] << 4, np.array([[1]], "<f4").view(np.uint8)], axis=1)
    levels = codec.decode("nf4_b64", rows, 16).astype(np.float64)[0]
    expected = np.abs(inputs[:, None] - levels[None]).argmin(axis=1)  # the first of two equal distances: the lower code
    values = np.stack([np.ones_like(inputs), inputs], axis=1).astype(np.float32)
    stored = codec.encode("nf4_b64", values)
    assert (stored[:, 0] & 15 == 15).all()
    assert np.array_equal(stored[:, 0] >> 4, expected)


@pytest.mark.parametrize(
    ("given", "code"),
    [
        (0.0, 7), (-0.0, 7), (1.0, 15), (-1.0, 0),
        pytest.param(0.07958029955625534 / 2, 7, id="tie of codes 7 and 8 goes to 7"),
        pytest.param(-0.09105003625154495 / 2, 6, id="tie of codes 6 and 7 goes to 6"),
        pytest.param(np.nextafter(np.float32(0.07958029955625534 / 2), np.float32(1)), 8, id="just above the tie"),
    ],
)  # fmt: skip
def test_nf4_ties_go_to_the_lower_code(codec, given, code):
    stored = codec.encode("nf4_b64", np.array([[1, given]], np.float32))
    assert stored[0, 0] == 0x0F | code << 4


@pytest.mark.parametrize("name", ["bf16", "fp16", "fp32"])
def test_every_bf16_value_in_a_plain_field(codec, name):
    """Infinities and both zeros keep their bits, finite values stay finite; every NaN is the positive quiet one."""
    to = {"bf16": np.uint16, "fp16": np.uint16, "fp32": np.uint32}[name]
    found = np.ascontiguousarray(codec.encode(name, INPUTS.reshape(256, 256))).view(to).reshape(-1)
    if name == "bf16":
        expected = np.arange(65536, dtype=np.uint16)
    elif name == "fp32":
        expected = INPUTS.view(np.uint32).copy()
    else:
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            clamped = np.where(np.isinf(INPUTS), INPUTS, np.clip(INPUTS, -65504, 65504))
            expected = clamped.astype(np.float16).view(np.uint16)
    expected[np.isnan(INPUTS)] = {"bf16": 0x7FC0, "fp16": 0x7E00, "fp32": 0x7FC00000}[name]
    assert np.array_equal(found, expected)


def test_every_fp16_value_survives(codec):
    bits = np.arange(65536, dtype=np.uint16)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        values = bits.view(np.float16).astype(np.float32).reshape(256, 256)
    stored = codec.encode("fp16", values)
    expected = np.where(np.isnan(values), 0x7E00, bits.reshape(256, 256))
    assert np.array_equal(np.ascontiguousarray(stored).view(np.uint16), expected)
    same_values(codec.decode("fp16", stored, 256), values)


@pytest.mark.parametrize("low", [0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
def test_fp32_to_bf16_rounds_to_nearest_even(codec, low):
    """Every upper half with lower halves at and beside the tie; the rope of ``v4_584`` rounds alike.

    What would be rounded to infinity is the largest finite number.
    """
    bits = (np.arange(65536, dtype=np.uint64) << 16 | low).astype(np.uint32)
    values = bits.view(np.float32)
    expected = (bits.astype(np.uint64) + 0x7FFF + (bits >> 16 & 1) >> 16).astype(np.uint16)
    expected -= (expected & 0x7FFF == 0x7F80) & np.isfinite(values)
    expected[np.isnan(values)] = 0x7FC0
    found = np.ascontiguousarray(codec.encode("bf16", values.reshape(256, 256))).view(np.uint16).reshape(-1)
    assert np.array_equal(found, expected)
    rows = np.zeros((1024, 512), np.float32)
    rows[:, 448:] = values.reshape(1024, 64)
    rope = np.ascontiguousarray(codec.encode("v4_584", rows)[:, 448:576]).view(np.uint16).reshape(-1)
    assert np.array_equal(rope, expected)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (2.0**-10, 0x00), (2.0**-10 * 1.0078125, 0x01), (2.0**-9, 0x01), (17, 0x58), (19, 0x5A), (1.0625, 0x38),
        (1.1875, 0x3A), (-0.0, 0x80), (0.0, 0x00), (-2.0**-10, 0x80), (448, 0x7E), (-448, 0xFE), (431, 0x7D),
        (432, 0x7E), (400, 0x7C),
    ],
)  # fmt: skip
def test_e4m3_rounding_written_out(codec, given, expected):
    row = np.zeros((1, 512), np.float32)
    row[0, :2] = 448, given
    assert codec.encode("v41_528", row)[0, 1] == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (0.25, 0), (0.75, 2), (1.25, 2), (1.75, 4), (2.5, 4), (3.5, 6), (5, 6), (5.01, 7), (6, 7), (-0.0, 8),
        (-0.25, 8), (-0.75, 10), (-6, 15), (0.2500001, 1),
    ],
)  # fmt: skip
def test_e2m1_ties_go_to_even(codec, given, expected):
    row = np.zeros((1, 32), np.float32)
    row[0, :2] = 6, given
    assert codec.encode("mxfp4", row)[0, 0] == 7 | expected << 4


@pytest.mark.parametrize(
    ("given", "expected"), [(0.5, 0), (1.5, 2), (2.5, 2), (-0.5, 0), (-1.5, -2), (126.5, 126), (-127, -127)]
)
def test_int8_rounds_to_nearest_even(codec, given, expected):
    stored = codec.encode("int8_row", np.array([[127, given]], np.float32))
    assert stored[0, 2:].copy().view("<f4").tolist() == [1.0]
    assert stored[0, :2].view(np.int8).tolist() == [127, expected]


def test_bf16_input_equals_the_same_values_as_fp32(codec):
    import ml_dtypes

    values = np.random.default_rng(5).standard_normal((3, 512)).astype(ml_dtypes.bfloat16)
    for name in ("v4_584", "v41_fp4_288", "row_580", "bf16"):
        assert np.array_equal(codec.encode(name, values), codec.encode(name, values.astype(np.float32)))


def test_the_integer_rounding_of_bf16_is_what_it_says():
    assert [bf16_bits(value) for value in (1.0, -2.0, 1.00390625, 1.01171875, 0.1)] == [
        0x3F80, 0xC000, 0x3F80, 0x3F82, 0x3DCD,
    ]  # fmt: skip
