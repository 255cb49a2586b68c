"""Pooling: the softmax-weighted sum over one window's rows, from the tail's ring and from the step's own inputs."""

import triton
import triton.language as tl

from kvcore.kernels.triton.codes import load_float, widened
from kvcore.kernels.triton.tail import ring_rows


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
    kv_ptr, score_ptr, tail, token, position, start, slot, channel, T: tl.constexpr, ROWS: tl.constexpr, CHUNK:
    tl.constexpr, OWN: tl.constexpr, NATIVE: tl.constexpr,
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
