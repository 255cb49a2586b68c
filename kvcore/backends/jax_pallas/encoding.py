"""Values to canonical rows and back, by the format table alone.

The same bytes as the reference, eagerly and under ``jit``. XLA is free with arithmetic where NumPy is not: it turns a
division by a constant or by a broadcast array into a product with the reciprocal (a quarter of the quotients change),
drops fp32 -> bf16 -> fp32 round trips, and on the CPU reads subnormals as zero. So quotients are corrected, rounding to
bf16 is ``reduce_precision``, and powers of two are applied to exponent bits.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from kvcore.errors import SpecError
from kvcore.spec import FORMATS, Field, Format, block_layout
from kvcore.spec.codes import CODES, E2M1_LEVELS, E4M3_SCALE_SMALLEST, NF4_LEVELS, unknown

DTYPES = {
    "fp32": jnp.float32,
    "bf16": jnp.bfloat16,
    "fp16": jnp.float16,
    "e4m3": jnp.float8_e4m3fn,
    "int8": jnp.int8,
}
BITS = {32: jnp.uint32, 16: jnp.uint16, 8: jnp.uint8}
KNOWN = (*DTYPES, "e2m1", "nf4")
"""Element codes that these encoders know."""

E4M3_VALUES = np.arange(256, dtype=np.uint8).view(DTYPES["e4m3"]).astype(np.float32)
"""The number that each byte of e4m3 stands for."""
NF4 = np.array(NF4_LEVELS, np.float32)
NF4_MIDPOINTS = (NF4[1:] + NF4[:-1]) / np.float32(2)
E2M1 = np.array([*E2M1_LEVELS, *(-level for level in E2M1_LEVELS)], np.float32)
SIGN, INFINITY, MANTISSA = np.uint32(0x80000000), np.uint32(0x7F800000), np.uint32(0x7FFFFF)
ABSOLUTE = np.int32(0x7FFFFFFF)
FP32_ONE = 127  # biased exponent of 1.0
RAISE = 64
SUBNORMAL_RAISED = np.float32(2.0 ** (RAISE - 126))
LARGE = np.float32(2.0**100)


def encode(format: str | Format, values: Array, global_scale: float = 1.0) -> Array:
    """Values [rows, dim] fp32 or bf16 -> canonical rows [rows, row_bytes] uint8."""
    format = sized(format, values.shape[1])
    values = values.astype(jnp.float32)
    if format.hadamard:
        values = hadamard(values)
    stored = {}
    channel = 0
    for field in format.fields:
        if not field.is_value:
            continue
        channels = values[:, channel : channel + field.size]
        channel += field.size
        if field.group is None:
            stored[field.name] = to_bytes(channels, field.code)
        else:
            stored[field.name], stored["scales"] = quantise(channels, field, format, global_scale)
    zeros = {field.name: jnp.zeros((len(values), field.nbytes), jnp.uint8) for field in format.fields}
    return jnp.concatenate([stored.get(field.name, zeros[field.name]) for field in format.fields], axis=1)


def decode(format: str | Format, rows: Array, dim: int | None = None, global_scale: float = 1.0) -> Array:
    """Canonical rows [rows, row_bytes] -> values [rows, dim], bf16 where that is exact, else fp32."""
    format = sized(format, dim)
    channels = []
    for field in format.fields:
        if not field.is_value:
            continue
        values = from_bytes(take(rows, format, field.name), field.code)
        if field.group is not None:
            scale_code = format.field("scales").code
            width = field.width
            stored = take(rows, format, "scales")
            if scale_code == "e8m0":
                values = times_power(values, jnp.repeat(stored, width, axis=1)[:, : field.size])
            else:
                values = times(values, jnp.repeat(from_bytes(stored, scale_code), width, axis=1)[:, : field.size])
                # Code times scale is exact, so the product with the global scale rounds once.
                values = values * np.float32(global_scale) if format.global_scaled else values
        channels.append(values)
    return jnp.concatenate(channels, axis=1).astype(DTYPES[format.value_code])


def pack_page(format: str | Format, rows: Array) -> Array:
    """Canonical rows [P, row_bytes] -> the packed page of those P rows, [page bytes] uint8, padding zero."""
    format = sized(format, None)
    layout = block_layout(format, len(rows), "packed")
    page = jnp.zeros(layout.nbytes, jnp.uint8)
    for place in layout.places:
        where = place.base + place.stride * np.arange(len(rows))[:, None] + np.arange(place.nbytes)[None]
        page = page.at[where].set(take(rows, format, place.field))
    return page


def unpack_page(format: str | Format, page: Array, rows: int) -> Array:
    """A packed page of ``rows`` rows -> canonical rows [rows, row_bytes]."""
    format = sized(format, None)
    fields = {}
    for place in block_layout(format, rows, "packed").places:
        where = place.base + place.stride * np.arange(rows)[:, None] + np.arange(place.nbytes)[None]
        fields[place.field] = page[where]
    return jnp.concatenate([fields[field.name] for field in format.fields], axis=1)


def quantise(channels: Array, field: Field, format: Format, global_scale: float) -> tuple[Array, Array]:
    """One quantised field: channels [rows, dims] -> code bytes [rows, nbytes], scale bytes [rows, groups · size]."""
    width = field.width
    padded = jnp.pad(channels, ((0, 0), (0, field.groups * width - field.size)))
    groups = padded.reshape(len(channels), field.groups, width)
    # The order of magnitudes is the order of their bits, and NaN comes last; XLA's fp32 maximum may pass over a NaN.
    amax = from_bits(jnp.max(bits_of(groups) & ~SIGN, axis=2))
    finite = bits_of(amax) < INFINITY
    groups = clamp(groups, field.limit)
    amax = jnp.clip(jnp.where(finite, amax, 0), np.float32(format.amax_floor), np.float32(field.limit))
    scales, scale_bits = scale_of(amax, field, format, global_scale)
    if field.rule == "pow2":
        ratios = over_power(groups, (bits_of(scales) >> 23)[:, :, None])
    else:
        ratios = divide(groups, scales[:, :, None])
    ratios = jnp.where(finite[:, :, None], ratios, 0)
    codes = to_bytes(ratios.reshape(padded.shape)[:, : field.size], field.code, clamp=True)
    # NF4 writes zero as code 7, so a faulty group's codes are cleared by hand.
    if field.code == "nf4":
        codes = jnp.where(jnp.repeat(finite, width // 2, axis=1)[:, : codes.shape[1]], codes, np.uint8(0))
    scale = field.scale_element
    scale_bits = jnp.where(finite, scale_bits, scale.nan or 0).astype(BITS[scale.bits])
    return codes, bytes_of(scale_bits)


def scale_of(amax: Array, field: Field, format: Format, global_scale: float) -> tuple[Array, Array]:
    """The scales [rows, groups] as fp32, and as bits of the scale's code, by the field's rule."""
    product = jnp.maximum(amax * np.float32(1 / CODES[field.code].largest), np.float32(format.scale_floor))
    if field.rule == "pow2":
        bits = bits_of(product)
        exponent = (bits >> 23) + ((bits & MANTISSA) != 0).astype(jnp.uint32)
        scales = from_bits(exponent << 23)
        return scales, exponent if field.scale == "e8m0" else bits_of(scales)
    if field.rule == "e4m3":
        relative = product if global_scale == 1 else divide(product, jnp.full_like(product, global_scale))
        stored = jnp.clip(relative, np.float32(E4M3_SCALE_SMALLEST), np.float32(448)).astype(DTYPES["e4m3"])
        bits = lax.bitcast_convert_type(stored, jnp.uint8)
        # Looked up: converted back at once, XLA may leave out both conversions on a GPU, and with them the rounding.
        return jnp.asarray(E4M3_VALUES)[bits] * np.float32(global_scale), bits
    if field.rule not in ("fp32", "absmax"):
        raise unknown("scale rule", field.rule, "encode")
    scales = amax if field.rule == "absmax" else product
    return scales, bits_of(scales)


def to_bytes(values: Array, code: str, clamp: bool = False) -> Array:
    """fp32 [rows, dims] -> the code's bytes [rows, nbytes], rounding to nearest even; NaN as the code's one, or 0."""
    if code in CODES and CODES[code].nan is None:
        values = jnp.where(jnp.isnan(values), 0, values)
    if code == "nf4":
        # A value on a midpoint takes the lower level: only midpoints strictly below it count.
        return pack_nibbles(jnp.sum(values[:, :, None] > NF4_MIDPOINTS[None, None], axis=2, dtype=jnp.uint8))
    if code not in KNOWN:
        raise unknown("element code", code, "encode")
    values = within(values, code, keep=not clamp)
    if code == "int8":
        return lax.bitcast_convert_type(jnp.rint(values).astype(jnp.int8), jnp.uint8)
    if code == "e2m1":
        return pack_nibbles(e2m1_codes(values).astype(jnp.uint8))
    if code == "fp32":
        bits = bits_of(values)
        # Told by bits: arithmetic on a NaN might not see it where fast mathematics is on.
        return bytes_of(jnp.where(bits & ~SIGN > INFINITY, np.uint32(CODES[code].nan or 0), bits))
    bits = lax.bitcast_convert_type(values.astype(DTYPES[code]), BITS[CODES[code].bits])
    return bytes_of(jnp.where(jnp.isnan(values), CODES[code].nan or 0, bits).astype(bits.dtype))


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


def from_bytes(stored: Array, code: str) -> Array:
    """The code's bytes [rows, nbytes] -> fp32 [rows, dims]."""
    if code not in KNOWN:
        raise unknown("element code", code, "decode")
    if code == "nf4":
        return jnp.asarray(NF4)[unpack_nibbles(stored)]
    if code == "e2m1":
        return jnp.asarray(E2M1)[unpack_nibbles(stored)]
    size = CODES[code].bits // 8
    if size > 1:
        stored = stored.reshape(len(stored), stored.shape[1] // size, size)
    return lax.bitcast_convert_type(stored, DTYPES[code]).astype(jnp.float32)


def e2m1_codes(values):
    """fp32 within ±6 -> e2m1 bits as int32: the magnitude counts the midpoints below it, ties go to the even code."""
    magnitude = jnp.abs(values)
    codes = (bits_of(values) >> 28 & 8).astype(jnp.int32)
    for midpoint, tie_goes_up in ((0.25, 0), (0.75, 1), (1.25, 0), (1.75, 1), (2.5, 0), (3.5, 1), (5.0, 0)):
        above = magnitude >= np.float32(midpoint) if tie_goes_up else magnitude > np.float32(midpoint)
        codes += above.astype(jnp.int32)
    return codes


def pack_nibbles(codes: Array) -> Array:
    """[rows, n] 4-bit codes -> [rows, n / 2] bytes, the even channel in the low nibble."""
    return codes[:, 0::2] | codes[:, 1::2] << 4


def unpack_nibbles(stored: Array) -> Array:
    """[rows, n / 2] bytes -> [rows, n] 4-bit codes."""
    return jnp.stack([stored & 0xF, stored >> 4], axis=2).reshape(len(stored), 2 * stored.shape[1])


def hadamard(values: Array, butterflies: Any = None, rounded: Any = None) -> Array:
    """Rotate rows by the orthonormal Sylvester matrix: fp32 butterflies, one product, then rounded to bf16.

    Sums of small values may be subnormal, and XLA takes those for zero, so rows are raised by 2^64 while that is safe.

    Args:
        values: [rows, dim], dim a power of two.
        butterflies: what does the sums; None for ``sylvester``.
        rounded: what rounds to bf16; None for ``to_bf16``.
    """
    magnitude = bits_of(values) & ~SIGN
    magnitude = jnp.where(magnitude > INFINITY, np.float32(np.inf), from_bits(magnitude))
    raised = jnp.max(magnitude, axis=1, keepdims=True) < np.float32(2.0**50)
    shift = jnp.where(raised, np.uint32(RAISE), np.uint32(0))
    values = (butterflies or sylvester)(over_power(values, FP32_ONE - shift))
    factor = np.float32(values.shape[1] ** -0.5)
    product = values * factor
    normal = over_power((rounded or to_bf16)(product), FP32_ONE + shift)
    # Where subnormal, bf16 is a multiple of 2^-133.
    small = jnp.rint(jnp.abs(_lowered(values, factor)) * np.float32(2.0**-16)).astype(jnp.uint32) << 16
    return jnp.where(raised & (jnp.abs(product) < SUBNORMAL_RAISED), from_bits(small | bits_of(values) & SIGN), normal)


def sylvester(values):
    """The sums of the rotation: log2(dim) rounds of butterflies over rows [rows, dim]."""
    rows, dim = values.shape
    stride = 1
    while stride < dim:
        pairs = values.reshape(rows, dim // (2 * stride), 2, stride)
        values = jnp.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], axis=2)
        values = values.reshape(rows, dim)
        stride *= 2
    return values


