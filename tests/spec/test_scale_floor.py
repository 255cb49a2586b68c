"""The floor under a scale: ``v32_656`` as FlashMLA's quantiser writes it, worked out here with exact numbers.

The published rule (deepseek-ai/FlashMLA, ``tests/quant.py``, layout ``V32_FP8Sparse``): a tile of 128 values has the
scale ``2 ** ceil(log2(max(amax / 448, 1e-4)))``, as fp32; its codes are ``e4m3(value / scale)``. vLLM's kernel for the
same bytes (``concat_and_cache_ds_mla_kernel`` in ``csrc/cache_kernels.cu``) keeps the scale as it is and floors it at
the smallest normal number: such rows are read here, but they are not what is written.
"""

from fractions import Fraction

import numpy as np
import pytest

from kvcore.errors import SpecError
from kvcore.spec import FORMATS, Field, Format
from tests.support.exact import e4m3_codes

FLOOR = Fraction(float(np.float32(1e-4)))


def published_scale(amax: float) -> Fraction:
    """The smallest power of two that is no less than amax / 448, and no less than the floor."""
    least, scale = max(Fraction(amax) / 448, FLOOR), Fraction(1, 2**149)
    while scale < least:
        scale *= 2
    return scale


def published_row(values: np.ndarray) -> bytes:
    """512 codes, four scales, and 64 channels in bf16, which are zero here."""
    codes, scales = b"", b""
    for tile in values[:512].reshape(4, 128):
        scale = published_scale(float(np.abs(tile).max()))
        codes += e4m3_codes(tile.astype(np.float64) / float(scale)).tobytes()
        scales += np.float32(scale).tobytes()
    return codes + scales + bytes(128)


@pytest.mark.parametrize(
    "largest", [0, 1e-30, 1e-6, 1e-4, 1e-3, 0.0447, 0.0448, 0.0449, 0.054, 0.0547, 0.06, 0.11, 1, 448]
)
def test_rows_are_those_of_the_published_rule(codec, rng, largest):
    values = np.zeros((3, 576), np.float32)
    values[:, :512] = rng.uniform(-1, 1, (3, 512)) * largest
    values[0, :512:128], values[1, 5] = largest, -largest
    assert [row.tobytes() for row in codec.encode("v32_656", values)] == [published_row(row) for row in values]


def test_small_tiles_written_out(codec):
    """2^-13 is the smallest power of two from 1e-4 on; a value of half its smallest code is lost, more is kept."""
    row = np.zeros((1, 576), np.float32)
    row[0, :4] = 0.04, -(2.0**-22), 2.0**-23, 2.0**-13
    stored = codec.encode("v32_656", row)[0]
    assert stored[:4].tolist() == [0x7A, 0x81, 0x00, 0x38]
    assert stored[512:528].view("<f4").tolist() == [2.0**-13] * 4


def test_a_floor_under_scales_that_are_not_rounded(codec):
    """The floor is data of any format whose scale is a number."""
    format = Format(
        name="test_scale_floor",
        fields=(
            Field(name="codes", dims=32, code="int8", group=0, scale="fp32", rule="fp32"),
            Field(name="scales", dims=1, code="fp32"),
        ),
        planes=(("codes", "scales"),),
        scale_floor=0.01,
    )
    rows = np.zeros((2, 32), np.float32)
    rows[:, 0] = 1.0, 127.0
    stored = codec.encode(format, rows)
    assert stored[:, 32:].copy().view("<f4")[:, 0].tolist() == [np.float32(0.01), np.float32(127) * np.float32(1 / 127)]
    assert stored[:, 0].tolist() == [100, 127]


@pytest.mark.parametrize(
    ("options", "where"),
    [
        ({"scale_floor": -1.0}, "scale_floor"),
        ({"scale_floor": float("nan")}, "scale_floor"),
        ({"scale_floor": float("inf")}, "scale_floor"),
        ({}, "amax_floor"),
    ],
)
def test_a_format_needs_one_of_the_floors(options, where):
    fields = FORMATS["v32_656"].fields
    with pytest.raises(SpecError) as refused:
        Format(name="test_floors", fields=fields, planes=(("codes", "scales", "rope"),), **options)
    assert refused.value.where == f"format test_floors: {where}"


def test_a_floor_under_a_scale_that_its_rule_clips_is_refused():
    fields = (
        Field(name="codes", dims=32, code="nf4", group=0, scale="fp32", rule="absmax"),
        Field(name="scales", dims=1, code="fp32"),
    )
    with pytest.raises(SpecError, match="rule pow2, fp32 or quotient"):
        Format(name="test_absmax_floor", fields=fields, planes=(("codes", "scales"),), scale_floor=1e-4)
