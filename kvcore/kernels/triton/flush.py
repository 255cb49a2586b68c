"""Flush: every entry that the step completes, pooled, normed, rotated, encoded and stored in one launch.

Programs go over the step's tokens and act on those that close a window, so the grid depends on shapes alone and a graph
that was captured stays right when other tokens close. Entries and index keys share the launch, and so can the write of
the step's own rows to the tail.

Map:
    ``load_own`` .. ``pool``: the softmax-weighted sum over one window's rows, from the tail's ring and from the step's
        own inputs.
    ``compress_window``, ``finish_window``: pool a window, finish its entry (norm, rotation: ``latent``), encode, store
        it. A window with many rows is split over channels to fill the chip: each part leaves its pooled channels in a
        scratch row, and the part that arrives last finishes the entry.
    ``tokens_before`` .. ``append_part``: a request's border, the windows that join its step to what came before, and
        the write of its rows to the tail's ring. The step's rows may take the places of rows that these windows need.
        So one program does both, in this order, and no program waits for another; channels are independent of each
        other, so that there may be a program for each part of them.
    ``append_last_kernel``: the tail of a long prefill, by programs for the rows that a request's ring keeps, not for
        tokens, of which few stay.
    ``stream``, ``flush_kernel``: the launch. ``shape.flush_cut`` cuts it into programs.
"""

import triton
import triton.language as tl

from kvcore.kernels.triton.address import begin, locate
from kvcore.kernels.triton.codes import load_float, round_bf16, widened
from kvcore.kernels.triton.latent import finish, turns
from kvcore.kernels.triton.rows import store_rows
from kvcore.kernels.triton.tail import ring_rows, save_rows, tail_pointers


@triton.jit
def load_own(kv_ptr, score_ptr, r, token, channel, T: tl.constexpr):
    """(kv, score) of the step's tokens where rows ``r`` of the window that ends at ``token`` would lie, as they are.

    Nothing need be known of the request for this. Rows may be another request's, for the caller to see to.
    """
    line = token - ((2 * T.ratio if T.overlap else T.ratio) - 1)
    base = line.to(tl.int64) * T.width
    at = (r * T.width + half_of(r, T))[:, None] + channel[None, :]
    mask = (line + r >= 0)[:, None] & (channel < T.dim)[None, :]
    if T.ratio & (T.ratio - 1):
        # A tile of a window that is no power of two has rows behind its last.
        mask &= (line + r <= token)[:, None]
    kv = tl.load(kv_ptr + base + at, mask=mask, other=0)
    return kv, tl.load(score_ptr + base + at, mask=mask, other=float("-inf"))


@triton.jit
def load_either(kv_ptr, score_ptr, tail, r, token, position, start, slot, channel, T: tl.constexpr):
    """(kv, score), each [rows, c] fp32: rows ``r`` of the window that ends at ``position``; absent rows weigh nothing.

    Rows from before the step come from the tail's ring, the step's own from its inputs.
    """
    window: tl.constexpr = 2 * T.ratio if T.overlap else T.ratio
    half = half_of(r, T)
    p = position + 1 - window + r
    own = (p >= start)[:, None]
    inside = ((r < window) & (p >= 0))[:, None] & (channel < T.dim)[None, :]
    here = ((token - position + p).to(tl.int64) * T.width + half)[:, None]
    there = (ring_rows(tl.maximum(p, 0), slot, T) + half)[:, None]
    kv_tail, score_tail = tail
    if kv_ptr.dtype.element_ty == tl.float32:
        kv_at = tl.where(own, kv_ptr + here, kv_tail + T.kv + there)
        score_at = tl.where(own, score_ptr + here, score_tail + T.score + there)
        if (T.dim | T.slot | T.row | T.kv | T.score) % 4 == 0:
            # Both choices are aligned, which the compiler does not see through the selection.
            kv_at, score_at = tl.multiple_of(kv_at, (16, 16)), tl.multiple_of(score_at, (16, 16))
        kv = tl.load(kv_at + channel[None, :], mask=inside, other=0.0)
        score = tl.load(score_at + channel[None, :], mask=inside, other=float("-inf"))
    else:
        here, there = here + channel[None, :], there + channel[None, :]
        new, old = inside & own, inside & (p < start)[:, None]
        kv = tl.where(own, load_float(kv_ptr + here, new), tl.load(kv_tail + T.kv + there, mask=old, other=0.0))
        old_score = tl.load(score_tail + T.score + there, mask=old, other=float("-inf"))
        score = tl.where(new, load_float(score_ptr + here, new), old_score)
    return kv, score


