"""How a region's fields lie: the runs of bytes that are moved together, and the shapes of the pools that hold them."""

from functools import cache
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from kvcore.plan import Region
from kvcore.spec.layout import LANES, TILE_BYTES, WORDS


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
        after = last.buffer, last.base + last.nbytes, last.stride, last.first + last.nbytes
        together = after == (run.buffer, run.base, run.stride, run.first)
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
    Words of scales are [units, tiles, 1, 128] uint32 for the same reason.
    """
    size = dict(region.unit.buffers)[buffer]
    if region.layout != "tpu_tile":
        return (units, size), np.uint8
    if buffer == WORDS:
        return (units, size // TILE_BYTES, 1, LANES), np.uint32
    places = [place for place in region.unit.places if place.buffer == buffer]
    stride = places[0].stride
    if stride % TILE_BYTES:
        return (units, size // TILE_BYTES, TILE_BYTES // LANES, LANES), np.uint8
    rows = region.unit.rows
    if all(region.format.field(place.field).code == "fp32" for place in places):
        return (units, rows, stride // TILE_BYTES, LANES), np.float32
    return (units, rows, stride // LANES, LANES), np.uint8


def split_bytes(stored):
    """Little-endian 16-bit elements -> all high bytes, then all low bytes."""
    return jnp.concatenate([stored[..., 1::2], stored[..., 0::2]], axis=-1)


def join_bytes(stored):
    """The inverse of ``split_bytes``."""
    half = stored.shape[-1] // 2
    return jnp.stack([stored[..., half:], stored[..., :half]], axis=-1).reshape(stored.shape)


def to_bytes(stored):
    """Elements of a pool as bytes, one axis more where they are wider."""
    return stored if stored.dtype == np.uint8 else lax.bitcast_convert_type(stored, jnp.uint8)


def from_bytes(stored, dtype):
    """Bytes [..., n] as elements of a pool, [..., n / size]."""
    if dtype == np.uint8:
        return stored
    size = dtype.itemsize
    return lax.bitcast_convert_type(stored.reshape(*stored.shape[:-1], stored.shape[-1] // size, size), dtype)


def as_elements(pool, unit, dtype):
    """A pool with units of that shape and dtype: itself, or the same bytes from another, such as [units, bytes]."""
    if pool.shape[1:] == unit and pool.dtype == dtype:
        return pool
    stored = to_bytes(pool).reshape(pool.shape[0], -1)
    return from_bytes(stored, np.dtype(dtype)).reshape(pool.shape[0], *unit)
