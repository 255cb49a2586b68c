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
from kvcore.digest import MASK, WORD, address_of, region_salt, row_lanes
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
    """``Ops.move_strips`` in host memory; False, and nothing is done, where something lies elsewhere, or unevenly."""
    outside = host_view(pages)
    written = [outside]
    held: dict[str, Array] = {}
    for strip in strips:
        for region in plan.region(strip.layer, strip.role):
            if not region.even:
                return False
            for name, _ in region.buffers.values():
                view = host_view(pools[name])
                if view is None:
                    return False
                plain = view.ndim == 2 and view.dtype == np.uint8
                held[name] = view if plain or not view.size else view.reshape(len(view), -1).view(np.uint8)
    if store:
        written = list(held.values())
    if outside is None or not all(array is not None and array.flags.writeable for array in written):
        return False
    at = np.asarray(units)
    # Layers are alike: where their rows lie is worked out once for a kind.
    known: dict[Any, list[_Piece]] = {}
    for strip in strips:
        offset = strip.start
        for region in plan.region(strip.layer, strip.role):
            alike = (
                *(id(region.unit), region.growth, region.rows, region.copies, region.heads, region.layout),
                *(strip.numbers, strip.rows, strip.row_bytes),
            )
            pieces = known.get(alike)
            if pieces is None:
                pieces = known[alike] = [*_pieces(outside, strip, region, at, store=store)]
            for piece in pieces:
                pool = held[region.buffers[piece.buffer][0]] if piece.buffer else None
                if pool is None or len(pool):
                    _copy(outside, offset, pool, piece, store=store)
            offset += region.heads * region.format.row
    return True


class _Piece(NamedTuple):
    """Rows of a run that follow one another evenly in pages and in units, of every layer that is alike.

    Attributes:
        buffer: of the layout; "" where nothing is stored: pages have zeros there.
        item: bytes that are copied together.
        shape: [units, rows, heads] of items in pages.
        first: byte of a strip's part at which they begin there.
        steps: from one to the next there.
        place: first byte of a unit at which they begin.
        apart: from one row, and one head, to the next in a unit.
        units: in which they lie.
        runs: (first page, how many, first unit) of neighbouring units; None where there are so many that units are
            taken one by one.
        half: bytes of the high halves, where those lie before the low ones; 0 elsewhere.
    """

    buffer: str
    item: np.dtype[Any]
    shape: tuple[int, int, int]
    first: int
    steps: tuple[int, int, int]
    place: int
    apart: tuple[int, int]
    units: Array
    runs: list[tuple[int, int, int]] | None
    half: int


def _gaps(lines: Sequence[Lines], whole: int) -> Iterator[tuple[int, int]]:
    """(first, nbytes) of what is in no run."""
    ends = [(0, 0), *((line.first, line.first + line.nbytes) for line in lines), (whole, whole)]
    return ((end, first - end) for (_, end), (first, _) in pairwise(ends) if first > end)


def _pieces(pages: Array, strip: Strip, region: Region, at: Array, *, store: bool) -> Iterator[_Piece]:
    """All pieces of a strip's part in a region."""
    lines, whole = lines_of(region), region.format.row
    if not store and sum(line.nbytes for line in lines) < whole:
        # Pads that a layout does not store.
        lines = *(Lines("", 0, 0, *gap, False) for gap in _gaps(lines, whole)), *lines
    row_step, head_step = region.steps
    for line in lines:
        nbytes, together = _together(region, line)
        heads = 1 if together else region.heads
        item = np.dtype((np.void, nbytes))
        steps = pages.strides[0], strip.row_bytes, whole
        for first, number, row, rows, units, place in _even(strip, region, at):
            runs = _runs(units, split=line.split)
            for copy in range(region.copies if store else 1):
                yield _Piece(
                    line.buffer,
                    item,
                    (number, rows, heads),
                    first * pages.strides[0] + row * strip.row_bytes + line.first,
                    steps,
                    line.base + (place + copy * region.rows) * row_step * line.stride,
                    (row_step * line.stride, head_step * line.stride),
                    units,
                    runs,
                    line.nbytes // 2 if line.split else 0,
                )


def _even(strip: Strip, region: Region, at: Array) -> Iterator[tuple[int, int, int, int, Array, int]]:
    """(first page, pages, first row there, rows, units, first row in the unit) of rows as they follow."""
    count = len(strip.numbers)
    if region.growth == "block":
        full, rest = divmod(count, strip.rows)
        full, rest = (len(at), 0) if full >= len(at) else (full, rest)
        if full:
            yield 0, full, 0, strip.rows, at[:full], 0
        if rest:
            yield full, 1, 0, rest, at[full : full + 1], 0
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
            yield 0, 1, first, end - first, at[:1], numbers[first] % region.rows


