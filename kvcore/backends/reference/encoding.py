"""Values to canonical rows and back, by the format table alone.

Storing is exact: scales come from exponent bits or one product, divisions are IEEE-rounded, values are clamped to the
code's range before they are cast (ml_dtypes would give NaN), and a group with a non-finite value stores a NaN scale and
zero codes, so that the fault stays in its row and is seen.
"""

import ml_dtypes
import numpy as np

from kvcore.errors import SpecError
from kvcore.spec import FORMATS, Field, Format, block_layout
from kvcore.spec.codes import CODES, E4M3_SCALE_SMALLEST, NF4_LEVELS, RANGE_SMALLEST, unknown

DTYPES = {
    "fp32": np.dtype(np.float32),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "fp16": np.dtype(np.float16),
    "e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "int8": np.dtype(np.int8),
    "e2m1": np.dtype(ml_dtypes.float4_e2m1fn),
}
BITS = {32: np.uint32, 16: np.uint16, 8: np.uint8, 4: np.uint8}
KNOWN = (*DTYPES, "nf4", "uint4")
"""Element codes that these encoders know."""

NF4 = np.array(NF4_LEVELS, np.float32)
NF4_MIDPOINTS = (NF4[1:] + NF4[:-1]) / np.float32(2)


def encode(format: str | Format, values: np.ndarray, global_scale: float = 1.0) -> np.ndarray:
    """Values [rows, dim] fp32 or bf16 -> canonical rows [rows, row_bytes] uint8."""
    format = sized(format, values.shape[1])
    global_scale *= format.global_scale
    values = np.asarray(values).astype(np.float32)
    if format.hadamard:
        values = hadamard(values)
    rows = np.zeros((len(values), format.row), np.uint8)
    channel = 0
    for field in format.fields:
        if not field.is_value:
            continue
        channels = values[:, channel : channel + field.size]
        channel += field.size
        if field.group is None:
            put(rows, format, field.name, to_bytes(channels, field.code))
            continue
        if field.has_offsets:
            codes, scales, offsets = quantise_range(channels, field, format)
            put(rows, format, "offsets", offsets)
        else:
            codes, scales = quantise(channels, field, format, global_scale)
        put(rows, format, field.name, codes)
        put(rows, format, "scales", scales)
    return rows


def decode(format: str | Format, rows: np.ndarray, dim: int | None = None, global_scale: float = 1.0) -> np.ndarray:
    """Canonical rows [rows, row_bytes] -> values [rows, dim], bf16 where that is exact, else fp32."""
    format = sized(format, dim)
    global_scale *= format.global_scale
    channels = []
    for field in format.fields:
        if not field.is_value:
            continue
        values = from_bytes(take(rows, format, field.name), field.code)
        if field.group is not None:
            scales, offsets = group_values(rows, format, field)
            with np.errstate(invalid="ignore", over="ignore"):
                values = values * np.repeat(scales, field.width, axis=1)[:, : field.size]
                if offsets is not None:
                    # Code times scale is exact, so the sum rounds once.
                    values = values + np.repeat(offsets, field.width, axis=1)[:, : field.size]
                # Code times scale is exact, so the product with the global scale rounds once.
                values = values * np.float32(global_scale) if format.global_scaled else values
        channels.append(values)
    with np.errstate(invalid="ignore", over="ignore"):
        return np.concatenate(channels, axis=1).astype(DTYPES[format.value_code])


def pack_page(format: str | Format, rows: np.ndarray) -> np.ndarray:
    """Canonical rows [P, row_bytes] -> the packed page of those P rows, [page bytes] uint8, padding zero."""
    format = sized(format, None)
    layout = block_layout(format, len(rows), "packed")
    page = np.zeros(layout.nbytes, np.uint8)
    for place in layout.places:
        for r, row in enumerate(take(rows, format, place.field)):
            start = place.base + r * place.stride
            page[start : start + place.nbytes] = row
    return page


def unpack_page(format: str | Format, page: np.ndarray, rows: int) -> np.ndarray:
    """A packed page of ``rows`` rows -> canonical rows [rows, row_bytes]."""
    format = sized(format, None)
    out = np.zeros((rows, format.row), np.uint8)
    for place in block_layout(format, rows, "packed").places:
        for r in range(rows):
            start = place.base + r * place.stride
            first, last = format.byte_range(place.field)
            out[r, first:last] = page[start : start + place.nbytes]
    return out


