"""A request's rows between pools and pages in the host's memory, and digests of pages: by fields, not row by row.

The defaults of ``move_strips`` and ``digest_strips`` where both sides lie in memory that NumPy can see: the
reference's arrays, torch's on the CPU, JAX's on the CPU to be read.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided

from kvcore.arrays import host_view
from kvcore.digest import MASK, WORD, region_salt, row_lanes
from kvcore.ops.results import Strip
from kvcore.plan import CachePlan, Region
from kvcore.pools import Pools

if TYPE_CHECKING:
    from kvcore.spec.layout import Place

Array = np.ndarray[Any, Any]

AT_ONCE = 1 << 18
"""Bytes of a temporary array: units that are no neighbours go through one."""


class Lines(NamedTuple):
    """Bytes of one field, or of fields side by side, in every row of a region.

    Attributes:
        buffer: of the layout.
        base: first byte in a unit.
        stride: from one format row of a unit to the next.
        first: first byte in the canonical format row.
        nbytes: of the run.
        split: high bytes of 16-bit elements come before all low ones.
    """

    buffer: str
    base: int
    stride: int
    first: int
    nbytes: int
    split: bool


@cache
def lines_of(region: Region) -> tuple[Lines, ...]:
    """The runs of a region's rows. Bytes of a canonical row that are in none of them are zeros."""
    found: list[Lines] = []
    places: list[Place] = sorted(region.unit.places, key=lambda place: region.format.byte_range(place.field))
    for place in places:
        first, _ = region.format.byte_range(place.field)
        one = Lines(place.buffer, place.base, place.stride, first, place.nbytes, place.split)
        last = found[-1] if found else None
        if last is not None and not last.split and _follows(last, one):
            found[-1] = last._replace(nbytes=last.nbytes + one.nbytes)
        else:
            found.append(one)
    return tuple(found)


def _follows(last: Lines, one: Lines) -> bool:
    end = last.buffer, last.stride, last.base + last.nbytes, last.first + last.nbytes, False
    return end == (one.buffer, one.stride, one.base, one.first, one.split)


def move(
    plan: CachePlan, pools: Pools, pages: Any, strips: Sequence[Strip], units: Any, *, store: bool = False
) -> bool:
    """``Ops.move_strips`` in host memory; False, and nothing is done, where something lies elsewhere."""
    outside = host_view(pages)
    written = [outside]
    held: dict[str, Array] = {}
    for strip in strips:
        for region in plan.region(strip.layer, strip.role):
            for name, _ in region.buffers.values():
                view = host_view(pools[name])
                if view is None:
                    return False
                held[name] = view.reshape(len(view), -1).view(np.uint8) if view.size else view
    if store:
        written = list(held.values())
    if outside is None or not all(array is not None and array.flags.writeable for array in written):
        return False
    at = np.asarray(units)
    for strip in strips:
        offset = strip.start
        for region in plan.region(strip.layer, strip.role):
            _move(held, outside, strip, region, offset, at, store=store)
            offset += region.heads * region.format.row
    return True


def _move(
    held: dict[str, Array], pages: Array, strip: Strip, region: Region, offset: int, at: Array, *, store: bool
) -> None:
    """One part of a strip."""
    lines, whole = lines_of(region), region.format.row
    if not store and sum(line.nbytes for line in lines) < whole:
        # Pads that a layout does not store.
        for line in (Lines("", 0, 0, *gap, False) for gap in _gaps(lines, whole)):
            for outside, _, _ in _pieces(pages, strip, region, offset, at, line):
                outside[...] = np.zeros((), outside.dtype)
    for line in lines:
        pool = held[region.buffers[line.buffer][0]]
        if not len(pool):
            continue
        for outside, units, place in _pieces(pages, strip, region, offset, at, line):
            for copy in range(region.copies if store else 1):
                inside = _rows(pool, region, line, place + copy * region.rows, outside.shape[1])
                _between(outside, inside, units, line, store=store)


def _gaps(lines: Sequence[Lines], whole: int) -> Iterator[tuple[int, int]]:
    """(first, nbytes) of what is in no run."""
    ends = [(0, 0), *((line.first, line.first + line.nbytes) for line in lines), (whole, whole)]
    return ((end, first - end) for (_, end), (first, _) in pairwise(ends) if first > end)


