"""Tiles of keys and values taken into a running softmax, decoded in registers, as ``words`` and ``chunks`` say.

A row's only scale is applied to its logit, or to its weight, instead of to every channel.
"""

import triton
import triton.language as tl

from kvcore.kernels.triton.chunks import row_pointers, scale_value
from kvcore.kernels.triton.codes import round_bf16
from kvcore.kernels.triton.words import load_packed, unpack_chunk


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
        key_parts: tl.constexpr = SK.parts
        for c in tl.static_range(key_chunks):
            k = unpack_chunk(raw_keys[c], key_scales, valid, c * SK.chunk, K, SK, True, NATIVE)
            some = logit if K.groups == 1 or not SK.apart else tl.zeros([rows, KEYS], tl.float32)
            for p in tl.static_range(key_parts):
                some = tl.dot(q[c * SK.parts + p], k[p], some, input_precision=SK.precision)
            if SK.apart and K.groups > 1:
                some = logit + some * scale_value(key_scales[c * SK.chunk // K.width], K, NATIVE)[None, :]
            logit = some
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
        v = ()
        summed = ()
        weights = ()
        value_chunks: tl.constexpr = SV.chunks
        value_parts: tl.constexpr = SV.parts
        for c in tl.static_range(value_chunks):
            v = v + unpack_chunk(raw_values[c], value_scales, valid, c * SV.chunk, V, SV, False, NATIVE)
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
            for p in tl.static_range(value_parts):
                weights = weights + (w,)
                summed = summed + (out[c * SV.parts + p] * kept[:, None],)
        panels: tl.constexpr = SV.chunks * SV.parts
        if PARTLY:
            for token in range(SPAN):
                its = mine & (member == token)
                until = tl.max(tl.where(its, position, -1), axis=0)
                since = tl.max(tl.where(its, earliest, 0), axis=0)
                met = (number <= until) & (number >= since)
                more = ()
                for p in tl.static_range(panels):
                    met_v = tl.where(met[:, None], v[p], 0.0).to(v[p].dtype)
                    with_it = tl.dot(weights[p], met_v, summed[p], input_precision=SV.precision)
                    more = more + (tl.where(its[:, None], with_it, summed[p]),)
                summed = more
        else:
            more = ()
            for p in tl.static_range(panels):
                more = more + (tl.dot(weights[p], v[p], summed[p], input_precision=SV.precision),)
            summed = more
        out = summed
        unit = next_unit
    return largest, total, out


@triton.jit
def panel_channels(PANEL: tl.constexpr, S: tl.constexpr):
    """Channels of a panel: every ``parts``-th of its chunk, if S.twice once more."""
    width: tl.constexpr = S.chunk // S.parts
    number = tl.arange(0, width * (2 if S.twice else 1)) % width
    return PANEL // S.parts * S.chunk + PANEL % S.parts + S.parts * number
