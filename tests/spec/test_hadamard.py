"""The rotated twins (``_h``) of the index formats: H_128 of Sylvester's kind, times 128^-0.5, rounded to bf16."""

import ml_dtypes
import numpy as np
import pytest

from kvcore.spec import FORMATS, Field, Format
from tests.support.exact import bf16_bits


def dense_hadamard(size):
    """The orthonormal matrix by its definition: entry (i, j) is -1 to the number of common one bits of i and j."""
    rows, columns = np.meshgrid(np.arange(size), np.arange(size), indexing="ij")
    odd = np.array(
        [[bin(r & c).count("1") % 2 for r, c in zip(*pair, strict=True)] for pair in zip(rows, columns, strict=True)]
    )
    return np.where(odd, -1.0, 1.0) * size**-0.5


def rotated_bf16(size):
    """A throw-away format that stores the rotated row itself."""
    field = Field(name="codes", dims=size, code="bf16")
    return Format(name=f"test_rotated_{size}", fields=(field,), planes=(("codes",),), hadamard=True)


def ulps_apart(found, wanted):
    """Distance in bf16 steps between bf16 values and exact ones rounded to bf16."""

    def ordered(bits):
        bits = bits.astype(np.int32)
        return np.where(bits & 0x8000, -(bits & 0x7FFF), bits)

    rounded = np.array([bf16_bits(value) for value in wanted.reshape(-1)]).reshape(wanted.shape)
    return np.abs(ordered(found.view(np.uint16)) - ordered(rounded))


@pytest.mark.parametrize("size", [2, 16, 128])
def test_rotation_equals_the_dense_matrix(codec, rng, size):
    values = rng.standard_normal((50, size)).astype(np.float32)
    exact = values.astype(np.float64) @ dense_hadamard(size)
    stored = codec.encode(rotated_bf16(size), values)
    found = np.ascontiguousarray(stored).view(ml_dtypes.bfloat16)
    # Sums near zero carry the rounding of fp32 addition, which can be many steps of a tiny number.
    large = np.abs(exact) > 1e-3
    assert large.mean() > 0.95
    assert ulps_apart(found, exact)[large].max() <= 1
    np.testing.assert_allclose(found.astype(np.float64)[~large], exact[~large], atol=1e-5)


def test_the_dense_matrix_is_symmetric_and_orthonormal():
    matrix = dense_hadamard(128)
    assert (matrix == matrix.T).all()
    np.testing.assert_allclose(matrix @ matrix, np.eye(128), atol=1e-12)


@pytest.mark.parametrize("channel", [0, 1, 64, 127])
def test_a_unit_vector_becomes_one_row_of_the_matrix(codec, channel):
    row = np.zeros((1, 128), np.float32)
    row[0, channel] = 1
    found = codec.encode(rotated_bf16(128), row).view(np.uint16)[0]
    # 128^-0.5 = 0.088388 -> bf16 0x3DB5
    signs = [bin(channel & j).count("1") % 2 for j in range(128)]
    assert found.tolist() == [0xBDB5 if odd else 0x3DB5 for odd in signs]


def test_sums_are_multiplied_once_then_rounded(codec, rng):
    """Small whole numbers add up exactly in any order: what is left is one fp32 product and one rounding to bf16."""
    values = rng.integers(-40, 41, (200, 128)).astype(np.float32)
    sums = np.rint(values.astype(np.float64) @ (dense_hadamard(128) * 128**0.5)) + 0.0  # no negative zeros
    scaled = (sums * np.float64(np.float32(128**-0.5))).astype(np.float32)
    expected = np.array([bf16_bits(value) for value in scaled.reshape(-1)]).reshape(200, 128)
    found = np.ascontiguousarray(codec.encode(rotated_bf16(128), values)).view(np.uint16)
    assert np.array_equal(found, expected)


def test_butterflies_are_added_in_fp32_without_rounding_between(codec):
    """2^24 + 1 is lost in fp32 addition; strides 1, 2, 4 … decide which sums lose it."""
    row = np.zeros((1, 4), np.float32)
    row[0] = 2.0**24, 1, -(2.0**24), 1
    # stride 1: (2^24, 2^24 - 1, -(2^24 - 1), -(2^24 + 1 -> 2^24)), since 2^24 + 1 rounds to 2^24
    # stride 2: (2^24 - (2^24 - 1), ...) = (1, -1, 2^25 - 1 -> 2^25, 2^25 - 1 -> 2^25), times a half
    found = codec.encode(rotated_bf16(4), row).view(ml_dtypes.bfloat16)[0].astype(float)
    assert found.tolist() == [0.5, -0.5, 2.0**24, 2.0**24]


@pytest.mark.parametrize("name", ["index_fp4_68", "index_fp8_132", "index_fp8_132_fp32scale", "index_nvfp4"])
def test_a_twin_encodes_the_rotated_row(codec, rng, name):
    values = rng.standard_normal((9, 128)).astype(np.float32) * 3
    rotated = codec.encode(rotated_bf16(128), values).view(ml_dtypes.bfloat16)
    assert np.array_equal(codec.encode(f"{name}_h", values), codec.encode(name, rotated))
    assert not np.array_equal(codec.encode(f"{name}_h", values), codec.encode(name, values))


@pytest.mark.parametrize("name", ["index_fp4_68", "index_fp8_132"])
def test_decoding_a_twin_does_not_rotate_back(codec, rng, name):
    stored = codec.encode(f"{name}_h", rng.standard_normal((5, 128)).astype(np.float32))
    assert np.array_equal(codec.decode(f"{name}_h", stored), codec.decode(name, stored))
    assert FORMATS[f"{name}_h"].row_bytes == FORMATS[name].row_bytes
