"""The scale of a group: the power-of-two rule over every mantissa, floors, edges of the range, global scales."""

import numpy as np
import pytest

from kvcore.spec import FORMATS, Field, Format
from tests.support.exact import e2m1_codes, e4m3_codes, product, quotient


def one_scale_a_channel(code, floor, channels):
    """A throw-away format in which every channel is a group of its own."""
    return Format(
        name="test_scale_of_each",
        fields=(
            Field(name="codes", dims=channels, code=code, group=1, scale="e8m0", rule="pow2"),
            Field(name="scales", dims=channels, code="e8m0"),
        ),
        planes=(("codes",), ("scales",)),
        amax_floor=floor,
    )


def rounded_up_exponent(exponent, reciprocal):
    """For all 2^23 mantissas: exponent of the smallest power of two >= fp32(amax * reciprocal), by integers.

    amax = (2^23 + i) * 2^(exponent - 23); ``reciprocal`` is an fp32 number given as (24-bit integer, exponent).
    """
    multiplier, power = reciprocal
    exact = (np.arange(2**23, dtype=np.int64) + 2**23) * multiplier  # 47 or 48 bits
    excess = np.where(exact >= 2**47, 24, 23)
    kept, lost = exact >> excess, exact & ((1 << excess) - 1)
    half = 1 << (excess - 1)
    kept += (lost > half) | ((lost == half) & (kept & 1 == 1))
    above = np.where(kept == 2**23, 23, 24)  # 2^24 after rounding up is a power of two as well
    return (exponent - 23) + power + excess + above


# fp32(1/448) and fp32(1/6) as integer times power of two: 1/448 = 9586980.57 * 2^-32, 1/6 = 11184810.67 * 2^-26.
RECIPROCAL = {"e4m3": (9586981, -32), "e2m1": (11184811, -26)}


@pytest.mark.parametrize("code", ["e4m3", "e2m1"])
def test_the_reciprocals_are_the_nearest_fp32(code):
    multiplier, power = RECIPROCAL[code]
    largest = {"e4m3": 448, "e2m1": 6}[code]
    assert 2**23 <= multiplier < 2**24
    assert abs(multiplier * largest - 2**-power) <= largest / 2


@pytest.mark.parametrize(
    ("code", "floor", "exponent", "floored"),
    [
        pytest.param("e4m3", 1e-4, 0, None, id="e4m3, amax 1 to 2"),
        pytest.param("e4m3", 1e-4, -14, -22, id="e4m3, across the floor"),
        pytest.param("e4m3", 1e-4, 127, None, id="e4m3, the largest amax"),
        pytest.param("e2m1", 6 * 2.0**-126, 3, None, id="e2m1, amax 8 to 16"),
        pytest.param("e2m1", 6 * 2.0**-126, -124, -126, id="e2m1, across the floor"),
    ],
)
def test_power_of_two_rule_over_all_mantissas(codec, code, floor, exponent, floored):
    format = one_scale_a_channel(code, floor, 4096)
    bits = np.arange(2**23, dtype=np.uint32) | np.uint32(exponent + 127 << 23)
    expected = rounded_up_exponent(exponent, RECIPROCAL[code])
    if floored is not None:
        expected = np.where(bits.view(np.float32) <= np.float32(floor), floored, expected)
    first_scale = 4096 // (2 if code == "e2m1" else 1)
    rows = 256
    for start in range(0, 2**23, rows * 4096):
        amax = bits[start : start + rows * 4096].view(np.float32).reshape(rows, 4096)
        stored = codec.encode(format, amax)[:, first_scale:].reshape(-1)
        assert np.array_equal(stored, expected[start : start + rows * 4096] + 127), f"mantissas from {start:#x}"


