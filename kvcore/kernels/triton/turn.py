"""Attention outputs turned back: RoPE by minus the query's position, on rows that were written and rounded before.

Rows are read again by the program that wrote them, a few kilobytes of its own cache. Rounded numbers are what
DeepSeek-V4's published inference code rotates, and the sums in registers can be given up first.
"""

import triton
import triton.language as tl

from kvcore.kernels.triton.codes import round_bf16
from kvcore.kernels.triton.latent import rotate, turns

HEADS = 16
"""Heads of a program of ``turn_back_kernel``."""


@triton.constexpr_function
def channels_of(pairs):
    """Channels of a tile that holds ``pairs`` pairs, 1 or more: a power of two."""
    return 2 << (pairs - 1).bit_length()


@triton.jit
def turn_back(at, inside, position, frequencies_ptr, DIM: tl.constexpr, PAIRS: tl.constexpr, NATIVE: tl.constexpr):
    """Rotate the last PAIRS pairs of rows of DIM channels at pointers ``at`` [n] by minus ``position``, in place."""
    size: tl.constexpr = channels_of(PAIRS)
    channel = tl.arange(0, size)[None, :]
    here = inside[:, None] & (channel < 2 * PAIRS)
    row = at[:, None] + (DIM - 2 * PAIRS) + channel
    x = tl.load(row, mask=here, other=0.0).to(tl.float32)
    cos, sin = turns(tl.zeros([1], tl.int32) + position, frequencies_ptr, size, 2 * PAIRS, PAIRS)
    x = rotate(x, cos, -sin, 2 * PAIRS, PAIRS)
    if at.dtype.element_ty == tl.bfloat16 and not NATIVE:
        x = round_bf16(x, NATIVE)
    tl.store(row, x.to(at.dtype.element_ty), mask=here)


@triton.jit
def turn_back_kernel(
    out_ptr, positions_ptr, frequencies_ptr, heads,
    DIM: tl.constexpr, PAIRS: tl.constexpr, HEADS: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Out [tokens, heads, DIM], HEADS heads of one token."""
    blocks = tl.cdiv(heads, HEADS)
    token = (tl.program_id(0) // blocks).to(tl.int64)
    head = tl.program_id(0) % blocks * HEADS + tl.arange(0, HEADS)
    at = out_ptr + (token * heads + head) * DIM
    turn_back(at, head < heads, tl.load(positions_ptr + token), frequencies_ptr, DIM, PAIRS, NATIVE)
