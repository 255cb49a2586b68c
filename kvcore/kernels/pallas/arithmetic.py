"""fp32 arithmetic with the bits that the reference has, eagerly, under ``jit`` and in a kernel alike.

XLA is free with arithmetic where NumPy is not: it turns a division by a constant or by a broadcast array into a product
with the reciprocal (a quarter of the quotients change), and on the CPU reads subnormals as zero. So quotients are
corrected, and powers of two are applied to exponent bits.
"""

import math

import jax.numpy as jnp
import numpy as np
from jax import lax

from kvcore.spec import Field, Format
from kvcore.spec.codes import CODES, unknown

SIGN, INFINITY, MANTISSA = np.uint32(0x80000000), np.uint32(0x7F800000), np.uint32(0x7FFFFF)
ABSOLUTE = np.int32(0x7FFFFFFF)
FP32_ONE = 127  # biased exponent of 1.0
RAISE = 64
SUBNORMAL_RAISED = np.float32(2.0 ** (RAISE - 126))
LARGE = np.float32(2.0**100)


def pool(keys, scores):
    """Softmax-weighted sum over axis 1 of [n, rows, d], for every channel apart; no row with weight gives 0."""
    largest = jnp.max(scores, axis=1, keepdims=True)
    weights = jnp.exp(scores - jnp.where(jnp.isneginf(largest), 0, largest))
    total = jnp.sum(weights, axis=1)
    products = jnp.sum(jnp.where(weights == 0, 0, weights * keys), axis=1)
    return products / jnp.where(total == 0, 1, total)


def fp32_scale(amax, field: Field, format: Format):
    """A group's scale as fp32, and as bits of the scale's code as uint32, by a rule whose scales aren't e4m3."""
    product = jnp.maximum(amax * np.float32(1 / CODES[field.code].largest), np.float32(format.scale_floor))
    if field.rule == "pow2":
        bits = bits_of(product)
        exponent = (bits >> 23) + ((bits & MANTISSA) != 0).astype(jnp.uint32)
        scales = from_bits(exponent << 23)
        return scales, exponent if field.scale == "e8m0" else bits_of(scales)
    if field.rule == "quotient":
        quotient = divide(amax, jnp.full_like(amax, np.float32(CODES[field.code].largest)))
        scales = jnp.maximum(quotient, np.float32(format.scale_floor))
        return scales, bits_of(scales)
    if field.rule not in ("fp32", "absmax"):
        raise unknown("scale rule", field.rule, "encode")
    scales = amax if field.rule == "absmax" else product
    return scales, bits_of(scales)


def half_away(ratios):
    """trunc(ratio ± 0.5), by what is left over of a magnitude's bits: no product is fused with the sum then."""
    magnitude = from_bits(bits_of(ratios) & ~SIGN)
    whole = jnp.floor(magnitude)
    # The number just below a half is one in which fp32's sum rounds up.
    up = (magnitude - whole >= 0.5) | (magnitude == np.nextafter(np.float32(0.5), np.float32(0)))
    whole = jnp.where(up, whole + 1, whole)
    return jnp.where(ratios < 0, -whole, whole)


def rotated(values, sylvester, to_bf16):
    """Rotate rows by the orthonormal Sylvester matrix: fp32 butterflies, one product, then rounded to bf16.

    Sums of small values may be subnormal, and XLA takes those for zero, so rows are raised by 2^64 while that is safe.

    Args:
        values: [rows, dim], dim a power of two.
        sylvester: what does the sums: log2(dim) rounds of butterflies.
        to_bf16: what rounds fp32 to bf16.
    """
    magnitude = bits_of(values) & ~SIGN
    magnitude = jnp.where(magnitude > INFINITY, np.float32(np.inf), from_bits(magnitude))
    raised = jnp.max(magnitude, axis=1, keepdims=True) < np.float32(2.0**50)
    shift = jnp.where(raised, np.uint32(RAISE), np.uint32(0))
    values = sylvester(over_power(values, FP32_ONE - shift))
    factor = np.float32(values.shape[1] ** -0.5)
    product = values * factor
    normal = over_power(to_bf16(product), FP32_ONE + shift)
    # Where subnormal, bf16 is a multiple of 2^-133.
    small = jnp.rint(jnp.abs(_lowered(values, factor)) * np.float32(2.0**-16)).astype(jnp.uint32) << 16
    return jnp.where(raised & (jnp.abs(product) < SUBNORMAL_RAISED), from_bits(small | bits_of(values) & SIGN), normal)