@pytest.mark.parametrize(
    ("amax", "exponent"),
    [
        (0, -22), (1e-5, -22), (1e-4, -22), (2.0**-10, -18), (0.4375, -10), (0.438, -9), (1, -8), (3.5, -7),
        (3.5001, -6), (7, -6), (448, 0), (449, 1), (464, 1), (-464, 1), (-448, 0),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["v4_584", "v41_528", "index_fp8_132"])
def test_e4m3_scales_written_out(codec, name, amax, exponent):
    row = np.zeros((1, FORMATS[name].dim), np.float32)
    row[0, 5] = amax
    first, _ = FORMATS[name].byte_range("scales")
    stored = codec.encode(name, row)[0, first:]
    if FORMATS[name].field("scales").code == "e8m0":
        assert stored[0] == exponent + 127
    else:
        assert stored[:4].copy().view("<f4")[0] == 2.0**exponent


@pytest.mark.parametrize(
    ("values", "scale", "codes"),
    [
        pytest.param([448, -448], 127, [0x7E, 0xFE], id="448 is the largest code at scale 1"),
        pytest.param([449, 448], 128, [0x76, 0x76], id="449 doubles the scale"),
        pytest.param([464, -464], 128, [0x76, 0xF6], id="464 is a tie at scale 2"),
        pytest.param([465, -465], 128, [0x77, 0xF7], id="465 is above that tie"),
        pytest.param([2.0**-149, 0], 105, [0, 0], id="the smallest fp32 subnormal vanishes"),
        pytest.param([-(2.0**-149), 0], 105, [0x80, 0], id="and keeps its sign"),
        pytest.param([2.0**-31, 2.0**-32], 105, [0x01, 0x00], id="smallest code at the floor scale, and half of it"),
        pytest.param([3.4028234663852886e38, 1], 247, [0x77, 0x00], id="the largest fp32: 240, as 256 would be inf"),
    ],
)
def test_edges_of_e4m3(codec, values, scale, codes):
    row = np.zeros((1, 512), np.float32)
    row[0, : len(values)] = values
    stored = codec.encode("v41_528", row)[0]
    assert stored[512] == scale
    assert stored[: len(codes)].tolist() == codes


@pytest.mark.parametrize("name", ["fp8_row", "index_fp8_132_fp32scale", "row_580"])
def test_an_fp32_scale_never_lets_the_largest_value_overflow(codec, name):
    """amax / scale may come out just above 448; clamped before the cast, it stays the largest code, never NaN."""
    dim = FORMATS[name].dim or 128
    amax = np.float32(1) + np.arange(4096, dtype=np.float32) * np.float32(2.0**-12)
    rows = np.zeros((4096, dim), np.float32)
    rows[:, 0], rows[:, 1] = amax, -amax
    stored = codec.encode(name, rows)
    assert (stored[:, 0] == 0x7E).all()
    assert (stored[:, 1] == 0xFE).all()
    first = {"fp8_row": 128, "index_fp8_132_fp32scale": 128, "row_580": 576}[name]
    assert np.array_equal(stored[:, first : first + 4].copy().view("<f4")[:, 0], product(amax, 1 / 448))


@pytest.mark.parametrize(
    ("code", "expected"), [("e4m3", [0x7E, 0xFE, 0x7E, 0x38]), ("int8", [127, 129, 127, 1])], ids=["e4m3", "int8"]
)
def test_codes_are_clamped_before_the_cast(codec, code, expected):
    """A clipped e4m3 scale of 448 leaves ratios of up to 10^30, where bare casts give NaN or wrap."""
    format = Format(
        name=f"test_clamp_{code}",
        fields=(
            Field(name="codes", dims=4, code=code, group=0, scale="e4m3", rule="e4m3"),
            Field(name="scales", dims=1, code="e4m3"),
        ),
        planes=(("codes", "scales"),),
        amax_floor=1e-4,
    )
    stored = codec.encode(format, np.array([[1e32, -1e30, 448 * 465, 448]], np.float32))
    assert stored[0].tolist() == [*expected, 0x7E]


def test_row_580_takes_amax_over_the_coded_channels_only(codec):
    row = np.zeros((1, 512), np.float32)
    row[0, 447], row[0, 448] = -2, 1000
    stored = codec.encode("row_580", row)
    scale = stored[0, 576:].copy().view("<f4")[0]
    assert scale == np.float32(2) * np.float32(1 / 448)
    decoded = codec.decode("row_580", stored)
    assert decoded[0, 447] == np.float32(-448) * scale
    assert decoded[0, 448] == 1000


@pytest.mark.parametrize(
    ("amax", "byte", "code"),
    [
        pytest.param(0.0, 0x01, 0, id="zero: the smallest scale"),
        pytest.param(6 * 2.0**-9, 0x01, 7, id="the floor itself"),
        pytest.param(6, 0x38, 7, id="six: scale 1"),
        pytest.param(5, 0x35, 7, id="five: nearest scale is below"),
        pytest.param(2688, 0x7E, 7, id="2688: the largest that fits"),
        pytest.param(2784, 0x7E, 7, id="464 sixths are clipped to 448"),
        pytest.param(2790, 0x7E, 7, id="beyond 464, where a bare cast gives NaN"),
        pytest.param(1e30, 0x7E, 7, id="far beyond: clipped"),
    ],
)
def test_e4m3_scales_of_fp4_entries(codec, amax, byte, code):
    row = np.zeros((1, 512), np.float32)
    row[0, :2] = -amax, amax
    stored = codec.encode("v41_fp4_288", row)[0]
    assert stored[256] == byte
    assert stored[0] == (code << 4 | code | 8)


@pytest.mark.parametrize("global_scale", [1.0, 0.5, 0.1, 3.7e-3, 12.0])
def test_nvfp4_with_a_global_scale(codec, rng, global_scale):
    """Stored scale e4m3(clip(amax * fp32(1/6) / global, 2^-9, 448)); value = code * scale * global."""
    values = (rng.standard_normal((40, 128)) * 10.0 ** rng.integers(-4, 4, (40, 1))).astype(np.float32)
    groups = values.reshape(40, 8, 16)
    amax = np.maximum(np.abs(groups).max(axis=2), np.float32(6 * 2.0**-126))
    bytes_ = e4m3_codes(np.clip(quotient(product(amax, 1 / 6), np.float32(global_scale)), 2.0**-9, 448))
    stored = codec.encode("index_nvfp4", values, global_scale)
    assert stored.shape == (40, 72)
    assert np.array_equal(stored[:, 64:], bytes_)

    levels = codec.decode("v41_528", np.concatenate([np.arange(512) % 256, np.full(16, 127)]).astype(np.uint8)[None])
    scales = product(levels[0].astype(np.float32)[bytes_], global_scale)
    codes = e2m1_codes(quotient(groups, scales[:, :, None])).reshape(40, 128)
    assert np.array_equal(stored[:, :64], codes[:, 0::2] | codes[:, 1::2] << 4)

    magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])[codes & 7] * np.where(codes & 8, -1, 1)
    expected = magnitudes.reshape(40, 8, 16) * scales[:, :, None].astype(np.float64)
    decoded = codec.decode("index_nvfp4", stored, global_scale=global_scale)
    assert decoded.dtype == np.float32
    np.testing.assert_allclose(decoded, expected.reshape(40, 128), rtol=2e-7)


