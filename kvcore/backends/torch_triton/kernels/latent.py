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
def turns(position, frequencies_ptr, SIZE: tl.constexpr, DIM: tl.constexpr, PAIRS: tl.constexpr):
    """(cos, sin), each [n, SIZE / 2], of fp32(position [n]) * fp32(frequency) in the last PAIRS of DIM / 2 pairs."""
    pair = tl.arange(0, SIZE // 2) - (DIM // 2 - PAIRS)
    frequency = tl.load(frequencies_ptr + pair, mask=(pair >= 0) & (pair < PAIRS), other=0.0)
    angle = position.to(tl.float32)[:, None] * frequency[None, :]
    return tl.cos(angle), tl.sin(angle)


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
