"""Launches that gather rows from the pools and decode them."""

import jax
import jax.numpy as jnp
import numpy as np

from kvcore.backends.jax_pallas.cuda.arguments import fields, floats, is_native, launched, record_of
from kvcore.backends.jax_pallas.encoding import DTYPES
from kvcore.kernels.triton.gather import (
    gather_all_kernel,
    gather_entries_kernel,
    gather_kv_kernel,
    gather_window_kernel,
    own_rows_kernel,
)
from kvcore.kernels.triton.shape import tile
from kvcore.plan import Region


def gather_window(pools, region: Region, index, window, own=None):
    """The last ``window`` rows of every request: values [Q, ring rows, dim] and positions [Q, ring rows].

    ``own`` rows [T, dim] of the step are put in as they would read once they are stored.
    """
    record, names = record_of(region)
    shape = len(index.slots), record.rows
    arguments = {
        "positions_out_ptr": jax.ShapeDtypeStruct(shape, jnp.int32),
        "slots_ptr": index.slots,
        "lengths_ptr": index.lengths,
        "WINDOW": window,
    }
    values, positions = _gathered(pools, gather_window_kernel, (*shape, record.dim), arguments, record, names)
    if own is not None:
        values = _put_own(values, own, index, record, {"LAST": True, "RING": True, "WINDOW": window, "CHUNK": 0})
    return _typed(region, values), positions


def gather_entries(pools, region: Region, index, indices, ratio, global_scale=1.0):
    """Entries by index [T, k]: values [T, k, dim], and whether each exists."""
    record, names = record_of(region, global_scale)
    arguments = {
        "valid_out_ptr": jax.ShapeDtypeStruct(indices.shape, jnp.int8),
        "indices_ptr": indices.astype(jnp.int32),
        "request_ptr": index.request_index,
        "lengths_ptr": index.lengths,
        "table_ptr": index.block_table,
        "picks": indices.shape[1],
        "table_columns": index.block_table.shape[1],
        "RATIO": ratio,
    }
    shape = *indices.shape, record.dim
    values, valid = _gathered(pools, gather_entries_kernel, shape, arguments, record, names)
    return _typed(region, values), valid != 0


def gather_all(pools, region: Region, index, ratio, columns, global_scale=1.0):
    """Every entry of every request: values [Q, columns, dim], counts [Q], positions [Q, columns]."""
    record, names = record_of(region, global_scale)
    shape = len(index.lengths), columns
    arguments = {
        "counts_out_ptr": jax.ShapeDtypeStruct(index.lengths.shape, jnp.int32),
        "positions_out_ptr": jax.ShapeDtypeStruct(shape, jnp.int32),
        "lengths_ptr": index.lengths,
        "table_ptr": index.block_table,
        "columns": columns,
        "table_columns": index.block_table.shape[1],
        "RATIO": ratio,
    }
    values, *others = _gathered(pools, gather_all_kernel, (*shape, record.dim), arguments, record, names)
    return _typed(region, values), *others


def gather_kv(pools, regions, index, own, component, columns):
    """Rows that a query of the step may see: k, v [Q, columns, heads, dim] and positions [Q, columns].

    ``own``: the step's k and v where they are not stored yet, else two times None.
    """
    seen = {"RING": component.span is not None, "WINDOW": component.window or 0, "CHUNK": component.chunk or 0}
    gathered, positions = [], None
    for region, given in zip(regions, own, strict=True):
        record, names = record_of(region)
        shape = len(index.slots), columns
        arguments = {
            "positions_out_ptr": jax.ShapeDtypeStruct(shape, jnp.int32),
            "slots_ptr": index.slots,
            "starts_ptr": index.starts,
            "lengths_ptr": index.lengths,
            "table_ptr": index.block_table,
            "columns": columns,
            "table_columns": index.block_table.shape[1],
            **seen,
        }
        shape = *shape, record.heads, record.dim
        values, positions = _gathered(pools, gather_kv_kernel, shape, arguments, record, names)
        if given is not None:
            values = _put_own(values, given, index, record, {"LAST": False, **seen})
        gathered.append(_typed(region, values))
    return *gathered, positions


def _put_own(gathered, own, index, record, constants):
    """Gathered rows [Q, columns, ...] with those of the step's own positions replaced by ``own``."""
    count = len(index.positions) * record.heads
    if not count or not gathered.size:
        return gathered
    rows, warps = tile(record, count)
    arguments = {
        "out_ptr": gathered,
        "values_ptr": floats(own),
        "positions_ptr": index.positions,
        "request_ptr": index.request_index,
        "starts_ptr": index.starts,
        "lengths_ptr": index.lengths,
        "count": count,
        "columns": gathered.shape[1],
        **constants,
        "R": record,
        "ROWS": rows,
        "NATIVE": is_native(),
    }
    grid = (-(-count // rows),)
    (changed,), _ = launched(own_rows_kernel, grid, arguments, warps=warps, written=(gathered,))
    return changed


def _gathered(pools, kernel, shape, arguments, record, names):
    """Launch a gather of rows [..., dim], one each; -> the values, then its other outputs in their order."""
    dtype = jnp.bfloat16 if record.exact else jnp.float32
    fresh = [jax.ShapeDtypeStruct(shape, dtype)]
    fresh += [value for value in arguments.values() if isinstance(value, jax.ShapeDtypeStruct)]
    count = int(np.prod(shape[:-1]))
    if not count:
        found = [jnp.zeros(one.shape, one.dtype) for one in fresh]
    else:
        rows, warps = tile(record, count)
        given = {
            "out_ptr": fresh[0],
            **arguments,
            **fields(pools, names),
            "count": count,
            "R": record,
            "ROWS": rows,
            "NATIVE": is_native(),
        }
        _, found = launched(kernel, (-(-count // rows),), given, warps=warps)
    return found


def _typed(region, values):
    """Decoded rows in the type that the format is decoded to."""
    return values.astype(DTYPES[region.format.value_code])
