"""Rows of a format out of byte lines, and into them, by the format table: what ``encoding`` does, lane by lane.

A line holds 128 channels of K rows, [K, 128] fp32. Formats whose fields this cannot place are told by ``supports``.
"""

import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu

from kvcore.kernels.pallas import arithmetic, codes
from kvcore.kernels.pallas.lines import Buffer, at_lane, buffers_of, byte_line, lanes, window
from kvcore.plan import Region
from kvcore.spec import Field, Format
from kvcore.spec.codes import CODES, E4M3_SCALE_SMALLEST, unknown
from kvcore.spec.layout import LANES, WORDS, Place

PLAIN = {"bf16": codes.to_bf16, "fp32": lambda line: line}
TO_CODE = {"e4m3": codes.to_e4m3, "e2m1": codes.to_e2m1}
SUPPORTED = (*TO_CODE, *PLAIN)
SCALES = ("e8m0", "fp32", "e4m3")


ENCODED_RULES = ("pow2", "fp32", "e4m3", "absmax")
"""Rules of scales that ``encode`` knows; to read rows, a scale's code is enough."""


def supports(region: Region) -> bool:
    """True where the kernels know every field of the region's format, in tiles, one head a row."""
    values = [field for field in region.format.fields if field.is_value]
    known = all(field.code in (PLAIN if field.group is None else TO_CODE) for field in values)
    known = known and all(field.rule in (None, *ENCODED_RULES) for field in values)
    return region.heads == 1 and decodes(region) and known


def decodes(region: Region) -> bool:
    """True where ``decode`` knows every field of the region's format, in tiles, of any number of heads."""
    if region.layout != "tpu_tile" or region.format.dim is None or WORDS in dict(region.unit.buffers):
        return False
    if region.format.global_scale != 1:
        return False
    values = [field for field in region.format.fields if field.is_value]
    fp32 = all(buffer.fp32 for buffer in buffers_of(region))
    known = all(field.code in (*SUPPORTED, "int8") and (field.code != "fp32" or fp32) for field in values)
    known = known and all(field.group is None or field.scale in SCALES for field in values)
    # Lanes of nibbles are paired within lines, and fp32 lines are taken whole.
    rotated = not region.format.hadamard or region.format.dim == LANES
    whole = all(field.size % LANES == 0 for field in values if field.code == "fp32")
    paired = all(field.code != "e2m1" or place_of(region, field.name).base % 64 == 0 for field in values)
    return known and rotated and whole and paired


def place_of(region: Region, field: str) -> Place:
    """Where a field lies."""
    return next(place for place in region.unit.places if place.field == field)