def times(values, scales):
    """The correctly rounded product of values of at most 2^20 and scales, subnormal scales and products included."""
    raised = (bits_of(scales) & ~SIGN) < bits_of(np.float32(2.0**-42))
    shift = jnp.where(raised, np.uint32(RAISE), np.uint32(0))
    scales = over_power(scales, FP32_ONE - shift)
    product = values * scales
    subnormal = raised & (jnp.abs(product) < SUBNORMAL_RAISED)
    small = jnp.abs(_lowered(values, scales)).astype(jnp.uint32) | bits_of(product) & SIGN
    return jnp.where(subnormal, from_bits(small), over_power(product, FP32_ONE + shift))


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


def to_bf16(values: Array) -> Array:
    """fp32 rounded to bf16, still as fp32. XLA may drop a cast there and back; it keeps ``reduce_precision``."""
    return lax.reduce_precision(values, exponent_bits=8, mantissa_bits=7)


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


def bytes_of(bits):
    """Unsigned integers [rows, n] -> little-endian bytes [rows, n · size]."""
    if bits.dtype.itemsize == 1:
        return bits
    return lax.bitcast_convert_type(bits, jnp.uint8).reshape(len(bits), bits.shape[1] * bits.dtype.itemsize)


def sized(format: str | Format, dim: int | None) -> Format:
    """The format by name or record, sized for ``dim`` where it has no size of its own.

    Raises:
        SpecError: it has none, and no dim is given.
    """
    format = FORMATS[format] if isinstance(format, str) else format
    format = format if dim is None else format.for_dim(dim)
    if format.dim is None:
        raise SpecError(
            got=format.name, where="format", allowed="a format of a size, or dim", hint="Pass dim, or for_dim(dim)."
        )
    return format


def take(rows: Array, format: Format, name: str) -> Array:
    """A field's bytes out of canonical rows."""
    first, last = format.byte_range(name)
    return rows[:, first:last]
