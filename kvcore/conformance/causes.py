"""Likely causes of a disagreement, recognised by the pattern of the differences.

One table for rows of a pool, one for values: (what to say, when to say it), the first that fits is reported. A cause is
a hint for the reader of a report; nothing is decided by it.
"""

from collections.abc import Callable

import numpy as np

from kvcore.conformance.canonical import untouched
from kvcore.spec import Format
from kvcore.spec.codes import CODES

Array = np.ndarray
SHIFTS = (1, -1, 2, -2)


def cause_of_rows(want: Array, got: Array, format: Format) -> str:
    """Of canonical rows [..., row_bytes] that differ; ``""`` if the pattern is not a known one."""
    for describe in ROW_CAUSES:
        cause = describe(want, got, format)
        if cause:
            return cause
    return ""


def cause_of_values(want: Array, got: Array) -> str:
    """Of values, indices or masks that differ; ``""`` if the pattern is not a known one."""
    for describe in VALUE_CAUSES:
        cause = describe(want, got)
        if cause:
            return cause
    return ""


def _shifted_rows(want: Array, got: Array, format: Format) -> str:
    if want.ndim != 4:
        return ""
    for shift in SHIFTS:
        if _equal_where_wrong(want, got, np.roll(want, shift, axis=1)):
            return f"shifted by {_many(abs(shift), 'row')}: row r lies at r {'+' if shift > 0 else '-'} {abs(shift)}"
    return ""


def _other_unit(want: Array, got: Array, format: Format) -> str:
    if want.ndim != 4:
        return ""
    units = np.flatnonzero((want != got).any(axis=(1, 2, 3)))
    moved = [any((got[unit] == want[other]).all() for other in units if other != unit) for unit in units]
    written = [not untouched(want[unit], format).all() for unit in units]
    return "stored in another unit (slot or block)" if len(units) > 1 and all(moved) and any(written) else ""


def _wrapped(want: Array, got: Array, format: Format) -> str:
    wrong = (want != got).any(axis=-1)
    if want.ndim != 4 or not untouched(want, format)[wrong].all():
        return ""
    last = np.zeros_like(wrong)
    last[-1] = True
    if (wrong & last).sum() == wrong.sum():
        return "-1 wrapped: a row without a place was written to the last unit"
    return "wrote rows that the step does not touch"


def _not_written(want: Array, got: Array, format: Format) -> str:
    wrong = (want != got).any(axis=-1)
    return "rows were not written" if untouched(got, format)[wrong].all() else ""


def _permuted(want: Array, got: Array, format: Format) -> str:
    if want.ndim != 4:
        return ""
    for unit in np.flatnonzero((want != got).any(axis=(1, 2, 3))):
        if sorted(row.tobytes() for row in want[unit]) != sorted(row.tobytes() for row in got[unit]):
            return ""
    return "the right rows in another order"


def _nibbles(want: Array, got: Array, format: Format) -> str:
    one, other = _field_where_wrong(want, got, format, lambda field: CODES[field.code].bits == 4)
    return "nibbles swapped" if one.size and (other == (one >> 4 | one << 4)).all() else ""