def within(values, code: str, *, keep: bool):
    """Finite fp32 values clamped to a code's range; ``keep``: infinities and NaN stay where the code has any."""
    if code == "fp32":
        return values
    clamped = clamp(values, CODES[code].largest)
    special = (lax.bitcast_convert_type(values, jnp.int32) & ABSOLUTE) >= np.int32(INFINITY)
    return jnp.where(special, values, clamped) if keep and code not in ("int8", "e2m1") else clamped


def clamp(values, limit: float):
    """fp32 values of a magnitude of at most ``limit``, by their bits: a comparison may read a subnormal as zero."""
    bits = lax.bitcast_convert_type(values, jnp.int32)
    most = np.float32(limit).view(np.int32)
    return lax.bitcast_convert_type(jnp.minimum(bits & ABSOLUTE, most) | bits & ~ABSOLUTE, jnp.float32)


def e2m1_codes(values):
    """fp32 within ±6 -> e2m1 bits as int32: the magnitude counts the midpoints below it, ties go to the even code."""
    magnitude = jnp.abs(values)
    codes = (bits_of(values) >> 28 & 8).astype(jnp.int32)
    for midpoint, tie_goes_up in ((0.25, 0), (0.75, 1), (1.25, 0), (1.75, 1), (2.5, 0), (3.5, 1), (5.0, 0)):
        above = magnitude >= np.float32(midpoint) if tie_goes_up else magnitude > np.float32(midpoint)
        codes += above.astype(jnp.int32)
    return codes


def times(values, scales):
    """The correctly rounded product of values of at most 2^20 and scales, subnormal scales and products included."""
    raised = (bits_of(scales) & ~SIGN) < bits_of(np.float32(2.0**-42))
    shift = jnp.where(raised, np.uint32(RAISE), np.uint32(0))
    scales = over_power(scales, FP32_ONE - shift)
    product = values * scales
    subnormal = raised & (jnp.abs(product) < SUBNORMAL_RAISED)
    small = jnp.abs(_lowered(values, scales)).astype(jnp.uint32) | bits_of(product) & SIGN
    return jnp.where(subnormal, from_bits(small), over_power(product, FP32_ONE + shift))


def times_layer(values, global_scale: float):
    """The correctly rounded product of codes times e4m3 scales and a scale of a layer."""
    if global_scale < 2.0**-RAISE:
        return times(values, jnp.full_like(values, global_scale))
    return values * np.float32(global_scale)


def _lowered(values, factor):
    """``values · 2^-64 · factor`` where that is subnormal, in units of 2^-149, rounded to a whole number."""
    product = values * factor
    high, low = _halves(values)
    factor_high, factor_low = _halves(factor)
    error = high * factor_high - product + high * factor_low + low * factor_high + low * factor_low
    multiple = product * np.float32(2.0 ** (149 - RAISE))
    rounded = jnp.rint(multiple)
    # Halfway by the rounded product alone: the product's own rounding error says on which side it really is.
    halfway = (jnp.abs(multiple - rounded) == 0.5) & (error != 0)
    return jnp.where(halfway, multiple + jnp.sign(error) * np.float32(0.5), rounded)


