"""Zero groups and non-finite values: the bytes they store and how far a fault spreads."""

import numpy as np
import pytest

from kvcore.spec import FORMATS
from tests.support.built_in_formats import DIM

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("name", "dim", "scales", "code_byte"),
    [
        pytest.param("v4_584", 512, "69" * 7, 0, id="v4_584: 2^-22"),
        pytest.param("v41_528", 512, "69" * 16, 0, id="v41_528: 2^-22"),
        pytest.param("v41_fp4_288", 512, "01" * 32, 0, id="v41_fp4_288: 2^-9"),
        pytest.param("v32_656", 576, "00000039" * 4, 0, id="v32_656: 2^-13 as fp32"),
        pytest.param("row_580", 512, "adac6f34", 0, id="row_580: 1e-4 / 448 as fp32"),
        pytest.param("mxfp4_368", 512, "01" * 14, 0, id="mxfp4_368: 2^-126"),
        pytest.param("v32_nvfp4_432", 576, "01" * 32, 0, id="v32_nvfp4_432: 2^-9"),
        pytest.param("index_fp8_132", 128, "00008034", 0, id="index_fp8_132: 2^-22 as fp32"),
        pytest.param("index_fp4_68", 128, "01" * 4, 0, id="index_fp4_68: 2^-126"),
        pytest.param("index_fp4_68_h", 128, "01" * 4, 0, id="index_fp4_68_h: 2^-126"),
        pytest.param("index_nvfp4", 128, "01" * 8, 0, id="index_nvfp4: 2^-9"),
        pytest.param("int8_row", 64, "d35d5335", 0, id="int8_row: 1e-4 / 127 as fp32"),
        pytest.param("fp8_row", 64, "adac6f34", 0, id="fp8_row: 1e-4 / 448 as fp32"),
        pytest.param("nf4_b64", 128, "17b7d138" * 2, 0x77, id="nf4_b64: 1e-4, and code 7 is zero"),
        pytest.param("mxfp4", 64, "01" * 2, 0, id="mxfp4: 2^-126"),
    ],
)
def test_a_row_of_zeros(codec, name, dim, scales, code_byte):
    format = FORMATS[name].for_dim(dim)
    stored = codec.encode(name, np.zeros((2, dim), np.float32))
    first, last = format.byte_range("scales")
    assert stored[1, first:last].tobytes().hex() == scales
    codes_first, codes_last = format.byte_range("codes")
    assert (stored[:, codes_first:codes_last] == code_byte).all()
    assert not codec.decode(name, stored, dim).astype(np.float32).any()