def _byte_order(want: Array, got: Array, format: Format) -> str:
    for bits in (16, 32):
        one, other = _field_where_wrong(want, got, format, lambda field, bits=bits: CODES[field.code].bits == bits)
        if one.size and (other.reshape(-1, bits // 8)[:, ::-1] == one.reshape(-1, bits // 8)).all():
            return f"byte order of {bits}-bit elements reversed"
    return ""


def _scales(want: Array, got: Array, format: Format) -> str:
    one, other = _field_where_wrong(want, got, format, lambda field: field.name == "scales")
    if not one.size:
        return ""
    code = format.field("scales").code
    if code == "e8m0":
        steps = other.astype(np.int64) - one
        if (other == 254 - one.astype(np.int64)).all():
            return "scale inverted"
        wrong = steps[steps != 0]
        if (wrong == -1).all():
            return "scale one binade low: rounded down instead of up"
        return "scale one binade high" if (wrong == 1).all() else ""
    if code == "fp32":
        values = [np.ascontiguousarray(array).reshape(-1, 4).view(np.float32)[:, 0] for array in (one, other)]
        with np.errstate(all="ignore"):
            if np.allclose(values[0] * values[1], 1, rtol=1e-3):
                return "scale inverted"
            ratio = values[1] / values[0]
        if np.allclose(ratio, ratio[0], rtol=1e-6) and not np.isclose(ratio[0], 1, rtol=1e-6):
            return f"scale off by a factor of {ratio[0]:.6g}"
        if np.allclose(ratio, 1, rtol=1e-6):
            return "scale off in its last bits: a division where a product is meant, or the reverse"
    return ""


def _halves(want: Array, got: Array, format: Format) -> str:
    for field in format.fields:
        first, last = format.byte_range(field.name)
        one, other = want[..., first:last], got[..., first:last]
        half = (last - first) // 2
        wrong = (one != other).any(axis=-1)
        if half and wrong.any() and (other[wrong] == np.roll(one[wrong], half, axis=-1)).all():
            return f"halves of {field.name} swapped (carry and cur)"
    return ""


def _codes_only(want: Array, got: Array, format: Format) -> str:
    one, other = _field_where_wrong(want, got, format, lambda field: field.group is not None)
    scaled = any(field.group is not None for field in format.fields)
    if not scaled or not one.size or not _same_field(want, got, format, "scales"):
        return ""
    if (np.abs(one.astype(np.int64) - other) <= 1).all():
        return "codes off by one step: another rounding"
    signs = {8: 0x80, 4: 0x88}[next(CODES[field.code].bits for field in format.fields if field.group is not None)]
    return "signs flipped" if (one ^ other == signs).all() else ""


ROW_CAUSES: tuple[Callable[[Array, Array, Format], str], ...] = (
    _nibbles,
    _scales,
    _shifted_rows,
    _other_unit,
    _wrapped,
    _not_written,
    _permuted,
    _byte_order,
    _halves,
    _codes_only,
)


def _invalid_read(want: Array, got: Array) -> str:
    wrong = _differs(want, got)
    if want.dtype.kind in "bui":
        return ""
    nan = np.isnan(got.astype(np.float32))
    if (nan & wrong).sum() == wrong.sum():
        zero = (want.astype(np.float32) == 0)[wrong].all()
        return "NaN where a row is not valid: masked by multiplying" if zero else "NaN: a row that was never written was read"
    rows = want.reshape(*want.shape[:-1], -1).astype(np.float32)
    invalid = (rows == 0).all(axis=-1) & wrong.any(axis=-1)
    if want.ndim >= 3 and invalid.sum() == wrong.any(axis=-1).sum():
        return "a row that is not valid was read: -1 wrapped, or a limit is off by one"
    valid_lost = (got.astype(np.float32) == 0)[wrong].all()
    return "valid values read as zero" if valid_lost else ""


def _shifted_values(want: Array, got: Array) -> str:
    for axis in range(want.ndim):
        for shift in SHIFTS:
            if want.shape[axis] > abs(shift) and _matches(np.roll(want, shift, axis=axis), got):
                return f"shifted by {abs(shift)} along axis {axis}"
    return ""


def _offset(want: Array, got: Array) -> str:
    if want.dtype.kind not in "iu":
        return ""
    span = (got.astype(np.int64) - want)[want != got]
    return f"off by {span[0]:+d}" if len(set(span.tolist())) == 1 else ""


def _mask_edge(want: Array, got: Array) -> str:
    if want.dtype.kind != "b":
        return ""
    if (got | want == got).all():
        return "more is visible than may be"
    return "less is visible than should be" if (got & want == got).all() else ""


def _visibility(want: Array, got: Array) -> str:
    if want.dtype.kind != "f" and "float" not in str(want.dtype):
        return ""
    one, other = np.isneginf(want.astype(np.float32)), np.isneginf(got.astype(np.float32))
    if (one & ~other).any() and not (other & ~one).any():
        return "more is visible than may be"
    return "less is visible than should be" if (other & ~one).any() and not (one & ~other).any() else ""


def _factor(want: Array, got: Array) -> str:
    if want.dtype.kind in "bui":
        return ""
    one, other = want.astype(np.float64), got.astype(np.float64)
    used = np.isfinite(one) & np.isfinite(other) & (np.abs(one) > 1e-3 * np.abs(one[np.isfinite(one)]).max(initial=0))
    if used.sum() < 2:
        return ""
    ratio = other[used] / one[used]
    if np.ptp(ratio) > 1e-2 * np.abs(ratio).max() or abs(ratio[0] - 1) < 1e-2:
        return ""
    return "sign flipped" if abs(ratio[0] + 1) < 1e-2 else f"off by a factor of {np.median(ratio):.4g}"


def _pairs(want: Array, got: Array) -> str:
    if want.ndim == 0 or want.shape[-1] % 2 or want.dtype.kind in "bui":
        return ""
    swapped = want.reshape(*want.shape[:-1], -1, 2)[..., ::-1].reshape(want.shape)
    return "neighbouring channels swapped (nibbles swapped)" if _matches(swapped, got) else ""


VALUE_CAUSES: tuple[Callable[[Array, Array], str], ...] = (
    _invalid_read,
    _pairs,
    _shifted_values,
    _offset,
    _mask_edge,
    _visibility,
    _factor,
)


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")


def _differs(want: Array, got: Array) -> Array:
    if want.dtype.kind in "bui":
        return want != got
    one, other = want.astype(np.float32), got.astype(np.float32)
    return (one != other) & ~(np.isnan(one) & np.isnan(other))


def _matches(moved: Array, got: Array) -> bool:
    """Equal but for the edge that a roll brings in: nine in ten elements."""
    one, other = moved.astype(np.float32), got.astype(np.float32)
    with np.errstate(invalid="ignore"):
        same = (one == other) | (np.isnan(one) & np.isnan(other)) | (np.abs(one - other) <= 1e-5 * np.abs(one))
    return bool(same.mean() > 0.9)


def _equal_where_wrong(want: Array, got: Array, moved: Array) -> bool:
    wrong = (want != got).any(axis=-1)
    return bool((moved[wrong] == got[wrong]).all())


def _field_where_wrong(want: Array, got: Array, format: Format, chosen: Callable[[object], bool]) -> tuple[Array, Array]:
    """The bytes [n] of the chosen fields in those rows where such a field differs, of want and of got."""
    ones, others = [], []
    for field in format.fields:
        if not chosen(field):
            continue
        first, last = format.byte_range(field.name)
        one, other = want[..., first:last], got[..., first:last]
        wrong = (one != other).any(axis=-1)
        ones.append(one[wrong].reshape(-1))
        others.append(other[wrong].reshape(-1))
    empty = np.zeros(0, np.uint8)
    return np.concatenate([empty, *ones]), np.concatenate([empty, *others])


def _same_field(want: Array, got: Array, format: Format, name: str) -> bool:
    first, last = format.byte_range(name)
    return bool((want[..., first:last] == got[..., first:last]).all())
