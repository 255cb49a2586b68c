"""Values to canonical rows and back, by the format table alone.

The same bytes as the reference, eagerly and under ``jit``. The arithmetic is that of the kernels
(``kernels.pallas.arithmetic``); XLA also drops fp32 -> bf16 -> fp32 round trips, so rounding to bf16 is
``reduce_precision``.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from kvcore.errors import SpecError
from kvcore.kernels.pallas.arithmetic import (
    INFINITY,
    SIGN,
    bits_of,
    clamp,
    divide,
    e2m1_codes,
    fp32_scale,
    from_bits,
    half_away,
    limit_of,
    over_power,
    raise_of,
    raised_by,
    rotated,
    times,
    times_layer,
    times_power,
    within,
)
from kvcore.spec import FORMATS, Field, Format, block_layout
from kvcore.spec.codes import CODES, E2M1_LEVELS, E4M3_SCALE_SMALLEST, NF4_LEVELS, RANGE_SMALLEST, unknown

DTYPES = {
    "fp32": jnp.float32,
    "bf16": jnp.bfloat16,
    "fp16": jnp.float16,
    "e4m3": jnp.float8_e4m3fn,
    "int8": jnp.int8,
}
BITS = {32: jnp.uint32, 16: jnp.uint16, 8: jnp.uint8}
KNOWN = (*DTYPES, "e2m1", "nf4", "uint4")
"""Element codes that these encoders know."""

E4M3_VALUES = np.arange(256, dtype=np.uint8).view(DTYPES["e4m3"]).astype(np.float32)
"""The number that each byte of e4m3 stands for."""
NF4 = np.array(NF4_LEVELS, np.float32)
NF4_MIDPOINTS = (NF4[1:] + NF4[:-1]) / np.float32(2)
E2M1 = np.array([*E2M1_LEVELS, *(-level for level in E2M1_LEVELS)], np.float32)
OF_RANGES = ("scales", "offsets")


def encode(format: str | Format, values: Array, global_scale: float = 1.0) -> Array:
    """Values [rows, dim] fp32 or bf16 -> canonical rows [rows, row_bytes] uint8."""
    format = sized(format, values.shape[1])
    global_scale *= format.global_scale
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
        elif field.has_offsets:
            stored[field.name], stored["scales"], stored["offsets"] = quantise_range(channels, field, format)
        else:
            stored[field.name], stored["scales"] = quantise(channels, field, format, global_scale)
    zeros = {field.name: jnp.zeros((len(values), field.nbytes), jnp.uint8) for field in format.fields}
    return jnp.concatenate([stored.get(field.name, zeros[field.name]) for field in format.fields], axis=1)


def decode(format: str | Format, rows: Array, dim: int | None = None, global_scale: float = 1.0) -> Array:
    """Canonical rows [rows, row_bytes] -> values [rows, dim], bf16 where that is exact, else fp32."""
    format = sized(format, dim)
    global_scale *= format.global_scale
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
            elif field.has_offsets:
                # Code times scale is exact, and nothing is subnormal, so the sum rounds once, fused or not.
                scales, offsets = (large(from_bytes(take(rows, format, name), scale_code)) for name in OF_RANGES)
                values = values * jnp.repeat(scales, width, axis=1)[:, : field.size]
                values = values + jnp.repeat(offsets, width, axis=1)[:, : field.size]
            else:
                values = times(values, jnp.repeat(from_bytes(stored, scale_code), width, axis=1)[:, : field.size])
                # Code times scale is exact, so the product with the global scale rounds once.
                values = times_layer(values, global_scale) if format.global_scaled else values
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
    limit = limit_of(field, global_scale)
    groups = clamp(groups, limit)
    amax = jnp.minimum(jnp.maximum(jnp.where(finite, amax, 0), np.float32(format.amax_floor)), np.float32(limit))
    powers = raise_of(field, global_scale)
    groups, amax = raised_by(groups, powers), raised_by(amax, powers)
    scales, scale_bits = scale_of(amax, field, format, global_scale * 2.0**powers)
    ratios = jnp.where(finite[:, :, None], ratios_of(groups, scales[:, :, None], field), 0)
    codes = to_bytes(ratios.reshape(padded.shape)[:, : field.size], field.code, clamp=True)
    # NF4 writes zero as code 7, so a faulty group's codes are cleared by hand.
    if field.code == "nf4":
        codes = jnp.where(jnp.repeat(finite, width // 2, axis=1)[:, : codes.shape[1]], codes, np.uint8(0))
    scale = field.scale_element
    scale_bits = jnp.where(finite, scale_bits, scale.nan or 0).astype(BITS[scale.bits])
    return codes, bytes_of(scale_bits)


def ratios_of(groups: Array, scales: Array, field: Field) -> Array:
    """Values over their scales, as the field's rule divides; integers of the ``quotient`` rule are whole already."""
    if field.rule == "pow2":
        return over_power(groups, bits_of(scales) >> 23)
    if field.rule != "quotient":
        return divide(groups, scales)
    ratios = groups * divide(jnp.ones_like(scales), scales)
    return half_away(ratios) if field.code == "int8" else ratios


