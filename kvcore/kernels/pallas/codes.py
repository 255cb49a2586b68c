"""Codes to numbers and back by integer arithmetic on lanes, so that every chip computes the same bits.

Casts to e4m3 are emulated on chips without it, and casts to e2m1 and e8m0 are missing on most: none is used.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax

from kvcore.kernels.pallas.arithmetic import e2m1_codes
from kvcore.spec.codes import CODES

ABSOLUTE = np.int32(0x7FFFFFFF)
INFINITY = np.int32(0x7F800000)


def int_bits(values):
    """fp32 -> int32."""
    return lax.bitcast_convert_type(values, jnp.int32)


def of_bits(bits):
    """int32 -> fp32."""
    return lax.bitcast_convert_type(bits, jnp.float32)


def both_halves(words):
    """The two bf16 numbers of words, the lower half first, as fp32."""
    return of_bits(words << 16), of_bits(words & np.int32(-0x10000))


def to_bf16(values):
    """fp32 rounded to the nearest even bf16, as fp32; a NaN stays one."""
    bits = int_bits(values)
    rounded = bits + 0x7FFF + (lax.shift_right_logical(bits, 16) & 1)
    rounded = jnp.where((bits & ABSOLUTE) > INFINITY, bits | 0x00400000, rounded)
    return of_bits(rounded & np.int32(-0x10000))


def from_e4m3(codes):
    """Bytes int32 -> fp32."""
    magnitude = codes & 0x7F
    small = magnitude.astype(jnp.float32) * np.float32(2.0**-9)
    value = jnp.where(magnitude < 8, small, of_bits((magnitude << 20) + (120 << 23)))
    value = jnp.where(magnitude == 0x7F, np.float32(np.nan), value)
    return of_bits(int_bits(value) | (codes & 0x80) << 24)


def to_e4m3(values):
    """fp32 -> bytes int32, to the nearest even; clamped to 448, a NaN as 0x7F."""
    bits = int_bits(values)
    magnitude = bits & ABSOLUTE
    normal = ((magnitude + 0x7FFFF + (magnitude >> 20 & 1)) >> 20) - (120 << 3)
    # 2^14 has steps of 2^-9, those of a subnormal e4m3: the sum is rounded where the code is.
    small = int_bits(of_bits(jnp.minimum(magnitude, np.int32(0x3C800000))) + np.float32(2.0**14)) & 0xF
    code = jnp.where(magnitude < 0x3C800000, small, jnp.minimum(normal, 0x7E))
    code = code | lax.shift_right_logical(bits, 24) & 0x80
    return jnp.where(magnitude > INFINITY, CODES["e4m3"].nan or 0, code)


def from_int8(codes):
    """Bytes int32 -> fp32."""
    return ((codes ^ 0x80) - 0x80).astype(jnp.float32)


def to_int8(values):
    """fp32 within ±127 -> bytes int32, to the nearest even."""
    # 1.5 · 2^23 has steps of 1: the sum is rounded to a whole number, whose last bits are those of the code.
    return int_bits(values + np.float32(1.5 * 2.0**23)) & 0xFF


def from_e2m1(codes):
    """Nibbles int32 -> fp32."""
    magnitude = codes & 7
    small = magnitude.astype(jnp.float32) * np.float32(0.5)
    value = jnp.where(magnitude < 2, small, of_bits((magnitude << 22) + (126 << 23)))
    return of_bits(int_bits(value) | (codes & 8) << 28)


def to_e2m1(values):
    """fp32 within ±6 -> nibbles int32."""
    return e2m1_codes(values)


def spread(codes):
    """[K, 128] bytes, of which the first 64 count -> their 128 nibbles in channel order, low nibble first.

    Lanes move by a product with a matrix of zeros and ones: numbers below 16 are exact in any precision.
    """
    byte = lax.broadcasted_iota(jnp.int32, (128, 128), 0)
    channel = lax.broadcasted_iota(jnp.int32, (128, 128), 1)
    low = jnp.where(channel == 2 * byte, 1.0, 0.0)
    high = jnp.where(channel == 2 * byte + 1, 1.0, 0.0)
    return (_moved(codes & 0xF, low) + _moved(codes >> 4 & 0xF, high)).astype(jnp.int32)


def packed(codes, *, second: bool):
    """[K, 128] nibbles in channel order -> 64 bytes in the first lanes of [K, 128], or the last; zeros elsewhere."""
    channel = lax.broadcasted_iota(jnp.int32, (128, 128), 0)
    byte = lax.broadcasted_iota(jnp.int32, (128, 128), 1) - (64 if second else 0)
    low = jnp.where(channel == 2 * byte, 1.0, 0.0)
    high = jnp.where(channel == 2 * byte + 1, 1.0, 0.0)
    return _moved(codes, low).astype(jnp.int32) | _moved(codes, high).astype(jnp.int32) << 4


def _moved(codes, matrix):
    left = codes.astype(jnp.float32).astype(jnp.bfloat16)
    return jnp.dot(left, matrix.astype(jnp.bfloat16), preferred_element_type=jnp.float32)
