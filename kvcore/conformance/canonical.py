"""Canonical rows of pools that lie on the host, read and written by the layout table alone.

Backends are compared on what their pools hold, not on what their own readers say about it: a writer and a reader that
are wrong in the same way would agree with each other.
"""

from collections.abc import Mapping

import numpy as np

from kvcore.plan import CachePlan, Region
from kvcore.spec import Format

Bytes = np.ndarray
POISON = 0xFF
"""Every byte of a pool before a check fills in the rows that may be read: NaN in most codes, row -1 in none."""


def poisoned(plan: CachePlan) -> dict[str, Bytes]:
    """The pools of a plan as host arrays [units, bytes of a unit], poison everywhere."""
    return {
        name: np.full((plan.units(region), size), POISON, np.uint8)
        for region in plan.regions
        for name, size in region.buffers.values()
    }


def read_rows(pools: Mapping[str, Bytes], region: Region) -> Bytes:
    """Every row of a region's pool, live or not, copies as further rows: [units, places, heads, row_bytes].

    Pads that are not stored are zero.
    """
    count = region.places * region.heads
    units = len(pools[next(iter(region.buffers.values()))[0]])
    rows = np.zeros((units, count, region.format.row), np.uint8)
    for place in region.unit.places:
        first, last = region.format.byte_range(place.field)
        stored = pools[region.buffers[place.buffer][0]][:, _offsets(place, count)]
        rows[:, :, first:last] = _join(stored) if place.split else stored
    return rows[:, _numbers(region)]


def write_rows(pools: Mapping[str, Bytes], region: Region, units: Bytes, numbers: Bytes, rows: Bytes) -> None:
    """Write rows [n, heads, row_bytes] at row ``numbers`` [n] of ``units`` [n], in place and in every copy."""
    for place in region.unit.places:
        first, last = region.format.byte_range(place.field)
        stored = rows[:, :, first:last]
        if place.split:
            stored = np.concatenate([stored[..., 1::2], stored[..., 0::2]], axis=2)
        offsets = _offsets(place, region.places * region.heads)[_numbers(region)]
        for copy in range(region.copies):
            where = units[:, None, None], offsets[numbers + copy * region.rows]
            pools[region.buffers[place.buffer][0]][where] = stored


def untouched(rows: Bytes, format: Format) -> Bytes:
    """[...] True where a row of [..., row_bytes] is still poison; pads, which some layouts don't store, don't count."""
    stored = [format.byte_range(field.name) for field in format.fields if field.name != "pad"]
    return np.logical_and.reduce([(rows[..., first:last] == POISON).all(axis=-1) for first, last in stored])


def canonical_noise(rng: np.random.Generator, count: int, format: Format) -> Bytes:
    """Random rows [count, row_bytes]; pads are zero by definition."""
    rows = rng.integers(0, 256, (count, format.row), np.uint8)
    for field in format.fields:
        if field.name == "pad":
            first, last = format.byte_range("pad")
            rows[:, first:last] = 0
    return rows


def _numbers(region: Region) -> Bytes:
    """Number of each format row in its unit: [places, heads]."""
    row, head = region.steps
    return row * np.arange(region.places)[:, None] + head * np.arange(region.heads)


def _offsets(place, count: int) -> Bytes:
    """Byte offsets in a unit of one field of every row: [count, nbytes]."""
    return place.base + place.stride * np.arange(count)[:, None] + np.arange(place.nbytes)


def _join(stored: Bytes) -> Bytes:
    """All high bytes, then all low bytes -> little-endian 16-bit elements."""
    half = stored.shape[-1] // 2
    return np.stack([stored[..., half:], stored[..., :half]], axis=-1).reshape(stored.shape)
