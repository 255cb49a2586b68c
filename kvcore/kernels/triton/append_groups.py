"""Append to keys and values in formats over tokens: groups that a step completes are coded, the newest rows stay raw.

Keys and values are written by one launch. Where steps are short a request's heads have a program each, which codes what
closes and then writes the raw rows: these may replace rows that it has just read. Elsewhere every group has programs of
its own, and the raw rows are written by a later launch.
"""

import triton
import triton.language as tl

from kvcore.kernels.triton.address import each_closing
from kvcore.kernels.triton.codes import bf16_bits, bits_float, float_bits, load_float
from kvcore.kernels.triton.groups import codes_at, scales_at
from kvcore.kernels.triton.rows import element_offsets, within


@triton.jit
def tokens_before(request, starts_ptr, lengths_ptr, requests, REQUESTS: tl.constexpr):
    """Tokens of the step that belong to earlier requests than ``request``."""
    before = request * 0
    for some in range(0, requests, REQUESTS):
        q = some + tl.arange(0, REQUESTS)
        mine = (q < request) & (q < requests)
        new = tl.load(lengths_ptr + q, mask=mine, other=0) - tl.load(starts_ptr + q, mask=mine, other=0)
        before += tl.sum(new, axis=0)
    return before


@triton.jit
def raw_bits(x, T: tl.constexpr, NATIVE: tl.constexpr):
    """Values (fp32) -> the bits of the bf16 numbers that the ring stores of them, as int32."""
    return bf16_bits(within(x, T), NATIVE)


@triton.jit
def tail_pointers(slot, number, head, tail_ptr, T: tl.constexpr):
    """int16 pointers [n, dim] of raw rows of positions [n]."""
    row = number % T.rows * T.heads + head
    at = tail_ptr + element_offsets(slot, row, T.plain_unit, T.plain_base, T.plain_stride, 1)
    return at.to(tl.pointer_type(tl.int16))[:, None] + tl.arange(0, T.dim)[None, :]


@triton.jit
def ranged(x, axis: tl.constexpr, P: tl.constexpr, NATIVE: tl.constexpr):
    """Values, groups along ``axis`` -> (codes int32, bits of scales, bits of offsets; these without that axis)."""
    magnitude = float_bits(x) & 0x7FFFFFFF
    finite = tl.max(magnitude, axis=axis) < 0x7F800000
    x = tl.where(tl.expand_dims(finite, axis), tl.minimum(tl.maximum(x, -P.limit), P.limit), 0.0)
    x = tl.where(tl.abs(x) < P.floor, 0.0, x)
    offset = bf16_bits(tl.min(x, axis=axis), NATIVE)
    least = bits_float(offset << 16)
    reach = tl.maximum(tl.max(x, axis=axis) - least, P.floor)
    fifteenth: tl.constexpr = 0.06666667014360428
    scale = bf16_bits(reach * fifteenth, NATIVE)
    step = tl.broadcast_to(tl.expand_dims(bits_float(scale << 16), axis), x.shape)
    ratio = tl.div_rn(x - tl.expand_dims(least, axis), step)
    code = float_bits(tl.minimum(tl.maximum(ratio, 0.0), 15.0) + 12582912.0) & 15
    return code, tl.where(finite, scale, 0x7FC0), offset


