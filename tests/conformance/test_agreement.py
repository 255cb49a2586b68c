"""The rules of agreement at their edges, with arrays written out."""

import ml_dtypes
import numpy as np
import pytest

from kvcore.conformance.agreement import compare_output
from kvcore.conformance.outputs import close, computed_rows, exact, rows, selection
from kvcore.spec import FORMATS

BF16 = ml_dtypes.bfloat16


def fp32(*values: float) -> np.ndarray:
    return np.array([values], np.float32)


@pytest.mark.parametrize(
    ("want", "got", "mismatches"),
    [
        pytest.param(fp32(1, 2), fp32(1, 2), 0, id="equal"),
        pytest.param(fp32(0.0), fp32(-0.0), 1, id="minus zero is another value"),
        pytest.param(fp32(np.nan), -fp32(np.nan), 0, id="any NaN is NaN"),
        pytest.param(fp32(1, np.nan), fp32(1, 2), 1, id="a number for NaN"),
        pytest.param(fp32(1), np.nextafter(fp32(1), np.float32(2)), 1, id="the last bit"),
        pytest.param(fp32(1), fp32(1).astype(np.float64), 1, id="another dtype"),
        pytest.param(fp32(1), fp32(1, 1), 1, id="another shape"),
        pytest.param(np.zeros((0, 3), np.float32), np.zeros((0, 3), np.float32), 0, id="nothing"),
        pytest.param(np.array([[True, False]]), np.array([[True, True]]), 1, id="a mask"),
    ],
)
def test_exact(want: np.ndarray, got: np.ndarray, mismatches: int) -> None:
    assert compare_output(exact("values", want, "row", "column"), exact("values", got, "row", "column")).mismatches == (
        mismatches
    )


def scores(*values: float) -> np.ndarray:
    return np.array([values], np.float32)


@pytest.mark.parametrize(
    ("want", "got", "mismatches", "max_ulp"),
    [
        pytest.param(fp32(1, 2), fp32(1, 2.00001), 0, 42, id="within fp32 noise"),
        pytest.param(fp32(1, 2), fp32(1, 2.001), 1, 4194, id="beyond fp32 noise"),
        pytest.param(fp32(1, -np.inf), fp32(1, -np.inf), 0, 0, id="minus infinity is exact"),
        pytest.param(fp32(1, -np.inf), fp32(1, -3e38), 1, 0, id="a large number for minus infinity"),
        pytest.param(fp32(100, 1e-6), fp32(100, 3e-6), 0, None, id="noise is relative to the largest"),
    ],
)
def test_close(want: np.ndarray, got: np.ndarray, mismatches: int, max_ulp: int | None) -> None:
    found = compare_output(close("out", want, "attention", "row", "column"), close("out", got, "attention"))
    assert found.mismatches == mismatches
    assert max_ulp is None or found.max_ulp == max_ulp


def bf16_ramp(count: int) -> np.ndarray:
    return np.linspace(1, 2, count).astype(BF16)[None]


@pytest.mark.parametrize(
    ("tipped", "agrees"),
    [
        pytest.param(0, True, id="none tipped"),
        pytest.param(2, True, id="two may always tip"),
        pytest.param(4, True, id="one in 64 of 256"),
        pytest.param(5, False, id="more than that are a rule, not an accident"),
    ],
)
def test_share_of_bf16_values_that_may_tip(tipped: int, agrees: bool) -> None:
    want = bf16_ramp(256)
    got = want.copy()
    got[0, :tipped] = np.nextafter(got[0, :tipped], BF16(4))
    found = compare_output(close("latents", want, "pooling", "entry", "channel"), close("latents", got, "pooling"))
    assert (found.mismatches == 0) is agrees
    assert found.max_ulp == (1 if tipped else 0)


SCORES = scores(5.0, 3.0, 3.00001, 1.0, -np.inf)


