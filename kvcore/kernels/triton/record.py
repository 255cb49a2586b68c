"""What a kernel must know of a region at compile time, as one hashable record of numbers.

A kernel takes the record as a ``constexpr`` argument and branches on it while it is compiled, so a new format, role or
layout is a new specialisation of the same source. All byte numbers are of one unit (a slot or a block) of a pool.
"""

from functools import cache
from typing import NamedTuple

import numpy as np

from kvcore.ops.choices import Declined
from kvcore.plan import Region
from kvcore.spec import Field, Format
from kvcore.spec.codes import CODES, RULES, unknown
from kvcore.spec.layout import Place

PLAIN_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
SCALE_BYTES = {"e8m0": 1, "e4m3": 1, "fp32": 4}
SCALED = ("e4m3", "e2m1", "int8", "nf4")
KERNEL_CODES = (*PLAIN_BYTES, *SCALED)
KERNEL_RULES = ("pow2", "fp32", "e4m3", "absmax", "quotient")
"""Codes, scales and rules that the kernels were written for. What is in no table is refused when a plan is bound."""


class RowRecord(NamedTuple):
    """A region whose rows are at most one scaled field, then at most one plain field.

    Attributes:
        dim: channels of a row; the first ``quant`` are scaled codes, the others plain.
        width: channels that share a scale, as a tile dimension: a power of two.
        tiles: groups of ``width`` in a tile of whole rows, a power of two.
        heads: rows of the pool for every position or entry.
        rows: positions or entries that a unit holds.
        paged: unit = block, else slot.
        code, rule, scale: names from the format's scaled field, "" without one.
        groups: scales of a row; ``pad`` zero bytes follow them.
        floor_bits: bits of the smallest group maximum, fp32; ``scale_floor_bits`` of the least for a scale.
        limit: magnitude to which finite scaled values are clamped, inf where that is every fp32 number; ``limit_bits``
            of the largest group maximum.
        inverse: fp32(1 / largest magnitude of the code); ``largest`` is that magnitude.
        global_scale: of formats with two-level scales, else 1.
        hadamard: rows are rotated before they are encoded.
        code_words, scale_words: a row's 4-bit codes are whole aligned 32-bit words; its scales are one.
        plain: code of the plain field, "" without one.
        apart: scaled and plain channels are best taken as tiles of their own: both exist, and no rotation joins them.
        exact: decoding is exact in bf16; else rows are decoded to fp32.
        rounded: what is computed before it is encoded is rounded to bf16: everything but plain fp32 rows.
        codes_unit, codes_base, codes_stride: byte k of the codes of row r of unit u is at
            ``u * unit + base + r * stride + k``; likewise of scales and the plain field.
    """

    dim: int
    quant: int
    width: int
    tiles: int
    heads: int
    rows: int
    paged: bool
    code: str
    rule: str
    scale: str
    groups: int
    pad: int
    floor_bits: int
    scale_floor_bits: int
    limit: float
    limit_bits: int
    inverse: float
    largest: float
    global_scale: float
    hadamard: bool
    code_words: bool
    scale_words: bool
    plain: str
    apart: bool
    exact: bool
    rounded: bool
    codes_unit: int
    codes_base: int
    codes_stride: int
    scales_unit: int
    scales_base: int
    scales_stride: int
    plain_unit: int
    plain_base: int
    plain_stride: int


PLACES = tuple(f"{field}_{what}" for field in ("codes", "scales", "plain") for what in ("unit", "base", "stride"))
"""What tells where a row lies."""


class RegionBuffers(NamedTuple):
    """Keys in the pools of the buffers that hold codes, scales and plain channels; absent fields repeat another's."""

    codes: str
    scales: str
    plain: str