@triton.jit
def load_ahead(kv_ptr, score_ptr, tail, r, token, position, start, slot, channel, T: tl.constexpr):
    """``load_either`` where most windows are the step's own: inputs are read at once, the ring only if need be."""
    window: tl.constexpr = 2 * T.ratio if T.overlap else T.ratio
    kv, score = load_own(kv_ptr, score_ptr, r, token, channel, T)
    kv, score = widened(kv), widened(score)
    if position + 1 - window < start:
        p = position + 1 - window + r
        own = (p >= start)[:, None]
        old = ((r < window) & (p >= 0) & (p < start))[:, None] & (channel < T.dim)[None, :]
        there = (ring_rows(tl.maximum(p, 0), slot, T) + half_of(r, T))[:, None] + channel[None, :]
        kv_tail, score_tail = tail
        kv = tl.where(own, kv, tl.load(kv_tail + T.kv + there, mask=old, other=0.0))
        score = tl.where(own, score, tl.load(score_tail + T.score + there, mask=old, other=float("-inf")))
    return kv, score


@triton.jit
def half_of(r, T: tl.constexpr):
    """First channel of row ``r``: tokens before the entry's own lend their carry half, its own the other."""
    return r // T.ratio * T.dim if T.overlap else tl.zeros_like(r)


@triton.jit
def weight_of(x, largest, NATIVE: tl.constexpr):
    """exp(x - largest) for x <= largest; results below 2^-126 may be 0."""
    if NATIVE:
        # What the product with largest is off by is common to all rows, and leaves by the division.
        power = tl.fma(x, tl.full(x.shape, 1.4426950408889634, tl.float32), largest * -1.4426950408889634)
        power = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [power], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        power = tl.exp(x - largest)
    return power


@triton.jit
def load_rows(kv_ptr, score_ptr, tail, r, token, position, start, slot, channel, T: tl.constexpr, OWN: tl.constexpr):
    """Rows ``r`` of a window; with OWN all are the step's, and come as they are."""
    if OWN:
        kv, score = load_own(kv_ptr, score_ptr, r, token, channel, T)
    else:
        kv, score = load_either(kv_ptr, score_ptr, tail, r, token, position, start, slot, channel, T)
    return kv, score


@triton.jit
def merge(largest, total, pooled, kv, score, NATIVE: tl.constexpr):
    """Take one more row into every cell's running softmax: its largest score, sum of weights and weighted sum."""
    above = tl.maximum(largest, score)
    finite = tl.where(above == float("-inf"), 0.0, above)
    weight, kept = weight_of(score, finite, NATIVE), weight_of(largest, finite, NATIVE)
    total = total * kept + weight
    pooled = tl.where(kept == 0.0, 0.0, pooled * kept) + tl.where(weight == 0.0, 0.0, weight * kv)
    return above, total, pooled


@triton.jit
def settle(largest, total, pooled, NATIVE: tl.constexpr):
    """Put the cells [rows, c] of each channel together -> [c]; no row with weight gives 0."""
    above = tl.max(largest, axis=0)
    finite = tl.where(above == float("-inf"), 0.0, above)
    kept = weight_of(largest, tl.broadcast_to(finite[None, :], largest.shape), NATIVE)
    total = tl.sum(total * kept, axis=0)
    pooled = tl.sum(tl.where(kept == 0.0, 0.0, pooled * kept), axis=0)
    return pooled / tl.where(total == 0.0, 1.0, total)


