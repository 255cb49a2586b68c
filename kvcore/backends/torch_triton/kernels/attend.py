"""Attention from encoded rows: one program takes some heads of one query over some of its keys.

A tile of keys is decoded once, in the products' precision, and used for both products. Rows are taken in chunks of
channels, each of which lies in one field, so that registers hold few decoded numbers at a time and no field is loaded
where the other lies. Exponentials are to the base 2.
Queries without a key and tiles without one are safe: weights are then zeros, never quotients of zeros.
"""

import triton
import triton.language as tl

from kvcore.backends.torch_triton.kernels.address import locate
from kvcore.backends.torch_triton.kernels.chunks import decode_chunk, load_chunk, load_chunk_scales
from kvcore.backends.torch_triton.kernels.codes import round_bf16


@triton.jit
def absorb(
    q, unit, row, valid, codes_ptr, scales_ptr, plain_ptr, scale, largest, total, out,
    R: tl.constexpr, S: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Take the keys in rows [n] into the running softmax: (largest, total, out), logits to the base 2.

    ``q`` and ``out`` are tuples of chunks. Everything is loaded before anything is used.
    """
    n: tl.constexpr = unit.shape[0]
    raw = ()
    scales = ()
    chunks: tl.constexpr = S.chunks
    for c in tl.static_range(chunks):
        raw = raw + (load_chunk(unit, row, valid, codes_ptr, plain_ptr, c * S.chunk, R, S),)
        if c * S.chunk < R.quant:
            scales = scales + (load_chunk_scales(unit, row, valid, scales_ptr, c * S.chunk, R, S, NATIVE),)
        else:
            scales = scales + (0,)
    logit = tl.zeros([q[0].shape[0], n], tl.float32)
    keys = ()
    for c in tl.static_range(chunks):
        k = decode_chunk(raw[c], scales[c], valid, c * S.chunk, R, S, NATIVE)
        keys = keys + (k,)
        logit = tl.dot(q[c], tl.trans(k), logit, input_precision="ieee")
    logit = tl.where(valid[None, :], logit * scale, float("-inf"))
    above = tl.maximum(largest, tl.max(logit, axis=1))
    finite = tl.where(above == float("-inf"), 0.0, above)
    weight = tl.exp2(logit - finite[:, None])
    kept = tl.exp2(largest - finite)
    total = total * kept + tl.sum(weight, axis=1)
    high = round_bf16(weight, False) if S.twice and S.full else weight.to(q[0].dtype)
    low = high
    if S.twice:
        # What rounding took from the weights, as a second product: then they are good to 2^-17.
        low = (weight - high.to(tl.float32)).to(q[0].dtype)
    summed = ()
    for c in tl.static_range(chunks):
        part = tl.dot(high, keys[c], out[c] * kept[:, None], input_precision="ieee")
        if S.twice:
            part = tl.dot(low, keys[c], part, input_precision="ieee")
        summed = summed + (part,)
    return above, total, summed


@triton.jit
def window_place(
    tile, token, request, position, count, start, slots_ptr, table_ptr, table_columns,
    R: tl.constexpr, KEYS: tl.constexpr, FRESH: tl.constexpr,
):  # fmt: skip
    """(unit, row, valid), each [KEYS]: window keys of tile ``tile``; FRESH: the step's own rows, -1: only older ones."""
    number = position + 1 - count + tile * KEYS + tl.arange(0, KEYS)
    valid = number <= position
    if FRESH == 1:
        valid = valid & (number >= start)
        unit, row = tl.zeros_like(number), token - position + number
    else:
        if FRESH == -1:
            valid = valid & (number < start)
        each = tl.full(number.shape, 0, tl.int32) + request
        unit, row = locate(each, tl.where(valid, number, -1), slots_ptr, table_ptr, table_columns, R)
    valid = valid & (unit >= 0)
    return tl.where(valid, unit, 0), tl.where(valid, row, 0), valid


@triton.jit
def entry_place(
    tile, token, request, visible, picks, selected_ptr, slots_ptr, table_ptr, table_columns,
    R: tl.constexpr, KEYS: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    """(unit, row, valid), each [KEYS]: entries of tile ``tile``, every visible one or those selected."""
    n = tile * KEYS + tl.arange(0, KEYS)
    if ALL:
        entry = n
    else:
        entry = tl.load(selected_ptr + token.to(tl.int64) * picks + n, mask=n < picks, other=-1)
    valid = (entry >= 0) & (entry < visible)
    each = tl.full(n.shape, 0, tl.int32) + request
    unit, row = locate(each, tl.where(valid, entry, -1).to(tl.int32), slots_ptr, table_ptr, table_columns, R)
    valid = valid & (unit >= 0)
    return tl.where(valid, unit, 0), tl.where(valid, row, 0), valid


@triton.jit
def store_heads(at, out, some, inside, S: tl.constexpr, NATIVE: tl.constexpr):
    """Store chunks ``out`` of [heads, chunk], times ``some`` [heads], at pointers ``at`` [heads]."""
    chunks: tl.constexpr = S.chunks
    for c in tl.static_range(chunks):
        channel = c * S.chunk + tl.arange(0, S.chunk)[None, :]
        x = out[c] * some[:, None]
        if at.dtype.element_ty == tl.bfloat16 and not NATIVE:
            x = round_bf16(x, NATIVE)
        tl.store(at[:, None] + channel, x.to(at.dtype.element_ty), mask=inside[:, None] & (channel < S.dim))


@triton.jit(do_not_specialize=["tokens", "picks", "table_columns", "splits"])
def attend_kernel(
    out_ptr, lse_ptr, partial_ptr, partial_lse_ptr, q_ptr, sink_ptr, selected_ptr,
    codes_ptr, scales_ptr, plain_ptr, entry_codes_ptr, entry_scales_ptr, entry_plain_ptr, own_ptr,
    positions_ptr, request_ptr, slots_ptr, starts_ptr, table_ptr,
    tokens, heads, picks, table_columns, splits, scale,
    W: tl.constexpr, E: tl.constexpr, O: tl.constexpr, S: tl.constexpr, WINDOW: tl.constexpr, RATIO: tl.constexpr,
    ALL: tl.constexpr, SINK: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    """q [tokens, heads, dim] -> out like it and lse [tokens, heads], or parts of them for ``merge_kernel``.

    WINDOW or RATIO 0: there is no window, or no entries. O is the record of the step's own rows, or 0. ``scale`` is
    that of the logits times log2(e). With ``splits`` > 1 a query's tiles are shared out among as many programs, which
    write normalised outputs [tokens, splits, heads, dim] and base-2 logarithms of their sums [tokens, splits, heads].
    """
    program = tl.program_id(0)
    blocks = tl.cdiv(heads, HEADS)
    token = program // (blocks * splits)
    split = program // blocks % splits
    head = program % blocks * HEADS + tl.arange(0, HEADS)
    inside = head < heads
    request = tl.load(request_ptr + token)
    position = tl.where(request >= 0, tl.load(positions_ptr + token), -1)
    request = tl.maximum(request, 0)
    start = 0

    windows = 0
    count = 0
    if WINDOW:
        count = tl.minimum(position + 1, WINDOW)
        windows = tl.cdiv(count, KEYS)
    visible = 0
    tiles = windows
    if RATIO:
        visible = (position + 1) // RATIO
        # Without a visible entry the selection need not be read.
        wanted = visible if ALL else tl.where(visible > 0, picks, 0)
        tiles += tl.cdiv(wanted, KEYS)
    each = tl.cdiv(tiles, splits)
    first = split * each
    last = tl.minimum(first + each, tiles)

    dtype: tl.constexpr = tl.float32 if S.full else tl.bfloat16
    q_at = q_ptr + (token.to(tl.int64) * heads + head) * S.dim
    q = ()
    out = ()
    chunks: tl.constexpr = S.chunks
    CHUNK: tl.constexpr = S.chunk
    for c in tl.static_range(chunks):
        channel = c * CHUNK + tl.arange(0, CHUNK)[None, :]
        q = q + (tl.load(q_at[:, None] + channel, mask=inside[:, None] & (channel < S.dim), other=0.0).to(dtype),)
        out = out + (tl.zeros([HEADS, CHUNK], tl.float32),)
    largest = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    if WINDOW:
        end = tl.minimum(last, windows)
        if O:
            start = tl.load(starts_ptr + request)
            for tile in tl.range(first, end):
                unit, row, valid = window_place(
                    tile, token, request, position, count, start, slots_ptr, table_ptr, table_columns, O, KEYS, 1
                )
                largest, total, out = absorb(
                    q, unit, row, valid, own_ptr, own_ptr, own_ptr, scale, largest, total, out, O, S, NATIVE
                )
            # The ring has nothing to add where the whole window is the step's own.
            end = tl.where(position + 1 - count < start, end, first)
        fresh: tl.constexpr = -1 if O else 0
        unit, row, valid = window_place(
            first, token, request, position, count, start, slots_ptr, table_ptr, table_columns, W, KEYS, fresh
        )
        for tile in tl.range(first, end, num_stages=STAGES):
            # The next tile's addresses are on their way while this one's keys are multiplied.
            next_unit, next_row, next_valid = window_place(
                tile + 1, token, request, position, count, start, slots_ptr, table_ptr, table_columns, W, KEYS, fresh
            )
            largest, total, out = absorb(
                q, unit, row, valid, codes_ptr, scales_ptr, plain_ptr, scale, largest, total, out, W, S, NATIVE
            )
            unit, row, valid = next_unit, next_row, next_valid
    if RATIO:
        begin = tl.maximum(first, windows) - windows
        unit, row, valid = entry_place(
            begin, token, request, visible, picks, selected_ptr, slots_ptr, table_ptr, table_columns, E, KEYS, ALL
        )
        for tile in tl.range(begin, last - windows, num_stages=STAGES):
            next_unit, next_row, next_valid = entry_place(
                tile + 1, token, request, visible, picks, selected_ptr, slots_ptr, table_ptr, table_columns, E, KEYS,
                ALL,
            )  # fmt: skip
            largest, total, out = absorb(
                q, unit, row, valid, entry_codes_ptr, entry_scales_ptr, entry_plain_ptr, scale, largest, total, out,
                E, S, NATIVE,
            )  # fmt: skip
            unit, row, valid = next_unit, next_row, next_valid

    some = 1.0 / tl.where(total == 0.0, 1.0, total)
    lse = largest + tl.log2(total)
    if splits > 1:
        line = (token.to(tl.int64) * splits + split) * heads + head
        tl.store(partial_lse_ptr + line, lse, mask=inside)
        written = inside & (tl.zeros_like(head) + first < last)
        store_heads(partial_ptr + line * S.dim, out, some, written, S, NATIVE)
    else:
        line = token.to(tl.int64) * heads + head
        tl.store(lse_ptr + line, lse * 0.6931471805599453, mask=inside)
        if SINK:
            some *= beside_sink(sink_ptr, head, inside, lse)
        store_heads(out_ptr + line * S.dim, out, some, inside, S, NATIVE)


@triton.jit
def beside_sink(sink_ptr, head, inside, lse):
    """Share of the weight that is left beside the sink, for base-2 ``lse``; a query without keys keeps its zeros."""
    sink = tl.load(sink_ptr + head, mask=inside, other=0.0).to(tl.float32)
    share = 1.0 / (1.0 + tl.exp2(sink * 1.4426950408889634 - lse))
    return tl.where(lse == float("-inf"), 0.0, share)