@pytest.mark.parametrize("fault", [NAN, -NAN, INF, -INF], ids=["nan", "-nan", "inf", "-inf"])
@pytest.mark.parametrize(
    ("name", "dim", "width", "scale"),
    [
        ("v4_584", 512, 64, "ff"),
        ("v41_528", 512, 32, "ff"),
        ("v41_fp4_288", 512, 16, "7f"),
        ("v32_656", 576, 128, "0000c07f"),
        ("row_580", 512, 448, "0000c07f"),
        ("mxfp4_368", 512, 32, "ff"),
        ("v32_nvfp4_432", 576, 16, "7f"),
        ("index_fp8_132", 128, 128, "0000c07f"),
        ("index_fp8_132_fp32scale", 128, 128, "0000c07f"),
        ("index_fp4_68", 128, 32, "ff"),
        ("index_nvfp4", 128, 16, "7f"),
        ("int8_row", 96, 96, "0000c07f"),
        ("fp8_row", 96, 96, "0000c07f"),
        ("nf4_b64", 160, 64, "0000c07f"),
        ("mxfp4", 80, 32, "ff"),
    ],
)
def test_a_fault_stays_in_its_group(codec, rng, name, dim, width, scale, fault):
    """The group stores a NaN scale and zero code bytes and decodes to NaN; every other byte is as without it."""
    format = FORMATS[name].for_dim(dim)
    codes = format.field("codes")
    group = (codes.dims - 1) // width  # the last one, which may be short
    values = rng.standard_normal((3, dim)).astype(np.float32)
    faulty = values.copy()
    faulty[1, group * width] = fault
    expected = codec.encode(name, values)
    bits = 4 if codes.code in ("e2m1", "nf4") else 8
    end = min((group + 1) * width, codes.dims)
    expected[1, group * width * bits // 8 : end * bits // 8] = 0
    first, _ = format.byte_range("scales")
    stored_scale = list(bytes.fromhex(scale))
    at = first + group * len(stored_scale)
    expected[1, at : at + len(stored_scale)] = stored_scale
    stored = codec.encode(name, faulty)
    assert np.array_equal(stored, expected)

    broken = np.isnan(codec.decode(name, stored, dim).astype(np.float32))
    assert broken[1, group * width : end].all()
    assert broken.sum() == end - group * width


def test_a_fault_in_a_rotated_row_reaches_the_whole_row_but_no_other(codec, rng):
    values = rng.standard_normal((3, 128)).astype(np.float32)
    expected = codec.encode("index_fp4_68_h", values)
    values[1, 77] = NAN
    expected[1] = [0] * 64 + [0xFF] * 4
    assert np.array_equal(codec.encode("index_fp4_68_h", values), expected)


@pytest.mark.parametrize("name", ["v4_584", "mxfp4_368", "row_580", "v32_656", "v32_nvfp4_432"])
def test_rope_keeps_infinities_and_one_nan(codec, name):
    format = FORMATS[name]
    row = np.zeros((1, format.dim), np.float32)
    row[0, -4:] = INF, -INF, NAN, -NAN
    stored = codec.encode(name, row)
    first, last = format.byte_range("rope")
    assert stored[0, last - 8 : last].copy().view("<u2").tolist() == [0x7F80, 0xFF80, 0x7FC0, 0x7FC0]
    clean = codec.encode(name, np.zeros((1, format.dim), np.float32))
    assert np.array_equal(stored[0, :first], clean[0, :first])  # the codes and scales don't see it
    back = codec.decode(name, stored)[0, -4:].astype(np.float32)
    assert back[:2].tolist() == [INF, -INF]
    assert np.isnan(back[2:]).all()


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        pytest.param("bf16", [INF, -INF, NAN, -0.0, 3.4e38], [0x7F80, 0xFF80, 0x7FC0, 0x8000, 0x7F7F], id="bf16"),
        pytest.param("fp16", [INF, -INF, NAN, 65519, 65520], [0x7C00, 0xFC00, 0x7E00, 0x7BFF, 0x7BFF], id="fp16"),
        pytest.param(
            "fp32",
            [INF, -INF, NAN, -0.0, 2.0**-149],
            [0x7F800000, 0xFF800000, 0x7FC00000, 0x80000000, 1],
            id="fp32",
        ),
    ],
)
def test_plain_fields_keep_infinities(codec, name, values, expected):
    stored = codec.encode(name, np.array([values], np.float32))
    bits = "<u4" if name == "fp32" else "<u2"
    assert np.ascontiguousarray(stored).view(bits)[0].tolist() == expected


def test_a_nan_with_a_payload_is_stored_as_the_one_nan(codec):
    odd = np.array([[0xFFC12345, 0x7F800001, 0xFFFFFFFF, 0x3F800000]], np.uint32).view(np.float32)
    assert codec.encode("fp32", odd).view("<u4").tolist() == [[0x7FC00000, 0x7FC00000, 0x7FC00000, 0x3F800000]]


def test_row_padding_is_zero_even_for_faulty_rows(codec):
    stored = codec.encode("v4_584", np.full((1, 512), NAN, np.float32))
    assert stored[0, 583] == 0
    stored = codec.encode("mxfp4_368", np.full((1, 512), INF, np.float32))
    assert stored[0, 238:240].tolist() == [0, 0]


@pytest.mark.parametrize(("name", "dim"), DIM.items(), ids=DIM)
def test_no_rows_at_all(codec, name, dim):
    stored = codec.encode(name, np.zeros((0, dim), np.float32))
    assert stored.shape == (0, FORMATS[name].for_dim(dim).row_bytes)
    assert codec.decode(name, stored, dim).shape == (0, dim)
