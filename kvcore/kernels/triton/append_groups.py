"""Append to keys and values in formats over tokens: groups that a step completes are coded, the newest rows stay raw.

Keys and values are written by one launch. Where steps are short a token's heads have a program each, which writes the
raw row, and codes the group that ends with it. Elsewhere every group has programs of its own, and the raw rows are
written by a later launch.
"""

import triton
import triton.language as tl

from kvcore.kernels.triton.address import begin, each_closing
from kvcore.kernels.triton.codes import bf16_bits, bits_float, float_bits, load_float
from kvcore.kernels.triton.groups import codes_at, scales_at
from kvcore.kernels.triton.rows import element_offsets, within

HELD = tl.constexpr(32)
"""Tokens of a group whose numbers a thread holds at once: what compilers take grows with the cube of them."""


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
def ordered(x):
    """fp32 numbers as integers that lie in the numbers' order, NaN before or behind all; of those, the numbers."""
    bits = float_bits(x)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def to_numbers(x, SHARE: tl.constexpr):
    """[n, groups] -> [n, groups · SHARE]: of each group to each of its numbers; [n] as it is where SHARE is 1."""
    if SHARE > 1:
        groups: tl.constexpr = x.shape[1]
        x = tl.broadcast_to(x[:, :, None], (x.shape[0], groups, SHARE))
        x = tl.reshape(x, (x.shape[0], groups * SHARE))
    return x


@triton.jit
def ends_of_groups(low, high, SHARE: tl.constexpr):
    """The least and the largest of each SHARE neighbours; where one is no number, one of both is none."""
    if SHARE > 1:
        n: tl.constexpr = low.shape[0]
        groups: tl.constexpr = low.shape[1] // SHARE
        least = tl.min(tl.reshape(ordered(low), (n, groups, SHARE)), axis=2)
        most = tl.max(tl.reshape(ordered(high), (n, groups, SHARE)), axis=2)
        low = bits_float(least ^ ((least >> 31) & 0x7FFFFFFF))
        high = bits_float(most ^ ((most >> 31) & 0x7FFFFFFF))
    return low, high


@triton.jit
def ends_of(low, high, SHARE: tl.constexpr, P: tl.constexpr, NATIVE: tl.constexpr):
    """Groups' least and largest numbers -> (both as they are coded, whether all is finite, bits of scales, steps, odd).

    Odd: some group has numbers that ``usual`` changes.
    """
    low, high = ends_of_groups(low, high, SHARE)
    largest = tl.maximum(float_bits(low) & 0x7FFFFFFF, float_bits(high) & 0x7FFFFFFF)
    finite = largest < 0x7F800000
    least, most = settled(low, finite, P), settled(high, finite, P)
    reach = tl.maximum(most - least, P.floor)
    fifteenth: tl.constexpr = 0.06666667014360428
    scale = bf16_bits(reach * fifteenth, NATIVE)
    # Numbers beyond the limit are few, and those below the floor matter where all of a group are near to it.
    unusual = (finite & (bits_float(largest) > P.limit)) | (reach < P.floor * 1099511627776.0)
    return least, most, finite, scale, bits_float(scale << 16), tl.max(tl.ravel(unusual.to(tl.int32)), axis=0) > 0


@triton.jit
def usual(rows, first, last, COUNT: tl.constexpr, P: tl.constexpr):
    """Rows whose small numbers are zero, and whose others lie between the ends."""
    kept = ()
    for i in tl.static_range(COUNT):
        x = tl.where(tl.abs(rows[i]) < P.floor, 0.0, rows[i])
        kept = kept + (tl.minimum(tl.maximum(x, first), last),)
    return kept


@triton.jit
def word_of(rows, some: tl.constexpr, first, step, inverse, known, NATIVE: tl.constexpr):
    """The codes of rows 8 ``some`` to 8 ``some`` + 7 as words."""
    word = tl.zeros(first.shape, tl.int32)
    for i in tl.static_range(8):
        ratio = quotient(rows[8 * some + i] - first, step, inverse, NATIVE)
        # The code, and 0x4B400000 beside it: of eight of them 0x3F400000 stays in a word.
        word += float_bits(ratio + 12582912.0) << 4 * i
    return tl.where(known, word - 0x3F400000, 0)


