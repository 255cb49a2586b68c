"""A request's border: the windows that join its step to what came before, and the write of its rows to the tail's ring.

The step's rows may take the places of rows that these windows need. So one program does both, in this order, and no
program waits for another; channels are independent of each other, so that there may be a program for each part of them.
"""

import triton
import triton.language as tl

from kvcore.kernels.triton.close import close_window
from kvcore.kernels.triton.codes import load_float
from kvcore.kernels.triton.tail import save_rows


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
def border(
    request, part, rows, step, ending, T: tl.constexpr, R: tl.constexpr, NORM: tl.constexpr, PAIRS: tl.constexpr, ROWS:
    tl.constexpr, CHUNK: tl.constexpr, PARTS: tl.constexpr, APPEND: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """What joins a request's step to what came before, for one part of the channels.

    Close the windows that need old rows of the ring; then, with APPEND, let the step's last rows overwrite them. No
    other program reads or writes these channels of the ring, so nothing has to wait. ``rows``, ``step`` and ``ending``
    are ``close_window``'s.
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
        close_window(
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