def _pieces(
    pages: Array, strip: Strip, region: Region, offset: int, at: Array, line: Lines
) -> Iterator[tuple[Array, Array, int]]:
    """(bytes outside [units, rows, heads] of a run each, their units, first row in the unit), as they follow."""
    size, count = region.format.row, len(strip.numbers)
    nbytes, whole = _together(region, line)

    def outside(first: int, number: int, row: int, rows: int) -> Array:
        start = offset + row * strip.row_bytes + line.first
        steps = pages.strides[0], strip.row_bytes, size
        shape = number, rows, 1 if whole else region.heads
        return _items(pages, first * pages.strides[0] + start, shape, steps, nbytes)

    if region.growth == "block":
        full, rest = divmod(count, strip.rows)
        full, rest = (len(at), 0) if full >= len(at) else (full, rest)
        if full:
            yield outside(0, full, 0, strip.rows), at[:full], 0
        if rest:
            yield outside(full, 1, 0, rest), at[full : full + 1], 0
        return
    # Where neighbours of a ring end: at its end, and where the numbers have a gap.
    numbers = strip.numbers
    if isinstance(numbers, range):
        cuts = [0, *range(-numbers.start % region.rows, count, region.rows), count]
    else:
        follow = [number % region.rows != 0 and number == before + 1 for before, number in pairwise(numbers)]
        cuts = [0, *(place + 1 for place, follows in enumerate(follow) if not follows), count]
    for first, end in pairwise(cuts):
        if first < end:
            yield outside(0, 1, first, end - first), at[:1], numbers[first] % region.rows


def _items(array: Array, first: int, shape: tuple[int, ...], steps: tuple[int, ...], nbytes: int) -> Array:
    """Items of so many bytes, which are copied together; ``array`` [n, bytes] may have gaps between its rows."""
    kind = np.dtype((np.void, nbytes))
    if array.flags.c_contiguous:
        return np.ndarray(shape, kind, array, first, steps)
    return as_strided(array[0, first : first + nbytes].view(kind), shape, steps, writeable=array.flags.writeable)


def _rows(pool: Array, region: Region, line: Lines, place: int, rows: int) -> Array:
    """Bytes inside, [all units, rows, heads] of a run each, from a row of the unit on."""
    row_step, head_step = region.steps
    nbytes, whole = _together(region, line)
    steps = pool.strides[0], row_step * line.stride, head_step * line.stride
    first = line.base + place * row_step * line.stride
    return _items(pool, first, (len(pool), rows, 1 if whole else region.heads), steps, nbytes)


def _together(region: Region, line: Lines) -> tuple[int, bool]:
    """(bytes that are copied together, whether those are of all heads of a row)."""
    side_by_side = region.steps[1] * line.stride == line.nbytes == region.format.row
    return (region.heads * line.nbytes, True) if side_by_side and not line.split else (line.nbytes, False)


