"""Canonical rows in and out of tiled pools with the TPU's kernels: the same rows as ``rows.load`` and ``rows.store``.

A row of every buffer is a whole number of tiles, or shares one with its neighbours; pads are written as zeros.
"""

import math
from functools import cache
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from kvcore.backends.jax_pallas.calls import ROWS_A_CALL, TILED, interpreted
from kvcore.backends.jax_pallas.runs import from_bytes, join_bytes, runs, split_bytes, to_bytes
from kvcore.kernels.pallas import states
from kvcore.kernels.pallas.lines import buffers_of
from kvcore.kernels.pallas.read_rows import read_rows
from kvcore.kernels.pallas.write_rows import write_parts, write_rows
from kvcore.plan import Region
from kvcore.spec.layout import LANES, LINES_ACROSS, TILE_BYTES, WORDS


def load(pools, region: Region, unit, row):
    """Canonical rows [..., heads, row_bytes] of positions or entries; zeros where the unit is -1."""
    shape = unit.shape
    fields = {buffer: _stored(pools, region, buffer, unit, row) for buffer in region.buffers}
    pieces = []
    end = 0
    for run in runs(region):
        stored = fields[run.buffer][:, run.base : run.base + run.nbytes]
        pieces.append(jnp.zeros((len(stored), run.first - end), jnp.uint8))
        pieces.append(join_bytes(stored) if run.split else stored)
        end = run.first + run.nbytes
    pieces.append(jnp.zeros((unit.size * region.heads, region.format.row - end), jnp.uint8))
    return jnp.concatenate(pieces, axis=1).reshape(*shape, region.heads, region.format.row)


