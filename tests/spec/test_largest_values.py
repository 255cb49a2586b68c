"""Finite values stay finite: what a format cannot reach is stored as the largest that it can."""

import numpy as np
import pytest

from kvcore.spec import FORMATS, Field, Format
from tests.support.built_in_formats import DIM

MOST = np.finfo(np.float32).max
PLAIN = {"fp16": (65504.0, "<u2", 0x7BFF), "bf16": (3.3895313892515355e38, "<u2", 0x7F7F), "fp32": (MOST, "<u4", None)}


@pytest.mark.parametrize("value", [1e5, 65520, 3e38, 3.39e38, 3.4e38, MOST], ids=str)
@pytest.mark.parametrize("name", sorted(DIM))
def test_no_finite_value_reads_as_infinite(codec, name, value):
    """Alone in its group or among small ones, of either sign."""
    dim = DIM[name]
    row = np.full((3, dim), 0.5, np.float32)
    row[0, ::7], row[1, 1::7], row[2] = value, -value, value
    if FORMATS[name].hadamard:
        row *= np.float32(2.0**-7)  # the sums of a rotation must be numbers themselves
    decoded = codec.decode(name, codec.encode(name, row), dim).astype(np.float32)
    assert np.isfinite(decoded).all()
    if not FORMATS[name].hadamard:
        assert (decoded[0, ::7] > 0).all()
        assert (decoded[1, 1::7] < 0).all()


@pytest.mark.parametrize("name", PLAIN)
def test_a_plain_field_stores_its_largest_and_keeps_infinities(codec, name):
    largest, bits, code = PLAIN[name]
    row = np.array([[1e5, -1e5, MOST, -MOST, np.inf, -np.inf, largest, -largest]], np.float32)
    back = codec.decode(name, codec.encode(name, row), 8).astype(np.float64)[0]
    assert back[2:].tolist() == [largest, -largest, np.inf, -np.inf, largest, -largest]
    assert back[0] == -back[1] == min(largest, back[0])
    if code is not None:
        assert codec.encode(name, row).view(bits)[0, 2] == code
    rope = FORMATS["v4_584"].field("rope")
    latent = np.zeros((1, 512), np.float32)
    latent[0, -rope.size :] = MOST
    assert (codec.decode("v4_584", codec.encode("v4_584", latent))[0, -rope.size :] == PLAIN["bf16"][0]).all()


@pytest.mark.parametrize(
    ("name", "limit"),
    [("v4_584", 240 * 2.0**120), ("mxfp4", 3 * 2.0**126), ("v32_656", 240 * 2.0**120), ("mxfp4_368", 3 * 2.0**126)],
)
def test_power_of_two_scales_reach_as_far_as_code_times_scale(codec, name, limit):
    """One step further code times scale would be 2^128."""
    row = np.zeros((1, DIM[name]), np.float32)
    row[0, :3] = MOST, -MOST, limit
    decoded = codec.decode(name, codec.encode(name, row), DIM[name]).astype(np.float64)[0]
    assert decoded[:3].tolist() == [limit, -limit, limit]


@pytest.mark.parametrize(
    ("code", "given", "stored"),
    [
        ("e4m3", [448, 463, 465, 1e5, -1e5, np.nan, np.inf], [0x7E, 0x7E, 0x7E, 0x7E, 0xFE, 0x7F, 0x7F]),
        ("int8", [126.4, 127.6, 1e5, -1e5, -0.0, np.nan, np.inf], [126, 127, 127, 129, 0, 0, 127]),
    ],
)
def test_codes_without_a_scale_are_clamped(codec, code, given, stored):
    format = Format(name=f"test_bare_{code}", fields=(Field(name="codes", dims=8, code=code),), planes=(("codes",),))
    row = np.array([[*given, 0]], np.float32)
    assert codec.encode(format, row)[0, :7].tolist() == stored