@triton.jit
def store_group(x, unit, row, codes_ptr, scales_ptr, offsets_ptr, P: tl.constexpr, NATIVE: tl.constexpr):
    """Code a group's values [tokens, dim], bf16 numbers as fp32, into one row of a unit."""
    start = codes_at(unit, row, codes_ptr, P)
    if P.plain != "":
        place = tl.arange(0, P.tokens)[:, None] * P.dim + tl.arange(0, P.dim)[None, :]
        tl.store(start.to(tl.pointer_type(tl.int16)) + place, bf16_bits(x, NATIVE).to(tl.int16))
    else:
        word_ptr = start.to(tl.pointer_type(tl.int32))
        scales, offsets = scales_at(unit, row, scales_ptr, offsets_ptr, P)
        scales, offsets = scales.to(tl.pointer_type(tl.int16)), offsets.to(tl.pointer_type(tl.int16))
        nibble = tl.arange(0, 8) * 4
        if P.over:
            code, scale, offset = ranged(x, 0, P, NATIVE)
            eights = tl.reshape(code, (P.tokens // 8, 8, P.dim)) << nibble[None, :, None]
            at = tl.arange(0, P.dim)[None, :] * (P.tokens // 8) + tl.arange(0, P.tokens // 8)[:, None]
            tl.store(word_ptr + at, tl.sum(eights, axis=1))
            group = tl.arange(0, P.dim)
        else:
            groups: tl.constexpr = P.dim // P.width
            code, scale, offset = ranged(tl.reshape(x, (P.tokens, groups, P.width)), 2, P, NATIVE)
            eights = tl.reshape(code, (P.tokens, P.dim // 8, 8)) << nibble[None, None, :]
            at = tl.arange(0, P.tokens)[:, None] * (P.dim // 8) + tl.arange(0, P.dim // 8)[None, :]
            tl.store(word_ptr + at, tl.sum(eights, axis=2))
            group = tl.arange(0, P.tokens)[:, None] * groups + tl.arange(0, groups)[None, :]
        tl.store(scales + group, scale.to(tl.int16))
        tl.store(offsets + group, offset.to(tl.int16))


@triton.jit
def close_group(
    request, group, head, first, start, slot, stored, values_ptr, table_ptr, table_columns, tail_ptr, codes_ptr,
    scales_ptr, offsets_ptr, P: tl.constexpr, T: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Code one group of a request and head: from the ring before ``start``, then from the step's rows."""
    number = group * P.tokens + tl.arange(0, P.tokens)
    channel = tl.arange(0, P.dim)
    own = number >= start
    token = first + number - start
    at = (token.to(tl.int64) * P.heads + head)[:, None] * P.dim + channel[None, :]
    x = load_float(values_ptr + at, own[:, None] & (channel[None, :] < P.dim))
    given = raw_bits(x, T, NATIVE)
    kept = (number < start) & (tl.zeros_like(number) + slot >= 0)
    held = tl.load(tail_pointers(tl.maximum(slot, 0), number, head, tail_ptr, T), mask=kept[:, None], other=0)
    x = bits_float(tl.where(own[:, None], given, held.to(tl.int32)) << 16)
    column = group // P.rows
    there = (group >= 0) & (column < table_columns) & ((group + 1) * P.tokens > stored)
    unit = tl.load(table_ptr + request.to(tl.int64) * table_columns + column, mask=there, other=-1)
    row = group % P.rows * P.heads + head
    if unit >= 0:
        store_group(x, unit, row, codes_ptr, scales_ptr, offsets_ptr, P, NATIVE)


@triton.jit
def append_part(
    request, head, starts_ptr, lengths_ptr, slots_ptr, stored_ptr, requests, values_ptr, table_ptr, table_columns,
    tail_ptr, codes_ptr, scales_ptr, offsets_ptr, P: tl.constexpr, T: tl.constexpr, REQUESTS: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    """One head of one request: code what closes, then write the raw rows."""
    start, length = tl.load(starts_ptr + request), tl.load(lengths_ptr + request)
    slot, stored = tl.load(slots_ptr + request), tl.load(stored_ptr + request)
    first = tokens_before(request, starts_ptr, lengths_ptr, requests, REQUESTS)
    for group in range(start // P.tokens, length // P.tokens):
        close_group(
            request, start * 0 + group, head, first, start, slot, stored, values_ptr, table_ptr, table_columns,
            tail_ptr, codes_ptr, scales_ptr, offsets_ptr, P, T, NATIVE,
        )  # fmt: skip
    # A raw row may replace one that other threads read of a group.
    tl.debug_barrier()
    channel = tl.arange(0, P.dim)
    for some in range(tl.maximum(start, length - T.rows), length, 8):
        number = some + tl.arange(0, 8)
        valid = (number < length) & (tl.zeros_like(number) + slot >= 0)
        at = ((first + number - start).to(tl.int64) * P.heads + head)[:, None] * P.dim + channel[None, :]
        x = load_float(values_ptr + at, valid[:, None] & (channel[None, :] < P.dim))
        pointers = tail_pointers(tl.maximum(slot, 0), number, head, tail_ptr, T)
        tl.store(pointers, raw_bits(x, T, NATIVE).to(tl.int16), mask=valid[:, None])


@triton.jit(do_not_specialize=["requests", "table_columns"])
def append_groups_kernel(
    k_ptr, v_ptr, key_codes_ptr, key_scales_ptr, key_plain_ptr, codes_ptr, scales_ptr, plain_ptr, key_tail_ptr,
    tail_ptr, starts_ptr, lengths_ptr, slots_ptr, stored_ptr, table_ptr, requests, table_columns,
    K: tl.constexpr, V: tl.constexpr, TK: tl.constexpr, TV: tl.constexpr, REQUESTS: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """K [tokens, key heads, dim] and v likewise of a short step: a program for a request and a head of either."""
    request = tl.program_id(0)
    part = tl.program_id(1)
    if part < K.heads:
        append_part(
            request, part, starts_ptr, lengths_ptr, slots_ptr, stored_ptr, requests, k_ptr, table_ptr, table_columns,
            key_tail_ptr, key_codes_ptr, key_scales_ptr, key_plain_ptr, K, TK, REQUESTS, NATIVE,
        )  # fmt: skip
    else:
        append_part(
            request, part - K.heads, starts_ptr, lengths_ptr, slots_ptr, stored_ptr, requests, v_ptr, table_ptr,
            table_columns, tail_ptr, codes_ptr, scales_ptr, plain_ptr, V, TV, REQUESTS, NATIVE,
        )  # fmt: skip


@triton.jit(do_not_specialize=["requests", "table_columns"])
def close_groups_kernel(
    k_ptr, v_ptr, key_codes_ptr, key_scales_ptr, key_plain_ptr, codes_ptr, scales_ptr, plain_ptr, key_tail_ptr,
    tail_ptr, starts_ptr, lengths_ptr, slots_ptr, stored_ptr, table_ptr, requests, table_columns,
    K: tl.constexpr, V: tl.constexpr, TK: tl.constexpr, TV: tl.constexpr, REQUESTS: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """The groups that a step completes, request by request: a program for a group and a head of keys or values."""
    number = tl.program_id(0) + tl.arange(0, 1)
    request, group = each_closing(number, starts_ptr, lengths_ptr, requests, K.tokens, REQUESTS)
    request, group = tl.max(request, axis=0), tl.max(group, axis=0)
    part = tl.program_id(1)
    if request < requests:
        start, slot = tl.load(starts_ptr + request), tl.load(slots_ptr + request)
        stored = tl.load(stored_ptr + request)
        first = tokens_before(request, starts_ptr, lengths_ptr, requests, REQUESTS)
        if part < K.heads:
            close_group(
                request, group, part, first, start, slot, stored, k_ptr, table_ptr, table_columns, key_tail_ptr,
                key_codes_ptr, key_scales_ptr, key_plain_ptr, K, TK, NATIVE,
            )  # fmt: skip
        else:
            close_group(
                request, group, part - K.heads, first, start, slot, stored, v_ptr, table_ptr, table_columns, tail_ptr,
                codes_ptr, scales_ptr, plain_ptr, V, TV, NATIVE,
            )  # fmt: skip