@cache
def recorded(region: Region, global_scale: float = 1.0) -> tuple[RowRecord, RegionBuffers] | Declined:
    """The record of a region and its pools' names, or why the kernels do not cover its format or layout.

    Raises:
        BackendError: a code, a scale's code or a rule that the kernels were not written for.
    """
    places = {place.field: place for place in region.unit.places}
    if any(place.split for place in places.values()):
        return Declined(f"layout {region.layout} stores the bytes of an element apart")
    if (region.steps[1] > 1 and region.heads > 1) or region.copies > 1:
        return Declined(f"layout {region.layout} stores the heads of a row apart, or rows twice")
    values = [field for field in region.format.fields if field.is_value]
    scaled = [field for field in values if field.group is not None]
    plain = [field for field in values if field.group is None]
    named = f"format {region.format.name}"
    if any(field.has_offsets for field in scaled) or (region.tokens > 1 and region.part):
        return Declined(f"{named} has offsets beside its scales, or rows of several tokens")
    if len(scaled) > 1 or len(plain) > 1 or values != scaled + plain:
        return Declined(f"{named} is not one scaled field, then one plain field")
    _check_known(region, values)
    if not all(field.code in PLAIN_BYTES for field in plain) or not all(field.code in SCALED for field in scaled):
        return Declined(f"{named} has a scaled code without a scale, or a plain one with one")
    dim = region.format.dim or 0
    tile = power_of_two(dim)
    quant = scaled[0] if scaled else None
    width = (quant.group if quant else 0) or tile
    if width & (width - 1):
        return Declined(f"{named} has groups of {width} channels, no power of two")
    pad = _pad(places, quant)
    if pad is None or (quant is not None and quant.groups + pad > tile // width):
        return Declined(f"{named} has padding elsewhere than right behind its scales, or more than a tile holds")
    scale = float(np.float32(global_scale * region.format.global_scale))
    record = RowRecord(
        dim=dim,
        quant=(quant.dims or 0) if quant else 0,
        width=width,
        tiles=tile // width,
        heads=region.heads,
        rows=region.rows,
        paged=region.growth == "block",
        code=quant.code if quant else "",
        rule=(quant.rule or "") if quant else "",
        scale=(quant.scale or "") if quant else "",
        groups=quant.groups if quant else 0,
        pad=pad,
        floor_bits=_bits(region.format.amax_floor),
        scale_floor_bits=_bits(region.format.scale_floor),
        limit=float("inf") if quant is None or quant.limit == CODES["fp32"].largest else quant.limit,
        limit_bits=0 if quant is None else _bits(quant.limit),
        inverse=float(np.float32(1 / CODES[quant.code].largest)) if quant else 1.0,
        largest=CODES[quant.code].largest if quant else 0.0,
        global_scale=scale if region.format.global_scaled else 1.0,
        hadamard=region.format.hadamard,
        code_words=bool(quant and CODES[quant.code].bits == 4 and quant.size % 8 == 0 and width % 8 == 0)
        and _in_words(region, places[quant.name] if quant else None),
        scale_words=bool(quant and SCALE_BYTES[quant.scale or ""] == 1 and quant.groups + pad == 4)
        and _in_words(region, places.get("scales")),
        plain=plain[0].code if plain else "",
        apart=bool(scaled and plain and not region.format.hadamard and plain[0].size == power_of_two(plain[0].size)),
        exact=region.format.value_code == "bf16",
        rounded=not region.format.is_fp32,
        **_places(region, "codes", places.get(quant.name) if quant else None),
        **_places(region, "scales", places.get("scales")),
        **_places(region, "plain", places.get(plain[0].name) if plain else None),
    )
    if not aligned(record):
        return Declined(f"{named} in layout {region.layout} has elements off their own alignment")
    some = next(iter(places.values()))
    names = [
        region.buffers[places.get(name, some).buffer][0]
        for name in (quant.name if quant else "", "scales", plain[0].name if plain else "")
    ]
    return record, RegionBuffers(*names)


def plain_record(record: RowRecord) -> RowRecord:
    """The record of the same rows decoded to bf16, one unit behind the other."""
    row = 2 * record.dim
    return record._replace(
        quant=0, width=power_of_two(record.dim), tiles=1, code="", rule="", scale="", groups=0, pad=0, inverse=1.0,
        largest=0.0, code_words=False, scale_words=False, plain="bf16", apart=False, **dict.fromkeys(PLACES, 0),
    )._replace(plain_unit=record.rows * row, plain_stride=row)  # fmt: skip


def own_record(record: RowRecord, format: Format) -> RowRecord:
    """The record of canonical rows [rows, row_bytes] of the same format, row r of the only block."""

    def base(*names: str) -> int:
        return next((format.byte_range(f.name)[0] for f in format.fields if f.name in names), 0)

    values = [field.name for field in format.fields if field.is_value]
    row = format.row
    return record._replace(
        rows=1 << 30, paged=True,
        codes_unit=0, codes_base=base(values[0]), codes_stride=row,
        scales_unit=0, scales_base=base("scales"), scales_stride=row,
        plain_unit=0, plain_base=base(values[-1]), plain_stride=row,
    )  # fmt: skip


def ceil_div(value: int, by: int) -> int:
    """``value / by``, rounded up. Triton's own is a function of its language: ten times as long on the host."""
    return -(-value // by)


def power_of_two(value: int) -> int:
    """The smallest power of two that is not below ``value``, at least 1."""
    return 1 << max(value - 1, 0).bit_length()


def power_of_two_scaled(record: RowRecord) -> bool:
    """True if the record's scales are powers of two."""
    return bool(record.rule) and RULES[record.rule].power_of_two


def _check_known(region: Region, values: list[Field]) -> None:
    """Refuse what no branch of the kernels was written for, which else might run into one that is like it."""
    for field in values:
        where = f"format {region.format.name}: Triton kernels"
        if field.code not in KERNEL_CODES:
            raise unknown("element code", field.code, where)
        if field.group is not None and field.scale not in SCALE_BYTES:
            raise unknown("scale code", field.scale, where)
        if field.group is not None and field.rule not in KERNEL_RULES:
            raise unknown("scale rule", field.rule, where)


def _bits(value: float) -> int:
    """Bits of an fp32 number."""
    return int(np.float32(value).view(np.int32))


def _places(region: Region, name: str, place: Place | None) -> dict[str, int]:
    """The record's three numbers for a field, zeros for one that the format lacks."""
    unit, base, stride = (
        (0, 0, 0) if place is None else (dict(region.unit.buffers)[place.buffer], place.base, place.stride)
    )
    return {f"{name}_unit": unit, f"{name}_base": base, f"{name}_stride": stride}


def _pad(places: dict[str, Place], quant: Field | None) -> int | None:
    """Bytes of padding that follow the scales, 0 without padding, None where padding lies elsewhere."""
    if "pad" not in places:
        return 0
    pad, scales = places["pad"], places.get("scales")
    if scales is None or quant is None or SCALE_BYTES[quant.scale or ""] != 1:
        return None
    follows = (pad.buffer, pad.base, pad.stride) == (scales.buffer, scales.base + scales.nbytes, scales.stride)
    return pad.nbytes if follows else None


def _in_words(region: Region, place: Place | None) -> bool:
    """True if a field starts on a multiple of 4 bytes in every row of every unit."""
    if place is None:
        return False
    return not any(n % 4 for n in (dict(region.unit.buffers)[place.buffer], place.base, place.stride))


def aligned(record: RowRecord) -> bool:
    """Elements of more than one byte must lie on their own alignment."""
    plain = PLAIN_BYTES.get(record.plain, 1)
    scale = SCALE_BYTES.get(record.scale, 1)
    plains = record.plain_unit, record.plain_base, record.plain_stride
    scales = record.scales_unit, record.scales_base, record.scales_stride
    return not any(n % plain for n in plains) and not any(n % scale for n in scales)
