"""Append: encode rows and scatter them to their places. One launch for any role, format and layout."""

import triton
import triton.language as tl

from kvcore.kernels.triton.address import begin, closing, head_of, locate
from kvcore.kernels.triton.codes import load_float, round_bf16
from kvcore.kernels.triton.latent import inverse_rms, rotate, turns
from kvcore.kernels.triton.rows import channels, store_codes, store_plain, store_rows


@triton.jit(do_not_specialize=["count", "table_columns"])
def append_kernel(
    values_ptr, codes_ptr, scales_ptr, plain_ptr, positions_ptr, request_ptr, slots_ptr, bound_ptr, table_ptr, count,
    table_columns, R: tl.constexpr, ROWS: tl.constexpr, AHEAD: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Store values [count, dim] (tokens × heads) of the step's tokens.

    ``bound_ptr`` holds a number a request: in a ring the lengths, since only the last positions are written; in blocks
    the tokens that were taken over, which are not written again.
    """
    begin(AHEAD)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < count
    token = row // R.heads
    position = tl.load(positions_ptr + token, mask=inside, other=-1)
    request = tl.load(request_ptr + token, mask=inside, other=-1)
    channel = channels(R)
    source = values_ptr + row.to(tl.int64)[:, None, None] * R.dim
    split: tl.constexpr = R.apart
    x = load_float(source + channel, inside[:, None, None] & (channel < (R.quant if split else R.dim)))
    plain = R.quant + tl.arange(0, R.dim - R.quant)[None, None, :] if split else channel
    y = load_float(source + plain, inside[:, None, None]) if split else x
    unit, place = locate(request, position, slots_ptr, table_ptr, table_columns, R)
    bound = tl.load(bound_ptr + request, mask=request >= 0, other=0)
    least = bound if R.paged else bound - R.rows
    valid = (unit >= 0) & (position >= least)
    narrow: tl.constexpr = values_ptr.dtype.element_ty != tl.float32
    place = place * R.heads + head_of(row, R)
    if split:
        store_codes(x, unit, place, valid, codes_ptr, scales_ptr, R, narrow, NATIVE)
        store_plain(y, plain, unit, place, valid, plain_ptr, R, narrow, NATIVE)
    else:
        store_rows(x, unit, place, valid, codes_ptr, scales_ptr, plain_ptr, R, narrow, NATIVE)


@triton.jit(do_not_specialize=["count", "table_columns", "eps"])
def append_rotated_kernel(
    values_ptr, codes_ptr, scales_ptr, plain_ptr, positions_ptr, request_ptr, slots_ptr, bound_ptr, table_ptr, norm_ptr,
    frequencies_ptr, count, table_columns, eps, NORM: tl.constexpr, PAIRS: tl.constexpr, R: tl.constexpr,
    ROWS: tl.constexpr, AHEAD: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """``append_kernel`` for latents that are still to be normed (NORM) and rotated at their positions."""
    begin(AHEAD)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < count
    position = tl.load(positions_ptr + row, mask=inside, other=-1)
    request = tl.load(request_ptr + row, mask=inside, other=-1)
    channel = channels(R)
    source = values_ptr + row.to(tl.int64)[:, None, None] * R.dim
    x = load_float(source + channel, inside[:, None, None] & (channel < R.dim))
    unit, place = locate(request, position, slots_ptr, table_ptr, table_columns, R)
    bound = tl.load(bound_ptr + request, mask=request >= 0, other=0)
    valid = (unit >= 0) & (position >= bound - R.rows)
    if NORM:
        scale = inverse_rms(tl.sum(tl.sum(x * x, axis=2), axis=1), eps, R.dim)
        weight = tl.load(norm_ptr + channel, mask=channel < R.dim, other=0).to(tl.float32)
        x = x * scale[:, None, None] * weight
        if R.rounded:
            x = round_bf16(x, NATIVE)
    if R.apart and R.dim - R.quant == 2 * PAIRS:
        # The rotated channels are exactly the plain field: turn those alone, read once more from the L1.
        turned = R.quant + tl.arange(0, 2 * PAIRS)[None, :]
        y = load_float(values_ptr + row.to(tl.int64)[:, None] * R.dim + turned, inside[:, None] & (turned < R.dim))
        if NORM:
            weight = tl.load(norm_ptr + turned).to(tl.float32)
            y = y * scale[:, None] * weight
            if R.rounded:
                y = round_bf16(y, NATIVE)
        cos, sin = turns(position, frequencies_ptr, 2 * PAIRS, 2 * PAIRS, PAIRS)
        y = rotate(y, cos, sin, 2 * PAIRS, PAIRS)
        if R.rounded and R.plain != "bf16":
            y = round_bf16(y, NATIVE)
        if R.rounded and not NORM and values_ptr.dtype.element_ty == tl.float32:
            # These channels are not rotated; where they were normed, or came as bf16, they are rounded already.
            x = round_bf16(x, NATIVE)
        store_codes(x, unit, place, valid, codes_ptr, scales_ptr, R, R.rounded, NATIVE)
        y = tl.reshape(y, (ROWS, 1, 2 * PAIRS))
        store_plain(y, tl.reshape(turned, (1, 1, 2 * PAIRS)), unit, place, valid, plain_ptr, R, False, NATIVE)
    else:
        cos, sin = turns(position, frequencies_ptr, R.tiles * R.width, R.dim, PAIRS)
        flat = rotate(tl.reshape(x, (ROWS, R.tiles * R.width)), cos, sin, R.dim, PAIRS)
        if R.rounded:
            flat = round_bf16(flat, NATIVE)
        x = tl.reshape(flat, (ROWS, R.tiles, R.width))
        store_rows(x, unit, place, valid, codes_ptr, scales_ptr, plain_ptr, R, R.rounded, NATIVE)


@triton.jit(do_not_specialize=["count", "table_columns", "requests"])
def store_entries_kernel(
    values_ptr, codes_ptr, scales_ptr, plain_ptr, starts_ptr, lengths_ptr, stored_ptr, table_ptr, count, requests,
    table_columns, R: tl.constexpr, RATIO: tl.constexpr, REQUESTS: tl.constexpr, SPREAD: tl.constexpr,
    ROWS: tl.constexpr, AHEAD: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Store values [count, dim] as the entries that the step completes, request by request."""
    begin(AHEAD)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < count
    channel = channels(R)
    source = values_ptr + row.to(tl.int64)[:, None, None] * R.dim + channel
    x = load_float(source, inside[:, None, None] & (channel < R.dim))
    request, entry = closing(tl.program_id(0) * ROWS, starts_ptr, lengths_ptr, requests, ROWS, RATIO, REQUESTS, SPREAD)
    unit, place = locate(tl.where(inside, request, -1), entry, table_ptr, table_ptr, table_columns, R)
    stored = tl.load(stored_ptr + request, mask=request >= 0, other=0)
    valid = (unit >= 0) & ((entry + 1) * RATIO > stored)
    narrow: tl.constexpr = values_ptr.dtype.element_ty != tl.float32
    store_rows(x, unit, place, valid, codes_ptr, scales_ptr, plain_ptr, R, narrow, NATIVE)
