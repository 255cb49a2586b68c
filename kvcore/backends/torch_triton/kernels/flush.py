"""Flush: every entry that the step completes, pooled, normed, rotated, encoded and stored in one launch.

Programs go over the step's tokens and act on those that close a window, so the grid depends on shapes alone and a
captured graph stays right when other tokens close. A window with many rows is split over channels to fill the chip: each
part leaves its pooled channels in a scratch row, and the part that arrives last finishes the entry. The two streams,
entries and index keys, share the launch, and so can the write of the step's own rows to the tail.
"""

import triton
import triton.language as tl

from kvcore.backends.torch_triton.kernels.address import locate
from kvcore.backends.torch_triton.kernels.codes import load_float, round_bf16
from kvcore.backends.torch_triton.kernels.latent import finish
from kvcore.backends.torch_triton.kernels.rows import store_rows
from kvcore.backends.torch_triton.kernels.tail import save_rows

NEVER: tl.constexpr = tl.constexpr(2147483647)


@triton.jit
def pool(kv_ptr, score_ptr, tail_ptr, token, position, start, slot, channel, T: tl.constexpr, ROWS: tl.constexpr):
    """Softmax-weighted sum over the window that ends at ``position``, for channels [c] -> [c] fp32.

    Rows from before the step come from the tail's ring, the step's own from its inputs.
    """
    window: tl.constexpr = 2 * T.ratio if T.overlap else T.ratio
    r = tl.arange(0, ROWS)
    p = position + 1 - window + r
    exists = (r < window) & (p >= 0)
    own = p >= start
    # A token in the window before the entry's own lends its carry half, the first; its own tokens the cur half.
    half = tl.where(r < T.ratio, 0, T.dim) if T.overlap else tl.zeros_like(r)
    here = (token - position + p).to(tl.int64) * T.width + half
    there = slot.to(tl.int64) * T.slot + (tl.maximum(p, 0) % T.rows).to(tl.int64) * (2 * T.width) + half
    inside = (channel < T.dim)[None, :]
    mask = exists[:, None] & inside
    if kv_ptr.dtype.element_ty == tl.float32:
        kv_at = tl.where(own[:, None], kv_ptr + here[:, None], tail_ptr + there[:, None]) + channel[None, :]
        score_at = tl.where(own[:, None], score_ptr + here[:, None], tail_ptr + T.width + there[:, None])
        kv = tl.load(kv_at, mask=mask, other=0.0)
        score = tl.load(score_at + channel[None, :], mask=mask, other=float("-inf"))
    else:
        new, old = mask & own[:, None], mask & (p < start)[:, None]
        here, there = here[:, None] + channel[None, :], there[:, None] + channel[None, :]
        kv = tl.where(new, load_float(kv_ptr + here, new), tl.load(tail_ptr + there, mask=old, other=0.0))
        old_score = tl.load(tail_ptr + T.width + there, mask=old, other=float("-inf"))
        score = tl.where(new, load_float(score_ptr + here, new), old_score)
    largest = tl.max(score, axis=0)
    largest = tl.where(largest == float("-inf"), 0.0, largest)
    weight = tl.exp(score - largest[None, :])
    total = tl.sum(weight, axis=0)
    pooled = tl.sum(tl.where(weight == 0.0, 0.0, weight * kv), axis=0)
    return pooled / tl.where(total == 0.0, 1.0, total)


