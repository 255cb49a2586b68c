"""Append: encode rows and scatter them to their places. One launch for any role, format and layout."""

import triton
import triton.language as tl

from kvcore.backends.torch_triton.kernels.address import closing, locate
from kvcore.backends.torch_triton.kernels.codes import load_float
from kvcore.backends.torch_triton.kernels.rows import channels, store_rows


@triton.jit
def append_kernel(
    values_ptr,
    codes_ptr,
    scales_ptr,
    plain_ptr,
    positions_ptr,
    request_ptr,
    slots_ptr,
    bound_ptr,
    table_ptr,
    count,
    table_columns,
    R: tl.constexpr,
    ROWS: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Store values [count, dim] (tokens × heads) of the step's tokens.

    ``bound_ptr`` holds a number a request: in a ring the lengths, since only the last positions are written; in blocks
    the tokens that were taken over, which are not written again.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < count
    token = row // R.heads
    position = tl.load(positions_ptr + token, mask=inside, other=-1)
    request = tl.load(request_ptr + token, mask=inside, other=-1)
    channel = channels(R)
    source = values_ptr + row.to(tl.int64)[:, None, None] * R.dim + channel
    x = load_float(source, inside[:, None, None] & (channel < R.dim))
    unit, place = locate(request, position, slots_ptr, table_ptr, table_columns, R)
    bound = tl.load(bound_ptr + request, mask=request >= 0, other=0)
    least = bound if R.paged else bound - R.rows
    valid = (unit >= 0) & (position >= least)
    store_rows(x, unit, place * R.heads + row % R.heads, valid, codes_ptr, scales_ptr, plain_ptr, R, NATIVE)


@triton.jit
def store_entries_kernel(
    values_ptr,
    codes_ptr,
    scales_ptr,
    plain_ptr,
    starts_ptr,
    lengths_ptr,
    stored_ptr,
    table_ptr,
    count,
    requests,
    table_columns,
    R: tl.constexpr,
    RATIO: tl.constexpr,
    REQUESTS: tl.constexpr,
    ROWS: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Store values [count, dim] as the entries that the step completes, request by request."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < count
    channel = channels(R)
    source = values_ptr + row.to(tl.int64)[:, None, None] * R.dim + channel
    x = load_float(source, inside[:, None, None] & (channel < R.dim))
    request, entry = closing(row, starts_ptr, lengths_ptr, requests, RATIO, REQUESTS)
    unit, place = locate(tl.where(inside, request, -1), entry, table_ptr, table_ptr, table_columns, R)
    stored = tl.load(stored_ptr + request, mask=request >= 0, other=0)
    store_rows(x, unit, place, (unit >= 0) & ((entry + 1) * RATIO > stored), codes_ptr, scales_ptr, plain_ptr, R, NATIVE)
