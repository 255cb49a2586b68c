"""Attention of classic layers from encoded rows: keys and values, each in its own format, read where they lie.

One program takes the query heads that share a key head and a value head, for one token or for some neighbours of one
request, over some of their keys: these are the rows of both products. Rows are decoded in registers, as ``chunks``
says; a row's only scale is applied to its logit, or to its weight, instead of to every channel. Exponentials are to the
base 2.
"""

import triton
import triton.language as tl

from kvcore.backends.torch_triton.kernels.attend import beside_sink
from kvcore.backends.torch_triton.kernels.chunks import row_pointers, scale_value
from kvcore.backends.torch_triton.kernels.codes import round_bf16
from kvcore.backends.torch_triton.kernels.words import NF4_REST, load_packed, nibble_words, unpack_chunk


@triton.jit
def first_seen(position, window, chunk):
    """First position that the queries at ``position`` see; window and chunk are 0 where they don't apply."""
    of_chunk = position // tl.maximum(chunk, 1) * chunk
    return tl.where(window > 0, tl.maximum(position + 1 - window, 0), of_chunk)


@triton.jit
def unit_of(
    first, least, most, request, slot, table_ptr, table_columns,
    K: tl.constexpr, KEYS: tl.constexpr, OWN: tl.constexpr, WHOLE: tl.constexpr, SPREAD: tl.constexpr,
):  # fmt: skip
    """Unit of the KEYS rows from position ``first`` on, -1 where there is none; one number if a tile lies in one unit.

    Where it does not (blocks smaller than a tile), every unit is looked up SPREAD times, by as many threads, and then
    handed around: else the compiler would look it up anew for every layout that it is used in.
    """
    if OWN:
        unit = slot * 0
    elif not K.paged:
        unit = slot
    elif WHOLE:
        column = first // K.rows
        there = (first <= most) & (column < table_columns)
        unit = tl.load(table_ptr + request.to(tl.int64) * table_columns + column, mask=there, other=-1)
    else:
        number = first + tl.arange(0, KEYS)[:, None] + tl.zeros([1, SPREAD], tl.int32)
        column = number // K.rows
        there = (number >= least) & (number <= most) & (column < table_columns)
        at = table_ptr + request.to(tl.int64) * table_columns + column
        unit = tl.max(tl.load(at, mask=there, other=-1), axis=1)
    return unit


