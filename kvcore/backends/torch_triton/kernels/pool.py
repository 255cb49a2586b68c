"""Pooling: the softmax-weighted sum over one window's rows, from the tail's ring and from the step's own inputs."""

import triton
import triton.language as tl

from kvcore.backends.torch_triton.kernels.codes import load_float


@triton.jit
def load_window(kv_ptr, score_ptr, tail_ptr, r, token, position, start, slot, channel, T: tl.constexpr):
    """(kv, score), each [rows, c] fp32: rows ``r`` of the window that ends at ``position``; absent rows weigh nothing.

    Rows from before the step come from the tail's ring, the step's own from its inputs.
    """
    window: tl.constexpr = 2 * T.ratio if T.overlap else T.ratio
    p = position + 1 - window + r
    exists = (r < window) & (p >= 0)
    own = (p >= start)[:, None]
    # A token in the window before the entry's own lends its carry half, the first; its own tokens the cur half.
    half = r // T.ratio * T.dim if T.overlap else tl.zeros_like(r)
    here = ((token - position + p).to(tl.int64) * T.width + half)[:, None]
    there = slot.to(tl.int64) * T.slot + (tl.maximum(p, 0) % T.rows).to(tl.int64) * (2 * T.width) + half
    there = there[:, None]
    inside = exists[:, None] & (channel < T.dim)[None, :]
    if kv_ptr.dtype.element_ty == tl.float32:
        kv_at = tl.where(own, kv_ptr + here, tail_ptr + there)
        score_at = tl.where(own, score_ptr + here, tail_ptr + T.width + there)
        if T.dim % 4 == 0:
            # Both choices are aligned, which the compiler does not see through the selection.
            kv_at, score_at = tl.multiple_of(kv_at, (16, 16)), tl.multiple_of(score_at, (16, 16))
        kv = tl.load(kv_at + channel[None, :], mask=inside, other=0.0)
        score = tl.load(score_at + channel[None, :], mask=inside, other=float("-inf"))
    else:
        here, there = here + channel[None, :], there + channel[None, :]
        if position + 1 - window >= start:
            known = (r < window)[:, None] & (channel < T.dim)[None, :]
            kv = load_float(kv_ptr + here, known)
            score = tl.where(known, load_float(score_ptr + here, known), float("-inf"))
        else:
            new, old = inside & own, inside & (p < start)[:, None]
            kv = tl.where(own, load_float(kv_ptr + here, new), tl.load(tail_ptr + there, mask=old, other=0.0))
            old_score = tl.load(tail_ptr + T.width + there, mask=old, other=float("-inf"))
            score = tl.where(new, load_float(score_ptr + here, new), old_score)
    return kv, score


@triton.jit
def weight_of(x, NATIVE: tl.constexpr):
    """exp(x) for x <= 0; results below 2^-126 may be 0."""
    if NATIVE:
        power = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x * 1.4426950408889634], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        power = tl.exp(x)
    return power


@triton.jit
def pool(
    kv,
    score,
    kv_ptr,
    score_ptr,
    tail_ptr,
    token,
    position,
    start,
    slot,
    channel,
    T: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Softmax-weighted sum over the window that ends at ``position``, for channels [c] -> [c] fp32.

    Rows are taken CHUNK at a time, the first of them given. Every cell of a chunk keeps a sum of its own, rescaled
    whenever a larger score turns up, and cells are put together at the end: no thread waits for another on the way.
    """
    largest, pooled = score, kv
    total = tl.full(score.shape, 1.0, tl.float32)
    for chunk in tl.range(1, ROWS // CHUNK):
        r = chunk * CHUNK + tl.arange(0, CHUNK)
        kv, score = load_window(kv_ptr, score_ptr, tail_ptr, r, token, position, start, slot, channel, T)
        above = tl.maximum(largest, score)
        finite = tl.where(above == float("-inf"), 0.0, above)
        weight, kept = weight_of(score - finite, NATIVE), weight_of(largest - finite, NATIVE)
        total = total * kept + weight
        pooled = tl.where(kept == 0.0, 0.0, pooled * kept) + tl.where(weight == 0.0, 0.0, weight * kv)
        largest = above
    above = tl.max(largest, axis=0)
    finite = tl.where(above == float("-inf"), 0.0, above)
    kept = weight_of(largest - finite[None, :], NATIVE)
    total = tl.sum(total * kept, axis=0)
    pooled = tl.sum(tl.where(kept == 0.0, 0.0, pooled * kept), axis=0)
    return pooled / tl.where(total == 0.0, 1.0, total)
