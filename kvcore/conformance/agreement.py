"""Comparing what a backend left behind with what the reference did; the answer is a record, never an exception.

Three rules: bits are equal; computed values are within the tolerance table; entries chosen by computed scores have the
same scores. Where a result differs, ``locate`` says where and ``diagnosis`` says why, if the pattern is a known one.
"""

import math
from collections.abc import Sequence

import ml_dtypes
import msgspec
import numpy as np

from kvcore.conformance.canonical import untouched
from kvcore.conformance.locate import Mismatch, bytes_of_channels, decode, locate_row, locate_value, whole
from kvcore.conformance.outputs import Output
from kvcore.conformance.value_diagnosis import cause_of_values
from kvcore.ops import tolerances
from kvcore.spec import Format

Array = np.ndarray


class Agreement(msgspec.Struct, frozen=True, kw_only=True):
    """How far two results agree.

    Attributes:
        mismatches: elements beyond what the rule allows; 0 means that they agree.
        max_abs: largest finite difference of values.
        max_ulp: largest difference in steps of the result's own precision.
        first_mismatch: None if they agree.
        note: what an agreeing result still deserves to have said about it.
    """

    mismatches: int = 0
    max_abs: float = 0.0
    max_ulp: int = 0
    first_mismatch: Mismatch | None = None
    note: str = ""


def compare(want: Sequence[Output], got: Sequence[Output]) -> Agreement:
    """All outputs of a check, in order; the first mismatch is that of the first output that differs."""
    found = [compare_output(one, other) for one, other in zip(want, got, strict=True)]
    return Agreement(
        mismatches=sum(one.mismatches for one in found),
        max_abs=max((one.max_abs for one in found), default=0.0),
        max_ulp=max((one.max_ulp for one in found), default=0),
        first_mismatch=next((one.first_mismatch for one in found if one.first_mismatch), None),
        note="; ".join(dict.fromkeys(one.note for one in found if one.note)),
    )


def compare_output(want: Output, got: Output) -> Agreement:
    """One output, by its rule. Another shape or dtype differs everywhere."""
    for what in ("shape", "dtype"):
        one, other = getattr(want.array, what), getattr(got.array, what)
        if one != other:
            return Agreement(
                mismatches=max(1, want.array.size), first_mismatch=whole(want, f"{what} {other} instead of {one}")
            )
    if want.array.size == 0:
        return Agreement()
    if want.rule == "selection":
        return _compare_selection(want, got.array)
    if want.format is not None:
        return _compare_rows(want, got.array, want.format)
    return _compare_values(want, got.array)


def _compare_rows(want: Output, got: Array, format: Format) -> Agreement:
    """Canonical rows: byte by byte; where they were computed, value by value, but rows left alone still by byte."""
    differ = want.array != got
    if not differ.any():
        return Agreement()
    wrong = differ
    if want.rule == "close":
        spared = untouched(want.array, format)[..., None]
        wrong = differ & (spared | bytes_of_channels(format, _beyond(want, got, format)))
    rows = differ.any(axis=-1)
    one, other = (decode(array[rows], format, want.global_scale) for array in (want.array, got))
    max_abs, max_ulp = _distance(one, other)
    first = locate_row(want, got, format, _first(wrong)) if wrong.any() else None
    return Agreement(mismatches=int(wrong.sum()), max_abs=max_abs, max_ulp=max_ulp, first_mismatch=first)


def _beyond(want: Output, got: Array, format: Format) -> Array:
    """[..., channels] True where decoded computed rows differ by more than their format's tolerance."""
    one, other = (decode(array, format, want.global_scale).astype(np.float32) for array in (want.array, got))
    # Poison decodes to whatever it does: only rows that the reference wrote count towards a share.
    written = ~untouched(want.array, format)
    wrong = np.zeros(one.shape, bool)
    for first, last, tolerance in tolerances.stored(want.operation, format):
        channels = np.s_[..., first:last]
        wrong[channels] = _outside(
            one[channels], other[channels], tolerance, tolerances.noise(want.operation), used=written
        )
    return wrong