@triton.jit
def ranged(rows, COUNT: tl.constexpr, SHARE: tl.constexpr, P: tl.constexpr, NATIVE: tl.constexpr):
    """Rows of bf16 numbers as fp32 -> (words of the codes of eight rows each, bits of scales, bits of offsets).

    A group is one number of each of the COUNT rows, or SHARE neighbours of each.
    """
    low, high = rows[0], rows[0]
    for i in tl.static_range(1, COUNT):
        low = tl.minimum(low, rows[i], propagate_nan=tl.PropagateNan.ALL)
        high = tl.maximum(high, rows[i], propagate_nan=tl.PropagateNan.ALL)
    least, most, finite, scale, step, unusual = ends_of(low, high, SHARE, P, NATIVE)
    first, last = to_numbers(least, SHARE), to_numbers(most, SHARE)
    if unusual:
        rows = usual(rows, first, last, COUNT, P)
    step, inverse = to_numbers(step, SHARE), to_numbers(1.0 / step, SHARE)
    known = to_numbers(finite, SHARE)
    words = ()
    count: tl.constexpr = COUNT // 8
    for some in tl.static_range(count):
        words = words + (word_of(rows, some, first, step, inverse, known, NATIVE),)
    # The smallest of bf16 numbers is one.
    return words, tl.where(finite, scale, 0x7FC0), float_bits(least) >> 16


@triton.jit
def settled(x, finite, P: tl.constexpr):
    """The smallest or the largest of a group as it is coded: within its limit, small ones and faults as zero."""
    x = tl.where(finite, tl.minimum(tl.maximum(x, -P.limit), P.limit), 0.0)
    return tl.where(tl.abs(x) < P.floor, 0.0, x)


@triton.jit
def ring_at(slot, number, head, tail_ptr, T: tl.constexpr):
    """int16 pointers to raw rows of positions."""
    # Of unsigned numbers a remainder by a power of two is a mask, and the compiler knows that of a group's first row.
    row = (number.to(tl.uint32) % T.rows).to(tl.int32) * T.heads + head
    at = tail_ptr + element_offsets(slot, row, T.plain_unit, T.plain_base, T.plain_stride, 1)
    return at.to(tl.pointer_type(tl.int16))