@triton.jit
def take_tiles(
    first, last, turn, jump, q, scale, largest, total, out, member, position, earliest, mine,
    base, least, most, request, slot, shift, key_head, value_head, table_ptr, table_columns,
    key_codes_ptr, key_scales_ptr, key_plain_ptr, codes_ptr, scales_ptr, plain_ptr,
    K: tl.constexpr, V: tl.constexpr, SK: tl.constexpr, SV: tl.constexpr, KEYS: tl.constexpr, SPAN: tl.constexpr,
    PARTLY: tl.constexpr, OWN: tl.constexpr, WHOLE: tl.constexpr, STAGES: tl.constexpr, SPREAD: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    """Take tiles ``first`` .. ``last`` - 1 of KEYS positions into the running softmax: (largest, total, out).

    From tile ``turn`` on ``jump`` tiles are left out. PARTLY: a row of the products may not see all keys of a tile. It
    then must not meet what it does not see, which may be NaN: each token has a product of its own.
    """
    rows: tl.constexpr = position.shape[0]
    unit = unit_of(
        base + (first + tl.where(first >= turn, jump, 0)) * KEYS, least, most, request, slot, table_ptr, table_columns,
        K, KEYS, OWN, WHOLE, SPREAD,
    )  # fmt: skip
    for step in tl.range(first, last, num_stages=STAGES):
        tile = step + tl.where(step >= turn, jump, 0)
        following = step + 1 + tl.where(step + 1 >= turn, jump, 0)
        # The next tile's unit is found while this one's keys are multiplied.
        next_unit = unit_of(
            base + following * KEYS, least, most, request, slot, table_ptr, table_columns, K, KEYS, OWN, WHOLE, SPREAD
        )
        number = base + tile * KEYS + tl.arange(0, KEYS)
        valid = (number >= least) & (number <= most) & (tl.zeros_like(number) + unit >= 0)
        row = number + shift if OWN else number % K.rows
        there = tl.maximum(unit, 0)
        keys_at = row_pointers(there, row * K.heads + key_head, key_codes_ptr, key_scales_ptr, key_plain_ptr, K)
        values_at = row_pointers(there, row * V.heads + value_head, codes_ptr, scales_ptr, plain_ptr, V)
        raw_keys, key_scales = load_packed(keys_at, valid, K, SK)
        raw_values, value_scales = load_packed(values_at, valid, V, SV)

        logit = tl.zeros([rows, KEYS], tl.float32)
        key_chunks: tl.constexpr = SK.chunks
        for c in tl.static_range(key_chunks):
            k = unpack_chunk(raw_keys[c], key_scales, valid, c * SK.chunk, K, SK, NATIVE)
            if SK.words and K.code == "nf4":
                part = tl.dot(q[c], tl.trans(k))
                rest = nibble_words(raw_keys[c], raw_keys[c], NF4_REST, False)
                part = tl.dot(q[c], tl.trans(rest), part)
                logit += part * scale_value(key_scales[c * SK.chunk // K.width], K, NATIVE)[None, :]
            else:
                logit = tl.dot(q[c], tl.trans(k), logit, input_precision=SK.precision)
        logit *= scale
        if SK.apart and K.groups == 1:
            logit *= scale_value(key_scales[0], K, NATIVE)[None, :]
        seen = valid[None, :]
        if SPAN > 1:
            seen = seen & mine[:, None]
        if PARTLY:
            seen = seen & (number[None, :] <= position[:, None]) & (number[None, :] >= earliest[:, None])
        logit = tl.where(seen, logit, float("-inf"))
        above = tl.maximum(largest, tl.max(logit, axis=1))
        finite = tl.where(above == float("-inf"), 0.0, above)
        weight = tl.exp2(logit - finite[:, None])
        kept = tl.exp2(largest - finite)
        total = total * kept + tl.sum(weight, axis=1)
        largest = above
        if SV.apart and V.groups == 1:
            weight *= scale_value(value_scales[0], V, NATIVE)[None, :]
            if SPAN > 1:
                weight = tl.where(seen, weight, 0.0)
        summed = ()
        value_chunks: tl.constexpr = SV.chunks
        for c in tl.static_range(value_chunks):
            v = unpack_chunk(raw_values[c], value_scales, valid, c * SV.chunk, V, SV, NATIVE)
            w = weight
            if SV.apart and V.groups > 1:
                w *= scale_value(value_scales[c * SV.chunk // V.width], V, NATIVE)[None, :]
                if SPAN > 1:
                    w = tl.where(seen, w, 0.0)
            # Where the result is bf16 so are the weights; their sum is of what they were before.
            if SV.narrow and SV.full:
                w = round_bf16(w, NATIVE)
            elif not SV.full:
                w = w.to(tl.bfloat16)
            some = out[c] * kept[:, None]
            if PARTLY:
                for token in range(SPAN):
                    its = mine & (member == token)
                    until = tl.max(tl.where(its, position, -1), axis=0)
                    since = tl.max(tl.where(its, earliest, 0), axis=0)
                    met = (number <= until) & (number >= since)
                    met_v = tl.where(met[:, None], v, 0.0).to(v.dtype)
                    with_it = tl.dot(w, met_v, some, input_precision=SV.precision)
                    some = tl.where(its[:, None], with_it, some)
            else:
                some = tl.dot(w, v, some, input_precision=SV.precision)
            summed = summed + (some,)
        out = summed
        unit = next_unit
    return largest, total, out


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
    positions_ptr, request_ptr, slots_ptr, starts_ptr, table_ptr,
    tokens, heads, each, window, chunk, sunk, table_columns, splits, scale,
    K: tl.constexpr, V: tl.constexpr, NK: tl.constexpr, NV: tl.constexpr, SK: tl.constexpr, SV: tl.constexpr,
    OWN: tl.constexpr, GROUPS: tl.constexpr, HEADS: tl.constexpr, SPAN: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, WHOLE: tl.constexpr, STAGES: tl.constexpr, SPREAD: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Q [tokens, heads, dim] -> out [tokens, heads, value dim] and lse [tokens, heads], or parts for ``merge_kernel``.

    GROUPS: groups of heads that share a key head and a value head. A program takes HEADS of a group's heads for
    ``each`` tokens, SPAN at most; these are the first of ROWS rows. NK and NV are the records of the step's own rows,
    which with OWN the pools do not hold yet. ``window`` and ``chunk`` are 0 where there is none; ``sunk`` says that
    there is a sink. ``scale`` is that of the logits times log2(e). Where ``splits`` > 1 a group's keys are shared out
    among as many programs, which write normalised outputs [tokens, splits, heads, value dim] and base-2 logarithms of
    their sums [tokens, splits, heads].
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
    earliest = first_seen(position, window, chunk)

    line = token.to(tl.int64) * heads + head
    q = ()
    key_chunks: tl.constexpr = SK.chunks
    for c in tl.static_range(key_chunks):
        channel = c * SK.chunk + tl.arange(0, SK.chunk)[None, :]
        x = tl.load(q_ptr + line[:, None] * K.dim + channel, mask=inside[:, None] & (channel < K.dim), other=0.0)
        q = q + (x.to(tl.float32 if SK.full else tl.bfloat16),)
    out = ()
    value_chunks: tl.constexpr = SV.chunks
    value_chunk: tl.constexpr = SV.chunk
    for _ in tl.static_range(value_chunks):
        out = out + (tl.zeros([ROWS, value_chunk], tl.float32),)
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
    """Store chunks ``out`` of [rows, channels], times ``some`` [rows], at pointers [rows]; zeros where ``total`` is."""
    value_chunks: tl.constexpr = SV.chunks
    for c in tl.static_range(value_chunks):
        channel = c * SV.chunk + tl.arange(0, SV.chunk)[None, :]
        x = tl.where((total == 0.0)[:, None], 0.0, out[c] * some[:, None])
        if at.dtype.element_ty == tl.bfloat16 and not NATIVE:
            x = round_bf16(x, NATIVE)
        tl.store(at[:, None] + channel, x.to(at.dtype.element_ty), mask=inside[:, None] & (channel < V.dim))
