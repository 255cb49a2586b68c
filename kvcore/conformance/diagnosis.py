"""Likely causes of a disagreement between rows of a pool, recognised by the pattern of the differences.

One table of patterns; the first that fits is reported. A cause is a hint for the reader of a report: nothing is decided
by it. ``value_diagnosis`` does the same for what verbs return.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from kvcore.conformance.canonical import untouched
from kvcore.spec import Field, Format
from kvcore.spec.codes import CODES

Array = np.ndarray
SHIFTS = (1, -1, 2, -2)


class Rows(NamedTuple):
    """Canonical rows that differ: [..., row_bytes]; of whole pools they are [units, rows, heads, row_bytes]."""

    want: Array
    got: Array
    format: Format

    @property
    def wrong(self) -> Array:
        """[...] True in rows that differ."""
        return (self.want != self.got).any(axis=-1)

    @property
    def units(self) -> list[int]:
        """Units of a pool that differ."""
        return [int(unit) for unit in np.flatnonzero(self.wrong.any(axis=(1, 2)))]

    @property
    def of_pool(self) -> bool:
        """True if these are the rows of a whole pool."""
        return self.want.ndim == 4

    def fields(self, chosen: Callable[[Field], bool]) -> tuple[Array, Array]:
        """The bytes [n] of the chosen fields in those rows where such a field differs, of want and of got."""
        ones, others = [np.zeros(0, np.uint8)], [np.zeros(0, np.uint8)]
        for field in filter(chosen, self.format.fields):
            first, last = self.format.byte_range(field.name)
            one, other = self.want[..., first:last], self.got[..., first:last]
            wrong = (one != other).any(axis=-1)
            ones.append(one[wrong].reshape(-1))
            others.append(other[wrong].reshape(-1))
        return np.concatenate(ones), np.concatenate(others)


def cause_of_rows(want: Array, got: Array, format: Format) -> str:
    """Why rows differ; ``""`` if the pattern is not a known one."""
    rows = Rows(want, got, format)
    return next(filter(None, (describe(rows) for describe in PATTERNS)), "")


def _nibbles(rows: Rows) -> str:
    one, other = rows.fields(lambda field: CODES[field.code].bits == 4)
    return "nibbles swapped" if one.size and (other == (one >> 4 | one << 4)).all() else ""


def _power_of_two_scales(rows: Rows) -> str:
    one, other = rows.fields(lambda field: field.name == "scales" and field.code == "e8m0")
    if not one.size:
        return ""
    if (other == 254 - one.astype(np.int64)).all():
        return "scale inverted"
    steps = set(np.unique(other.astype(np.int64) - one).tolist()) - {0}
    known = {-1: "scale one binade low: rounded down instead of up", 1: "scale one binade high"}
    return known.get(steps.pop(), "") if len(steps) == 1 else ""


def _fp32_scales(rows: Rows) -> str:
    one, other = rows.fields(lambda field: field.name == "scales" and field.code == "fp32")
    if not one.size:
        return ""
    want, got = one.view(np.float32), other.view(np.float32)
    with np.errstate(all="ignore"):
        ratios = got / want
        if np.allclose(want * got, 1, rtol=1e-3):
            return "scale inverted"
    if np.allclose(ratios, 1, rtol=1e-6):
        return "scale off in its last bits: a division where a product is meant, or the reverse"
    return f"scale off by a factor of {ratios[0]:.6g}" if np.allclose(ratios, ratios[0], rtol=1e-6) else ""


def _shifted(rows: Rows) -> str:
    if not rows.of_pool:
        return ""
    for shift in SHIFTS:
        if (np.roll(rows.want[rows.units], shift, axis=1) == rows.got[rows.units]).all():
            count = "one row" if abs(shift) == 1 else f"{abs(shift)} rows"
            return f"shifted by {count}: what belongs in row r lies in row r {'+' if shift > 0 else '-'} {abs(shift)}"
    return ""


def _other_unit(rows: Rows) -> str:
    if not rows.of_pool or len(rows.units) < 2:
        return ""
    moved = all(
        any((rows.got[unit] == rows.want[other]).all() for other in rows.units if other != unit) for unit in rows.units
    )
    return "stored in another unit (slot or block)" if moved else ""


def _wrote_elsewhere(rows: Rows) -> str:
    if not rows.of_pool or not untouched(rows.want, rows.format)[rows.wrong].all():
        return ""
    if rows.units == [len(rows.want) - 1]:
        return "-1 wrapped: rows without a place were written to the last unit"
    return "wrote rows that the step does not touch, or left freed ones as they were"


def _not_written(rows: Rows) -> str:
    return "rows were not written" if untouched(rows.got, rows.format)[rows.wrong].all() else ""


def _permuted(rows: Rows) -> str:
    if not rows.of_pool:
        return ""
    for unit in rows.units:
        one, other = (
            sorted(row.tobytes() for row in array[unit].reshape(-1, array.shape[-1])) for array in (rows.want, rows.got)
        )
        if one != other:
            return ""
    return "the right rows in another order"


def _byte_order(rows: Rows) -> str:
    for size in (2, 4):
        one, other = rows.fields(lambda field, size=size: CODES[field.code].bits == 8 * size)
        if one.size and (other.reshape(-1, size)[:, ::-1] == one.reshape(-1, size)).all():
            return f"byte order of {8 * size}-bit elements reversed"
    return ""


def _halves(rows: Rows) -> str:
    for field in rows.format.fields:
        one, other = rows.fields(lambda other, field=field: other is field)
        width = field.nbytes
        if one.size and width % 2 == 0:
            swapped = np.roll(one.reshape(-1, width), width // 2, axis=1)
            if (other.reshape(-1, width) == swapped).all():
                return f"halves of {field.name} swapped (carry and cur)"
    return ""


def _codes(rows: Rows) -> str:
    scaled = [field for field in rows.format.fields if field.group is not None]
    one, other = rows.fields(lambda field: field in scaled)
    scales, _ = rows.fields(lambda field: field.name == "scales")
    if not one.size or scales.size:
        return ""
    sign = 0x88 if CODES[scaled[0].code].bits == 4 else 0x80
    if ((one ^ other) & ~np.uint8(sign) == 0).all():
        return "signs differ"
    if CODES[scaled[0].code].bits == 8 and (np.abs(one.astype(np.int64) - other) <= 1).all():
        return "codes off by one step under the same scales: another rounding"
    return ""


PATTERNS: tuple[Callable[[Rows], str], ...] = (
    _nibbles,
    _power_of_two_scales,
    _fp32_scales,
    _shifted,
    _other_unit,
    _wrote_elsewhere,
    _not_written,
    _permuted,
    _byte_order,
    _halves,
    _codes,
)
"""From the most to the least specific."""