@pytest.mark.parametrize(
    ("want", "got", "mismatches", "note"),
    [
        pytest.param([0, 2, 1], [0, 2, 1], 0, "", id="the same"),
        pytest.param([0, 2, 1], [0, 1, 2], 0, "selection differs, values agree", id="order within rounding"),
        pytest.param([0, 2], [0, 1], 0, "selection differs, values agree", id="choice within rounding"),
        pytest.param([0, 2], [0, 3], 1, "", id="another score"),
        pytest.param([0, 2, 1], [0, 2, 2], 1, "", id="one entry twice"),
        pytest.param([0, -1], [0, 3], 1, "", id="an entry where there is none"),
        pytest.param([0, 3], [0, 4], 1, "", id="an entry that is not visible"),
        pytest.param([0, 3], [0, 17], 1, "", id="an entry that does not exist"),
    ],
)
def test_selection(want: list[int], got: list[int], mismatches: int, note: str) -> None:
    one, other = (selection("picks", np.array([picks], np.int32), SCORES) for picks in (want, got))
    found = compare_output(one, other)
    assert found.mismatches == mismatches
    assert found.note == note


def v4_rows(count: int) -> np.ndarray:
    """Rows of codes 0x38 (1.0), scale 2^0, rope 1.0."""
    found = np.zeros((1, count, 1, 584), np.uint8)
    found[..., :448] = 0x38
    found[..., 448:576] = np.tile([0x80, 0x3F], 64)
    found[..., 576:583] = 127
    return found


@pytest.mark.parametrize(
    ("byte", "value", "exact_mismatches", "computed_mismatches", "where"),
    [
        pytest.param(5, 0x39, 1, 0, "codes byte 5 (channel 5)", id="a code tipped over"),
        pytest.param(5, 0x3C, 1, 1, "codes byte 5 (channel 5)", id="a code half as large again"),
        pytest.param(450, 0x81, 1, 0, "rope byte 2 (channel 449)", id="a rope channel tipped over"),
        pytest.param(451, 0x40, 1, 1, "rope byte 3 (channel 449)", id="a rope channel four times as large"),
        pytest.param(577, 128, 1, 65, "scales byte 1", id="a scale of twice the size"),
        pytest.param(583, 1, 1, 0, "pad byte 0", id="a pad that is not zero"),
    ],
)
def test_rows(byte: int, value: int, exact_mismatches: int, computed_mismatches: int, where: str) -> None:
    want = v4_rows(3)
    got = want.copy()
    got[0, 1, 0, byte] = value
    stored = compare_output(rows("1.window", want, FORMATS["v4_584"]), rows("1.window", got, FORMATS["v4_584"]))
    assert stored.mismatches == exact_mismatches
    assert stored.first_mismatch is not None
    assert stored.first_mismatch.where == f"unit 0, row 1, head 0, {where}"
    computed = compare_output(*(computed_rows("1.entries", array, FORMATS["v4_584"], "rope") for array in (want, got)))
    assert (computed.mismatches > 0) == (computed_mismatches > 0)


def test_values_and_bytes_of_a_row_mismatch() -> None:
    want = v4_rows(1)
    got = want.copy()
    got[0, 0, 0, 7] = 0xB8
    found = compare_output(rows("1.window", want, FORMATS["v4_584"]), rows("1.window", got, FORMATS["v4_584"]))
    assert found.first_mismatch is not None
    assert (found.first_mismatch.want_bytes, found.first_mismatch.got_bytes) == ("38", "b8")
    assert (found.first_mismatch.want_value, found.first_mismatch.got_value) == ("1", "-1")
    assert found.first_mismatch.cause == "signs differ"
    assert found.max_abs == 2.0


def test_a_computed_row_that_should_be_left_alone_is_compared_by_byte() -> None:
    want = np.full((1, 2, 1, 584), 0xFF, np.uint8)
    got = want.copy()
    got[0, 1, 0, 576] = 0  # the scale is no longer NaN, yet all codes still are
    found = compare_output(*(computed_rows("1.entries", array, FORMATS["v4_584"], "rope") for array in (want, got)))
    assert found.mismatches == 1
