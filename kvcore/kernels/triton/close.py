"""Closing one window: pool its rows, finish the entry (norm, rotation), encode and store it.

A window with many rows is split over channels to fill the chip: each part leaves its pooled channels in a scratch row,
and the part that arrives last finishes the entry.
"""

import triton
import triton.language as tl

from kvcore.kernels.triton.address import locate
from kvcore.kernels.triton.codes import round_bf16, widened
from kvcore.kernels.triton.latent import finish, turns
from kvcore.kernels.triton.pool import load_ahead, load_own, pool, settle
from kvcore.kernels.triton.rows import store_rows


@triton.jit
def close_window(
    token, position, request, part, rows, step, ending, T: tl.constexpr, R: tl.constexpr, NORM: tl.constexpr, PAIRS:
    tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, PARTS: tl.constexpr, PREFILL: tl.constexpr, WHOLE:
    tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """One part of one entry: pool its channels; the last part to arrive finishes and stores the entry.

    With PREFILL most windows are the step's own; with WHOLE those that are not are left to the border's programs.

    Args:
        rows: pointers of the step's kv and score, and ``tail_pointers`` of the ring that has the rows before them.
        step: pointers of slots, starts, lengths and stored, and the block table with its columns.
        ending: what ``finish_window`` takes: pointers of codes, scales and plain values, of the norm's weight and the
            frequencies, eps, and pointers of scratch rows and arrivals.
    """
    kv_ptr, score_ptr, tail = rows
    slots_ptr, starts_ptr, _, stored_ptr, table_ptr, table_columns = step
    codes_ptr, scales_ptr, plain_ptr, norm_ptr, frequencies_ptr, eps, scratch_ptr, arrivals_ptr = ending
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
        r = tl.arange(0, ROWS)
        if WHOLE:
            kv, score = load_own(kv_ptr, score_ptr, r, token, channel, T)
        else:
            kv, score = load_ahead(kv_ptr, score_ptr, tail, r, token, position, start, slot, channel, T)
        cos, sin = turns(entry * T.ratio, frequencies_ptr, size, R.dim, PAIRS)
        score = widened(score)
        x = settle(score, tl.full(score.shape, 1.0, tl.float32), widened(kv), NATIVE)
    else:
        cos, sin = turns(entry * T.ratio, frequencies_ptr, size, R.dim, PAIRS)
        if PREFILL and not WHOLE and T.ratio & (T.ratio - 1) == 0:
            if position + 1 - window >= start:
                x = pool(kv_ptr, score_ptr, tail, token, position, start, slot, channel, T, ROWS, CHUNK, True, NATIVE)
            else:
                few: tl.constexpr = CHUNK // 4 if CHUNK > 8 else 2
                x = pool(kv_ptr, score_ptr, tail, token, position, start, slot, channel, T, ROWS, few, False, NATIVE)
        else:
            x = pool(kv_ptr, score_ptr, tail, token, position, start, slot, channel, T, ROWS, CHUNK, WHOLE, NATIVE)
    if R.rounded:
        x = round_bf16(x, NATIVE)
    if WHOLE and PARTS == 1:
        valid = valid & (one + position + 1 - window >= one + start)
    # Entries of one request close ``ratio`` tokens apart, so this number is an entry's own.
    number = token // T.ratio + request
    scratch = scratch_ptr + number.to(tl.int64) * size
    wanted = True
    if WHOLE and PARTS > 1:
        # Asked so late since the loads don't wait for it; of a window that is not whole they were the step's own rows.
        wanted = position + 1 - window >= start
    if wanted:
        finish_window(
            x, channel, weight, cos, sin, eps, unit, row, valid, codes_ptr, scales_ptr, plain_ptr, scratch, arrivals_ptr
            + number, R, NORM, PAIRS, PARTS, NATIVE,
        )  # fmt: skip


@triton.jit
def finish_window(
    x, channel, weight, cos, sin, eps, unit, row, valid, codes_ptr, scales_ptr, plain_ptr, scratch, arrivals, R:
    tl.constexpr, NORM: tl.constexpr, PAIRS: tl.constexpr, PARTS: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Norm, rotate, encode and store an entry from its pooled channels; with PARTS the last part does it for all."""
    size: tl.constexpr = R.tiles * R.width
    if PARTS > 1:
        tl.store(scratch + channel, x)
        tl.debug_barrier()
        if tl.atomic_add(arrivals, 1, sem="acq_rel") == PARTS - 1:
            tl.debug_barrier()
            x_all = tl.load(scratch + tl.arange(0, size), cache_modifier=".cg")
            tl.store(arrivals, 0)
            x_all = finish(x_all[None, :], weight, cos, sin, eps, R, NORM, PAIRS, NATIVE)
            x_all = tl.reshape(x_all, (1, R.tiles, R.width))
            store_rows(x_all, unit, row, valid, codes_ptr, scales_ptr, plain_ptr, R, R.rounded, NATIVE)
    else:
        x = finish(x[None, :], weight, cos, sin, eps, R, NORM, PAIRS, NATIVE)
        x = tl.reshape(x, (1, R.tiles, R.width))
        store_rows(x, unit, row, valid, codes_ptr, scales_ptr, plain_ptr, R, R.rounded, NATIVE)