def line_count(region: Region) -> int:
    """Lines of channels of a row."""
    return -(-(region.format.dim or 0) // LANES)


def decode(region: Region, words, row, global_scale: float = 1.0):
    """Lines [K, 128] fp32 of K rows; channels beyond the row are zero.

    Args:
        region: of the rows.
        words: buffer name -> [K, tiles, 128] int32.
        row: [K, 1] int32, their numbers in their units.
        global_scale: of formats that have one.
    """
    buffers = {buffer.name: buffer for buffer in buffers_of(region)}

    def at(place: Place, first: int):
        buffer = buffers[place.buffer]
        return window(lambda n: byte_line(words[place.buffer], buffer, row, n), buffer.lines, place.base + first)

    found = []
    for number in range(line_count(region)):
        line = None
        start = 0
        for field in region.format.fields:
            if not field.is_value:
                continue
            first = LANES * number - start
            if -LANES < first < field.size:
                values = _field_line(region, field, words, first, at, global_scale)
                channel = lanes(values.shape) + first
                inside = (channel >= 0) & (channel < field.size)
                line = jnp.where(inside, values, 0.0 if line is None else line)
            start += field.size
        found.append(line)
    return found


def _field_line(region: Region, field: Field, words, first: int, at, global_scale: float):
    """Channels ``first`` to ``first + 127`` of a field."""
    place = place_of(region, field.name)
    if field.code == "fp32":
        return codes.of_bits(words[place.buffer][:, (place.base + 4 * first) // (4 * LANES), :])
    if field.code == "bf16":
        high, low = at(place, first), at(place, field.size + first)
        return codes.of_bits(high << 24 | low << 16)
    if field.code == "e4m3":
        values = codes.from_e4m3(at(place, first))
    elif field.code == "int8":
        values = codes.from_int8(at(place, first))
    elif field.code == "e2m1":
        values = codes.from_e2m1(codes.spread(at(place, first // 2)))
    else:
        raise unknown("element code", field.code, "decode")
    if field.group is None:
        return values
    scale = place_of(region, "scales")
    size = (field.scale_element.bits) // 8
    stored = jnp.zeros(values.shape, jnp.int32)
    group = (lanes(values.shape) + first) // field.width if field.groups > 1 else None
    for number in range(max(first, 0) // field.width, -(-min(first + LANES, field.size) // field.width)):
        one = 0
        for byte in range(size):
            line, lane = divmod(scale.base + size * number + byte, LANES)
            one = one | at_lane(at(scale, LANES * line - scale.base), lane) << 8 * byte
        one = jnp.broadcast_to(one, values.shape)
        stored = one if group is None else jnp.where(group == number, one, stored)
    if field.scale == "e8m0":
        return arithmetic.times_power(values, stored)
    if field.scale not in SCALES:
        raise unknown("scale code", field.scale, "decode")
    scales = codes.of_bits(stored) if field.scale == "fp32" else codes.from_e4m3(stored)
    values = arithmetic.times(values, scales)
    return arithmetic.times_layer(values, global_scale) if region.format.global_scaled else values


def encode(region: Region, values, global_scale: float = 1.0):
    """Lines of channels [K, 128] fp32 -> buffer name -> words [K, 128] int32 of each of the row's tiles.

    Where rows share a tile the word holds this row's bytes lowest, as if it were the first.
    """
    format = region.format
    if format.hadamard:
        values = [arithmetic.rotated(values[0], butterflies, codes.to_bf16)]
    stored = {}
    start = 0
    for field in format.fields:
        if field.is_value:
            stored |= _encoded(region, field, values, start, global_scale)
            start += field.size
    words = {}
    for buffer in buffers_of(region):
        if buffer.fp32:
            words[buffer.name] = _fp32_words(region, buffer, stored)
            continue
        lines = [_byte_line(region, buffer, stored, number, values[0].shape) for number in range(buffer.lines)]
        size = min(len(lines), 4)
        tiles = [lines[first : first + size] for first in range(0, len(lines), size)]
        words[buffer.name] = [sum((line << 8 * byte for byte, line in enumerate(t)), jnp.int32(0)) for t in tiles]
    return words


def _encoded(region: Region, field: Field, values, start: int, global_scale: float):
    """Field name -> its elements as int32 lines, from channel 0 of the field on; scales as (byte, [K, 1]) by hand."""
    count = -(-field.size // LANES)
    channels = [window(lambda n: values[n], len(values), start + LANES * number) for number in range(count)]
    inside = [lanes(channels[0].shape) + LANES * number < field.size for number in range(count)]
    if field.group is None:
        if field.code not in PLAIN:
            raise unknown("element code", field.code, "encode")
        lines = [codes.int_bits(PLAIN[field.code](arithmetic.within(line, field.code, keep=True))) for line in channels]
        nan = np.int32(0x7FC00000)
        return {field.name: [jnp.where((bits & codes.ABSOLUTE) > codes.INFINITY, nan, bits) for bits in lines]}
    ratios = [jnp.zeros(line.shape, jnp.float32) for line in channels]
    finite_lanes = [jnp.zeros(line.shape, jnp.bool_) for line in channels]
    scale_bytes = []
    size = field.scale_element.bits // 8
    for number in range(field.groups):
        amax, finite = jnp.zeros((len(values[0]), 1), jnp.float32), None
        mine = []
        for line, (channel, within) in enumerate(zip(channels, inside, strict=True)):
            group = (lanes(channel.shape) + LANES * line) // field.width
            mine.append((group == number) & within)
        touched = [
            line
            for line in range(count)
            if field.width * number < LANES * (line + 1) and field.width * (number + 1) > LANES * line
        ]
        faulty = jnp.zeros_like(amax)
        for line in touched:
            magnitude = jnp.where(mine[line], codes.int_bits(channels[line]) & codes.ABSOLUTE, 0)
            bad = jnp.where(magnitude >= codes.INFINITY, 1.0, 0.0)
            faulty = jnp.maximum(faulty, jnp.max(bad, axis=1, keepdims=True))
            good = codes.of_bits(jnp.where(magnitude >= codes.INFINITY, 0, magnitude))
            amax = jnp.maximum(amax, jnp.max(good, axis=1, keepdims=True))
        finite = faulty == 0
        limit = arithmetic.limit_of(field, global_scale)
        amax = jnp.maximum(jnp.where(finite, amax, 0), np.float32(region.format.amax_floor))
        amax = jnp.minimum(amax, np.float32(limit))
        powers = arithmetic.raise_of(field, global_scale)
        amax, raised_scale = arithmetic.raised_by(amax, powers), global_scale * 2.0**powers
        scales, bits = _scale_of(amax, field, region.format, raised_scale)
        for line in touched:
            by = jnp.broadcast_to(scales, channels[line].shape)
            clamped = arithmetic.raised_by(arithmetic.clamp(channels[line], limit), powers)
            if field.rule == "pow2":
                exponent = arithmetic.bits_of(by) >> 23
                quotient = arithmetic.over_power(clamped, exponent)
            else:
                quotient = arithmetic.divide(clamped, by)
            ratios[line] = jnp.where(mine[line] & finite, quotient, ratios[line])
            finite_lanes[line] = mine[line] & finite | finite_lanes[line]
        bits = jnp.where(finite, bits, np.int32(np.uint32(field.scale_element.nan or 0)))
        scale_bytes += [bits >> 8 * byte & 0xFF for byte in range(size)]
    largest = np.float32(CODES[field.code].largest)
    ratios = [jnp.clip(ratio, -largest, largest) for ratio in ratios]
    if field.code not in TO_CODE:
        raise unknown("element code", field.code, "encode")
    return {field.name: [TO_CODE[field.code](ratio) for ratio in ratios], "scales": scale_bytes}


def _scale_of(amax, field: Field, format: Format, global_scale: float):
    """The scales [K, 1] as fp32, and their stored bits as int32: without casts to e4m3."""
    if field.rule != "e4m3":
        scales, bits = arithmetic.fp32_scale(amax, field, format)
        return scales, bits.astype(jnp.int32)
    product = amax * np.float32(1 / CODES[field.code].largest)
    relative = product if global_scale == 1 else arithmetic.divide(product, jnp.full_like(product, global_scale))
    code = codes.to_e4m3(jnp.clip(relative, np.float32(E4M3_SCALE_SMALLEST), np.float32(448)))
    return codes.from_e4m3(code) * np.float32(global_scale), code


def _fp32_words(region: Region, buffer: Buffer, stored):
    words = [None] * buffer.tiles
    for place in region.unit.places:
        if place.buffer == buffer.name:
            for number, line in enumerate(stored[place.field]):
                words[place.base // (4 * LANES) + number] = line
    return words


def _byte_line(region: Region, buffer: Buffer, stored, number: int, shape):
    """Bytes 128·number and on of rows in a buffer, pads as zeros."""
    line = jnp.zeros(shape, jnp.int32)
    address = lanes(shape) + LANES * number
    for place in region.unit.places:
        if place.buffer != buffer.name:
            continue
        if place.field == "scales":
            for byte, value in enumerate(stored["scales"]):
                if (place.base + byte) // LANES == number:
                    line = jnp.where(address == place.base + byte, value, line)
            continue
        field = region.format.field(place.field)
        elements = stored[place.field]
        if field.code == "e2m1":
            pieces = [(0, field.nbytes, _packed(elements))]
        elif place.split:
            pieces = [
                (0, field.size, [bits >> 24 & 0xFF for bits in elements]),
                (field.size, 2 * field.size, [bits >> 16 & 0xFF for bits in elements]),
            ]
        else:
            pieces = [(0, field.size, elements)]
        for first, last, found in pieces:
            begin = LANES * number - place.base - first
            if -LANES < begin < last - first:
                inside = (address >= place.base + first) & (address < place.base + last)
                line = jnp.where(inside, window(lambda n, found=found: found[n], len(found), begin), line)
    return line


def _packed(nibbles):
    """Lines of nibbles -> lines of bytes, half as many."""
    bytes_ = []
    for number in range(0, len(nibbles), 2):
        line = codes.packed(nibbles[number], second=False)
        if number + 1 < len(nibbles):
            line = line | codes.packed(nibbles[number + 1], second=True)
        bytes_.append(line)
    return bytes_


def butterflies(values):
    """The sums of a rotation, of rows that are one line: neighbours come by rolling the lanes."""
    lane = lanes(values.shape)
    stride = 1
    while stride < LANES:
        second = (lane & stride) != 0
        other = jnp.where(second, pltpu.roll(values, stride, 1), pltpu.roll(values, LANES - stride, 1))
        values = jnp.where(second, other - values, values + other)
        stride *= 2
    return values
