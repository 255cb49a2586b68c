"""Numbers to codes and back, bit for bit as the formats define them.

``NATIVE`` tells a kernel to use the hardware's fp8 and bf16 conversions (sm_89 and later); without it the same bits
come from integer arithmetic on the fp32 encoding, which also holds on older GPUs and in the interpreter.
"""

import numpy as np
import triton
import triton.language as tl

from kvcore.spec.codes import NF4_LEVELS

_LEVELS = np.array(NF4_LEVELS, np.float32)
LEVELS = tl.constexpr(tuple(float(level) for level in _LEVELS))
MIDPOINTS = tl.constexpr(tuple(float(middle) for middle in (_LEVELS[1:] + _LEVELS[:-1]) / np.float32(2)))


@triton.jit
def float_bits(x):
    """fp32 -> its bits as int32."""
    return x.to(tl.int32, bitcast=True)


@triton.jit
def bits_float(bits):
    """int32 bits -> fp32."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def small_float(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """Round |x| to nearest even in a small float format without infinities; returns the code without its sign.

    |x| is at most the largest finite value. Below the smallest normal number codes are multiples of one step, so adding
    the fp32 number whose unit in the last place is that step rounds; above, the mantissa is rounded in place.
    """
    a = float_bits(x) & 0x7FFFFFFF
    magic: tl.constexpr = (151 - BIAS - MANTISSA) << 23
    step = float_bits(bits_float(a) + bits_float(tl.full([], magic, tl.int32))) - magic
    drop: tl.constexpr = 23 - MANTISSA
    normal = ((a + ((1 << (drop - 1)) - 1) + ((a >> drop) & 1)) >> drop) - ((127 - BIAS) << MANTISSA)
    return tl.where(a < ((128 - BIAS) << 23), step, normal)


@triton.jit
def e4m3_code(x, NATIVE: tl.constexpr):
    """fp32 with |x| <= 448 (or a hair above) -> e4m3 byte as int32, to nearest even; keeps -0."""
    if NATIVE:
        code = x.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.int32)
    else:
        code = small_float(x, 3, 7) | ((float_bits(x) >> 24) & 0x80)
    return code


@triton.jit
def e4m3_value(code, NATIVE: tl.constexpr):
    """e4m3 byte (int32) -> fp32: the seven magnitude bits, placed in an fp32, times 2^120; 0x7F is NaN."""
    if NATIVE:
        value = code.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        magnitude = bits_float((code & 0x7F) << 20) * 1.329227995784916e36
        magnitude = tl.where((code & 0x7F) == 0x7F, float("nan"), magnitude)
        value = bits_float(float_bits(magnitude) | ((code & 0x80) << 24))
    return value


@triton.jit
def e8m0_value(stored):
    """e8m0 byte (int32) -> fp32 power of two; 0xFF is NaN."""
    return bits_float(tl.where(stored == 0xFF, 0x7FC00000, tl.where(stored == 0, 0x00400000, stored << 23)))


@triton.jit
def e2m1_code(x):
    """fp32 with |x| <= 6 (or a hair above) -> 4-bit code as int32, to nearest even; keeps -0."""
    return small_float(x, 1, 1) | ((float_bits(x) >> 28) & 8)


@triton.jit
def e2m1_code_of_narrow(x):
    """``e2m1_code`` of bf16 numbers: scaled so that fp32's subnormals fall on e2m1's, all codes round alike.

    The product is exact where it matters: a bf16 number has too few bits to lose any that could decide a tie.
    """
    bits = float_bits(x * 1.1754943508222875e-38)
    magnitude = bits & 0x7FFFFFFF
    return ((magnitude + 0x1FFFFF + ((magnitude >> 22) & 1)) >> 22) | ((bits >> 28) & 8)


@triton.jit
def e2m1_value(code):
    """4-bit code (int32) -> fp32: the three magnitude bits, placed in an fp32, times 2^126."""
    magnitude = bits_float((code & 7) << 22) * 8.507059173023462e37
    return bits_float(float_bits(magnitude) | ((code & 8) << 28))


@triton.jit
def int8_code(x):
    """fp32 with |x| <= 127 -> its nearest integer, ties to even, as the low byte of an int32."""
    return float_bits(x + 12582912.0) & 0xFF


@triton.jit
def nf4_code(x):
    """fp32 in [-1, 1] -> NF4 code as int32: how many midpoints between levels lie strictly below."""
    code = tl.zeros_like(x).to(tl.int32)
    for k in tl.static_range(15):
        code += (x > MIDPOINTS[k]).to(tl.int32)
    return code


@triton.jit
def nf4_value(code):
    """NF4 code (int32) -> its level as fp32."""
    value = tl.zeros_like(code).to(tl.float32)
    for k in tl.static_range(16):
        value = tl.where(code == k, LEVELS[k], value)
    return value


@triton.jit
def bf16_bits(x, NATIVE: tl.constexpr):
    """fp32 -> bf16 bits as int32, to nearest even; NaN as 0x7FC0."""
    if NATIVE:
        bits = x.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    else:
        raw = float_bits(x)
        bits = ((raw + 0x7FFF + ((raw >> 16) & 1)) >> 16) & 0xFFFF
    return tl.where(x != x, 0x7FC0, bits)


@triton.jit
def round_bf16(x, NATIVE: tl.constexpr):
    """fp32 rounded to bf16, still as fp32."""
    return bits_float(bf16_bits(x, NATIVE) << 16)


@triton.jit
def widened(x):
    """fp32 or bf16 values as fp32, bf16 from its bits."""
    if x.dtype != tl.float32:
        x = bits_float(x.to(tl.int16, bitcast=True).to(tl.int32) << 16)
    return x


@triton.jit
def load_float(pointers, mask):
    """Load fp32 or bf16 values as fp32; zeros where masked."""
    return widened(tl.load(pointers, mask=mask, other=0))
