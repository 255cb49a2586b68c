"""Values to canonical rows and back, by the format table alone.

Storing is exact: scales come from exponent bits or one product, divisions are IEEE-rounded (by a tensor: torch turns a
division by a scalar into a product on a GPU), values are clamped to the code's range before they are cast, and a group
with a non-finite value stores a NaN scale and zero codes, so that the fault stays in its row and is seen.
"""

from functools import cache

import torch
from torch.nn.functional import pad

from kvcore.errors import SpecError
from kvcore.spec import FORMATS, Field, Format, block_layout
from kvcore.spec.codes import CODES, E2M1_LEVELS, E4M3_SCALE_SMALLEST, NF4_LEVELS, RANGE_SMALLEST, unknown

DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "e4m3": torch.float8_e4m3fn,
    "int8": torch.int8,
}
BITS = {32: torch.int32, 16: torch.int16, 8: torch.uint8}
FOUR_BITS: dict[str, tuple[float, ...]] = {
    "nf4": NF4_LEVELS,
    "e2m1": (*E2M1_LEVELS, *(-level for level in E2M1_LEVELS)),
    "uint4": tuple(map(float, range(16))),
}
"""Codes of four bits -> their values, code 0 first."""
KNOWN = (*DTYPES, "e2m1", "nf4", "uint4")
"""Element codes that these encoders know."""


def encode(format: str | Format, values: torch.Tensor, global_scale: float = 1.0) -> torch.Tensor:
    """Values [rows, dim] fp32 or bf16 -> canonical rows [rows, row_bytes] uint8."""
    format = sized(format, values.shape[1])
    global_scale *= format.global_scale
    values = values.to(torch.float32).contiguous()
    if format.hadamard:
        values = hadamard(values)
    rows = torch.zeros((len(values), format.row), dtype=torch.uint8, device=values.device)
    # Tensors without rows may have strides that no view of other elements is made from.
    if not len(rows):
        return rows
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


def decode(format: str | Format, rows: torch.Tensor, dim: int | None = None, global_scale: float = 1.0) -> torch.Tensor:
    """Canonical rows [rows, row_bytes] -> values [rows, dim], bf16 where that is exact, else fp32."""
    format = sized(format, dim)
    global_scale *= format.global_scale
    if not len(rows):
        return torch.zeros((0, format.dim or 0), dtype=DTYPES[format.value_code], device=rows.device)
    channels = []
    for field in format.fields:
        if not field.is_value:
            continue
        values = from_bytes(take(rows, format, field.name), field.code)
        if field.group is not None:
            scales, offsets = group_values(rows, format, field)
            if field.size == field.groups * field.width:
                # Group by group, with no scale written out for every channel.
                values = values.view(len(rows), field.groups, field.width)
                values = values * scales[:, :, None]
                # Code times scale is exact, so the sum rounds once.
                values = (values if offsets is None else values.add_(offsets[:, :, None])).flatten(1)
            else:
                values = values * spread(scales, field)
                values = values if offsets is None else values.add_(spread(offsets, field))
            # Code times scale is exact, so the product with the global scale rounds once.
            values = values * global_scale if format.global_scaled else values
        channels.append(values.to(DTYPES[format.value_code]))
    return channels[0] if len(channels) == 1 else torch.cat(channels, dim=1)


def pack_page(format: str | Format, rows: torch.Tensor) -> torch.Tensor:
    """Canonical rows [P, row_bytes] -> the packed page of those P rows, [page bytes] uint8, padding zero."""
    format = sized(format, None)
    layout = block_layout(format, len(rows), "packed")
    page = rows.new_zeros(layout.nbytes)
    for place in layout.places:
        page.as_strided((len(rows), place.nbytes), (place.stride, 1), place.base)[:] = take(rows, format, place.field)
    return page