@triton.jit
def raw_values(
    number, channel, start, first, slot, head, values_ptr, tail_ptr, P: tl.constexpr, T: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    """Raw rows [n, c] of positions [n] as fp32.

    They come from the ring before position ``start``, else from the step's rows, whose row ``first`` is of ``start``.
    """
    own = number >= start
    held = (number < start) & (tl.zeros_like(number) + slot >= 0)
    token = ((first + number - start).to(tl.int64) * P.heads + head) * P.dim
    ring = ring_at(tl.maximum(slot, 0), number, head, tail_ptr, T)
    narrow: tl.constexpr = values_ptr.dtype.element_ty == tl.bfloat16
    rows = values_ptr.to(tl.pointer_type(tl.int16)) if narrow else values_ptr
    # Of a choice between pointers of several rows Triton does not see that their channels lie side by side.
    bits = tl.load(ring[:, None] + channel[None, :], mask=held[:, None], other=0).to(tl.int32)
    given = tl.load(rows + token[:, None] + channel[None, :], mask=own[:, None], other=0)
    bits |= given.to(tl.int32) if narrow else raw_bits(given, T, NATIVE)
    return bits_float(bits << 16)


@triton.jit
def eight_rows(
    number, channel, start, first, slot, head, values_ptr, tail_ptr, RING: tl.constexpr, P: tl.constexpr,
    T: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """The raw rows [1, c] of eight positions from ``number``, a multiple of eight, on, as of ``raw_values``.

    The first RING come from the ring. Integers have no layout that a compiler looks for, and what is common to eight
    rows is computed once.
    """
    none = tl.zeros_like(channel)[None, :]
    given = ((first + number - start).to(tl.int64) * P.heads + head) * P.dim
    ring = ring_at(tl.maximum(slot, 0), number, head, tail_ptr, T)
    own, there = none + (start - number), none + slot >= 0
    apart: tl.constexpr = P.heads * P.dim
    ring_apart: tl.constexpr = T.heads * T.plain_stride // 2
    rows = ()
    for i in tl.static_range(8):
        if T.rows % 8:
            ring_row = ring_at(tl.maximum(slot, 0), number + i, head, tail_ptr, T)
        else:
            ring_row = ring + i * ring_apart
        if i < RING:
            bits = tl.load(ring_row + channel[None, :], mask=there, other=0).to(tl.int32)
        elif values_ptr.dtype.element_ty == tl.bfloat16:
            # Such rows are what the ring would hold of them.
            row = values_ptr.to(tl.pointer_type(tl.int16)) + given + i * apart
            at = tl.where(own <= i, row, ring_row)
            bits = tl.load(at + channel[None, :], mask=(own <= i) | there, other=0).to(tl.int32)
        else:
            bits = tl.load(ring_row + channel[None, :], mask=(own > i) & there, other=0).to(tl.int32)
            x = tl.load(values_ptr + given + i * apart + channel[None, :], mask=own <= i, other=0)
            bits |= raw_bits(x, T, NATIVE)
        rows = rows + (bits_float(bits << 16),)
    return rows


@triton.jit
def held_rows(
    number, channel, start, first, slot, head, values_ptr, tail_ptr, COUNT: tl.constexpr, P: tl.constexpr,
    T: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """The raw rows of COUNT positions. A step of a token has the last alone, and the others' places side by side."""
    if start >= number + COUNT - 1:
        rows = ()
        for some in tl.static_range(COUNT // 8):
            rows = rows + eight_rows(
                number + 8 * some, channel, start, first, slot, head, values_ptr, tail_ptr, COUNT - 1 - 8 * some, P, T,
                NATIVE,
            )  # fmt: skip
    else:
        rows = ()
        for some in tl.static_range(COUNT // 8):
            rows = rows + eight_rows(
                number + 8 * some, channel, start, first, slot, head, values_ptr, tail_ptr, 0, P, T, NATIVE
            )  # fmt: skip
    return rows


@triton.jit
def ranged_in_turns(
    at, number, channel, start, first, slot, head, values_ptr, tail_ptr, P: tl.constexpr, T: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    """What ``ranged`` does, of rows read twice, HELD at a time -> (scales, offsets); words are stored at ``at``."""
    low = tl.full(channel.shape, float("inf"), tl.float32)[None, :]
    high = -low
    for some in tl.range(0, P.tokens, HELD, num_stages=1):
        rows = held_rows(
            number + some, channel, start, first, slot, head, values_ptr, tail_ptr, HELD, P, T, NATIVE
        )  # fmt: skip
        for i in tl.static_range(HELD):
            low = tl.minimum(low, rows[i], propagate_nan=tl.PropagateNan.ALL)
            high = tl.maximum(high, rows[i], propagate_nan=tl.PropagateNan.ALL)
    least, most, finite, scale, step, unusual = ends_of(low, high, 1, P, NATIVE)
    inverse = 1.0 / step
    for some in tl.range(0, P.tokens, HELD, num_stages=1):
        rows = held_rows(
            number + some, channel, start, first, slot, head, values_ptr, tail_ptr, HELD, P, T, NATIVE
        )  # fmt: skip
        if unusual:
            rows = usual(rows, least, most, HELD, P)
        words = ()
        for n in tl.static_range(HELD // 8):
            words = words + (word_of(rows, n, least, step, inverse, finite, NATIVE),)
        store_words(at + some // 8, channel, words, HELD // 8, P.tokens // 8)
    return tl.where(finite, scale, 0x7FC0), float_bits(least) >> 16


@triton.jit
def four_words(a, b, c, d):
    """[1, n] -> [1, 4 n]: four words side by side."""
    pairs = tl.join(tl.join(a, c), tl.join(b, d))
    return tl.reshape(pairs, (1, 4 * a.shape[1]))


@triton.jit
def store_words(at, channel, words, COUNT: tl.constexpr, APART: tl.constexpr):
    """COUNT words of every channel [C], side by side, channel 0's from ``at`` on, those of the next APART further."""
    if COUNT % 4:
        for some in tl.static_range(COUNT):
            tl.store(at + (channel * APART + some)[None, :], words[some])
    else:
        least, quarter = tl.min(channel, axis=0), tl.arange(0, 4 * channel.shape[0])
        for some in tl.static_range(COUNT // 4):
            four = four_words(words[4 * some], words[4 * some + 1], words[4 * some + 2], words[4 * some + 3])
            place = (least + quarter // 4) * APART + 4 * some + quarter % 4
            tl.store(at + place[None, :], four)


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
def store_tokens(
    rows, token, channel, unit, row, codes_ptr, scales_ptr, offsets_ptr, P: tl.constexpr, NATIVE: tl.constexpr
):
    """Store rows [n, C] of the tokens [n] of a group as they are, or in codes over channels."""
    C: tl.constexpr = channel.shape[0]
    target, token = codes_at(unit, row, codes_ptr, P), token[:, None]
    if P.plain != "":
        place = token * P.dim + channel[None, :]
        tl.store(target.to(tl.pointer_type(tl.int16)) + place, bf16_bits(rows, NATIVE).to(tl.int16))
    else:
        least = tl.min(channel, axis=0)
        words, scale, offset = ranged(eighths(rows), 8, P.width // 8, P, NATIVE)
        word = token * (P.dim // 8) + least // 8 + tl.arange(0, C // 8)[None, :]
        tl.store(target.to(tl.pointer_type(tl.int32)) + word, words[0])
        of_group = token * (P.dim // P.width) + least // P.width + tl.arange(0, C // P.width)[None, :]
        scales, offsets = scales_at(unit, row, scales_ptr, offsets_ptr, P)
        tl.store(scales.to(tl.pointer_type(tl.int16)) + of_group, scale.to(tl.int16))
        tl.store(offsets.to(tl.pointer_type(tl.int16)) + of_group, offset.to(tl.int16))


@triton.jit
def close_group(
    request, group, head, channel, first, start, slot, stored, values_ptr, table_ptr, table_columns, tail_ptr,
    codes_ptr, scales_ptr, offsets_ptr, P: tl.constexpr, T: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Code channels [C] of one group of a request and head: from the ring before ``start``, then the step's rows."""
    column = group // P.rows
    there = (group >= 0) & (column < table_columns) & ((group + 1) * P.tokens > stored)
    unit = tl.load(table_ptr + request.to(tl.int64) * table_columns + column, mask=there, other=-1)
    row = group % P.rows * P.heads + head
    number = group * P.tokens
    words_of: tl.constexpr = P.tokens // 8
    over: tl.constexpr = P.over and P.plain == ""
    token = tl.arange(0, min(P.tokens, HELD))
    # All loads are under way before the unit is known, where a thread can hold what they bring.
    if P.tokens <= HELD:
        if over:
            # A thread has all tokens of its channels: nothing is exchanged.
            rows = held_rows(
                number, channel, start, first, slot, head, values_ptr, tail_ptr, P.tokens, P, T, NATIVE
            )  # fmt: skip
        else:
            every = number + token
            x = raw_values(every, channel, start, first, slot, head, values_ptr, tail_ptr, P, T, NATIVE)
    if unit >= 0:
        if over:
            at = codes_at(unit, row, codes_ptr, P).to(tl.pointer_type(tl.int32))
            if P.tokens <= HELD:
                words, scale, offset = ranged(rows, P.tokens, 1, P, NATIVE)
                store_words(at, channel, words, words_of, words_of)
            else:
                scale, offset = ranged_in_turns(
                    at, number, channel, start, first, slot, head, values_ptr, tail_ptr, P, T, NATIVE
                )
            scales, offsets = scales_at(unit, row, scales_ptr, offsets_ptr, P)
            tl.store(scales.to(tl.pointer_type(tl.int16)) + channel[None, :], scale.to(tl.int16))
            tl.store(offsets.to(tl.pointer_type(tl.int16)) + channel[None, :], offset.to(tl.int16))
        elif P.tokens <= HELD:
            store_tokens(x, token, channel, unit, row, codes_ptr, scales_ptr, offsets_ptr, P, NATIVE)
        else:
            for some in tl.range(0, P.tokens, HELD, num_stages=1):
                every = number + some + token
                x = raw_values(every, channel, start, first, slot, head, values_ptr, tail_ptr, P, T, NATIVE)
                store_tokens(x, some + token, channel, unit, row, codes_ptr, scales_ptr, offsets_ptr, P, NATIVE)


@triton.jit
def append_part(
    token, part, positions_ptr, request_ptr, starts_ptr, lengths_ptr, slots_ptr, stored_ptr, values_ptr, table_ptr,
    table_columns, tail_ptr, codes_ptr, scales_ptr, offsets_ptr, P: tl.constexpr, T: tl.constexpr,
    PIECES: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Some channels of one head of a token: write its raw row, and code the group that ends with it.

    Rows that replace those of a group that this step completes are written by who codes it, once it has read them.
    """
    head = part // PIECES
    channel = part % PIECES * (P.dim // PIECES) + tl.arange(0, P.dim // PIECES)
    every = channel >= 0
    request = tl.load(request_ptr + token)
    position = tl.load(positions_ptr + token)
    own = load_float(values_ptr + (token.to(tl.int64) * P.heads + head) * P.dim + channel, every)
    if (request >= 0) & (position >= 0):
        start, length = tl.load(starts_ptr + request), tl.load(lengths_ptr + request)
        slot, stored = tl.load(slots_ptr + request), tl.load(stored_ptr + request)
        oldest = start // P.tokens
        closes = (oldest + 1) * P.tokens <= length
        later = tl.where(closes, oldest * P.tokens + T.rows, length)
        place = tl.zeros_like(channel) + position
        kept = (tl.zeros_like(channel) + slot >= 0) & (place >= length - T.rows) & (place < later)
        at = ring_at(tl.maximum(slot, 0), position, head, tail_ptr, T)
        tl.store(at + channel, raw_bits(own, T, NATIVE).to(tl.int16), mask=kept)
        if position % P.tokens == P.tokens - 1:
            group = position // P.tokens
            first = token - (position - start)
            close_group(
                request, group, head, channel, first, start, slot, stored, values_ptr, table_ptr, table_columns,
                tail_ptr, codes_ptr, scales_ptr, offsets_ptr, P, T, NATIVE,
            )  # fmt: skip
            if (group == oldest) & (later < length):
                tl.debug_barrier()
                for number in range(tl.maximum(later, length - T.rows), length):
                    row = ((first + number - start).to(tl.int64) * P.heads + head) * P.dim
                    x = load_float(values_ptr + row + channel, every)
                    at = ring_at(tl.maximum(slot, 0), start * 0 + number, head, tail_ptr, T)
                    tl.store(at + channel, raw_bits(x, T, NATIVE).to(tl.int16), mask=tl.zeros_like(channel) + slot >= 0)


@triton.jit(do_not_specialize=["table_columns"])
def append_groups_kernel(
    k_ptr, v_ptr, key_codes_ptr, key_scales_ptr, key_plain_ptr, codes_ptr, scales_ptr, plain_ptr, key_tail_ptr,
    tail_ptr, positions_ptr, request_ptr, starts_ptr, lengths_ptr, slots_ptr, stored_ptr, table_ptr, table_columns,
    K: tl.constexpr, V: tl.constexpr, TK: tl.constexpr, TV: tl.constexpr, PIECES: tl.constexpr, AHEAD: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    """K [tokens, key heads, dim] and v likewise of a short step: PIECES programs for a token and a head of either."""
    begin(AHEAD)
    token = tl.program_id(0)
    part = tl.program_id(1)
    if part < K.heads * PIECES:
        append_part(
            token, part, positions_ptr, request_ptr, starts_ptr, lengths_ptr, slots_ptr, stored_ptr, k_ptr, table_ptr,
            table_columns, key_tail_ptr, key_codes_ptr, key_scales_ptr, key_plain_ptr, K, TK, PIECES, NATIVE,
        )  # fmt: skip
    else:
        append_part(
            token, part - K.heads * PIECES, positions_ptr, request_ptr, starts_ptr, lengths_ptr, slots_ptr, stored_ptr,
            v_ptr, table_ptr, table_columns, tail_ptr, codes_ptr, scales_ptr, plain_ptr, V, TV, PIECES, NATIVE,
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