def divide(values, by):
    """The correctly rounded quotient, by > 0; ``by`` may broadcast.

    A quotient within an ulp is corrected by its exact remainder: products of 12-bit halves are exact in fp32, whether
    or not the compiler fuses them with the subtraction. Quotients too small for any code to see may be off.
    """
    # Beyond 2^126 the reciprocal would be subnormal, which XLA reads as zero.
    shrink = jnp.where(by > LARGE, np.float32(2.0**-64), np.float32(1))
    sign = bits_of(values) & SIGN
    values, by = jnp.abs(values) * shrink, by * shrink
    inverse = np.float32(1) / by
    quotient = values * inverse
    high, low = _halves(quotient)
    by_high, by_low = _halves(by)
    remainder = values - high * by_high - high * by_low - low * by_high - low * by_low
    return from_bits(bits_of(quotient + remainder * inverse) & ~SIGN | sign)


def limit_of(field: Field, global_scale: float) -> float:
    """Magnitude from which values are coded alike at the latest: of small scales of a layer far below fp32's own limit.

    Quotients of larger ones by such a scale are beyond fp32, where ``divide`` has no remainder to correct them by.
    """
    if field.rule != "e4m3" or global_scale == 1:
        return field.limit
    return min(field.limit, 4 * CODES["e4m3"].largest * field.element.largest * global_scale)


def raise_of(field: Field, global_scale: float) -> int:
    """Powers of two by which a small scale of a layer, and what is divided by it, are raised; 0 of any other.

    What is left over of their quotients would be subnormal, which XLA reads as zero, and nothing would be corrected.
    """
    if field.rule != "e4m3" or global_scale >= 2.0**-RAISE:
        return 0
    return 1 - math.frexp(global_scale)[1]


def raised_by(values, powers: int):
    """Values · 2^powers, 0 to 126, exactly; subnormal ones, too."""
    return over_power(values, jnp.uint32(FP32_ONE - powers)) if powers else values


def _halves(values):
    """Values = high + low exactly, 12 significant bits each."""
    high = from_bits(bits_of(values) & np.uint32(0xFFFFF000))
    return high, values - high


def over_power(values, exponent):
    """Values / 2^(exponent - 127), exactly while the quotient is normal; exponent uint32, 1 to 253, broadcasts."""
    bits = bits_of(values)
    # A subnormal is its mantissa times 2^-149, and the mantissa as a number is normal.
    mantissa = (bits & MANTISSA).astype(jnp.float32)
    small = mantissa * from_bits(jnp.maximum(105 - exponent.astype(jnp.int32), 0).astype(jnp.uint32) << 23)
    small = from_bits(bits_of(small) | bits & SIGN)
    normal = values * from_bits((2 * FP32_ONE - exponent) << 23)
    return jnp.where(bits & INFINITY == 0, small, normal)


def times_power(values, exponent):
    """Values · 2^(exponent - 127) for values of at most 4 significant bits, exactly; exponent uint8, 255 means NaN."""
    bits = bits_of(values)
    exponent = exponent.astype(jnp.int32)
    raised = (bits >> 23 & 0xFF).astype(jnp.int32) + exponent - FP32_ONE
    mantissa = bits & MANTISSA
    normal = raised.astype(jnp.uint32) << 23 | mantissa
    subnormal = (mantissa | np.uint32(0x800000)) >> jnp.clip(1 - raised, 0, 31).astype(jnp.uint32)
    scaled = jnp.where(raised > 0, jnp.where(raised >= 255, INFINITY, normal), subnormal)
    scaled = jnp.where(bits & ~SIGN == 0, np.uint32(0), scaled) | bits & SIGN
    invalid = (exponent == 255) | (bits & ~SIGN > INFINITY)
    return from_bits(jnp.where(invalid, np.uint32(CODES["fp32"].nan or 0), scaled))


def bits_of(values):
    """fp32 -> uint32."""
    return lax.bitcast_convert_type(values, jnp.uint32)


def from_bits(bits):
    """uint32 -> fp32."""
    return lax.bitcast_convert_type(bits, jnp.float32)
