"""Where rows lie: from (request, position or entry) to a place in the pools, and canonical rows in and out of it.

An address is a pure function of the slot, the position and the block table, kept as two coordinates, (unit, place in
the unit): one flat offset would outgrow int32. A row that does not exist has unit -1, which lies outside every pool;
reads of it are zeros and writes to it are dropped. JAX by itself would wrap -1 around to the last unit.
"""

import math
from functools import cache
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from kvcore.backends.jax_pallas.encoding import decode, encode
from kvcore.plan import Region
from kvcore.spec import KV, Entries, Tail, Window
from kvcore.spec.layout import LANES, TILE_BYTES

OUTSIDE = lax.GatherScatterMode.FILL_OR_DROP


def locate(region: Region, index, request, number):
    """(unit, row in the unit) of rows ``number`` of requests, both of one shape; unit -1 where there is none.

    ``number`` is a position, or an entry's number in a paged component of compressed entries.
    """
    exists = (request >= 0) & (number >= 0)
    number = jnp.where(exists, number, 0)
    if region.growth == "slot":
        unit = of(index.slots, request)
    else:
        column = number // region.rows
        exists &= column < index.block_table.shape[1]
        unit = of(index.block_table, request, jnp.where(exists, column, 0))
    return jnp.where(exists, unit, -1), number % region.rows


def load(pools, region: Region, unit, row):
    """Canonical rows [..., heads, row_bytes] of positions or entries; zeros where the unit is -1."""
    pieces = []
    end = 0
    for run in runs(region):
        pool = pools[region.buffers[run.buffer][0]]
        size = pool.dtype.itemsize
        where, width = _places(region, run, unit, row, size)
        numbers = lax.GatherDimensionNumbers(
            offset_dims=(where.ndim - 1,), collapsed_slice_dims=(0,), start_index_map=(0, 1)
        )
        flat = pool.reshape(pool.shape[0], -1)
        stored = lax.gather(flat, where, numbers, (1, width), mode=OUTSIDE, fill_value=0)
        stored = _to_bytes(stored).reshape(*unit.shape, region.heads, run.nbytes)
        pieces.append(jnp.zeros((*unit.shape, region.heads, run.first - end), jnp.uint8))
        pieces.append(join_bytes(stored) if run.split else stored)
        end = run.first + run.nbytes
    pieces.append(jnp.zeros((*unit.shape, region.heads, region.format.row - end), jnp.uint8))
    return jnp.concatenate([piece for piece in pieces if piece.shape[-1]], axis=-1)


def store(pools, region: Region, unit, row, rows):
    """Pools with canonical rows [..., heads, row_bytes] written; nothing happens where the unit is -1."""
    written = dict(pools)
    for run in runs(region):
        name = region.buffers[run.buffer][0]
        pool = written[name]
        stored = rows[..., run.first : run.first + run.nbytes]
        stored = split_bytes(stored) if run.split else stored
        where, width = _places(region, run, unit, row, pool.dtype.itemsize)
        stored = _from_bytes(stored, pool.dtype).reshape(*where.shape[:-1], width)
        numbers = lax.ScatterDimensionNumbers(
            update_window_dims=(where.ndim - 1,), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0, 1)
        )
        flat = pool.reshape(pool.shape[0], -1)
        written[name] = lax.scatter(flat, where, stored, numbers, mode=OUTSIDE).reshape(pool.shape)
    return written


def split_bytes(stored):
    """Little-endian 16-bit elements -> all high bytes, then all low bytes."""
    return jnp.concatenate([stored[..., 1::2], stored[..., 0::2]], axis=-1)


def join_bytes(stored):
    """The inverse of ``split_bytes``."""
    half = stored.shape[-1] // 2
    return jnp.stack([stored[..., half:], stored[..., :half]], axis=-1).reshape(stored.shape)


def first_token(index):
    """[Q] row of each request's first new token among the step's tokens: tokens come request by request."""
    new = index.lengths - index.starts
    return jnp.cumsum(new) - new


def read(pools, region: Region, index, request, number, own=None):
    """Canonical rows [..., heads, row_bytes] of positions: from the step's ``own`` rows if new, else stored.

    Args:
        own: canonical rows [T, heads, row_bytes] of the step's tokens, or None to read everything from the pools.
    """
    stored = load(pools, region, *locate(region, index, request, number))
    if own is None or not len(own):
        return stored
    start = of(index.starts, request)
    token = of(first_token(index), request) + number - start
    new = (request >= 0) & (number >= start)
    token = jnp.clip(token, 0, len(own) - 1)
    return jnp.where(new[..., None, None], own[token], stored)


def append(pools, region: Region, index, rows):
    """Pools with canonical rows [T, heads, row_bytes] of the step's tokens stored at their positions.

    More tokens than a ring holds: rows that a later token of the same step overwrites are left out, so each byte has
    one writer. Padding tokens write nowhere.
    """
    unit, row = locate(region, index, index.request_index, index.positions)
    if region.growth == "slot":
        first = of(index.lengths, index.request_index) - region.rows
    else:
        # Rows that were taken over at admission are not written again: other requests read them.
        first = of(index.stored, index.request_index)
    unit = jnp.where(index.positions >= first, unit, -1)
    return store(pools, region, unit, row, rows)


def encode_rows(region: Region, values, global_scale=1.0):
    """Values [n, d] or [n, heads, d] -> canonical rows [n, heads, row_bytes] of a region."""
    flat = values.reshape(len(values) * region.heads, region.format.dim)
    return encode(region.format, flat, global_scale).reshape(len(values), region.heads, region.format.row)


