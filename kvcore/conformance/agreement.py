"""Comparing what a backend left behind with what the reference did; the answer is a record, never an exception.

A disagreement is reported as a diagnosis: how many values differ, the first of them with its place, both bytes and both
values, and the likely cause where the pattern of the differences is a known one.
"""

import math
from collections.abc import Sequence

import ml_dtypes
import msgspec
import numpy as np

from kvcore import tolerances
from kvcore.backends.reference import encoding
from kvcore.conformance.canonical import POISON, untouched
from kvcore.conformance.causes import cause_of_rows, cause_of_values
from kvcore.conformance.outputs import Output
from kvcore.spec import FORMATS, Format
from kvcore.spec.codes import CODES

Array = np.ndarray


class Mismatch(msgspec.Struct, frozen=True, kw_only=True):
    """The first difference of a check.

    Attributes:
        output: which of the check's outputs, for example ``1.window``.
        coordinate: index into that output.
        where: the same in words: ``unit 3, row 5, head 0, codes byte 17 (channel 17)``.
        want_bytes: the reference's element, bytes in hex, lowest first.
        got_bytes: the backend's.
        want_value: the element's value as text (``nan`` and ``inf`` are values too).
        got_value: the backend's.
        cause: likely reason, or empty if the pattern is not a known one.
    """

    output: str
    coordinate: tuple[int, ...]
    where: str
    want_bytes: str
    got_bytes: str
    want_value: str
    got_value: str
    cause: str


class Agreement(msgspec.Struct, frozen=True, kw_only=True):
    """How far two results agree.

    Attributes:
        mismatches: elements beyond what the rule allows; 0 means that they agree.
        max_abs: largest finite difference of values.
        max_ulp: largest difference in steps of the result's own precision.
        first_mismatch: None if they agree.
        note: what an agreeing result still deserves to have said about it.
    """

    mismatches: int
    max_abs: float
    max_ulp: int
    first_mismatch: Mismatch | None = None
    note: str = ""


def compare(want: Sequence[Output], got: Sequence[Output]) -> Agreement:
    """All outputs of a check, in order; the first mismatch is that of the first output that differs."""
    found = [compare_one(one, other) for one, other in zip(want, got, strict=True)]
    return Agreement(
        mismatches=sum(one.mismatches for one in found),
        max_abs=max((one.max_abs for one in found), default=0.0),
        max_ulp=max((one.max_ulp for one in found), default=0),
        first_mismatch=next((one.first_mismatch for one in found if one.first_mismatch), None),
        note="; ".join(dict.fromkeys(one.note for one in found if one.note)),
    )


def compare_one(want: Output, got: Output) -> Agreement:
    """One output, by its rule."""
    for what in ("shape", "dtype"):
        one, other = str(getattr(want.array, what)), str(getattr(got.array, what))
        if one != other:
            return _whole(want, f"{what} {other} instead of {one}")
    if want.array.size == 0:
        return Agreement(mismatches=0, max_abs=0.0, max_ulp=0)
    if want.rule == "selection":
        return _compare_selection(want, got)
    if want.format is not None:
        return _compare_rows(want, got.array, want.format)
    return _compare_values(want, got.array)


def _compare_rows(want: Output, got: Array, format: Format) -> Agreement:
    """Canonical rows: byte by byte, or, for computed ones, value by value."""
    if want.rule == "exact":
        wrong = want.array != got
    else:
        spared = untouched(want.array, format)[..., None]
        wrong = (want.array != got) & (spared | _bytes_of_channels(format, _beyond(want, got, format)))
    differ = want.array != got
    if not differ.any():
        return Agreement(mismatches=0, max_abs=0.0, max_ulp=0)
    rows = differ.any(axis=-1)
    one, other = (_decode(array[rows], format, want.global_scale) for array in (want.array, got))
    max_abs, max_ulp = _distance(one, other)
    if not wrong.any():
        return Agreement(mismatches=0, max_abs=max_abs, max_ulp=max_ulp)
    coordinate = tuple(int(i) for i in np.argwhere(wrong)[0])
    return Agreement(
        mismatches=int(wrong.sum()),
        max_abs=max_abs,
        max_ulp=max_ulp,
        first_mismatch=_row_mismatch(want, got, format, coordinate),
    )


def _beyond(want: Output, got: Array, format: Format) -> Array:
    """[..., channels] True where decoded computed rows differ by more than their tolerance allows."""
    one, other = (_decode(array, format, want.global_scale) for array in (want.array, got))
    wrong = np.zeros(one.shape, bool)
    touched = ~untouched(want.array, format)
    for first, last, tolerance in tolerances.stored(want.operation, format):
        channels = np.s_[..., first:last]
        wrong[channels] = _outside(one[channels], other[channels], tolerance, tolerances.OPERATIONS[want.operation], touched)
    return wrong