@triton.jit
def close_window(
    token, position, request, part, kv_ptr, score_ptr, tail_ptr, codes_ptr, scales_ptr, plain_ptr, slots_ptr, starts_ptr,
    stored_ptr, table_ptr, table_columns, norm_ptr, frequencies_ptr, eps, scratch_ptr, arrivals_ptr, T: tl.constexpr,
    R: tl.constexpr, NORM: tl.constexpr, PAIRS: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """One part of one entry: pool its channels; the last part to arrive finishes and stores the entry."""
    size: tl.constexpr = R.tiles * R.width
    share: tl.constexpr = size // PARTS
    slot = tl.load(slots_ptr + request)
    start = tl.load(starts_ptr + request)
    channel = part * share + tl.arange(0, share)
    x = pool(kv_ptr, score_ptr, tail_ptr, token, position, start, slot, channel, T, ROWS)
    if R.exact:
        x = round_bf16(x, NATIVE)
    last = True
    if PARTS > 1:
        # Entries of one request close ``ratio`` tokens apart, so this number is an entry's own.
        number = token // T.ratio + request
        scratch = scratch_ptr + number.to(tl.int64) * size
        tl.store(scratch + channel, x)
        tl.debug_barrier()
        arrived = tl.atomic_add(arrivals_ptr + number, 1, sem="acq_rel")
        last = arrived == PARTS - 1
        if last:
            tl.debug_barrier()
            x_all = tl.load(scratch + tl.arange(0, size), cache_modifier=".cg")
            tl.store(arrivals_ptr + number, 0)
            store_entry(x_all, position, request, codes_ptr, scales_ptr, plain_ptr, stored_ptr, table_ptr, table_columns, norm_ptr,
                        frequencies_ptr, eps, T, R, NORM, PAIRS, NATIVE)
    else:
        store_entry(x, position, request, codes_ptr, scales_ptr, plain_ptr, stored_ptr, table_ptr, table_columns, norm_ptr,
                    frequencies_ptr, eps, T, R, NORM, PAIRS, NATIVE)


@triton.jit
def store_entry(
    x, position, request, codes_ptr, scales_ptr, plain_ptr, stored_ptr, table_ptr, table_columns, norm_ptr, frequencies_ptr, eps,
    T: tl.constexpr, R: tl.constexpr, NORM: tl.constexpr, PAIRS: tl.constexpr, NATIVE: tl.constexpr,
):
    """Norm, rotate at the window's first position, encode and store one pooled latent x [channels]."""
    one = tl.zeros([1], tl.int32)
    entry = one + position // T.ratio
    x = finish(x[None, :], entry * T.ratio, norm_ptr, frequencies_ptr, eps, R, NORM, PAIRS, NATIVE)
    unit, row = locate(one + request, entry, table_ptr, table_ptr, table_columns, R)
    x = tl.reshape(x, (1, R.tiles, R.width))
    fresh = position >= tl.load(stored_ptr + request)
    store_rows(x, unit, row, (unit >= 0) & fresh, codes_ptr, scales_ptr, plain_ptr, R, NATIVE)


@triton.jit
def stream(
    kv_ptr, score_ptr, tail_ptr, codes_ptr, scales_ptr, plain_ptr, positions_ptr, request_ptr, slots_ptr, starts_ptr,
    stored_ptr, table_ptr, count, table_columns, norm_ptr, frequencies_ptr, eps, scratch_ptr, arrivals_ptr, T: tl.constexpr,
    R: tl.constexpr, NORM: tl.constexpr, PAIRS: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr,
    TOKENS: tl.constexpr, APPEND: tl.constexpr, NATIVE: tl.constexpr,
):
    """One program's tokens of one stream: close windows, and with APPEND store the tokens' raw rows."""
    part = tl.program_id(0) % PARTS
    first = tl.program_id(0) // PARTS * TOKENS
    if TOKENS == 1:
        position = tl.load(positions_ptr + first)
        request = tl.load(request_ptr + first)
        known = (position >= 0) & (request >= 0)
        if APPEND:
            if known:
                append_part(first, position, request, part, kv_ptr, score_ptr, tail_ptr, slots_ptr, T, R, PARTS)
        if known & ((position + 1) % T.ratio == 0):
            close_window(first, position, request, part, kv_ptr, score_ptr, tail_ptr, codes_ptr, scales_ptr, plain_ptr,
                         slots_ptr, starts_ptr, stored_ptr, table_ptr, table_columns, norm_ptr, frequencies_ptr, eps, scratch_ptr,
                         arrivals_ptr, T, R, NORM, PAIRS, ROWS, PARTS, NATIVE)
    else:
        token = first + tl.arange(0, TOKENS)
        positions = tl.load(positions_ptr + token, mask=token < count, other=-1)
        closes = (positions >= 0) & ((positions + 1) % T.ratio == 0)
        current = tl.min(tl.where(closes, token, NEVER), axis=0)
        while current < NEVER:
            position = tl.load(positions_ptr + current)
            request = tl.load(request_ptr + current)
            close_window(current, position, request, part, kv_ptr, score_ptr, tail_ptr, codes_ptr, scales_ptr, plain_ptr,
                         slots_ptr, starts_ptr, stored_ptr, table_ptr, table_columns, norm_ptr, frequencies_ptr, eps, scratch_ptr,
                         arrivals_ptr, T, R, NORM, PAIRS, ROWS, PARTS, NATIVE)
            current = tl.min(tl.where(closes & (token > current), token, NEVER), axis=0)


@triton.jit
def append_part(
    token, position, request, part, kv_ptr, score_ptr, tail_ptr, slots_ptr, T: tl.constexpr, R: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Store one part of a token's raw row. The host made sure that no window of the step needs the row it replaces."""
    one = tl.zeros([1], tl.int32)
    slot = tl.load(slots_ptr + request)
    size: tl.constexpr = (2 if T.overlap else 1) * R.tiles * R.width // PARTS
    column = part * size + tl.arange(0, size)
    mask = (column < T.width)[None, :] & (slot >= 0)
    kv = load_float(kv_ptr + token.to(tl.int64) * T.width + column[None, :], mask)
    score = load_float(score_ptr + token.to(tl.int64) * T.width + column[None, :], mask)
    save_rows(kv, column, mask, one + slot, one + position, tail_ptr, T)
    save_rows(score, column + T.width, mask, one + slot, one + position, tail_ptr, T)


@triton.jit
def flush_kernel(
    kv_ptr, score_ptr, tail_ptr, codes_ptr, scales_ptr, plain_ptr, norm_ptr,
    index_kv_ptr, index_score_ptr, index_tail_ptr, index_codes_ptr, index_scales_ptr, index_plain_ptr, index_norm_ptr,
    frequencies_ptr, positions_ptr, request_ptr, slots_ptr, starts_ptr, stored_ptr, table_ptr, scratch_ptr, arrivals_ptr,
    count, table_columns, programs, eps,
    T: tl.constexpr, R: tl.constexpr, NORM: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr,
    IT: tl.constexpr, IR: tl.constexpr, INDEX_NORM: tl.constexpr, INDEX_ROWS: tl.constexpr, INDEX: tl.constexpr,
    PAIRS: tl.constexpr, TOKENS: tl.constexpr, APPEND: tl.constexpr, NATIVE: tl.constexpr,
):
    """Both streams of a layer; with INDEX the grid's second axis is the stream."""
    if INDEX:
        if tl.program_id(1) == 1:
            if tl.program_id(0) < programs:
                stream(index_kv_ptr, index_score_ptr, index_tail_ptr, index_codes_ptr, index_scales_ptr,
                       index_plain_ptr, positions_ptr, request_ptr, slots_ptr, starts_ptr, stored_ptr, table_ptr, count,
                       table_columns, index_norm_ptr, frequencies_ptr, eps, scratch_ptr, arrivals_ptr, IT, IR,
                       INDEX_NORM, PAIRS, INDEX_ROWS, 1, TOKENS, APPEND, NATIVE)
        else:
            stream(kv_ptr, score_ptr, tail_ptr, codes_ptr, scales_ptr, plain_ptr, positions_ptr, request_ptr,
                   slots_ptr, starts_ptr, stored_ptr, table_ptr, count, table_columns, norm_ptr, frequencies_ptr, eps, scratch_ptr,
                   arrivals_ptr, T, R, NORM, PAIRS, ROWS, PARTS, TOKENS, APPEND, NATIVE)
    else:
        stream(kv_ptr, score_ptr, tail_ptr, codes_ptr, scales_ptr, plain_ptr, positions_ptr, request_ptr, slots_ptr,
               starts_ptr, stored_ptr, table_ptr, count, table_columns, norm_ptr, frequencies_ptr, eps, scratch_ptr, arrivals_ptr,
               T, R, NORM, PAIRS, ROWS, PARTS, TOKENS, APPEND, NATIVE)
