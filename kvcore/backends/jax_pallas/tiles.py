"""Canonical rows in and out of tiled pools with the TPU's kernels: the same rows as ``rows.load`` and ``rows.store``.

A row of every buffer is a whole number of tiles, or shares one with its neighbours; pads are written as zeros.
"""

import jax.numpy as jnp
import numpy as np

from kvcore.backends.jax_pallas.calls import ROWS_A_CALL, interpreted
from kvcore.backends.jax_pallas.runs import from_bytes, join_bytes, runs, split_bytes, to_bytes
from kvcore.kernels.pallas.read_rows import read_rows
from kvcore.kernels.pallas.write_rows import write_parts, write_rows
from kvcore.plan import Region
from kvcore.spec.layout import TILE_BYTES


def load(pools, region: Region, unit, row):
    """Canonical rows [..., heads, row_bytes] of positions or entries; zeros where the unit is -1."""
    shape = unit.shape
    unit, row = _every_head(region, unit, row)
    interpret = interpreted(pools)
    fields = {}
    for buffer, (name, _) in region.buffers.items():
        pool, (stride, parts) = pools[name], _row_of(region, buffer)
        found = []
        for first in range(0, len(unit), ROWS_A_CALL):
            some = slice(first, first + ROWS_A_CALL)
            found.append(read_rows(pool, unit[some], row[some] // parts, interpret=interpret))
        stored = to_bytes(jnp.concatenate(found)) if found else jnp.zeros((0, parts * stride), jnp.uint8)
        stored = stored.reshape(len(unit), parts, stride)
        mine = jnp.arange(parts, dtype=jnp.int32)[None] == (row % parts)[:, None]
        fields[buffer] = jnp.max(jnp.where(mine[:, :, None], stored, np.uint8(0)), axis=1)
    pieces = []
    end = 0
    for run in runs(region):
        stored = fields[run.buffer][:, run.base : run.base + run.nbytes]
        pieces.append(jnp.zeros((len(unit), run.first - end), jnp.uint8))
        pieces.append(join_bytes(stored) if run.split else stored)
        end = run.first + run.nbytes
    pieces.append(jnp.zeros((len(unit), region.format.row - end), jnp.uint8))
    return jnp.concatenate(pieces, axis=1).reshape(*shape, region.heads, region.format.row)


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
    unit, row = _every_head(region, unit, row)
    rows = rows.reshape(len(unit), region.format.row)
    interpret = interpreted(pools)
    for buffer, (name, _) in region.buffers.items():
        stride, parts = _row_of(region, buffer)
        pieces = []
        end = 0
        for run in sorted((run for run in runs(region) if run.buffer == buffer), key=lambda run: run.base):
            stored = rows[:, run.first : run.first + run.nbytes]
            pieces.append(jnp.zeros((len(unit), run.base - end), jnp.uint8))
            pieces.append(split_bytes(stored) if run.split else stored)
            end = run.base + run.nbytes
        pieces.append(jnp.zeros((len(unit), stride - end), jnp.uint8))
        pool = pools[name]
        stored = from_bytes(jnp.concatenate(pieces, axis=1), pool.dtype)
        for first in range(0, len(unit), ROWS_A_CALL):
            some = slice(first, first + ROWS_A_CALL)
            if parts == 1:
                tiles = stored[some].reshape(-1, *pool.shape[2:])
                pool = write_rows(pool, unit[some], row[some], tiles, interpret=interpret)
            else:
                tile = stored[some].reshape(-1, 1, 4 // parts, 128)
                tile = jnp.broadcast_to(tile, (len(tile), parts, *tile.shape[2:]))
                pool = write_parts(pool, unit[some], row[some], tile, interpret=interpret)
        pools = pools.replace(name, pool)
    return pools


def _every_head(region: Region, unit, row):
    """Units and rows [n] of every head of positions or entries [...], flat."""
    heads = jnp.arange(region.heads, dtype=jnp.int32)
    row = row.reshape(-1)[:, None] * region.heads + heads[None]
    unit = jnp.broadcast_to(unit.reshape(-1)[:, None], row.shape)
    return unit.reshape(-1), row.reshape(-1)


def _row_of(region: Region, buffer: str) -> tuple[int, int]:
    """(bytes of a row in a buffer, rows that share a tile)."""
    stride = next(place.stride for place in region.unit.places if place.buffer == buffer)
    return stride, max(1, TILE_BYTES // stride)
