"""Launches that encode and store: rows of the step, entries that the caller compressed, raw rows of the tails."""

import numpy as np

from kvcore.backends.jax_pallas.cuda.arguments import fields, floats, is_native, record_of, tail_of, tails, updated
from kvcore.kernels.triton.append import append_kernel, append_rotated_kernel, store_entries_kernel
from kvcore.kernels.triton.record import power_of_two
from kvcore.kernels.triton.shape import tile
from kvcore.kernels.triton.tail import append_tail_kernel
from kvcore.plan import Region


def append(pools, region: Region, index, values, global_scale=1.0):
    """Pools with values [T, dim] or [T, heads, dim] of the step's tokens encoded and stored at their positions."""
    record, names = record_of(region, global_scale)
    count = len(index.positions) * record.heads
    if not count:
        return pools
    rows, warps = tile(record, count)
    arguments = {
        "values_ptr": floats(values),
        **fields(pools, names),
        "positions_ptr": index.positions,
        "request_ptr": index.request_index,
        "slots_ptr": index.slots,
        "bound_ptr": index.stored if record.paged else index.lengths,
        "table_ptr": index.block_table,
        "count": count,
        "table_columns": index.block_table.shape[1],
        "R": record,
        "ROWS": rows,
        "NATIVE": is_native(),
    }
    return updated(pools, append_kernel, (-(-count // rows),), arguments, names, warps=warps)


def append_rotated(pools, region: Region, index, values, frequencies, norm_weight, eps):
    """``append`` of one head with a norm, if it has a weight, and a rotation in front."""
    record, names = record_of(region)
    count = len(index.positions)
    if not count:
        return pools
    rows, warps = tile(record, count)
    values = floats(values)
    arguments = {
        "values_ptr": values,
        **fields(pools, names),
        "positions_ptr": index.positions,
        "request_ptr": index.request_index,
        "slots_ptr": index.slots,
        "bound_ptr": index.lengths,
        "table_ptr": index.block_table,
        "norm_ptr": values if norm_weight is None else norm_weight,
        "frequencies_ptr": frequencies,
        "count": count,
        "table_columns": index.block_table.shape[1],
        "eps": np.float32(eps),
        "NORM": norm_weight is not None,
        "PAIRS": len(frequencies),
        "R": record,
        "ROWS": rows,
        "NATIVE": is_native(),
    }
    return updated(pools, append_rotated_kernel, (-(-count // rows),), arguments, names, warps=warps)


def store_entries(pools, region: Region, index, values, ratio, global_scale=1.0):
    """Pools with values [closed, dim] encoded and stored as the entries that the step completes."""
    record, names = record_of(region, global_scale)
    count, requests = len(values), len(index.starts)
    if not count:
        return pools
    rows, warps = tile(record, count)
    arguments = {
        "values_ptr": floats(values),
        **fields(pools, names),
        "starts_ptr": index.starts,
        "lengths_ptr": index.lengths,
        "stored_ptr": index.stored,
        "table_ptr": index.block_table,
        "count": count,
        "requests": requests,
        "table_columns": index.block_table.shape[1],
        "R": record,
        "RATIO": ratio,
        "REQUESTS": 64 if requests <= 64 else 256,
        "SPREAD": count < 2 * requests,
        "ROWS": rows,
        "NATIVE": is_native(),
    }
    return updated(pools, store_entries_kernel, (-(-count // rows),), arguments, names, warps=warps)


def append_tail(layer, pools, index, kv, score, *, role):
    """Pools with raw compressor rows kv and score [T, width] stored at slot·R + p mod R."""
    record, names = tail_of(layer, role)
    count = len(index.positions)
    if not count:
        return pools
    columns = power_of_two(record.width)
    rows = 1 if count <= 2048 else max(1, 2048 // columns)
    arguments = {
        "kv_ptr": floats(kv),
        "score_ptr": floats(score),
        **tails(pools, names),
        "positions_ptr": index.positions,
        "request_ptr": index.request_index,
        "slots_ptr": index.slots,
        "lengths_ptr": index.lengths,
        "count": count,
        "T": record,
        "ROWS": rows,
        "COLUMNS": columns,
    }
    warps = max(1, min(8, rows * columns // 256))
    return updated(pools, append_tail_kernel, (-(-count // rows),), arguments, names, warps=warps)
