"""Gather: rows from the pools, decoded to dense arrays with their positions. Rows that don't exist read as zeros."""

import triton
import triton.language as tl

from kvcore.kernels.triton.address import head_of, locate
from kvcore.kernels.triton.codes import load_float
from kvcore.kernels.triton.rows import as_stored, channels, load_rows, store_dense


@triton.jit(do_not_specialize=["count"])
def gather_window_kernel(
    out_ptr, positions_out_ptr, codes_ptr, scales_ptr, plain_ptr, slots_ptr, lengths_ptr, count, WINDOW: tl.constexpr,
    R: tl.constexpr, ROWS: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """The last min(length, WINDOW) positions of each request, ascending: out [requests, R.rows, dim], count rows."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < count
    request = row // R.rows
    length = tl.load(lengths_ptr + request, mask=inside, other=0)
    position = tl.maximum(length - WINDOW, 0) + row % R.rows
    position = tl.where(inside & (position < length), position, -1)
    unit, place = locate(request, position, slots_ptr, slots_ptr, 0, R)
    valid = unit >= 0
    x = load_rows(unit, place, valid, codes_ptr, scales_ptr, plain_ptr, R, NATIVE)
    store_dense(out_ptr, row.to(tl.int64) * R.dim, x, channels(R), inside, R)
    tl.store(positions_out_ptr + row, tl.where(valid, position, -1), mask=inside)


@triton.jit(do_not_specialize=["count", "topk", "table_columns"])
def gather_entries_kernel(
    out_ptr, valid_out_ptr, codes_ptr, scales_ptr, plain_ptr, indices_ptr, request_ptr, lengths_ptr, table_ptr, count,
    topk, table_columns, RATIO: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Entries by logical index: indices [tokens, topk] -> out [tokens, topk, dim] and valid bytes; count rows."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < count
    request = tl.load(request_ptr + row // topk, mask=inside, other=-1)
    entry = tl.load(indices_ptr + row, mask=inside, other=-1)
    entries = tl.load(lengths_ptr + request, mask=request >= 0, other=0) // RATIO
    entry = tl.where((entry >= 0) & (entry < entries), entry, -1).to(tl.int32)
    unit, place = locate(request, entry, table_ptr, table_ptr, table_columns, R)
    valid = unit >= 0
    x = load_rows(unit, place, valid, codes_ptr, scales_ptr, plain_ptr, R, NATIVE)
    store_dense(out_ptr, row.to(tl.int64) * R.dim, x, channels(R), inside, R)
    tl.store(valid_out_ptr + row, valid.to(tl.int8), mask=inside)


@triton.jit(do_not_specialize=["count", "columns", "table_columns"])
def gather_all_kernel(
    out_ptr, counts_out_ptr, positions_out_ptr, codes_ptr, scales_ptr, plain_ptr, lengths_ptr, table_ptr, count,
    columns, table_columns, RATIO: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Every entry of every request: out [requests, columns, dim], counts [requests], positions [requests, columns]."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < count
    request = row // columns
    entry = row % columns
    entries = tl.load(lengths_ptr + request, mask=inside, other=0) // RATIO
    tl.store(counts_out_ptr + request, entries, mask=inside & (entry == 0))
    entry = tl.where(inside & (entry < entries), entry, -1)
    unit, place = locate(request, entry, table_ptr, table_ptr, table_columns, R)
    valid = unit >= 0
    x = load_rows(unit, place, valid, codes_ptr, scales_ptr, plain_ptr, R, NATIVE)
    store_dense(out_ptr, row.to(tl.int64) * R.dim, x, channels(R), inside, R)
    tl.store(positions_out_ptr + row, tl.where(valid, entry * RATIO, -1), mask=inside)


@triton.jit
def first_seen(start, length, RING: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """First position that the step's first query sees; the last position if it brings no token; 0 without RING."""
    first = tl.zeros_like(start)
    if RING:
        query = tl.where(start < length, start, tl.maximum(length - 1, 0))
        if WINDOW:
            first = tl.maximum(query + 1 - WINDOW, 0)
        else:
            first = query // CHUNK * CHUNK
    return first


@triton.jit(do_not_specialize=["count", "columns", "table_columns"])
def gather_kv_kernel(
    out_ptr, positions_out_ptr, codes_ptr, scales_ptr, plain_ptr, slots_ptr, starts_ptr, lengths_ptr, table_ptr, count,
    columns, table_columns, RING: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, R: tl.constexpr,
    ROWS: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Positions that a query of the step may see: out [requests, columns, heads, dim], positions [requests, columns].

    Every position below the length, with RING from ``first_seen`` on. WINDOW and CHUNK are 0 where they don't apply.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < count
    cell = row // R.heads
    request = cell // columns
    length = tl.load(lengths_ptr + request, mask=inside, other=0)
    start = tl.load(starts_ptr + request, mask=inside, other=0)
    position = cell % columns + first_seen(start, length, RING, WINDOW, CHUNK)
    position = tl.where(inside & (position < length), position, -1)
    unit, place = locate(request, position, slots_ptr, table_ptr, table_columns, R)
    valid = unit >= 0
    head = head_of(row, R)
    x = load_rows(unit, place * R.heads + head, valid, codes_ptr, scales_ptr, plain_ptr, R, NATIVE)
    store_dense(out_ptr, row.to(tl.int64) * R.dim, x, channels(R), inside, R)
    tl.store(positions_out_ptr + cell, tl.where(valid, position, -1), mask=inside & (head == 0))


@triton.jit(do_not_specialize=["count", "columns"])
def own_rows_kernel(
    out_ptr, values_ptr, positions_ptr, request_ptr, starts_ptr, lengths_ptr, count, columns, LAST: tl.constexpr,
    RING: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    """Put the step's own rows, values [tokens, heads, dim], where a gather would put them once they were stored.

    LAST: the gather starts at what the step's last query sees, not its first.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < count
    token = row // R.heads
    position = tl.load(positions_ptr + token, mask=inside, other=-1)
    request = tl.load(request_ptr + token, mask=inside, other=-1)
    known = (position >= 0) & (request >= 0)
    length = tl.load(lengths_ptr + request, mask=known, other=0)
    start = length if LAST else tl.load(starts_ptr + request, mask=known, other=0)
    column = position - first_seen(start, length, RING, WINDOW, CHUNK)
    keep = known & (column >= 0) & (column < columns)
    channel = channels(R)
    source = values_ptr + row.to(tl.int64)[:, None, None] * R.dim + channel
    x = load_float(source, keep[:, None, None] & (channel < R.dim))
    narrow: tl.constexpr = values_ptr.dtype.element_ty != tl.float32
    at = ((request.to(tl.int64) * columns + column) * R.heads + head_of(row, R)) * R.dim
    store_dense(out_ptr, at, as_stored(x, R, narrow, NATIVE), channel, keep, R)
