"""The figures beside the formats: bits from the format table, errors in the order that the codes promise."""

import pytest

from kvcore.parity.quality import measure
from kvcore.spec import FORMATS


@pytest.fixture(scope="module")
def found():
    return {quality.format: quality for quality in measure()}


def test_every_format_that_is_not_rotated_is_measured(found) -> None:
    assert set(found) == {name for name, format in FORMATS.items() if not format.hadamard}


@pytest.mark.parametrize(
    ("format", "bits"),
    [
        ("fp32", 32.0),
        ("bf16", 16.0),
        ("fp16", 16.0),
        ("v4_584", 8 * 584 / 512),
        ("v32_656", 8 * 656 / 576),
        ("index_fp4_68", 8 * 68 / 128),
    ],
)
def test_bits_a_channel(found, format: str, bits: float) -> None:
    assert found[format].bits == bits


@pytest.mark.parametrize(
    ("format", "least", "most"),
    [
        pytest.param("fp32", 0.0, 0.0, id="fp32 keeps the sample"),
        pytest.param("fp16", 1e-4, 4e-4, id="11 bits: half a step is 2^-12 and less"),
        pytest.param("bf16", 1e-3, 3e-3, id="8 bits: half a step is 2^-9 and less"),
        pytest.param("int8_row", 3e-3, 2e-2, id="127 steps up to the largest of the row"),
        pytest.param("v4_584", 1e-2, 4e-2, id="e4m3: 4 bits"),
        pytest.param("mxfp4", 5e-2, 0.2, id="e2m1: 2 bits"),
    ],
)
def test_error(found, format: str, least: float, most: float) -> None:
    assert least <= found[format].error <= most


def test_it_is_the_same_every_time(found) -> None:
    assert {quality.format: quality for quality in measure()} == found
