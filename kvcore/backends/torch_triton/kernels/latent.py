"""From raw latents to what is stored: RMS norm and rotation, in fp32, rounded to bf16 where the entry's format is."""

import triton
import triton.language as tl

from kvcore.backends.torch_triton.kernels.codes import round_bf16


@triton.jit
def inverse_rms(square_sum, eps, DIM: tl.constexpr):
    """``1 / sqrt(square_sum / DIM + eps)``, every step rounded."""
    mean = square_sum / DIM
    return tl.div_rn(tl.full(mean.shape, 1.0, tl.float32), tl.sqrt_rn(mean + eps))


@triton.jit
def turn(even, odd, angle):
    """Rotate pairs (even, odd) by ``angle``."""
    cos, sin = tl.cos(angle), tl.sin(angle)
    return even * cos - odd * sin, even * sin + odd * cos


@triton.jit
def rotate(x, position, frequencies_ptr, DIM: tl.constexpr, PAIRS: tl.constexpr):
    """Rotate the last PAIRS interleaved pairs of x [n, channels], angle = fp32(position [n]) * fp32(frequency)."""
    n: tl.constexpr = x.shape[0]
    half: tl.constexpr = x.shape[1] // 2
    pair = tl.arange(0, half) - (DIM // 2 - PAIRS)
    turned = (pair >= 0) & (pair < PAIRS)
    frequency = tl.load(frequencies_ptr + pair, mask=turned, other=0.0)
    even, odd = tl.split(tl.reshape(x, (n, half, 2)))
    new_even, new_odd = turn(even, odd, position.to(tl.float32)[:, None] * frequency[None, :])
    even = tl.where(turned[None, :], new_even, even)
    odd = tl.where(turned[None, :], new_odd, odd)
    return tl.reshape(tl.join(even, odd), (n, 2 * half))


@triton.jit
def finish(x, position, norm_ptr, frequencies_ptr, eps, R: tl.constexpr, NORM: tl.constexpr, PAIRS: tl.constexpr,
           NATIVE: tl.constexpr):
    """Norm and rotate latents x [n, channels] at positions [n]; R says where bf16 rounding belongs."""
    channel = tl.arange(0, x.shape[1])
    if NORM:
        weight = tl.load(norm_ptr + channel, mask=channel < R.dim, other=0).to(tl.float32)
        x = x * inverse_rms(tl.sum(x * x, axis=1), eps, R.dim)[:, None] * weight[None, :]
        if R.exact:
            x = round_bf16(x, NATIVE)
    if PAIRS:
        x = rotate(x, position, frequencies_ptr, R.dim, PAIRS)
        if R.exact:
            x = round_bf16(x, NATIVE)
    return x