def _compare_values(want: Output, got: Array) -> Agreement:
    if want.array.dtype.kind in "bui":
        wrong = want.array != got
        span = np.abs(want.array.astype(np.int64) - got.astype(np.int64))
        max_abs, max_ulp = float(span.max()), int(span.max())
    else:
        one, other = want.array.astype(np.float32), got.astype(np.float32)
        if want.rule == "exact":
            bits = f"u{want.array.dtype.itemsize}"
            wrong = (want.array.view(bits) != got.view(bits)) & ~(np.isnan(one) & np.isnan(other))
        else:
            precision = "fp32" if want.array.dtype == np.float32 else "bf16"
            tolerance = tolerances.computed(want.operation, precision)
            wrong = _outside(one, other, tolerance, tolerances.OPERATIONS[want.operation])
        max_abs, max_ulp = _distance(want.array, got)
    if not wrong.any():
        return Agreement(mismatches=0, max_abs=max_abs, max_ulp=max_ulp)
    coordinate = tuple(int(i) for i in np.argwhere(wrong)[0])
    mismatch = _mismatch(want, coordinate, want.array[coordinate], got[coordinate], cause_of_values(want.array, got))
    return Agreement(mismatches=int(wrong.sum()), max_abs=max_abs, max_ulp=max_ulp, first_mismatch=mismatch)


def _compare_selection(want: Output, got: Output) -> Agreement:
    """Entries chosen by computed scores: others are as good if their scores are the same within the tolerance."""
    assert want.scores is not None
    differ = want.array != got.array
    if not differ.any():
        return Agreement(mismatches=0, max_abs=0.0, max_ulp=0)
    padded = np.concatenate([want.scores, np.full((len(want.scores), 1), -np.inf, np.float32)], axis=1)
    valid = (got.array >= -1) & (got.array < want.scores.shape[1])
    one = np.take_along_axis(padded, want.array.astype(np.int64), axis=1)
    other = np.take_along_axis(padded, np.where(valid, got.array, -1).astype(np.int64), axis=1)
    one, other = -np.sort(-one, axis=1), -np.sort(-other, axis=1)
    tolerance = tolerances.computed(want.operation, "fp32")
    wrong = _outside(one, other, tolerance, 0.0) | ~valid
    twice = [[pick >= 0 and pick in row[:k] for k, pick in enumerate(row)] for row in got.array.tolist()]
    wrong |= np.array(twice, bool)
    max_abs, max_ulp = _distance(one, other)
    if not wrong.any():
        return Agreement(mismatches=0, max_abs=max_abs, max_ulp=max_ulp, note="selection differs, values agree")
    coordinate = tuple(int(i) for i in np.argwhere(differ & wrong.any(axis=1, keepdims=True))[0])
    cause = cause_of_values(want.array, got.array) or "values differ: the chosen entries have other scores"
    mismatch = _mismatch(want, coordinate, want.array[coordinate], got.array[coordinate], cause)
    return Agreement(mismatches=int(wrong.sum()), max_abs=max_abs, max_ulp=max_ulp, first_mismatch=mismatch)


def _outside(want: Array, got: Array, tolerance: tolerances.Tolerance, noise: float, count: Array | None = None) -> Array:
    """True where got is further from want than the tolerance, or where too many are further than fp32 noise.

    Args:
        noise: error of the operation in fp32: what every value may have.
        count: [...] rows that are part of the result, None for all: the share is taken of these.
    """
    finite = np.isfinite(want) & np.isfinite(got)
    equal = (want == got) | (np.isnan(want) & np.isnan(got))
    magnitudes = np.where(finite, np.abs(want), 0)
    largest = magnitudes.max(initial=0)
    with np.errstate(invalid="ignore", over="ignore"):
        span = np.abs(got.astype(np.float64) - want.astype(np.float64))
    wrong = ~equal & (~finite | (span > tolerance.relative * magnitudes + tolerance.absolute * largest))
    if tolerance.share < 1:
        tipped = ~equal & finite & (span > noise * (magnitudes + largest))
        size = tipped.size if count is None else int(count.sum()) * tipped.shape[-1]
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
    steps = np.abs(_steps(one) - _steps(other)).max()
    return float(span), int(steps)


def _steps(values: Array) -> Array:
    """Floats as integers in order of value, so that neighbours differ by one."""
    size = values.dtype.itemsize
    bits = np.ascontiguousarray(values).view(f"i{size}").astype(np.int64)
    return np.where(bits < 0, -(bits & (2 ** (8 * size - 1) - 1)), bits)


