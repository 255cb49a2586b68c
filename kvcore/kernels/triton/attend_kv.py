"""Attention of classic layers from encoded rows: keys and values, each in its own format, read where they lie.

One program takes the query heads that share a key head and a value head, for one token or for some neighbours of one
request, over some of their keys: these are the rows of both products. ``kv_tiles`` takes tiles of keys and values into
a running softmax; exponentials are to the base 2.
"""

import triton
import triton.language as tl

from kvcore.kernels.triton.attend import beside_sink
from kvcore.kernels.triton.codes import round_bf16
from kvcore.kernels.triton.kv_tiles import panel_channels, take_tiles


@triton.jit
def first_seen(position, left, window, chunk):
    """First position that the queries at ``position`` see; window and chunk are 0 where they don't apply.

    The first ``left`` positions are no tokens: none is seen, and chunks begin with the first token.
    """
    of_chunk = left + (position - left) // tl.maximum(chunk, 1) * chunk
    return tl.maximum(tl.where(window > 0, position + 1 - window, of_chunk), left)


@triton.jit
def take_rows(
    split, splits, q, scale, largest, total, out, member, position, earliest, mine, apiece,
    least, most, request, slot, shift, key_head, value_head, table_ptr, table_columns,
    key_codes_ptr, key_scales_ptr, key_plain_ptr, codes_ptr, scales_ptr, plain_ptr,
    K: tl.constexpr, V: tl.constexpr, SK: tl.constexpr, SV: tl.constexpr, KEYS: tl.constexpr, SPAN: tl.constexpr,
    OWN: tl.constexpr, WHOLE: tl.constexpr, STAGES: tl.constexpr, SPREAD: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Take this split's share of positions ``least`` .. ``most`` of one request into the running softmax.

    ``apiece``: there are rows of other requests beside it, so that no tile is seen by all.
    """
    # Tiles begin where blocks do, if those are multiples of them.
    base = least // KEYS * KEYS if WHOLE else least
    tiles = tl.cdiv(tl.maximum(most + 1 - base, 0), KEYS)
    each = tl.cdiv(tiles, splits)
    first = tl.minimum(split * each, tiles)
    last = tl.minimum(first + each, tiles)
    if SPAN == 1:
        largest, total, out = take_tiles(
            first, last, last + 1, 0, q, scale, largest, total, out, member, position, earliest, mine,
            base, least, most, request, slot, shift, key_head, value_head, table_ptr, table_columns,
            key_codes_ptr, key_scales_ptr, key_plain_ptr, codes_ptr, scales_ptr, plain_ptr,
            K, V, SK, SV, KEYS, SPAN, False, OWN, WHOLE, STAGES, SPREAD, NATIVE,
        )  # fmt: skip
    else:
        since = tl.max(tl.where(mine, earliest, 0), axis=0)
        until = tl.min(tl.where(mine, position, 0x7FFFFFFF), axis=0)
        whole = tl.maximum(tl.cdiv(tl.maximum(since - base, 0), KEYS), first)
        end = tl.minimum(tl.maximum(until + 1 - base, 0) // KEYS, last)
        whole = tl.minimum(whole, last)
        end = tl.where(apiece, whole, tl.maximum(end, whole))
        if OWN:
            # Of the step's own rows there are few: one loop less to compile.
            end = whole
        else:
            largest, total, out = take_tiles(
                whole, end, last + 1, 0, q, scale, largest, total, out, member, position, earliest, mine,
                base, least, most, request, slot, shift, key_head, value_head, table_ptr, table_columns,
                key_codes_ptr, key_scales_ptr, key_plain_ptr, codes_ptr, scales_ptr, plain_ptr,
                K, V, SK, SV, KEYS, SPAN, False, OWN, WHOLE, STAGES, SPREAD, NATIVE,
            )  # fmt: skip
        largest, total, out = take_tiles(
            first, last - (end - whole), whole, end - whole, q, scale, largest, total, out, member, position,
            earliest, mine,
            base, least, most, request, slot, shift, key_head, value_head, table_ptr, table_columns,
            key_codes_ptr, key_scales_ptr, key_plain_ptr, codes_ptr, scales_ptr, plain_ptr,
            K, V, SK, SV, KEYS, SPAN, True, OWN, WHOLE, 1, SPREAD, NATIVE,
        )  # fmt: skip
    return largest, total, out


@triton.jit
def take_request(
    split, splits, q, scale, largest, total, out, token, member, position, earliest, mine, apiece, request,
    slots_ptr, starts_ptr, key_head, value_head, table_ptr, table_columns,
    key_codes_ptr, key_scales_ptr, key_plain_ptr, codes_ptr, scales_ptr, plain_ptr, own_keys_ptr, own_values_ptr,
    K: tl.constexpr, V: tl.constexpr, NK: tl.constexpr, NV: tl.constexpr, SK: tl.constexpr, SV: tl.constexpr,
    KEYS: tl.constexpr, SPAN: tl.constexpr, OWN: tl.constexpr, WHOLE: tl.constexpr, STAGES: tl.constexpr,
    SPREAD: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Take one request's rows, those of the pools, then with OWN the step's own, into the running softmax."""
    most = tl.max(tl.where(mine, position, -1), axis=0)
    least = tl.min(tl.where(mine, earliest, 0x7FFFFFFF), axis=0)
    least = tl.where(most < 0, 0, least)
    slot = tl.load(slots_ptr + request)
    stored = most
    if OWN:
        start = tl.load(starts_ptr + request)
        stored = tl.minimum(most, start - 1)
    largest, total, out = take_rows(
        split, splits, q, scale, largest, total, out, member, position, earliest, mine, apiece,
        least, stored, request, slot, 0, key_head, value_head, table_ptr, table_columns,
        key_codes_ptr, key_scales_ptr, key_plain_ptr, codes_ptr, scales_ptr, plain_ptr,
        K, V, SK, SV, KEYS, SPAN, False, WHOLE, STAGES, SPREAD, NATIVE,
    )  # fmt: skip
    if OWN:
        # Tokens come request by request: from a position to the token that brings it is one number's way.
        shift = tl.max(tl.where(mine, token - position, -0x7FFFFFFF), axis=0)
        largest, total, out = take_rows(
            split, splits, q, scale, largest, total, out, member, position, earliest, mine, apiece,
            tl.maximum(least, start), most, request, slot, shift, key_head, value_head, table_ptr, table_columns,
            own_keys_ptr, own_keys_ptr, own_keys_ptr, own_values_ptr, own_values_ptr, own_values_ptr,
            NK, NV, SK, SV, KEYS, SPAN, True, False, STAGES, SPREAD, NATIVE,
        )  # fmt: skip
    return largest, total, out


@triton.jit(do_not_specialize=["tokens", "heads", "each", "window", "chunk", "sunk", "table_columns", "splits"])
def attend_kv_kernel(
    out_ptr, lse_ptr, partial_ptr, partial_lse_ptr, q_ptr, sink_ptr,
    key_codes_ptr, key_scales_ptr, key_plain_ptr, codes_ptr, scales_ptr, plain_ptr, own_keys_ptr, own_values_ptr,
    positions_ptr, request_ptr, slots_ptr, starts_ptr, table_ptr, left_ptr,
    tokens, heads, each, window, chunk, sunk, table_columns, splits, scale,
    K: tl.constexpr, V: tl.constexpr, NK: tl.constexpr, NV: tl.constexpr, SK: tl.constexpr, SV: tl.constexpr,
    OWN: tl.constexpr, LEFT: tl.constexpr, GROUPS: tl.constexpr, HEADS: tl.constexpr, SPAN: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, WHOLE: tl.constexpr, STAGES: tl.constexpr, SPREAD: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    """Q [tokens, heads, dim] -> out [tokens, heads, value dim] and lse [tokens, heads], or parts for ``merge_kernel``.

    GROUPS: groups of heads that share a key head and a value head. A program takes HEADS of a group's heads for
    ``each`` tokens, SPAN at most; these are the first of ROWS rows. NK and NV are the records of the step's own rows,
    which with OWN the pools do not hold yet. LEFT: requests have left padding. ``window`` and ``chunk`` are 0 where
    there is none; ``sunk`` says that there is a sink. ``scale`` is that of the logits times log2(e). Where ``splits`` >
    1 a group's keys are shared out among as many programs, which write normalised outputs [tokens, splits, heads, value
    dim] and base-2 logarithms of their sums [tokens, splits, heads].
    """
    program = tl.program_id(0)
    size = heads // GROUPS
    blocks = tl.cdiv(size, HEADS)
    group = program // blocks % GROUPS
    split = program // (blocks * GROUPS) % splits
    row = tl.arange(0, ROWS)
    member = row // HEADS
    token = program // (blocks * GROUPS * splits) * each + member
    of_group = program % blocks * HEADS + row % HEADS
    inside = (member < each) & (token < tokens) & (of_group < size)
    head = group * size + of_group
    key_head = group * K.heads // GROUPS
    value_head = group * V.heads // GROUPS

    requests = tl.load(request_ptr + token, mask=inside, other=-1)
    position = tl.load(positions_ptr + token, mask=inside & (requests >= 0), other=-1)
    left = tl.zeros_like(position)
    if LEFT:
        left = tl.load(left_ptr + requests, mask=inside & (requests >= 0), other=0)
    earliest = first_seen(position, left, window, chunk)

    line = token.to(tl.int64) * heads + head
    q = ()
    key_panels: tl.constexpr = SK.chunks * SK.parts
    for p in tl.static_range(key_panels):
        channel = panel_channels(p, SK)[None, :]
        x = tl.load(q_ptr + line[:, None] * K.dim + channel, mask=inside[:, None] & (channel < K.dim), other=0.0)
        q = q + (x.to(tl.float32 if SK.full else tl.bfloat16),)
    out = ()
    panels: tl.constexpr = SV.chunks * SV.parts
    width: tl.constexpr = SV.chunk // SV.parts
    for _ in tl.static_range(panels):
        out = out + (tl.zeros([ROWS, width], tl.float32),)
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)

    newest = tl.max(requests, axis=0)
    if SPAN == 1:
        largest, total, out = take_request(
            split, splits, q, scale, largest, total, out, token, member, position, earliest, requests >= 0, False,
            tl.maximum(newest, 0), slots_ptr, starts_ptr, key_head, value_head, table_ptr, table_columns,
            key_codes_ptr, key_scales_ptr, key_plain_ptr, codes_ptr, scales_ptr, plain_ptr, own_keys_ptr,
            own_values_ptr, K, V, NK, NV, SK, SV, KEYS, SPAN, OWN, WHOLE, STAGES, SPREAD, NATIVE,
        )  # fmt: skip
    else:
        oldest = tl.min(tl.where(requests >= 0, requests, 0x7FFFFFFF), axis=0)
        for one in range(oldest, newest + 1):
            # The interpreter counts in plain numbers.
            request = newest * 0 + one
            largest, total, out = take_request(
                split, splits, q, scale, largest, total, out, token, member, position, earliest, requests == request,
                oldest < newest, request, slots_ptr, starts_ptr, key_head, value_head, table_ptr, table_columns,
                key_codes_ptr, key_scales_ptr, key_plain_ptr, codes_ptr, scales_ptr, plain_ptr, own_keys_ptr,
                own_values_ptr, K, V, NK, NV, SK, SV, KEYS, SPAN, OWN, WHOLE, STAGES, SPREAD, NATIVE,
            )  # fmt: skip

    some = 1.0 / tl.where(total == 0.0, 1.0, total)
    lse = largest + tl.log2(tl.where(total == 0.0, 1.0, total))
    if splits > 1:
        line = (token.to(tl.int64) * splits + split) * heads + head
        tl.store(partial_lse_ptr + line, lse, mask=inside)
        store_rows(partial_ptr + line * V.dim, out, some, total, inside & (lse != float("-inf")), V, SV, NATIVE)
    else:
        tl.store(lse_ptr + line, lse * 0.6931471805599453, mask=inside)
        if sunk:
            some *= beside_sink(sink_ptr, head, inside, lse)
        store_rows(out_ptr + line * V.dim, out, some, total, inside, V, SV, NATIVE)


@triton.jit
def store_rows(at, out, some, total, inside, V: tl.constexpr, SV: tl.constexpr, NATIVE: tl.constexpr):
    """Store panels ``out`` of [rows, channels], times ``some`` [rows], at pointers [rows]; zeros where ``total`` is."""
    panels: tl.constexpr = SV.chunks * SV.parts
    for p in tl.static_range(panels):
        channel = panel_channels(p, SV)[None, :]
        x = tl.where((total == 0.0)[:, None], 0.0, out[p] * some[:, None])
        if at.dtype.element_ty == tl.bfloat16 and not NATIVE:
            x = round_bf16(x, NATIVE)
        tl.store(at[:, None] + channel, x.to(at.dtype.element_ty), mask=inside[:, None] & (channel < V.dim))
