"""Flush: every entry that the step completes, pooled, normed, rotated, encoded and stored in one launch.

Programs go over the step's tokens and act on those that close a window, so the grid depends on shapes alone and a graph
that was captured stays right when other tokens close. A window with many rows is split over channels to fill the chip:
each part leaves its pooled channels in a scratch row, and the part that arrives last finishes the entry. Entries and
index keys share the launch, and so can the write of the step's own rows to the tail.
"""

import triton
import triton.language as tl

from kvcore.backends.torch_triton.kernels.address import locate
from kvcore.backends.torch_triton.kernels.codes import load_float, round_bf16
from kvcore.backends.torch_triton.kernels.latent import finish, turns
from kvcore.backends.torch_triton.kernels.pool import load_ahead, pool, settle
from kvcore.backends.torch_triton.kernels.rows import store_rows
from kvcore.backends.torch_triton.kernels.tail import save_rows

NEVER: tl.constexpr = tl.constexpr(2147483647)


@triton.jit
def close_window(
    token,
    position,
    request,
    part,
    kv_ptr,
    score_ptr,
    tail_ptr,
    codes_ptr,
    scales_ptr,
    plain_ptr,
    slots_ptr,
    starts_ptr,
    stored_ptr,
    table_ptr,
    table_columns,
    norm_ptr,
    frequencies_ptr,
    eps,
    scratch_ptr,
    arrivals_ptr,
    T: tl.constexpr,
    R: tl.constexpr,
    NORM: tl.constexpr,
    PAIRS: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    PARTS: tl.constexpr,
    PREFILL: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """One part of one entry: pool its channels; the last part to arrive finishes and stores the entry."""
    size: tl.constexpr = R.tiles * R.width
    share: tl.constexpr = size // PARTS
    # Everything that has to be fetched is asked for before the long wait for the window itself.
    slot = tl.load(slots_ptr + request)
    start = tl.load(starts_ptr + request)
    stored = tl.load(stored_ptr + request)
    one = tl.zeros([1], tl.int32)
    entry = one + position // T.ratio
    unit, row = locate(one + request, entry, table_ptr, table_ptr, table_columns, R)
    valid = (unit >= 0) & (one + position >= one + stored)
    everything = tl.arange(0, size)
    weight = tl.full([size], 1.0, tl.float32)
    if NORM:
        weight = tl.load(norm_ptr + everything, mask=everything < R.dim, other=0).to(tl.float32)
    channel = part * share + tl.arange(0, share)
    window: tl.constexpr = 2 * T.ratio if T.overlap else T.ratio
    if PREFILL and ROWS == CHUNK:
        kv, score = load_ahead(
            kv_ptr, score_ptr, tail_ptr, tl.arange(0, ROWS), token, position, start, slot, channel, T
        )
        cos, sin = turns(entry * T.ratio, frequencies_ptr, size, R.dim, PAIRS)
        x = settle(score, tl.full(score.shape, 1.0, tl.float32), kv, NATIVE)
    else:
        cos, sin = turns(entry * T.ratio, frequencies_ptr, size, R.dim, PAIRS)
        if PREFILL and T.ratio & (T.ratio - 1) == 0:
            if position + 1 - window >= start:
                x = pool(
                    kv_ptr, score_ptr, tail_ptr, token, position, start, slot, channel, T, ROWS, CHUNK, True, NATIVE
                )
            else:
                few: tl.constexpr = CHUNK // 4 if CHUNK > 8 else 2
                x = pool(
                    kv_ptr, score_ptr, tail_ptr, token, position, start, slot, channel, T, ROWS, few, False, NATIVE
                )
        else:
            x = pool(kv_ptr, score_ptr, tail_ptr, token, position, start, slot, channel, T, ROWS, CHUNK, False, NATIVE)
    if R.rounded:
        x = round_bf16(x, NATIVE)
    if PARTS > 1:
        # Entries of one request close ``ratio`` tokens apart, so this number is an entry's own.
        number = token // T.ratio + request
        scratch = scratch_ptr + number.to(tl.int64) * size
        tl.store(scratch + channel, x)
        tl.debug_barrier()
        if tl.atomic_add(arrivals_ptr + number, 1, sem="acq_rel") == PARTS - 1:
            tl.debug_barrier()
            x_all = tl.load(scratch + everything, cache_modifier=".cg")
            tl.store(arrivals_ptr + number, 0)
            x_all = finish(x_all[None, :], weight, cos, sin, eps, R, NORM, PAIRS, NATIVE)
            x_all = tl.reshape(x_all, (1, R.tiles, R.width))
            store_rows(x_all, unit, row, valid, codes_ptr, scales_ptr, plain_ptr, R, R.rounded, NATIVE)
    else:
        x = finish(x[None, :], weight, cos, sin, eps, R, NORM, PAIRS, NATIVE)
        store_rows(
            tl.reshape(x, (1, R.tiles, R.width)),
            unit,
            row,
            valid,
            codes_ptr,
            scales_ptr,
            plain_ptr,
            R,
            R.rounded,
            NATIVE,
        )


@triton.jit
def stream(
    kv_ptr,
    score_ptr,
    tail_ptr,
    codes_ptr,
    scales_ptr,
    plain_ptr,
    positions_ptr,
    request_ptr,
    slots_ptr,
    starts_ptr,
    stored_ptr,
    table_ptr,
    count,
    table_columns,
    norm_ptr,
    frequencies_ptr,
    eps,
    scratch_ptr,
    arrivals_ptr,
    T: tl.constexpr,
    R: tl.constexpr,
    NORM: tl.constexpr,
    PAIRS: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    PARTS: tl.constexpr,
    TOKENS: tl.constexpr,
    APPEND: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """One program's tokens of one stream: close windows, and with APPEND store the tokens' raw rows."""
    part = tl.program_id(0) % PARTS
    first = tl.program_id(0) // PARTS * TOKENS
    if TOKENS == 1:
        position = tl.load(positions_ptr + first)
        request = tl.load(request_ptr + first)
        known = (position >= 0) & (request >= 0)
        if APPEND:
            append_part(first, position, request, part, kv_ptr, score_ptr, tail_ptr, slots_ptr, T, R, PARTS)
        if known & ((position + 1) % T.ratio == 0):
            close_window(
                first,
                position,
                request,
                part,
                kv_ptr,
                score_ptr,
                tail_ptr,
                codes_ptr,
                scales_ptr,
                plain_ptr,
                slots_ptr,
                starts_ptr,
                stored_ptr,
                table_ptr,
                table_columns,
                norm_ptr,
                frequencies_ptr,
                eps,
                scratch_ptr,
                arrivals_ptr,
                T,
                R,
                NORM,
                PAIRS,
                ROWS,
                CHUNK,
                PARTS,
                False,
                NATIVE,
            )
    else:
        token = first + tl.arange(0, TOKENS)
        positions = tl.load(positions_ptr + token, mask=token < count, other=-1)
        closes = (positions >= 0) & ((positions + 1) % T.ratio == 0)
        current = tl.min(tl.where(closes, token, NEVER), axis=0)
        while current < NEVER:
            position = tl.load(positions_ptr + current)
            request = tl.load(request_ptr + current)
            close_window(
                current,
                position,
                request,
                part,
                kv_ptr,
                score_ptr,
                tail_ptr,
                codes_ptr,
                scales_ptr,
                plain_ptr,
                slots_ptr,
                starts_ptr,
                stored_ptr,
                table_ptr,
                table_columns,
                norm_ptr,
                frequencies_ptr,
                eps,
                scratch_ptr,
                arrivals_ptr,
                T,
                R,
                NORM,
                PAIRS,
                ROWS,
                CHUNK,
                PARTS,
                True,
                NATIVE,
            )
            current = tl.min(tl.where(closes & (token > current), token, NEVER), axis=0)


@triton.jit
def append_part(
    token,
    position,
    request,
    part,
    kv_ptr,
    score_ptr,
    tail_ptr,
    slots_ptr,
    T: tl.constexpr,
    R: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Store one part of a token's raw row. The host made sure that no window of the step needs the row it replaces."""
    one = tl.zeros([1], tl.int32)
    size: tl.constexpr = (2 if T.overlap else 1) * R.tiles * R.width // PARTS
    column = part * size + tl.arange(0, size)
    inside = (column < T.width)[None, :] & ((one + position >= 0) & (one + request >= 0))[:, None]
    kv = load_float(kv_ptr + token.to(tl.int64) * T.width + column[None, :], inside)
    score = load_float(score_ptr + token.to(tl.int64) * T.width + column[None, :], inside)
    slot = tl.load(slots_ptr + one + request, mask=one + request >= 0, other=-1)
    mask = inside & (slot >= 0)[:, None]
    position = tl.maximum(one + position, 0)
    save_rows(kv, column, mask, slot, position, tail_ptr, T)
    save_rows(score, column + T.width, mask, slot, position, tail_ptr, T)


@triton.jit(do_not_specialize=["count", "table_columns", "programs", "eps"])
def flush_kernel(
    kv_ptr,
    score_ptr,
    tail_ptr,
    codes_ptr,
    scales_ptr,
    plain_ptr,
    norm_ptr,
    index_kv_ptr,
    index_score_ptr,
    index_tail_ptr,
    index_codes_ptr,
    index_scales_ptr,
    index_plain_ptr,
    index_norm_ptr,
    frequencies_ptr,
    positions_ptr,
    request_ptr,
    slots_ptr,
    starts_ptr,
    stored_ptr,
    table_ptr,
    scratch_ptr,
    arrivals_ptr,
    count,
    table_columns,
    programs,
    eps,
    T: tl.constexpr,
    R: tl.constexpr,
    NORM: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    PARTS: tl.constexpr,
    IT: tl.constexpr,
    IR: tl.constexpr,
    INDEX_NORM: tl.constexpr,
    INDEX_ROWS: tl.constexpr,
    INDEX_CHUNK: tl.constexpr,
    INDEX: tl.constexpr,
    PAIRS: tl.constexpr,
    TOKENS: tl.constexpr,
    APPEND: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Both streams of a layer; with INDEX the grid's second axis is the stream."""
    if INDEX:
        if tl.program_id(1) == 1:
            if tl.program_id(0) < programs:
                stream(
                    index_kv_ptr,
                    index_score_ptr,
                    index_tail_ptr,
                    index_codes_ptr,
                    index_scales_ptr,
                    index_plain_ptr,
                    positions_ptr,
                    request_ptr,
                    slots_ptr,
                    starts_ptr,
                    stored_ptr,
                    table_ptr,
                    count,
                    table_columns,
                    index_norm_ptr,
                    frequencies_ptr,
                    eps,
                    scratch_ptr,
                    arrivals_ptr,
                    IT,
                    IR,
                    INDEX_NORM,
                    PAIRS,
                    INDEX_ROWS,
                    INDEX_CHUNK,
                    1,
                    TOKENS,
                    APPEND,
                    NATIVE,
                )
        else:
            stream(
                kv_ptr,
                score_ptr,
                tail_ptr,
                codes_ptr,
                scales_ptr,
                plain_ptr,
                positions_ptr,
                request_ptr,
                slots_ptr,
                starts_ptr,
                stored_ptr,
                table_ptr,
                count,
                table_columns,
                norm_ptr,
                frequencies_ptr,
                eps,
                scratch_ptr,
                arrivals_ptr,
                T,
                R,
                NORM,
                PAIRS,
                ROWS,
                CHUNK,
                PARTS,
                TOKENS,
                APPEND,
                NATIVE,
            )
    else:
        stream(
            kv_ptr,
            score_ptr,
            tail_ptr,
            codes_ptr,
            scales_ptr,
            plain_ptr,
            positions_ptr,
            request_ptr,
            slots_ptr,
            starts_ptr,
            stored_ptr,
            table_ptr,
            count,
            table_columns,
            norm_ptr,
            frequencies_ptr,
            eps,
            scratch_ptr,
            arrivals_ptr,
            T,
            R,
            NORM,
            PAIRS,
            ROWS,
            CHUNK,
            PARTS,
            TOKENS,
            APPEND,
            NATIVE,
        )