def unpack_page(format: str | Format, page: torch.Tensor, rows: int) -> torch.Tensor:
    """A packed page of ``rows`` rows -> canonical rows [rows, row_bytes]."""
    page = page.contiguous()
    format = sized(format, None)
    out = page.new_zeros((rows, format.row))
    for place in block_layout(format, rows, "packed").places:
        start = page.storage_offset() + place.base
        put(out, format, place.field, page.as_strided((rows, place.nbytes), (place.stride, 1), start))
    return out


def quantise(
    channels: torch.Tensor, field: Field, format: Format, global_scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """One quantised field: channels [rows, dims] -> code bytes [rows, nbytes], scale bytes [rows, groups · size]."""
    padded = pad(channels, (0, field.groups * field.width - field.size))
    groups = padded.reshape(len(channels), field.groups, field.width)
    amax = groups.abs().amax(dim=2)
    finite = amax.isfinite()
    limit = field.limit
    groups = groups.clamp(-limit, limit)
    amax = torch.where(finite, amax, 0).clamp(format.amax_floor, limit)
    scales, scale_bits = scale_of(amax, field, format, global_scale)
    ratios = torch.where(finite[:, :, None], ratios_of(groups, scales[:, :, None], field), 0)
    codes = to_bytes(ratios.reshape(padded.shape)[:, : field.size], field.code, clamp=True)
    # NF4 writes zero as code 7, so a faulty group's codes are cleared by hand.
    if field.code == "nf4":
        codes.masked_fill_(~finite.repeat_interleave(field.width // 2, dim=1)[:, : codes.shape[1]], 0)
    scale = field.scale_element
    scale_bits = torch.where(finite, scale_bits, scale.nan or 0).to(BITS[scale.bits])
    return codes, scale_bits.view(torch.uint8)


def ratios_of(groups: torch.Tensor, scales: torch.Tensor, field: Field) -> torch.Tensor:
    """Values over their scales, as the field's rule divides; integers of the ``quotient`` rule are whole already."""
    if field.rule != "quotient":
        return groups / scales
    ratios = groups * (torch.ones_like(scales) / scales)
    return (ratios + torch.copysign(torch.full_like(ratios, 0.5), ratios)).trunc() if field.code == "int8" else ratios


def quantise_range(
    channels: torch.Tensor, field: Field, format: Format
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One field whose groups have offsets: channels [rows, dims] -> bytes of codes, of scales and of offsets."""
    rows, limit, largest = len(channels), field.limit, field.element.largest
    missing = field.groups * field.width - field.size
    # The last group may be short: repeating its last channel changes neither its smallest nor its largest.
    padded = torch.cat([channels, channels[:, -1:].expand(-1, missing)], dim=1) if missing else channels
    groups = padded.reshape(rows, field.groups, field.width)
    finite = groups.isfinite().all(dim=2)
    groups = torch.where(finite[:, :, None], groups.clamp(-limit, limit), 0)
    # What is nearer to zero than a scale can tell is zero.
    groups = torch.where(groups.abs() < format.amax_floor, 0, groups)
    offsets = groups.amin(dim=2).to(torch.bfloat16)
    least = offsets.to(torch.float32)
    reach = (groups.amax(dim=2) - least).clamp(min=format.amax_floor)
    scales = (reach * (1 / largest)).to(torch.bfloat16)
    ratios = (groups - least[:, :, None]) / scales.to(torch.float32)[:, :, None]
    codes = to_bytes(ratios.reshape(rows, field.groups * field.width)[:, : field.size], field.code, clamp=True)
    scale_bits = torch.where(finite, scales.view(torch.int16), field.scale_element.nan or 0).to(torch.int16)
    return codes, scale_bits.view(torch.uint8), offsets.view(torch.uint8)


def scale_of(
    amax: torch.Tensor, field: Field, format: Format, global_scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The scales [rows, groups] as fp32, and as bits of the scale's code, by the field's rule."""
    product = (amax * (1 / field.element.largest)).clamp(min=format.scale_floor)
    if field.rule == "pow2":
        bits = product.view(torch.int32)
        exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0)
        scale_bits = exponent << 23
        return scale_bits.view(torch.float32), exponent if field.scale == "e8m0" else scale_bits
    if field.rule == "e4m3":
        relative = (product / torch.full_like(product, global_scale)).clamp(E4M3_SCALE_SMALLEST, CODES["e4m3"].largest)
        stored = relative.to(DTYPES["e4m3"])
        return stored.to(torch.float32) * global_scale, stored.view(torch.uint8)
    if field.rule == "quotient":
        scales = torch.clamp_min(amax / torch.full_like(amax, field.element.largest), format.scale_floor)
        return scales, scales.view(torch.int32)
    if field.rule not in ("fp32", "absmax"):
        raise unknown("scale rule", field.rule, "encode")
    scales = amax if field.rule == "absmax" else product
    return scales, scales.view(torch.int32)


def group_values(rows: torch.Tensor, format: Format, field: Field) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Of canonical rows, a field's scales and its offsets, if it has any: [rows, groups] fp32 each."""
    scales = scale_values(take(rows, format, "scales"), format.field("scales").code)
    if not field.has_offsets:
        return scales, None
    offsets = scale_values(take(rows, format, "offsets"), format.field("offsets").code)
    scales, offsets = (torch.where(each.abs() < RANGE_SMALLEST, 0, each) for each in (scales, offsets))
    return scales, offsets


def scale_values(stored: torch.Tensor, code: str) -> torch.Tensor:
    """Stored scale bytes [rows, groups · size] -> fp32 [rows, groups]; e8m0 byte b means 2^(b - 127), 0xFF NaN."""
    if code == "e8m0":
        exponent = stored.to(torch.int32)
        bits = torch.where(exponent == 0, 0x00400000, exponent << 23)
        return torch.where(exponent == 0xFF, 0x7FC00000, bits).view(torch.float32)
    return from_bytes(stored, code)


def spread(scales, field: Field):
    """Scales [rows, groups] -> [rows, dims]: each group's scale at its channels; the last group may be short."""
    return scales[:, :, None].expand(-1, -1, field.width).flatten(1)[:, : field.size]


def to_bytes(values: torch.Tensor, code: str, clamp: bool = False) -> torch.Tensor:
    """fp32 [rows, dims] -> the code's bytes [rows, nbytes], rounding to nearest even; NaN as the code's one, or 0."""
    if code == "nf4":
        values = torch.where(values.isnan(), 0, values)
        # A value on a midpoint takes the lower level: bucketize counts the midpoints strictly below it.
        edges = nf4_midpoints(values.device)
        return pack_nibbles(torch.bucketize(values.contiguous(), edges, out_int32=True).to(torch.uint8))
    if code not in KNOWN:
        raise unknown("element code", code, "encode")
    if code == "uint4":
        return pack_nibbles(values.nan_to_num(nan=0.0).clamp(0, CODES[code].largest).round_().to(torch.uint8))
    values = values.clamp(-CODES[code].largest, CODES[code].largest) if clamp else within(values, code)
    if code == "int8":
        return values.nan_to_num(nan=0.0).round().to(torch.int8).view(torch.uint8)
    if code == "e2m1":
        magnitude = torch.bucketize(values.abs(), e2m1_edges(values.device), out_int32=True)
        magnitude = torch.where(values.isnan(), 0, magnitude)
        negative = values.signbit() & ~values.isnan()
        return pack_nibbles((magnitude + 8 * negative).to(torch.uint8))
    values = values.contiguous()  # only then can elements be seen as bytes
    bits = values.to(DTYPES[code]).view(BITS[CODES[code].bits])
    if code == "e4m3" and not clamp:
        # The cast saturates; e4m3 itself has no code for an infinity but NaN of either sign.
        bits = torch.where(values.isinf(), bits | 0x7F, bits)
    return torch.where(values.isnan(), CODES[code].nan or 0, bits).view(torch.uint8)


def within(values, code: str):
    """Finite values clamped to the range of a code that is not theirs; NaN stays, as do infinities if it has any."""
    if code == "fp32" or values.dtype == DTYPES.get(code):
        return values
    values, largest = values.to(torch.float32), CODES[code].largest
    clamped = values.clamp(-largest, largest)
    return clamped if code in ("int8", "e2m1") else torch.where(values.isinf(), values, clamped)


def from_bytes(stored: torch.Tensor, code: str) -> torch.Tensor:
    """The code's bytes [rows, nbytes] -> fp32 [rows, dims]."""
    if code in FOUR_BITS:
        # A byte at a time: both of its values are one number of 64 bits.
        found = pairs_of(code, stored.device).index_select(0, stored.reshape(-1).int())
        return found.view(torch.float32).reshape(len(stored), 2 * stored.shape[1])
    if code not in DTYPES:
        raise unknown("element code", code, "decode")
    return reinterpret(stored, DTYPES[code]).to(torch.float32)


@cache
def levels(code: str, device):
    """The sixteen values of a 4-bit code, fp32, code 0 first."""
    return torch.tensor(FOUR_BITS[code], dtype=torch.float32, device=device)


@cache
def pairs_of(code: str, device):
    """The two values of every byte, the low nibble's first, as int64 [256] of their bits."""
    values, byte = levels(code, device), torch.arange(256, device=device)
    return torch.stack([values[byte & 0xF], values[byte >> 4]], dim=1).view(torch.int64).reshape(256)


@cache
def nf4_midpoints(device):
    """The fifteen midpoints of the NF4 levels, rounded to fp32."""
    values = levels("nf4", device)
    return (values[1:] + values[:-1]) / torch.full_like(values[1:], 2)


@cache
def e2m1_edges(device):
    """Largest magnitude that still rounds to each level: a tie goes to the even code, so up to every second one."""
    values = torch.tensor(E2M1_LEVELS, dtype=torch.float32)
    middle = (values[1:] + values[:-1]) / 2
    upward = torch.arange(len(middle)) % 2 == 1
    return torch.where(upward, middle.nextafter(torch.zeros_like(middle)), middle).to(device)


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """[rows, n] 4-bit codes -> [rows, n / 2] bytes, the even channel in the low nibble."""
    return codes[:, 0::2] | codes[:, 1::2] << 4


def hadamard(values: torch.Tensor) -> torch.Tensor:
    """Rotate rows by the orthonormal Sylvester matrix: fp32 butterflies, one product, then rounded to bf16."""
    rows, dim = values.shape
    stride = 1
    while stride < dim:
        pairs = values.reshape(rows, dim // (2 * stride), 2, stride)
        values = torch.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], dim=2)
        stride *= 2
    return to_bf16(values.reshape(rows, dim) * dim**-0.5)


@cache
def plain_code(format: Format) -> str | None:
    """The code of a format that is one number a channel, in a type that torch computes with; None for any other."""
    value, *others = format.fields
    plain = not others and value.group is None and value.code in ("fp32", "bf16", "fp16") and not format.hadamard
    return value.code if plain else None


def to_bf16(values: torch.Tensor) -> torch.Tensor:
    """fp32 rounded to bf16, still as fp32."""
    return values.to(torch.bfloat16).to(torch.float32)


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


def take(rows: torch.Tensor, format: Format, name: str) -> torch.Tensor:
    """A field's bytes out of canonical rows."""
    first, last = format.byte_range(name)
    return rows[:, first:last]


def put(rows, format: Format, name: str, stored) -> None:
    """Write a field's bytes into canonical rows."""
    first, last = format.byte_range(name)
    rows[:, first:last] = stored


def reinterpret(stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Bytes [..., n] as elements of ``dtype``; copied where their addresses or strides don't allow a view."""
    *steps, last = stored.storage_offset(), *stored.stride()
    if last != 1 or any(step % dtype.itemsize for step in steps):
        stored = stored.clone(memory_format=torch.contiguous_format)
    return stored.view(dtype)