def _between(outside: Array, inside: Array, units: Array, line: Lines, *, store: bool) -> None:
    """Copy between units' rows and pages', whole runs of neighbouring units at a time."""
    ends = (units[1:] - units[:-1] != 1).nonzero()[0] + 1 if len(units) > 1 else units[1:]
    if len(ends) > max(4, len(units) // 2) and units.min() >= 0 and not line.split:
        step = max(1, AT_ONCE // max(1, outside[0].size * outside.dtype.itemsize))
        for first in range(0, len(units), step):
            some = slice(first, first + step)
            if store:
                inside[units[some]] = outside[some]
            else:
                outside[some] = inside[units[some]]
        return
    for first, end in pairwise([0, *ends.tolist(), len(units)]):
        unit, part = int(units[first]), outside[first:end]
        if unit < 0:
            # Units -1 are neighbours of none but unit 0.
            part, unit = part[1:], unit + 1
            if not store:
                outside[first] = np.zeros((), outside.dtype)
        stored = inside[unit : unit + len(part)]
        if not line.split:
            np.copyto(*((stored, part) if store else (part, stored)))
        elif part.size:
            _turned(part, stored, line.nbytes // 2, store=store)


def _turned(outside: Array, inside: Array, half: int, *, store: bool) -> None:
    """Little-endian 16-bit elements outside; all high bytes, then all low bytes inside."""
    here, there = (_as_bytes(array, 2 * half) for array in (outside, inside))
    for parity, first in ((1, 0), (0, half)):
        mixed, plain = here[..., parity::2], there[..., first : first + half]
        np.copyto(*((plain, mixed) if store else (mixed, plain)))


def _as_bytes(array: Array, nbytes: int) -> Array:
    """Items of ``nbytes`` as one axis of bytes more."""
    return array.view(np.dtype((np.uint8, (nbytes,))))


def rows_in_place(plan: CachePlan, pools: Pools, layer: int, role: str) -> list[tuple[Array, int]] | None:
    """A component's rows as they lie in the pools, [units, rows, bytes] and first byte of the canonical row, by part.

    None where canonical rows must be put together: out of several fields, of heads that lie apart, or with gaps.
    """
    found: list[tuple[Array, int]] = []
    first = 0
    for region in plan.region(layer, role):
        size = region.heads * region.format.row
        (name, _), *others = region.buffers.values()
        line, *more = lines_of(region)
        view = host_view(pools[name])
        side_by_side = _together(region, line) == (size, True) and region.steps[0] * line.stride == size
        if others or more or view is None or not side_by_side or size % WORD or plan.context > 1:
            return None
        view = view.reshape(len(view), -1).view(np.uint8)
        if view.shape[1] != region.rows * size or not view.flags.c_contiguous:
            return None
        found.append((view.reshape(len(view), region.rows, size), first))
        first += size
    return found


class Field(NamedTuple):
    """Bytes of a component's rows where they lie, as words of a canonical row.

    Attributes:
        pool: [units, bytes], whose rows follow one another byte by byte.
        base: first byte in a unit, of row 0.
        step: from one row of a unit to the next.
        first: first byte in the canonical row.
        nbytes: in every row.
    """

    pool: Array
    base: int
    step: int
    first: int
    nbytes: int


def fields_in_place(plan: CachePlan, pools: Pools, layer: int, role: str) -> list[Field] | None:
    """A component's rows as they lie in the pools, field by field and head by head.

    None where fields are no words of the canonical row, where bytes of it lie nowhere, and on a device.
    """
    found: list[Field] = []
    offset = 0
    for region in plan.region(layer, role):
        size, (row_step, head_step) = region.format.row, region.steps
        lines = lines_of(region)
        if plan.context > 1 or sum(line.nbytes for line in lines) != size:
            return None
        for line in lines:
            pool = host_view(pools[region.buffers[line.buffer][0]])
            if pool is None or line.split:
                return None
            pool = pool.reshape(len(pool), -1).view(np.uint8) if pool.flags.c_contiguous else pool
            if pool.ndim != 2 or pool.dtype != np.uint8 or pool.strides[1] != 1:
                return None
            nbytes, whole = _together(region, line)
            for head in range(1 if whole else region.heads):
                base = line.base + head * head_step * line.stride
                found.append(Field(pool, base, row_step * line.stride, offset + head * size + line.first, nbytes))
        offset += region.heads * size
    return None if any(field.first % WORD or field.nbytes % WORD for field in found) else found


def digest(pages: Any, strips: Sequence[Strip], first_page: int) -> Array | None:
    """``Ops.digest_strips`` in host memory; None where the pages lie elsewhere."""
    held = host_view(pages)
    if held is None:
        return None
    lanes = np.zeros((len(held), 2), np.int64)
    places: dict[Any, Array] = {}
    for strip in strips:
        # The same in all layers of a ratio.
        kind = strip.numbers, strip.tokens_per_row, strip.rows
        if kind not in places:
            places[kind] = _positions(strip, first_page, len(held))
        rows = held[:, strip.start : strip.stop].reshape(len(held), strip.rows, strip.row_bytes)
        lanes += row_lanes(rows, places[kind], region_salt(strip.layer, strip.role))
    return lanes & MASK


def _positions(strip: Strip, first_page: int, pages: int) -> Array:
    """[pages, rows] of a strip's rows, -1 after the last."""
    numbers = strip.numbers[first_page * strip.rows : (first_page + pages) * strip.rows]
    found = np.full(pages * strip.rows, -1, np.int64)
    ascending = np.arange(numbers.start, numbers.stop) if isinstance(numbers, range) else np.array(numbers, np.int64)
    found[: len(numbers)] = ascending * strip.tokens_per_row
    return found.reshape(pages, strip.rows)
