"""Where the bytes of exported strips lie: the tables of ``kernels.strips`` and ``kernels.checksum``, made on the host.

Fields that lie side by side both in a unit and in the canonical row are one run. A run is copied in the widest words
that all its addresses are multiples of.
"""

from functools import cache, lru_cache
from itertools import product
from typing import NamedTuple

import numpy as np

from kvcore.digest import region_salt
from kvcore.kernels.triton import checksum
from kvcore.kernels.triton.strips import ENTRY
from kvcore.plan import Region

MOST_WIDE = 8
"""Bytes of the widest word."""
SIZES = 9
"""Leading integers of an entry that are bytes before they become words; of a pool's address only multiples matter."""


class Run(NamedTuple):
    """Neighbouring bytes of a row.

    Attributes:
        buffer: of the layout; "" for bytes that are not stored and read as zeros.
        base: first byte in a unit.
        stride: bytes from one format row of a unit to the next.
        first: first byte in the canonical row.
        nbytes: of the run.
    """

    buffer: str
    base: int
    stride: int
    first: int
    nbytes: int


def runs(region: Region) -> tuple[Run, ...] | None:
    """Runs of a region's rows, which together are the whole row; None where bytes of an element lie apart."""
    return _runs(region.unit)


@cache
def _runs(unit):
    found: list[Run] = []
    end = 0
    for place in sorted(unit.places, key=lambda place: unit.format.byte_range(place.field)):
        first, last = unit.format.byte_range(place.field)
        if place.split:
            return None
        if first > end:
            found.append(Run("", 0, 0, end, first - end))
        run = Run(place.buffer, place.base, place.stride, first, place.nbytes)
        before = found[-1] if found else None
        if before and (before.buffer, before.stride, before.base + before.nbytes) == (run.buffer, run.stride, run.base):
            found[-1] = before._replace(nbytes=before.nbytes + run.nbytes)
        else:
            found.append(run)
        end = last
    if end < unit.format.row:
        found.append(Run("", 0, 0, end, unit.format.row - end))
    return tuple(found)


def of_move(plan, pools, strips, grain, *, store):
    """[(bytes of a word, [runs, ENTRY] int64)]; None where a layout stores the bytes of an element apart.

    ``grain``: bytes that all pages begin at multiples of. With ``store`` every copy of a row is moved to.
    """
    entries = []
    for strip in strips:
        offset, numbers = strip.start, strip.numbers
        for region in plan.region(strip.layer, strip.role):
            found = runs(region)
            if found is None:
                return None
            row_step, head_step = region.steps
            for run, copy in product(found, range(region.copies if store else 1)):
                pool = pools[region.buffers[run.buffer][0]] if run.buffer else None
                place = (0, 0) if pool is None else (pool.data_ptr(), pool.stride(0))
                base = run.base + copy * region.rows * row_step * run.stride
                inside = *place, base, row_step * run.stride, head_step * run.stride, run.nbytes
                outside = offset + run.first, strip.row_bytes, region.format.row
                entries.append((*inside, *outside, region.heads, strip.rows, region.rows, numbers.start, len(numbers)))
            offset += region.heads * region.format.row
    whole = np.array(entries, np.int64).reshape(-1, ENTRY)
    if not len(whole):
        return []
    widths = np.gcd(np.gcd.reduce(whole[:, :SIZES], axis=1), np.gcd(grain, MOST_WIDE))
    found = []
    for width in np.unique(widths).tolist():
        table = whole[widths == width]
        table[:, 1:SIZES] //= width
        found.append((width, table))
    return found


@lru_cache(maxsize=16)  # the pages of one request come in several pieces
def of_digest(strips, grain):
    """[strips, ENTRY] int32 of ``kernels.checksum``; None where rows are not whole words of the digest."""
    sizes = [grain, *(size for strip in strips for size in (strip.start, strip.row_bytes))]
    if any(size % checksum.WORD for size in sizes):
        return None
    entries = [
        (
            *(strip.start // checksum.WORD, strip.rows, strip.row_bytes // checksum.WORD),
            *(strip.numbers.start * strip.tokens_per_row, strip.tokens_per_row, len(strip.numbers)),
            region_salt(strip.layer, strip.role),
        )
        for strip in strips
    ]
    return np.array(entries, np.int64).reshape(-1, checksum.ENTRY).astype(np.uint32).view(np.int32)