@triton.jit
def pool(
    kv_ptr, score_ptr, tail, token, position, start, slot, channel, T: tl.constexpr, ROWS: tl.constexpr,
    CHUNK: tl.constexpr, OWN: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Softmax-weighted sum over the window that ends at ``position``, for channels [c] -> [c] fp32.

    Rows are taken CHUNK at a time, the next asked for before the last are used. Every cell of a chunk keeps a sum of
    its own and cells are put together at the end: no thread waits for another on the way.
    """
    r = tl.arange(0, CHUNK)
    kv, score = load_rows(kv_ptr, score_ptr, tail, r, token, position, start, slot, channel, T, OWN)
    if ROWS > CHUNK:
        next_kv, next_score = load_rows(
            kv_ptr, score_ptr, tail, CHUNK + r, token, position, start, slot, channel, T, OWN
        )
    largest, pooled = widened(score), widened(kv)
    total = tl.full(largest.shape, 1.0, tl.float32)
    if ROWS > CHUNK:
        for chunk in tl.range(2, ROWS // CHUNK):
            kv, score = next_kv, next_score
            next_kv, next_score = load_rows(
                kv_ptr, score_ptr, tail, chunk * CHUNK + r, token, position, start, slot, channel, T, OWN
            )
            largest, total, pooled = merge(largest, total, pooled, widened(kv), widened(score), NATIVE)
        largest, total, pooled = merge(largest, total, pooled, widened(next_kv), widened(next_score), NATIVE)
    return settle(largest, total, pooled, NATIVE)


@triton.jit
def compress_window(
    token, position, request, part, rows, step, ending, T: tl.constexpr, R: tl.constexpr, NORM: tl.constexpr,
    PAIRS: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, PARTS: tl.constexpr, PREFILL: tl.constexpr,
    WHOLE: tl.constexpr, NATIVE: tl.constexpr,
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
            x, channel, weight, cos, sin, eps, unit, row, valid, codes_ptr, scales_ptr, plain_ptr, scratch,
            arrivals_ptr + number, R, NORM, PAIRS, PARTS, NATIVE,
        )  # fmt: skip


@triton.jit
def finish_window(
    x, channel, weight, cos, sin, eps, unit, row, valid, codes_ptr, scales_ptr, plain_ptr, scratch, arrivals,
    R: tl.constexpr, NORM: tl.constexpr, PAIRS: tl.constexpr, PARTS: tl.constexpr, NATIVE: tl.constexpr,
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


@triton.jit
def tokens_before(request, starts_ptr, lengths_ptr):
    """How many of the step's tokens are of earlier requests: tokens come request by request."""
    before = 0
    for some in range(0, request, 128):
        q = some + tl.arange(0, 128)
        mine = q < request
        new = tl.load(lengths_ptr + q, mask=mine, other=0) - tl.load(starts_ptr + q, mask=mine, other=0)
        before += tl.sum(new, axis=0)
    return before


@triton.jit
def boundary(
    request, part, rows, step, ending, T: tl.constexpr, R: tl.constexpr, NORM: tl.constexpr, PAIRS: tl.constexpr,
    ROWS: tl.constexpr, CHUNK: tl.constexpr, PARTS: tl.constexpr, APPEND: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """What joins a request's step to what came before, for one part of the channels.

    Close the windows that need old rows of the ring; then, with APPEND, let the step's last rows overwrite them. No
    other program reads or writes these channels of the ring, so nothing has to wait. ``rows``, ``step`` and ``ending``
    are ``compress_window``'s.
    """
    kv_ptr, score_ptr, tail = rows
    kv_tail, score_tail = tail  # in two steps: Triton 3.6 takes tuples apart one level at a time
    slots_ptr, starts_ptr, lengths_ptr, _, _, _ = step
    window: tl.constexpr = 2 * T.ratio if T.overlap else T.ratio
    start = tl.load(starts_ptr + request)
    length = tl.load(lengths_ptr + request)
    first = tokens_before(request, starts_ptr, lengths_ptr)
    position = start // T.ratio * T.ratio + T.ratio - 1
    while (position < length) & (position + 1 - window < start):
        compress_window(
            first + position - start, position, request, part, rows, step, ending, T, R, NORM, PAIRS, ROWS, CHUNK,
            PARTS, False, False, NATIVE,
        )  # fmt: skip
        position += T.ratio
    if APPEND:
        tl.debug_barrier()
        share: tl.constexpr = R.tiles * R.width // PARTS
        few: tl.constexpr = 1024 // share if share < 512 else 2
        channel = part * share + tl.arange(0, share)
        slot = tl.load(slots_ptr + request) + tl.zeros([few], tl.int32)
        for some in range(tl.maximum(start, length - T.rows), length, few):
            p = some + tl.arange(0, few)
            token = (first + p - start).to(tl.int64)[:, None] * T.width
            inside = ((p < length) & (slot >= 0))[:, None] & (channel < T.dim)[None, :]
            for half in tl.static_range(2 if T.overlap else 1):
                column = half * T.dim + channel
                kv = load_float(kv_ptr + token + column[None, :], inside)
                score = load_float(score_ptr + token + column[None, :], inside)
                save_rows(kv, column + T.kv, inside, slot, p, kv_tail, T)
                save_rows(score, column + T.score, inside, slot, p, score_tail, T)


@triton.jit
def append_part(
    token, position, request, part, rows, slots_ptr, T: tl.constexpr, R: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Store one part of a token's raw row. The host made sure that no window of the step needs the row it replaces."""
    kv_ptr, score_ptr, tail = rows
    kv_tail, score_tail = tail
    one = tl.zeros([1], tl.int32)
    size: tl.constexpr = (2 if T.overlap else 1) * R.tiles * R.width // PARTS
    column = part * size + tl.arange(0, size)
    inside = (column < T.width)[None, :] & ((one + position >= 0) & (one + request >= 0))[:, None]
    kv = load_float(kv_ptr + token.to(tl.int64) * T.width + column[None, :], inside)
    score = load_float(score_ptr + token.to(tl.int64) * T.width + column[None, :], inside)
    slot = tl.load(slots_ptr + one + request, mask=one + request >= 0, other=-1)
    mask = inside & (slot >= 0)[:, None]
    position = tl.maximum(one + position, 0)
    save_rows(kv, column + T.kv, mask, slot, position, kv_tail, T)
    save_rows(score, column + T.score, mask, slot, position, score_tail, T)


LAST_ROWS = 2
"""Rows of a program of ``append_last_kernel``: a ring of short windows has few."""


@triton.jit
def append_last_kernel(
    kv_ptr, score_ptr, kv_tail_ptr, score_tail_ptr, slots_ptr, starts_ptr, lengths_ptr, T: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Store the last rows of kv and score [tokens, width] of every request, as many as its ring has."""
    programs: tl.constexpr = (T.rows + ROWS - 1) // ROWS
    request = tl.program_id(0) // programs
    start = tl.load(starts_ptr + request)
    length = tl.load(lengths_ptr + request)
    slot = tl.load(slots_ptr + request) + tl.zeros([ROWS], tl.int32)
    back = tl.program_id(0) % programs * ROWS + tl.arange(0, ROWS)
    position = length - 1 - back
    valid = (slot >= 0) & (back < T.rows) & (position >= tl.maximum(start, 0))
    token = tokens_before(request, starts_ptr, lengths_ptr) + position - start
    column = tl.arange(0, COLUMNS)
    source = tl.where(valid, token, 0).to(tl.int64)[:, None] * T.width + column[None, :]
    mask = valid[:, None] & (column < T.width)[None, :]
    position = tl.maximum(position, 0)
    kv_tail, score_tail = tail_pointers(kv_tail_ptr, score_tail_ptr, T)
    save_rows(load_float(kv_ptr + source, mask), column + T.kv, mask, slot, position, kv_tail, T)
    save_rows(load_float(score_ptr + source, mask), column + T.score, mask, slot, position, score_tail, T)


NEVER: tl.constexpr = tl.constexpr(2147483647)


@triton.jit
def stream(
    tokens, step, rows, ending, T: tl.constexpr, R: tl.constexpr, NORM: tl.constexpr, PAIRS: tl.constexpr,
    ROWS: tl.constexpr, CHUNK: tl.constexpr, PARTS: tl.constexpr, BOUNDARY: tl.constexpr, BOUNDARY_CHUNK: tl.constexpr,
    TOKENS: tl.constexpr, APPEND: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """One program of one stream: a request's border, where there are BORDER programs to it, or some tokens' windows.

    ``tokens`` are pointers of their positions and requests, and the numbers of both; the rest is ``compress_window``'s.
    """
    positions_ptr, request_ptr, count, requests = tokens
    WHOLE: tl.constexpr = BOUNDARY > 0
    program = tl.program_id(0)
    if WHOLE and program < requests * BOUNDARY:
        boundary(
            program // BOUNDARY, program % BOUNDARY, rows, step, ending, T, R, NORM, PAIRS, ROWS, BOUNDARY_CHUNK,
            BOUNDARY, APPEND, NATIVE,
        )  # fmt: skip
    else:
        program -= requests * BOUNDARY
        part = program % PARTS
        first = program // PARTS * TOKENS
        if TOKENS == 1:
            position = tl.load(positions_ptr + first)
            request = tl.load(request_ptr + first)
            if APPEND and not WHOLE:
                append_part(first, position, request, part, rows, step[0], T, R, PARTS)
            if (position >= 0) & (request >= 0) & ((position + 1) % T.ratio == 0):
                compress_window(
                    first, position, request, part, rows, step, ending, T, R, NORM, PAIRS, ROWS, CHUNK, PARTS, WHOLE,
                    WHOLE, NATIVE,
                )  # fmt: skip
        else:
            token = first + tl.arange(0, TOKENS)
            positions = tl.load(positions_ptr + token, mask=token < count, other=-1)
            closes = (positions >= 0) & ((positions + 1) % T.ratio == 0)
            current = tl.min(tl.where(closes, token, NEVER), axis=0)
            while current < NEVER:
                position = tl.load(positions_ptr + current)
                request = tl.load(request_ptr + current)
                compress_window(
                    current, position, request, part, rows, step, ending, T, R, NORM, PAIRS, ROWS, CHUNK, PARTS, True,
                    WHOLE, NATIVE,
                )  # fmt: skip
                current = tl.min(tl.where(closes & (token > current), token, NEVER), axis=0)


@triton.jit(do_not_specialize=["count", "table_columns", "requests", "programs", "eps"])
def flush_kernel(
    kv_ptr, score_ptr, kv_tail_ptr, score_tail_ptr, codes_ptr, scales_ptr, plain_ptr, norm_ptr, index_kv_ptr,
    index_score_ptr, index_kv_tail_ptr, index_score_tail_ptr, index_codes_ptr, index_scales_ptr, index_plain_ptr,
    index_norm_ptr, frequencies_ptr, positions_ptr, request_ptr, slots_ptr, starts_ptr, lengths_ptr, stored_ptr,
    table_ptr, scratch_ptr, arrivals_ptr, count, requests, table_columns, programs, eps, T: tl.constexpr,
    R: tl.constexpr, NORM: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, PARTS: tl.constexpr,
    BOUNDARY: tl.constexpr, BOUNDARY_CHUNK: tl.constexpr, IT: tl.constexpr, IR: tl.constexpr, INDEX_NORM: tl.constexpr,
    INDEX_ROWS: tl.constexpr, INDEX_CHUNK: tl.constexpr, INDEX_BOUNDARY: tl.constexpr,
    INDEX_BOUNDARY_CHUNK: tl.constexpr, INDEX: tl.constexpr, PAIRS: tl.constexpr, TOKENS: tl.constexpr,
    APPEND: tl.constexpr, AHEAD: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Both streams of a layer; with INDEX the grid's second axis is the stream."""
    begin(AHEAD)
    tokens = positions_ptr, request_ptr, count, requests
    step = slots_ptr, starts_ptr, lengths_ptr, stored_ptr, table_ptr, table_columns
    second = False
    if INDEX:
        second = tl.program_id(1) == 1
    if second:
        if tl.program_id(0) < programs:
            stream(
                tokens,
                step,
                (index_kv_ptr, index_score_ptr, tail_pointers(index_kv_tail_ptr, index_score_tail_ptr, IT)),
                (
                    index_codes_ptr,
                    index_scales_ptr,
                    index_plain_ptr,
                    index_norm_ptr,
                    frequencies_ptr,
                    eps,
                    scratch_ptr,
                    arrivals_ptr,
                ),
                IT,
                IR,
                INDEX_NORM,
                PAIRS,
                INDEX_ROWS,
                INDEX_CHUNK,
                1,
                INDEX_BOUNDARY,
                INDEX_BOUNDARY_CHUNK,
                TOKENS,
                APPEND,
                NATIVE,
            )
    else:
        stream(
            tokens, step, (kv_ptr, score_ptr, tail_pointers(kv_tail_ptr, score_tail_ptr, T)), (codes_ptr, scales_ptr,
            plain_ptr, norm_ptr, frequencies_ptr, eps, scratch_ptr, arrivals_ptr), T, R, NORM, PAIRS, ROWS, CHUNK,
            PARTS, BOUNDARY, BOUNDARY_CHUNK, TOKENS, APPEND, NATIVE,
        )  # fmt: skip