def test_nvfp4_written_out(codec):
    row = np.zeros((1, 128), np.float32)
    row[0, :4] = 6, -3, 0.5, 6000
    row[0, 16:18] = 6, -1.5
    stored = codec.encode("index_nvfp4", row, 0.5)[0]
    assert stored[64:].tolist() == [0x7E, 0x40, 1, 1, 1, 1, 1, 1]  # 6000 is clipped at 448; 6 / 6 / 0.5 = 2
    assert stored[:2].tolist() == [0x80, 0x70]  # 6 / 224 rounds to 0, -3 / 224 to -0
    assert stored[8] == 0xB7  # 6 -> code 7; -1.5 -> code 11
    decoded = codec.decode("index_nvfp4", stored[None], global_scale=0.5)[0]
    assert decoded[[0, 3, 16, 17]].tolist() == [0, 1344, 6, -1.5]


@pytest.mark.parametrize("name", ["mxfp4_368", "index_fp8_132", "row_580", "v32_656"])
def test_groups_do_not_see_each_other(codec, rng, name):
    """Changing one group's values changes that group's codes and scale and nothing else."""
    format = FORMATS[name]
    values = rng.standard_normal((1, format.dim)).astype(np.float32)
    codes = format.field("codes")
    width = codes.group or codes.dims
    changed = values.copy()
    changed[0, :width] *= 100
    before, after = codec.encode(name, values)[0], codec.encode(name, changed)[0]
    code_bytes = width * (4 if codes.code == "e2m1" else 8) // 8
    first, last = format.byte_range("scales")
    size = (last - first) // codes.groups
    allowed = {*range(code_bytes), *range(first, first + size)}
    assert set(np.flatnonzero(before != after).tolist()) <= allowed
    assert (before[first : first + size] != after[first : first + size]).any()