def quantise_range(channels: Array, field: Field, format: Format) -> tuple[Array, Array, Array]:
    """One field whose groups have offsets: channels [rows, dims] -> bytes of codes, of scales and of offsets."""
    rows, largest = len(channels), np.float32(field.element.largest)
    # The last group may be short: repeating its last channel changes neither its smallest nor its largest.
    missing = field.groups * field.width - field.size
    groups = jnp.concatenate([channels, jnp.repeat(channels[:, -1:], missing, axis=1)], axis=1)
    groups = groups.reshape(rows, field.groups, field.width)
    finite = jnp.max(bits_of(groups) & ~SIGN, axis=2) < INFINITY
    groups = jnp.where(finite[:, :, None], clamp(groups, field.limit), 0)
    # What is nearer to zero than a scale can tell is zero: told by bits, and no subnormal is left.
    floor = np.float32(format.amax_floor)
    groups = jnp.where((bits_of(groups) & ~SIGN) < bits_of(floor), 0, groups)
    offsets = to_bf16(jnp.min(groups, axis=2))
    reach = jnp.maximum(jnp.max(groups, axis=2) - offsets, floor)
    scales = to_bf16(reach * np.float32(1 / largest))
    ratios = divide(jnp.maximum(groups - offsets[:, :, None], 0), scales[:, :, None])
    codes = to_bytes(ratios.reshape(rows, field.groups * field.width)[:, : field.size], field.code, clamp=True)
    scale_bits = jnp.where(finite, bits_of(scales) >> 16, np.uint32(field.scale_element.nan or 0)).astype(jnp.uint16)
    offset_bits = (bits_of(offsets) >> 16).astype(jnp.uint16)
    return codes, bytes_of(scale_bits), bytes_of(offset_bits)


def large(values):
    """Scales or offsets of the ``range`` rule, those below what encoders write as zero: told by bits."""
    return jnp.where((bits_of(values) & ~SIGN) < bits_of(np.float32(RANGE_SMALLEST)), 0, values)


def scale_of(amax: Array, field: Field, format: Format, global_scale: float) -> tuple[Array, Array]:
    """The scales [rows, groups] as fp32, and as bits of the scale's code, by the field's rule."""
    if field.rule != "e4m3":
        return fp32_scale(amax, field, format)
    product = amax * np.float32(1 / CODES[field.code].largest)
    relative = product if global_scale == 1 else divide(product, jnp.full_like(product, global_scale))
    stored = jnp.clip(relative, np.float32(E4M3_SCALE_SMALLEST), np.float32(448)).astype(DTYPES["e4m3"])
    bits = lax.bitcast_convert_type(stored, jnp.uint8)
    # Looked up: converted back at once, XLA may leave out both conversions on a GPU, and with them the rounding.
    return jnp.asarray(E4M3_VALUES)[bits] * np.float32(global_scale), bits


def to_bytes(values: Array, code: str, clamp: bool = False) -> Array:
    """fp32 [rows, dims] -> the code's bytes [rows, nbytes], rounding to nearest even; NaN as the code's one, or 0."""
    if code in CODES and CODES[code].nan is None:
        values = jnp.where(jnp.isnan(values), 0, values)
    if code == "nf4":
        # A value on a midpoint takes the lower level: only midpoints strictly below it count.
        return pack_nibbles(jnp.sum(values[:, :, None] > NF4_MIDPOINTS[None, None], axis=2, dtype=jnp.uint8))
    if code not in KNOWN:
        raise unknown("element code", code, "encode")
    if code == "uint4":
        return pack_nibbles(jnp.rint(jnp.clip(values, 0, np.float32(CODES[code].largest))).astype(jnp.uint8))
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


def from_bytes(stored: Array, code: str) -> Array:
    """The code's bytes [rows, nbytes] -> fp32 [rows, dims]."""
    if code not in KNOWN:
        raise unknown("element code", code, "decode")
    if code == "nf4":
        return jnp.asarray(NF4)[unpack_nibbles(stored)]
    if code == "e2m1":
        return jnp.asarray(E2M1)[unpack_nibbles(stored)]
    if code == "uint4":
        return unpack_nibbles(stored).astype(jnp.float32)
    size = CODES[code].bits // 8
    if size > 1:
        stored = stored.reshape(len(stored), stored.shape[1] // size, size)
    return lax.bitcast_convert_type(stored, DTYPES[code]).astype(jnp.float32)


def pack_nibbles(codes: Array) -> Array:
    """[rows, n] 4-bit codes -> [rows, n / 2] bytes, the even channel in the low nibble."""
    return codes[:, 0::2] | codes[:, 1::2] << 4


def unpack_nibbles(stored: Array) -> Array:
    """[rows, n / 2] bytes -> [rows, n] 4-bit codes."""
    return jnp.stack([stored & 0xF, stored >> 4], axis=2).reshape(len(stored), 2 * stored.shape[1])


def hadamard(values: Array) -> Array:
    """Rotate rows [rows, dim] by the orthonormal Sylvester matrix, in fp32, then rounded to bf16."""
    return rotated(values, sylvester, to_bf16)


def sylvester(values):
    """The sums of the rotation: log2(dim) rounds of butterflies over rows [rows, dim].

    A round takes neighbours, and puts sums before differences, so that all rounds are alike: the next one's neighbours
    are twice as far apart, and after the last one every sum is where it belongs.
    """
    rounds = values.shape[1].bit_length() - 1
    if not rounds:
        return values

    def butterflies(_, values):
        even, odd = values[:, 0::2], values[:, 1::2]
        return jnp.concatenate([even + odd, even - odd], axis=1)

    # A CPU compiles the one round; a GPU would wait for a loop's host after each.
    return lax.fori_loop(0, rounds, butterflies, values, unroll=True if jax.default_backend() != "cpu" else 1)


def to_bf16(values: Array) -> Array:
    """fp32 rounded to bf16, still as fp32. XLA may drop a cast there and back; it keeps ``reduce_precision``."""
    return lax.reduce_precision(values, exponent_bits=8, mantissa_bits=7)


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