def _stored(pools, region: Region, buffer: str, unit, row):
    """What one buffer holds of rows, [n · heads, its bytes of one]; zeros where the unit is -1."""
    name, _ = region.buffers[buffer]
    moved = _moved(region, buffer)
    units, rows = _every(region, moved, unit, row)
    found = []
    at_once = ROWS_A_CALL // moved.step
    for first in range(0, len(units), at_once):
        some = slice(first, first + at_once)
        at = units[some], rows[some] * moved.step // moved.parts
        found.append(read_rows(pools[name], *at, count=moved.tiles, interpret=interpreted(pools)))
    size = moved.tiles * moved.item
    stored = to_bytes(jnp.concatenate(found)) if found else jnp.zeros((0, size), jnp.uint8)
    stored = stored.reshape(len(units), size)
    begin, piece = (rows * moved.step % moved.parts)[:, None], moved.item // moved.parts
    mine = stored[:, : moved.nbytes]
    for part in range(1, (size - moved.nbytes) // piece + 1):
        mine = jnp.where(begin == part, stored[:, part * piece : part * piece + moved.nbytes], mine)
    return mine.reshape(unit.size * region.heads, moved.stride)


def load_bf16(pools, region: Region, unit, row):
    """Rows of a region in bf16 as numbers, [..., heads, dim]: joining bytes to bytes would move lanes."""
    (run,) = runs(region)
    stored = _stored(pools, region, run.buffer, unit, row)
    halves = [stored[:, first : first + run.nbytes // 2] for first in (run.base, run.base + run.nbytes // 2)]
    high, low = (half.astype(jnp.uint16) for half in halves)
    bits = high << jnp.uint16(8) | low
    return lax.bitcast_convert_type(bits, jnp.bfloat16).reshape(*unit.shape, region.heads, -1)


def load_fp32(pools, region: Region, unit, row):
    """Rows of a region of fp32 pools and one head as numbers, [..., dim]; joining bytes would move lanes."""
    interpret = interpreted(pools)
    flat = unit.reshape(-1), row.reshape(-1)
    fields = []
    # A kernel over no rows has no block that it could be given.
    if not len(flat[0]):
        return jnp.zeros((*unit.shape, region.format.row // 4), jnp.float32)
    for run in runs(region):
        found = read_rows(pools[region.buffers[run.buffer][0]], *flat, interpret=interpret)
        found = found.reshape(len(found), found.shape[1] * found.shape[2])
        fields.append(found[:, run.base // 4 : (run.base + run.nbytes) // 4])
    values = jnp.concatenate(fields, axis=1)
    return values.reshape(*unit.shape, values.shape[1])


def store(pools, region: Region, unit, row, rows):
    """Pools with canonical rows [..., heads, row_bytes] written; nothing happens where the unit is -1."""
    rows = rows.reshape(unit.size * region.heads, region.format.row)
    interpret = interpreted(pools)
    for buffer, (name, _) in region.buffers.items():
        moved = _moved(region, buffer)
        pieces = []
        end = 0
        for run in sorted((run for run in runs(region) if run.buffer == buffer), key=lambda run: run.base):
            stored = rows[:, run.first : run.first + run.nbytes]
            pieces.append(jnp.zeros((len(rows), run.base - end), jnp.uint8))
            pieces.append(split_bytes(stored) if run.split else stored)
            end = run.base + run.nbytes
        pieces.append(jnp.zeros((len(rows), moved.stride - end), jnp.uint8))
        pool = pools[name]
        units, numbers = _every(region, moved, unit, row)
        stored = jnp.concatenate(pieces, axis=1).reshape(len(units), moved.nbytes)
        at_once = ROWS_A_CALL // moved.step
        for first in range(0, len(units), at_once):
            some = slice(first, first + at_once)
            if moved.parts == 1:
                tiles = from_bytes(stored[some], pool.dtype).reshape(-1, moved.tiles, *pool.shape[2:])
                pool = write_rows(pool, units[some], numbers[some] * moved.step, tiles, interpret=interpret)
            else:
                # Rows across tiles are lines that share one, as shorter rows do.
                every = stored[some].reshape(-1, moved.item // moved.parts)
                piece = jnp.arange(moved.step, dtype=jnp.int32)[None]
                number = (numbers[some, None] * moved.step + piece).reshape(-1)
                tile = from_bytes(jnp.tile(every, (1, moved.parts)), pool.dtype).reshape(-1, *pool.shape[2:])
                given = jnp.repeat(units[some], moved.step), number, tile
                pool = write_parts(pool, *given, parts=moved.parts, interpret=interpret)
        pools = pools.replace(name, pool)
    return pools


def keeps_states(pools, region: Region) -> bool:
    """Whether states are moved as numbers: heads of whole tiles side by side, in a format that the kernels know."""
    if pools.kernels not in TILED or region.role != "state" or not states.supports(region.format):
        return False
    if region.copies != 1 or region.steps[1] != 1:
        return False
    place, *scales = region.unit.places
    if place.base or place.stride != place.nbytes or any(other.buffer != WORDS for other in scales):
        return False
    # Four lines of bytes are read as one of words, in whole registers.
    return buffers_of(region)[0].fp32 or place.nbytes % (8 * TILE_BYTES) == 0


def load_states(pools, region: Region, unit, row, shape: tuple[int, ...]):
    """States [n, *shape] at (unit, row) [n]; zeros where the unit is -1: no copy of them lies anywhere in between."""
    held = [pools[name] for name, _ in region.buffers.values()]
    found = states.read_states(region.format, held, unit, row, _in_lines(shape), interpret=interpreted(pools))
    return found.reshape(len(unit), *shape)


def store_states(pools, region: Region, values, source, unit, row, count):
    """Pools with states ``values[source]`` [m, heads, ...] at (unit, row) [n], and NaN in ``count`` - 1 rows before."""
    names = [name for name, _ in region.buffers.values()]
    values = values if values.dtype == jnp.bfloat16 else values.astype(jnp.float32)
    values = values.reshape(len(values), *_in_lines(values.shape[1:]))
    given = [pools[name] for name in names], values, source, unit, row, count
    written = states.write_states(region.format, *given, rows=region.rows, interpret=interpreted(pools))
    for name, pool in zip(names, written, strict=True):
        pools = pools.replace(name, pool)
    return pools


def _in_lines(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """(heads, a, b) of a state's shape: as it is where its rows are whole lines, else lines side by side."""
    heads, *inner = shape
    if len(inner) == 2 and inner[1] % LANES == 0:
        return heads, inner[0], inner[1]
    return heads, math.prod(inner) // LANES, LANES


class _Moved(NamedTuple):
    """What of a buffer moves together: all heads of a position where those fill tiles or a fraction of one.

    Attributes:
        heads: rows that move together, all of a position's or one.
        stride: bytes of a row.
        nbytes: bytes that move together.
        item: bytes of an item of the pool's second axis.
        tiles: items that hold those.
        parts: equal pieces of an item, 1 where what moves is whole items.
        step: pieces that what moves takes.
    """

    heads: int
    stride: int
    nbytes: int
    item: int
    tiles: int
    parts: int
    step: int


@cache
def _moved(region: Region, buffer: str) -> _Moved:
    stride = next(place.stride for place in region.unit.places if place.buffer == buffer)
    if stride // LANES in LINES_ACROSS:
        return _Moved(1, stride, stride, TILE_BYTES, 2, TILE_BYTES // LANES, stride // LANES)
    # Rows of whole tiles are items of the pool, however many tiles they have.
    item = TILE_BYTES if stride % TILE_BYTES else stride
    together = region.heads * stride
    heads = region.heads if together % item == 0 or item % together == 0 else 1
    nbytes = heads * stride
    tiles, parts = max(1, nbytes // item), max(1, item // nbytes)
    return _Moved(heads, stride, nbytes, item, tiles, parts, tiles)


def _every(region: Region, moved: _Moved, unit, row):
    """Units [n], and numbers in units of what moves together [n], of positions or entries [...], flat."""
    groups = region.heads // moved.heads
    row = row.reshape(-1)[:, None] * groups + jnp.arange(groups, dtype=jnp.int32)[None]
    unit = jnp.broadcast_to(unit.reshape(-1)[:, None], row.shape)
    return unit.reshape(-1), row.reshape(-1)