def _decode(rows: Array, format: Format, global_scale: float) -> Array:
    """Canonical rows [..., row_bytes] -> values [..., channels] of the format's own dtype."""
    flat = rows.reshape(-1, rows.shape[-1])
    values = encoding.decode(None, format, flat, format.dim, global_scale)
    return values.reshape(*rows.shape[:-1], values.shape[-1])


def _bytes_of_channels(format: Format, wrong: Array) -> Array:
    """[..., channels] -> [..., row_bytes]: the code bytes of those channels."""
    mask = np.zeros((*wrong.shape[:-1], format.row), bool)
    for byte in range(format.row):
        channel = channel_of(format, byte)
        if channel is not None:
            mask[..., byte] = wrong[..., channel : channel + _channels_per_byte(format, byte)].any(axis=-1)
    return mask


def channel_of(format: Format, byte: int) -> int | None:
    """The (first) channel that a byte of the canonical row holds; None for scales and pads."""
    channel = 0
    for field in format.fields:
        first, last = format.byte_range(field.name)
        if field.is_value:
            if first <= byte < last:
                return channel + (byte - first) * 8 // CODES[field.code].bits
            channel += field.dims or 0
    return None


def _channels_per_byte(format: Format, byte: int) -> int:
    for field in format.fields:
        first, last = format.byte_range(field.name)
        if first <= byte < last:
            return max(1, 8 // CODES[field.code].bits)
    return 1


def _row_mismatch(want: Output, got: Array, format: Format, coordinate: tuple[int, ...]) -> Mismatch:
    *place, byte = coordinate
    field = next(f for f in format.fields if format.byte_range(f.name)[0] <= byte < format.byte_range(f.name)[1])
    first, _ = format.byte_range(field.name)
    size = max(1, CODES[field.code].bits // 8)
    start = first + (byte - first) // size * size
    elements = [array[(*place, slice(start, start + size))] for array in (want.array, got)]
    channel = channel_of(format, byte)
    if channel is None:
        values = [_scale_text(element, field.code) for element in elements]
    else:
        rows = [array[tuple(place)][None] for array in (want.array, got)]
        # Of two channels in one byte, the one that differs.
        decoded = [_decode(row, format, want.global_scale)[0] for row in rows]
        if _channels_per_byte(format, byte) == 2 and (elements[0][0] ^ elements[1][0]) & 0xF == 0:
            channel += 1
        values = [f"{float(row[channel]):.9g}" for row in decoded]
    names = [f"{axis} {i}" for axis, i in zip(want.axes[:-1], place, strict=True)]
    inside = f"{field.name} byte {byte - first}" + ("" if channel is None else f" (channel {channel})")
    return Mismatch(
        output=want.name,
        coordinate=coordinate,
        where=", ".join([*names, inside]),
        want_bytes=elements[0].tobytes().hex(),
        got_bytes=elements[1].tobytes().hex(),
        want_value=values[0],
        got_value=values[1],
        cause=cause_of_rows(want.array, got, format),
    )


def _scale_text(element: Array, code: str) -> str:
    if code == "e8m0":
        return f"2^{int(element[0]) - 127}" if element[0] != POISON else "nan"
    if code == "zero":
        return str(int(element[0]))
    dtypes = {"fp32": np.float32, "e4m3": ml_dtypes.float8_e4m3fn}
    return f"{float(np.ascontiguousarray(element).view(dtypes[code])[0]):.9g}"


def _mismatch(want: Output, coordinate: tuple[int, ...], one: Array, other: Array, cause: str) -> Mismatch:
    return Mismatch(
        output=want.name,
        coordinate=coordinate,
        where=", ".join(f"{axis} {i}" for axis, i in zip(want.axes, coordinate, strict=True)),
        want_bytes=np.asarray(one).tobytes().hex(),
        got_bytes=np.asarray(other).tobytes().hex(),
        want_value=f"{float(one):.9g}",
        got_value=f"{float(other):.9g}",
        cause=cause,
    )


def _whole(want: Output, cause: str) -> Agreement:
    """A result of another shape or dtype differs everywhere."""
    mismatch = Mismatch(
        output=want.name,
        coordinate=(),
        where=want.name,
        want_bytes="",
        got_bytes="",
        want_value="",
        got_value="",
        cause=cause,
    )
    return Agreement(mismatches=max(1, want.array.size), max_abs=0.0, max_ulp=0, first_mismatch=mismatch)


__all__ = ["FORMATS", "Agreement", "Mismatch", "channel_of", "compare", "compare_one"]
