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
def tail_pointers(slot, number, head, channel, tail_ptr, T: tl.constexpr):
    """int16 pointers [n, channels] of raw rows of positions [n]."""
    row = number % T.rows * T.heads + head
    at = tail_ptr + element_offsets(slot, row, T.plain_unit, T.plain_base, T.plain_stride, 1)
    return at.to(tl.pointer_type(tl.int16))[:, None] + channel[None, :]


@triton.jit
def quotient(x, by, inverse, NATIVE: tl.constexpr):
    """Quotients as division rounds them where that is in the middle between two integers, else to within a step.

    ``inverse`` is 1 / by to a few steps. A divisor has eight significant bits and a middle five, so that no quotient
    comes so near to a middle without being one that the second guess would be taken for it.
    """
    if NATIVE:
        guess = x * inverse
        ratio = tl.fma(tl.fma(-guess, by, x), inverse, guess)
    else:
        ratio = tl.div_rn(x, by)
    return ratio


@triton.jit
def over_group(x, what: tl.constexpr, P: tl.constexpr, C: tl.constexpr):
    """The largest or smallest of each group of C channels, from strips' own: [tokens / 8, C] or [tokens, C / 8]."""
    if P.over:
        found = tl.max(x, axis=0) if what == "max" else tl.min(x, axis=0)
    else:
        x = tl.reshape(x, (P.tokens, C // P.width, P.width // 8))
        found = tl.max(x, axis=2) if what == "max" else tl.min(x, axis=2)
    return found


@triton.jit
def to_strips(x, P: tl.constexpr, C: tl.constexpr):
    """Of each group -> of each of a strip's numbers."""
    if P.over:
        x = tl.broadcast_to(x[None, :], (P.tokens // 8, C))
    else:
        x = tl.broadcast_to(x[:, :, None], (P.tokens, C // P.width, P.width // 8))
        x = tl.reshape(x, (P.tokens, C // 8))
    return x


@triton.jit
def ranged(strips, P: tl.constexpr, C: tl.constexpr, NATIVE: tl.constexpr):
    """Eight strips of bf16 numbers, side by side -> (words of their eight codes, bits of scales, bits of offsets).

    Strip i holds every eighth token (or channel) of a group from i on, so that a word is made of one number of each.
    """
    low, high = strips[0], strips[0]
    for i in tl.static_range(1, 8):
        low = tl.minimum(low, strips[i], propagate_nan=tl.PropagateNan.ALL)
        high = tl.maximum(high, strips[i], propagate_nan=tl.PropagateNan.ALL)
    magnitude = tl.maximum(float_bits(low) & 0x7FFFFFFF, float_bits(high) & 0x7FFFFFFF)
    largest = over_group(magnitude, "max", P, C)
    finite = largest < 0x7F800000
    least = settled(over_group(low, "min", P, C), finite, P)
    most = settled(over_group(high, "max", P, C), finite, P)
    reach = tl.maximum(most - least, P.floor)
    fifteenth: tl.constexpr = 0.06666667014360428
    scale = bf16_bits(reach * fifteenth, NATIVE)
    step = bits_float(scale << 16)
    first, last = to_strips(least, P, C), to_strips(most, P, C)
    # Numbers beyond the limit are few, and those below the floor matter where all of a group are near to it.
    unusual = (finite & (bits_float(largest) > P.limit)) | (reach < P.floor * 1099511627776.0)
    if tl.max(tl.ravel(unusual.to(tl.int32)), axis=0) > 0:
        kept = ()
        for i in tl.static_range(8):
            x = tl.where(tl.abs(strips[i]) < P.floor, 0.0, strips[i])
            kept = kept + (tl.minimum(tl.maximum(x, first), last),)
        strips = kept
    step, inverse = to_strips(step, P, C), to_strips(1.0 / step, P, C)
    word = tl.zeros(first.shape, tl.int32)
    for i in tl.static_range(8):
        ratio = quotient(strips[i] - first, step, inverse, NATIVE)
        word |= (float_bits(ratio + 12582912.0) & 15) << 4 * i
    word = tl.where(to_strips(finite, P, C), word, 0)
    # The smallest of bf16 numbers is one.
    return word, tl.where(finite, scale, 0x7FC0), float_bits(least) >> 16


@triton.jit
def settled(x, finite, P: tl.constexpr):
    """The smallest or the largest of a group as it is coded: within its limit, small ones and faults as zero."""
    x = tl.where(finite, tl.minimum(tl.maximum(x, -P.limit), P.limit), 0.0)
    return tl.where(tl.abs(x) < P.floor, 0.0, x)


@triton.jit
def raw_values(
    number, channel, start, first, slot, head, values_ptr, tail_ptr, P: tl.constexpr, T: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    """Tokens' raw rows [n, channels] as fp32: from the ring before position ``start``, else from the step's rows."""
    own = number >= start
    known = tl.zeros_like(number) + slot >= 0
    token = ((first + number - start).to(tl.int64) * P.heads + head) * P.dim
    row = number % T.rows * T.heads + head
    ring = tail_ptr + element_offsets(tl.maximum(slot, 0), row, T.plain_unit, T.plain_base, T.plain_stride, 1)
    ring = ring.to(tl.pointer_type(tl.int16))
    if values_ptr.dtype.element_ty == tl.bfloat16:
        # Such rows are what the ring would hold of them.
        at = tl.where(own, values_ptr.to(tl.pointer_type(tl.int16)) + token, ring)
        bits = tl.load(at[:, None] + channel[None, :], mask=(own | known)[:, None], other=0)
        if NATIVE:
            x = bits.to(tl.bfloat16, bitcast=True).to(tl.float32)
        else:
            x = bits_float(bits.to(tl.int32) << 16)
    else:
        given = raw_bits(load_float(values_ptr + token[:, None] + channel[None, :], own[:, None]), T, NATIVE)
        held = tl.load(ring[:, None] + channel[None, :], mask=(known & (number < start))[:, None], other=0)
        x = bits_float(tl.where(own[:, None], given, held.to(tl.int32)) << 16)
    return x


@triton.jit
def eighths(x):
    """[a, 8 b] -> eight of [a, b]: number i of every eight."""
    x = tl.reshape(x, (x.shape[0], x.shape[1] // 8, 2, 2, 2))
    even, odd = tl.split(x)
    a, c = tl.split(even)
    b, d = tl.split(odd)
    s0, s4 = tl.split(a)
    s2, s6 = tl.split(c)
    s1, s5 = tl.split(b)
    s3, s7 = tl.split(d)
    return s0, s1, s2, s3, s4, s5, s6, s7


@triton.jit
def close_group(
    request, group, head, channel, first, start, slot, stored, values_ptr, table_ptr, table_columns, tail_ptr,
    codes_ptr, scales_ptr, offsets_ptr, P: tl.constexpr, T: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Code channels [C] of one group of a request and head: from the ring before ``start``, then the step's rows."""
    C: tl.constexpr = channel.shape[0]
    column = group // P.rows
    there = (group >= 0) & (column < table_columns) & ((group + 1) * P.tokens > stored)
    unit = tl.load(table_ptr + request.to(tl.int64) * table_columns + column, mask=there, other=-1)
    row = group % P.rows * P.heads + head
    number = group * P.tokens + tl.arange(0, P.tokens)
    # All loads are under way before the unit is known.
    if P.over and P.plain == "":
        strips = ()
        for i in tl.static_range(8):
            every = group * P.tokens + i + 8 * tl.arange(0, P.tokens // 8)
            strips = strips + (
                raw_values(every, channel, start, first, slot, head, values_ptr, tail_ptr, P, T, NATIVE),
            )
    else:
        x = raw_values(number, channel, start, first, slot, head, values_ptr, tail_ptr, P, T, NATIVE)
    if unit >= 0:
        target = codes_at(unit, row, codes_ptr, P)
        if P.plain != "":
            place = tl.arange(0, P.tokens)[:, None] * P.dim + channel[None, :]
            tl.store(target.to(tl.pointer_type(tl.int16)) + place, bf16_bits(x, NATIVE).to(tl.int16))
        else:
            least = tl.min(channel, axis=0)
            if P.over:
                at = channel[None, :] * (P.tokens // 8) + tl.arange(0, P.tokens // 8)[:, None]
                of_group = channel
            else:
                strips = eighths(x)
                groups: tl.constexpr = P.dim // P.width
                token = tl.arange(0, P.tokens)[:, None]
                at = token * (P.dim // 8) + least // 8 + tl.arange(0, C // 8)[None, :]
                of_group = token * groups + least // P.width + tl.arange(0, C // P.width)[None, :]
            word, scale, offset = ranged(strips, P, C, NATIVE)
            scales, offsets = scales_at(unit, row, scales_ptr, offsets_ptr, P)
            tl.store(target.to(tl.pointer_type(tl.int32)) + at, word)
            tl.store(scales.to(tl.pointer_type(tl.int16)) + of_group, scale.to(tl.int16))
            tl.store(offsets.to(tl.pointer_type(tl.int16)) + of_group, offset.to(tl.int16))


@triton.jit
def append_part(
    request, part, starts_ptr, lengths_ptr, slots_ptr, stored_ptr, requests, values_ptr, table_ptr, table_columns,
    tail_ptr, codes_ptr, scales_ptr, offsets_ptr, P: tl.constexpr, T: tl.constexpr, REQUESTS: tl.constexpr,
    PIECES: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Some channels of one head of one request: code what closes, then write the raw rows."""
    start, length = tl.load(starts_ptr + request), tl.load(lengths_ptr + request)
    slot, stored = tl.load(slots_ptr + request), tl.load(stored_ptr + request)
    first = tokens_before(request, starts_ptr, lengths_ptr, requests, REQUESTS)
    head = part // PIECES
    channel = part % PIECES * (P.dim // PIECES) + tl.arange(0, P.dim // PIECES)
    for group in range(start // P.tokens, length // P.tokens):
        close_group(
            request, start * 0 + group, head, channel, first, start, slot, stored, values_ptr, table_ptr,
            table_columns, tail_ptr, codes_ptr, scales_ptr, offsets_ptr, P, T, NATIVE,
        )  # fmt: skip
    # A raw row may replace one that other threads read of a group.
    tl.debug_barrier()
    for some in range(tl.maximum(start, length - T.rows), length, 8):
        number = some + tl.arange(0, 8)
        valid = (number < length) & (tl.zeros_like(number) + slot >= 0)
        at = ((first + number - start).to(tl.int64) * P.heads + head)[:, None] * P.dim + channel[None, :]
        x = load_float(values_ptr + at, valid[:, None])
        pointers = tail_pointers(tl.maximum(slot, 0), number, head, channel, tail_ptr, T)
        tl.store(pointers, raw_bits(x, T, NATIVE).to(tl.int16), mask=valid[:, None])


@triton.jit(do_not_specialize=["requests", "table_columns"])
def append_groups_kernel(
    k_ptr, v_ptr, key_codes_ptr, key_scales_ptr, key_plain_ptr, codes_ptr, scales_ptr, plain_ptr, key_tail_ptr,
    tail_ptr, starts_ptr, lengths_ptr, slots_ptr, stored_ptr, table_ptr, requests, table_columns,
    K: tl.constexpr, V: tl.constexpr, TK: tl.constexpr, TV: tl.constexpr, REQUESTS: tl.constexpr,
    PIECES: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """K [tokens, key heads, dim] and v likewise of a short step: PIECES programs for a request and a head of either."""
    request = tl.program_id(0)
    part = tl.program_id(1)
    if part < K.heads * PIECES:
        append_part(
            request, part, starts_ptr, lengths_ptr, slots_ptr, stored_ptr, requests, k_ptr, table_ptr, table_columns,
            key_tail_ptr, key_codes_ptr, key_scales_ptr, key_plain_ptr, K, TK, REQUESTS, PIECES, NATIVE,
        )  # fmt: skip
    else:
        append_part(
            request, part - K.heads * PIECES, starts_ptr, lengths_ptr, slots_ptr, stored_ptr, requests, v_ptr,
            table_ptr, table_columns, tail_ptr, codes_ptr, scales_ptr, plain_ptr, V, TV, REQUESTS, PIECES, NATIVE,
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
                request, group, part, tl.arange(0, K.dim), first, start, slot, stored, k_ptr, table_ptr, table_columns,
                key_tail_ptr, key_codes_ptr, key_scales_ptr, key_plain_ptr, K, TK, NATIVE,
            )  # fmt: skip
        else:
            close_group(
                request, group, part - K.heads, tl.arange(0, V.dim), first, start, slot, stored, v_ptr, table_ptr,
                table_columns, tail_ptr, codes_ptr, scales_ptr, plain_ptr, V, TV, NATIVE,
            )  # fmt: skip