def quantise(channels: np.ndarray, field: Field, format: Format, global_scale: float) -> tuple[np.ndarray, np.ndarray]:
    """One quantised field: channels [rows, dims] -> code bytes [rows, nbytes], scale bytes [rows, groups · size]."""
    padded = np.zeros((len(channels), field.groups * field.width), np.float32)
    padded[:, : field.size] = channels
    groups = padded.reshape(len(channels), field.groups, field.width)
    amax = np.abs(groups).max(axis=2, initial=0)
    finite = np.isfinite(amax)
    limit = np.float32(field.limit)
    groups = np.clip(groups, -limit, limit)
    amax = np.clip(np.where(finite, amax, 0), np.float32(format.amax_floor), limit)
    scales, scale_bits = scale_of(amax, field, format, global_scale)
    with np.errstate(invalid="ignore", over="ignore", divide="ignore", under="ignore"):
        ratios = np.where(finite[:, :, None], ratios_of(groups, scales[:, :, None], field), 0)
    codes = to_bytes(ratios.reshape(padded.shape)[:, : field.size], field.code, clamp=True)
    # NF4 writes zero as code 7, so a faulty group's codes are cleared by hand.
    if not finite.all() and field.code == "nf4":
        codes[~np.repeat(finite, field.width // 2, axis=1)[:, : codes.shape[1]]] = 0
    scale = field.scale_element
    scale_bits = np.where(finite, scale_bits, np.uint32(scale.nan or 0)).astype(BITS[scale.bits])
    return codes, scale_bits.view(np.uint8).reshape(len(channels), field.groups * scale_bits.itemsize)


def ratios_of(groups: np.ndarray, scales: np.ndarray, field: Field) -> np.ndarray:
    """Values over their scales, as the field's rule divides; integers of the ``quotient`` rule are whole already."""
    if field.rule != "quotient":
        return groups / scales
    ratios = groups * (np.float32(1) / scales)
    return np.trunc(ratios + np.copysign(np.float32(0.5), ratios)) if field.code == "int8" else ratios


def quantise_range(channels: np.ndarray, field: Field, format: Format) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One field whose groups have offsets: channels [rows, dims] -> bytes of codes, of scales and of offsets."""
    rows, limit = len(channels), np.float32(field.limit)
    # The last group may be short: repeating its last channel changes neither its smallest nor its largest.
    missing = field.groups * field.width - field.size
    groups = np.concatenate([channels, np.repeat(channels[:, -1:], missing, axis=1)], axis=1)
    groups = groups.reshape(rows, field.groups, field.width)
    finite = np.asarray(np.isfinite(groups).all(axis=2))
    groups = np.where(finite[:, :, None], np.clip(groups, -limit, limit), np.float32(0))
    floor = np.float32(format.amax_floor)
    # What is nearer to zero than a scale can tell is zero.
    groups = np.where(np.abs(groups) < floor, np.float32(0), groups)
    offsets = to_bf16(groups.min(axis=2))
    reach = np.maximum(groups.max(axis=2) - offsets, floor)
    scales = to_bf16(reach * np.float32(1 / field.element.largest))
    ratios = (groups - offsets[:, :, None]) / scales[:, :, None]
    codes = to_bytes(ratios.reshape(rows, field.groups * field.width)[:, : field.size], field.code, clamp=True)
    scale_bits = np.where(finite, scales.view(np.uint32) >> 16, np.uint32(field.scale_element.nan or 0))
    stored = [bits.astype(np.uint16).view(np.uint8) for bits in (scale_bits, offsets.view(np.uint32) >> 16)]
    return codes, stored[0], stored[1]


def scale_of(amax: np.ndarray, field: Field, format: Format, global_scale: float) -> tuple[np.ndarray, np.ndarray]:
    """The scales [rows, groups] as fp32, and as bits of the scale's code, by the field's rule."""
    product = np.maximum(amax * np.float32(1 / field.element.largest), np.float32(format.scale_floor))
    if field.rule == "pow2":
        bits = product.view(np.uint32)
        exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0)
        scales = (exponent << 23).astype(np.uint32).view(np.float32)
        return scales, exponent if field.scale == "e8m0" else scales.view(np.uint32)
    if field.rule == "e4m3":
        with np.errstate(over="ignore"):
            relative = product / np.float32(global_scale)
        relative = np.clip(relative, np.float32(E4M3_SCALE_SMALLEST), np.float32(448))
        stored = relative.astype(DTYPES["e4m3"])
        return stored.astype(np.float32) * np.float32(global_scale), stored.view(np.uint8)
    if field.rule == "quotient":
        scales = np.maximum(amax / np.float32(field.element.largest), np.float32(format.scale_floor))
        return scales, scales.view(np.uint32)
    if field.rule not in ("fp32", "absmax"):
        raise unknown("scale rule", field.rule, "encode")
    scales = amax if field.rule == "absmax" else product
    return scales, scales.view(np.uint32)


def group_values(rows: np.ndarray, format: Format, field: Field) -> tuple[np.ndarray, np.ndarray | None]:
    """Of canonical rows, a field's scales and its offsets, if it has any: [rows, groups] fp32 each."""
    scales = scale_values(take(rows, format, "scales"), format.field("scales").code)
    if not field.has_offsets:
        return scales, None
    offsets = scale_values(take(rows, format, "offsets"), format.field("offsets").code)
    scales, offsets = (np.where(np.abs(each) < RANGE_SMALLEST, np.float32(0), each) for each in (scales, offsets))
    return scales, offsets


def scale_values(stored: np.ndarray, code: str) -> np.ndarray:
    """Stored scale bytes [rows, groups · size] -> fp32 [rows, groups]; e8m0 byte b means 2^(b - 127), 0xFF NaN."""
    if code == "e8m0":
        exponent = stored.astype(np.uint32)
        bits = np.where(exponent == 0, 0x00400000, exponent << 23)
        return np.where(exponent == 0xFF, 0x7FC00000, bits).astype(np.uint32).view(np.float32)
    return from_bytes(stored, code)


def to_bytes(values: np.ndarray, code: str, clamp: bool = False) -> np.ndarray:
    """fp32 [rows, dims] -> the code's bytes [rows, nbytes], rounding to nearest even; NaN as the code's one, or 0."""
    if code in CODES and CODES[code].nan is None:
        values = np.where(np.isnan(values), np.float32(0), values)
    if code == "nf4":
        # A value on a midpoint takes the lower level: "left" counts the midpoints strictly below it.
        return pack_nibbles(np.searchsorted(NF4_MIDPOINTS, values, side="left").astype(np.uint8))
    if code == "uint4":
        return pack_nibbles(np.rint(np.clip(values, 0, CODES[code].largest)).astype(np.uint8))
    dtype = dtype_of(code)
    within = np.clip(values, -np.float32(CODES[code].largest), np.float32(CODES[code].largest))
    # Infinities stay what they are where the code has any: a plain field keeps them.
    values = within if clamp or code in ("int8", "e2m1") else np.where(np.isinf(values), values, within)
    if code == "int8":
        return np.rint(values).astype(np.int8).view(np.uint8)
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        bits = np.ascontiguousarray(values.astype(dtype)).view(BITS[CODES[code].bits])
    if code == "e2m1":
        return pack_nibbles(bits & 0xF)
    bits = np.where(np.isnan(values), bits.dtype.type(CODES[code].nan or 0), bits)
    return bits.view(np.uint8).reshape(len(values), values.shape[1] * bits.itemsize)


def from_bytes(stored: np.ndarray, code: str) -> np.ndarray:
    """The code's bytes [rows, nbytes] -> fp32 [rows, dims]."""
    stored = np.ascontiguousarray(stored)
    if code == "nf4":
        return NF4[unpack_nibbles(stored)]
    if code == "e2m1":
        return unpack_nibbles(stored).view(DTYPES["e2m1"]).astype(np.float32)
    if code == "uint4":
        return unpack_nibbles(stored).astype(np.float32)
    return stored.view(dtype_of(code)).astype(np.float32)


def dtype_of(code: str) -> np.dtype:
    """The dtype whose numbers a code's bits are.

    Raises:
        BackendError: this encoder does not know the code.
    """
    if code not in DTYPES:
        raise unknown("element code", code, "encode or decode")
    return DTYPES[code]


def pack_nibbles(codes: np.ndarray) -> np.ndarray:
    """[rows, n] 4-bit codes -> [rows, n / 2] bytes, the even channel in the low nibble."""
    return codes[:, 0::2] | codes[:, 1::2] << 4


def unpack_nibbles(stored: np.ndarray) -> np.ndarray:
    """[rows, n / 2] bytes -> [rows, n] 4-bit codes."""
    return np.stack([stored & 0xF, stored >> 4], axis=2).reshape(len(stored), 2 * stored.shape[1])


def hadamard(values: np.ndarray) -> np.ndarray:
    """Rotate rows by the orthonormal Sylvester matrix: fp32 butterflies, one product, then rounded to bf16."""
    rows, dim = values.shape
    stride = 1
    with np.errstate(invalid="ignore", over="ignore"):
        while stride < dim:
            even, odd = np.moveaxis(values.reshape(rows, dim // (2 * stride), 2, stride), 2, 0)
            values = np.stack([even + odd, even - odd], axis=2).reshape(rows, dim)
            stride *= 2
        return to_bf16(values * np.float32(dim**-0.5))


def to_bf16(values: np.ndarray) -> np.ndarray:
    """fp32 rounded to bf16, still as fp32."""
    with np.errstate(over="ignore"):
        return values.astype(DTYPES["bf16"]).astype(np.float32)


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


def take(rows: np.ndarray, format: Format, name: str) -> np.ndarray:
    """A field's bytes out of canonical rows."""
    first, last = format.byte_range(name)
    return rows[:, first:last]


def put(rows: np.ndarray, format: Format, name: str, stored: np.ndarray) -> None:
    """Write a field's bytes into canonical rows."""
    first, last = format.byte_range(name)
    rows[:, first:last] = stored
