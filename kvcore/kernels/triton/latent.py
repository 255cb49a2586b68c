"""From raw latents to what is stored: RMS norm and rotation, in fp32, rounded to bf16 where the entry's format is."""

import triton
import triton.language as tl

from kvcore.kernels.triton.codes import round_bf16

FUSED: tl.constexpr = tl.constexpr(not triton.knobs.runtime.interpret)
"""Compiled: ``tl.fma`` rounds once. The interpreter's rounds twice, which reduces large angles wrongly."""


@triton.jit
def cos_sin(angle):
    """(cos, sin) of fp32 angles, within 2e-7 for |angle| < 2^24; without the branch that libdevice takes beyond 1e5.

    Cody and Waite's reduction by pi/2 in three parts, every product exact in its fma; then the polynomials of Cephes.
    """
    if FUSED:
        turn = tl.math.floor(angle * 0.6366197723675814 + 0.5)
        r = tl.fma(turn, -1.5707963705062866, angle)
        r = tl.fma(turn, 4.371138828673793e-08, r)
        r = tl.fma(turn, 1.7151245100059e-15, r)
        # Beyond 2^20 the number of quarter turns may be off by some, which leaves r too large.
        more = tl.math.floor(r * 0.6366197723675814 + 0.5)
        r = tl.fma(more, 4.371138828673793e-08, tl.fma(more, -1.5707963705062866, r))
        z = r * r
        s = tl.fma(tl.fma(tl.fma(z, -1.9515295891e-4, 8.3321608736e-3), z, -1.6666654611e-1), z * r, r)
        c = tl.fma(tl.fma(z, 2.443315711809948e-5, -1.388731625493765e-3), z, 4.166664568298827e-2)
        c = tl.fma(c, z * z, tl.fma(z, -0.5, 1.0))
        quarter = (turn + more).to(tl.int32)
        swap = (quarter & 1) != 0
        cos, sin = tl.where(swap, s, c), tl.where(swap, c, s)
        cos = tl.where(((quarter + 1) & 2) != 0, -cos, cos)
        sin = tl.where((quarter & 2) != 0, -sin, sin)
    else:
        cos, sin = tl.cos(angle), tl.sin(angle)
    return cos, sin


@triton.jit
def inverse_rms(square_sum, eps, DIM: tl.constexpr):
    """``1 / sqrt(square_sum / DIM + eps)``, every step rounded."""
    mean = square_sum / DIM
    return tl.div_rn(tl.full(mean.shape, 1.0, tl.float32), tl.sqrt_rn(mean + eps))


@triton.jit
def turns(position, frequencies_ptr, SIZE: tl.constexpr, DIM: tl.constexpr, PAIRS: tl.constexpr):
    """(cos, sin), each [n, SIZE / 2], of fp32(position [n]) * fp32(frequency) in the last PAIRS of DIM / 2 pairs."""
    pair = tl.arange(0, SIZE // 2) - (DIM // 2 - PAIRS)
    frequency = tl.load(frequencies_ptr + pair, mask=(pair >= 0) & (pair < PAIRS), other=0.0)
    angle = position.to(tl.float32)[:, None] * frequency[None, :]
    return cos_sin(angle)


@triton.jit
def rotate(x, cos, sin, DIM: tl.constexpr, PAIRS: tl.constexpr):
    """Rotate the last PAIRS interleaved pairs of x [n, channels], of which DIM are the row's."""
    n: tl.constexpr = x.shape[0]
    half: tl.constexpr = x.shape[1] // 2
    pair = tl.arange(0, half) - (DIM // 2 - PAIRS)
    turned = ((pair >= 0) & (pair < PAIRS))[None, :]
    even, odd = tl.split(tl.reshape(x, (n, half, 2)))
    new_even = tl.where(turned, even * cos - odd * sin, even)
    new_odd = tl.where(turned, even * sin + odd * cos, odd)
    return tl.reshape(tl.join(new_even, new_odd), (n, 2 * half))


@triton.jit
def finish(x, weight, cos, sin, eps, R: tl.constexpr, NORM: tl.constexpr, PAIRS: tl.constexpr, NATIVE: tl.constexpr):
    """Norm latents x [n, channels] with weight [channels] and rotate them; R says where bf16 rounding belongs."""
    if NORM:
        x = x * inverse_rms(tl.sum(x * x, axis=1), eps, R.dim)[:, None] * weight[None, :]
        if R.rounded:
            x = round_bf16(x, NATIVE)
    if PAIRS:
        x = rotate(x, cos, sin, R.dim, PAIRS)
        if R.rounded:
            x = round_bf16(x, NATIVE)
    return x