def _compare_values(want: Output, got: Array) -> Agreement:
    one, other = want.array, got
    if one.dtype.kind in "bui":
        wrong = one != other
        steps = np.abs(one.astype(np.int64) - other.astype(np.int64)).max()
        max_abs, max_ulp = float(steps), int(steps)
    else:
        floats = one.astype(np.float32), other.astype(np.float32)
        if want.rule == "exact":
            bits = f"u{one.dtype.itemsize}"
            wrong = (one.view(bits) != other.view(bits)) & ~(np.isnan(floats[0]) & np.isnan(floats[1]))
        else:
            tolerance = tolerances.computed(want.operation, want.precision)
            wrong = _outside(*floats, tolerance, tolerances.noise(want.operation))
            if want.precision == "bf16":
                one, other = (array.astype(ml_dtypes.bfloat16) for array in (one, other))
        max_abs, max_ulp = _distance(one, other)
    first = None
    if wrong.any():
        first = locate_value(want, got, _first(wrong), cause_of_values(want.array, got))
    return Agreement(mismatches=int(wrong.sum()), max_abs=max_abs, max_ulp=max_ulp, first_mismatch=first)


def _compare_selection(want: Output, got: Array) -> Agreement:
    """Entries chosen by computed scores: others are as good if their scores are the same within the tolerance."""
    assert want.scores is not None
    differ = want.array != got
    if not differ.any():
        return Agreement()
    # Column n stands for -1: no entry, no score.
    scores = np.concatenate([want.scores, np.full((len(want.scores), 1), -np.inf, np.float32)], axis=1)
    valid = (got >= -1) & (got < want.scores.shape[1])
    one = np.take_along_axis(scores, want.array.astype(np.int64), axis=1)
    other = np.take_along_axis(scores, np.where(valid, got, -1).astype(np.int64), axis=1)
    one, other = -np.sort(-one, axis=1), -np.sort(-other, axis=1)
    wrong = _outside(one, other, tolerances.computed(want.operation, "fp32"), 0.0) | ~valid | _repeated(got)
    max_abs, max_ulp = _distance(one, other)
    if not wrong.any():
        return Agreement(max_abs=max_abs, max_ulp=max_ulp, note="selection differs, values agree")
    where = _first(differ & wrong.any(axis=1, keepdims=True))
    cause = cause_of_values(want.array, got) or "values differ: the chosen entries have other scores"
    first = locate_value(want, got, where, cause)
    return Agreement(mismatches=int(wrong.sum()), max_abs=max_abs, max_ulp=max_ulp, first_mismatch=first)


def _repeated(selected: Array) -> Array:
    """True where an entry was already picked for the same token."""
    return np.array(
        [[entry >= 0 and entry in row[:k] for k, entry in enumerate(row)] for row in selected.tolist()], bool
    )


def _outside(
    want: Array, got: Array, tolerance: tolerances.Tolerance, noise: float, *, used: Array | None = None
) -> Array:
    """True where got is further from want than the tolerance, or where too many are further than fp32 noise.

    Args:
        noise: what every value may be off by, as a part of it and of the largest.
        used: [...] rows that the share is taken of; None for all.
    """
    equal = (want == got) | (np.isnan(want) & np.isnan(got))
    finite = np.isfinite(want) & np.isfinite(got)
    magnitudes = np.where(finite, np.abs(want), 0).astype(np.float64)
    largest = magnitudes.max(initial=0)
    span = np.abs(np.where(finite, got, 0).astype(np.float64) - np.where(finite, want, 0))
    wrong = ~equal & (~finite | (span > tolerance.relative * magnitudes + tolerance.absolute * largest))
    if tolerance.share < 1:
        tipped = ~equal & finite & (span > noise * (magnitudes + largest))
        size = tipped.size if used is None else int(used.sum()) * tipped.shape[-1]
        # Two may always tip, however small the result.
        if tipped.sum() > max(2, math.ceil(tolerance.share * size)):
            wrong |= tipped
    return wrong


def _distance(want: Array, got: Array) -> tuple[float, int]:
    """(largest absolute difference, largest difference in steps of the dtype) where both are finite."""
    finite = np.isfinite(want.astype(np.float32)) & np.isfinite(got.astype(np.float32))
    if not finite.any():
        return 0.0, 0
    one, other = want[finite], got[finite]
    span = np.abs(one.astype(np.float64) - other.astype(np.float64)).max()
    return float(span), int(np.abs(_steps(one) - _steps(other)).max())


def _steps(values: Array) -> Array:
    """Floats as integers in order of value, so that neighbours differ by one."""
    size = values.dtype.itemsize
    bits = np.ascontiguousarray(values).view(f"i{size}").astype(np.int64)
    return np.where(bits < 0, -(bits & (2 ** (8 * size - 1) - 1)), bits)


def _first(wrong: Array) -> tuple[int, ...]:
    return tuple(int(i) for i in np.argwhere(wrong)[0])