def decode_rows(region: Region, rows, global_scale=1.0):
    """Canonical rows [..., row_bytes] of a region -> values [..., dim]."""
    flat = rows.reshape(math.prod(rows.shape[:-1]), region.format.row)
    return decode(region.format, flat, global_scale=global_scale).reshape(*rows.shape[:-1], region.format.dim)


def of(array, request, *further):
    """``array[request]`` of a [Q, ...] array, -1 where the request is -1; also where there are no requests at all."""
    if not array.size:
        return jnp.full_like(request, -1)
    found = array.at[(jnp.clip(request, 0, len(array) - 1), *further)].get(mode="promise_in_bounds")
    return jnp.where(request >= 0, found, -1)


def live(component, length):
    """``component.live``, as (first, end) arrays of ``length``'s shape."""
    match component:
        case Entries():
            return jnp.zeros_like(length), length // component.ratio
        case Tail():
            closed = length // component.ratio - (1 if component.overlap else 0)
            return jnp.maximum(closed * component.ratio, 0), length
        case Window():
            return first_visible(component, length - 1), length
        case KV(storage="ring"):
            return jnp.where(length == 0, 0, first_visible(component, length - 1)), length
    return jnp.zeros_like(length), length


def visible(component, start, length):
    """``component.visible``, as (first, end) arrays."""
    first, _ = live(component, length)
    if component.storage != "ring":
        return first, length
    return jnp.where(start == length, first, first_visible(component, start)), length


def first_visible(component, position):
    """``component.first_visible``, of an array of positions."""
    if component.window is not None:
        return jnp.maximum(position + 1 - component.window, 0)
    if component.chunk is not None:
        return position // component.chunk * component.chunk
    return jnp.zeros_like(position)


def numbered(first, end, columns):
    """Row numbers first, first + 1 ... before end, for each request: [Q, columns] int32, -1 beyond the end."""
    numbers = first[:, None] + jnp.arange(columns, dtype=jnp.int32)[None]
    return jnp.where(numbers < end[:, None], numbers, -1)


def requests_like(numbers):
    """[Q, columns] request numbers beside ``numbers``."""
    return jnp.broadcast_to(jnp.arange(len(numbers), dtype=jnp.int32)[:, None], numbers.shape)


class Run(NamedTuple):
    """Fields that lie together, in a unit and in the canonical row: moved by one gather or scatter.

    Byte k of the run in row r is at ``base + r * stride + k`` of the unit's part of ``buffer``, and at ``first + k`` of
    the canonical row.
    """

    buffer: str
    base: int
    stride: int
    nbytes: int
    first: int
    split: bool


@cache
def runs(region: Region) -> tuple[Run, ...]:
    """The runs of a region's rows, in canonical order."""
    found: list[Run] = []
    for place in sorted(region.unit.places, key=lambda place: region.format.byte_range(place.field)):
        first, _ = region.format.byte_range(place.field)
        run = Run(place.buffer, place.base, place.stride, place.nbytes, first, place.split)
        last = found[-1] if found else run
        together = (last.buffer, last.base + last.nbytes, last.stride, last.first + last.nbytes) == run[:3] + (first,)
        if found and together and not (last.split or run.split):
            found[-1] = last._replace(nbytes=last.nbytes + run.nbytes)
        else:
            found.append(run)
    return tuple(found)


def pool_shape(region: Region, buffer: str, units: int):
    """(shape, dtype) of a pool: [units, bytes of a unit] uint8, but whole tiles for ``tpu_tile``.

    On a TPU a row is moved by one DMA only if it is a whole tile of the array, so there the last two axes are a row's
    tile: [units, rows, 4n, 128] uint8; [units, tiles, 4, 128] where several short rows share a tile; and
    [units, rows, n, 128] fp32 for fp32 rows, since bytes cannot be joined to wider elements without moving lanes.
    """
    size = dict(region.unit.buffers)[buffer]
    if region.layout != "tpu_tile":
        return (units, size), np.uint8
    places = [place for place in region.unit.places if place.buffer == buffer]
    stride = places[0].stride
    if stride % TILE_BYTES:
        return (units, size // TILE_BYTES, TILE_BYTES // LANES, LANES), np.uint8
    rows = region.unit.rows
    if all(region.format.field(place.field).code == "fp32" for place in places):
        return (units, rows, stride // TILE_BYTES, LANES), np.float32
    return (units, rows, stride // LANES, LANES), np.uint8


def _places(region: Region, run: Run, unit, row, size: int):
    """(unit, first element) of every piece of a run as indices [..., 2], and the elements of a piece.

    Heads that lie side by side are one piece, others one each: [..., heads, 2].
    """
    row = row * region.heads
    width = run.nbytes
    if run.stride == run.nbytes and not run.split:
        width *= region.heads
    else:
        row = row[..., None] + jnp.arange(region.heads, dtype=jnp.int32).reshape((1,) * row.ndim + (-1,))
        unit = jnp.broadcast_to(unit[..., None], row.shape)
    return jnp.stack([unit, (run.base + row * run.stride) // size], axis=-1), width // size


def _to_bytes(stored):
    return stored if stored.dtype == np.uint8 else lax.bitcast_convert_type(stored, jnp.uint8)


def _from_bytes(stored, dtype):
    if dtype == np.uint8:
        return stored
    size = dtype.itemsize
    return lax.bitcast_convert_type(stored.reshape(*stored.shape[:-1], stored.shape[-1] // size, size), dtype)