def _runs(units: Array, *, split: bool) -> list[tuple[int, int, int]] | None:
    """Neighbouring units; None where few are neighbours. Units -1 are neighbours of none but unit 0."""
    ends = (units[1:] - units[:-1] != 1).nonzero()[0] + 1 if len(units) > 1 else units[1:]
    if len(ends) > max(4, len(units) // 2) and units.min() >= 0 and not split:
        return None
    found: list[tuple[int, int, int]] = []
    for first, end in pairwise([0, *ends.tolist(), len(units)]):
        unit = int(units[first])
        if unit < 0:
            found.append((first, 1, -1))
            first, unit = first + 1, unit + 1
        if first < end:
            found.append((first, end - first, unit))
    return found


def _items(
    array: Array, unit: int, first: int, shape: tuple[int, ...], steps: tuple[int, ...], kind: np.dtype[Any]
) -> Array:
    """Items of a kind, copied together, from a byte of a unit on; ``array`` [n, bytes] may have gaps between units."""
    if array.flags.c_contiguous:
        return np.ndarray(shape, kind, array, unit * array.strides[0] + first, steps)
    there = array[unit, first : first + kind.itemsize].view(kind)
    return as_strided(there, shape, steps, writeable=array.flags.writeable)


def _together(region: Region, line: Lines) -> tuple[int, bool]:
    """(bytes that are copied together, whether those are of all heads of a row)."""
    side_by_side = region.steps[1] * line.stride == line.nbytes == region.format.row
    return (region.heads * line.nbytes, True) if side_by_side and not line.split else (line.nbytes, False)


def _copy(pages: Array, offset: int, pool: Array | None, piece: _Piece, *, store: bool) -> None:
    """Copy a piece between a strip at ``offset`` of pages and a pool, whole runs of neighbouring units at a time."""
    units, (_, rows, heads), item = piece.units, piece.shape, piece.item
    if pool is None or piece.runs is None:
        outside = _items(pages, 0, offset + piece.first, piece.shape, piece.steps, item)
        if pool is None:
            outside[...] = np.zeros((), outside.dtype)
            return
        inside = _items(pool, 0, piece.place, (len(pool), rows, heads), (pool.strides[0], *piece.apart), item)
        step = max(1, AT_ONCE // max(1, rows * heads * item.itemsize))
        for first in range(0, len(units), step):
            some = slice(first, first + step)
            if store:
                inside[units[some]] = outside[some]
            else:
                outside[some] = inside[units[some]]
        return
    apart = pool.strides[0], *piece.apart
    for first, count, unit in piece.runs:
        shape = count, rows, heads
        part = _items(pages, first, offset + piece.first, shape, piece.steps, item)
        if unit < 0:
            if not store:
                part[...] = np.zeros((), item)
            continue
        stored = _items(pool, unit, piece.place, shape, apart, item)
        if piece.half:
            _turned(part, stored, piece.half, store=store)
        elif store:
            stored[...] = part
        else:
            part[...] = stored


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
        if not region.even:
            return None
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
        pool: name of the pool.
        base: first byte in a unit, of row 0.
        step: from one row of a unit to the next.
        first: first byte in the canonical row.
        nbytes: in every row.
    """

    pool: str
    base: int
    step: int
    first: int
    nbytes: int


def fields_in_place(plan: CachePlan, layer: int, role: str) -> list[Field] | None:
    """A component's rows as they lie in the pools, field by field and head by head.

    None where fields are no words of the canonical row, and where bytes of it lie nowhere.
    """
    memo = plan.layers[layer].memo
    key = "fields in place", role
    if key not in memo:
        memo[key] = _fields(plan, layer, role)
    return memo[key]


def _fields(plan: CachePlan, layer: int, role: str) -> list[Field] | None:
    found: list[Field] = []
    offset = 0
    for region in plan.region(layer, role):
        if not region.even:
            return None
        size, (row_step, head_step) = region.format.row, region.steps
        lines = lines_of(region)
        # Zeros that are not stored may be the rest of a word, as those behind the last one are.
        ends = [0, *(_whole_words(line.first + line.nbytes) for line in lines)]
        if plan.context > 1 or ends != [*(line.first for line in lines), _whole_words(size)]:
            return None
        for line in lines:
            if line.split:
                return None
            pool, _ = region.buffers[line.buffer]
            nbytes, whole = _together(region, line)
            for head in range(1 if whole else region.heads):
                base = line.base + head * head_step * line.stride
                found.append(Field(pool, base, row_step * line.stride, offset + head * size + line.first, nbytes))
        offset += region.heads * size
    return None if any(field.first % WORD for field in found) else found


def _whole_words(nbytes: int) -> int:
    return -(-nbytes // WORD) * WORD


class Units(NamedTuple):
    """A pool in the host's memory, the bytes of each of whose units follow one another.

    Attributes:
        address: of the first.
        apart: bytes from one to the next.
        units: how many.
    """

    address: int
    apart: int
    units: int


def units_of(pool: Any) -> Units | None:
    """Where a pool lies; None on a device, and where bytes of a unit do not follow one another."""
    view = host_view(pool)
    if (
        view is None
        or not view.ndim
        or not (view.flags.c_contiguous or (view.ndim == 2 and view.dtype == np.uint8 and view.strides[1] == 1))
    ):
        return None
    return Units(address_of(view), view.strides[0], len(view))


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
