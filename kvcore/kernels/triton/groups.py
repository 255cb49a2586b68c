"""Keys and values in formats over tokens: what a kernel must know of a part, and its groups as numbers.

A row of such a part is ``tokens`` tokens of a head. Four-bit codes lie channel by channel where scales are over tokens
(``over``), else token by token; plain numbers lie token by token.
"""

from functools import cache
from typing import NamedTuple

import triton
import triton.language as tl

from kvcore.kernels.triton.device import GLUON
from kvcore.kernels.triton.record import power_of_two
from kvcore.kernels.triton.rows import element_offsets
from kvcore.ops.choices import Declined
from kvcore.plan import Region
from kvcore.spec.codes import largest_kept


class GroupsRecord(NamedTuple):
    """A part of which a row is some tokens of a head.

    Attributes:
        dim: channels of a token; ``heads`` rows of the pool for every group, of ``tokens`` tokens.
        rows: groups that a block holds.
        over: a scale is one channel's, over all tokens of the group; else ``width`` channels' of a token.
        plain: "bf16" of plain numbers, "" where there are codes of four bits with scales and offsets in bf16.
        floor: magnitudes below it are stored as zero; ``limit``: greater ones are clamped to it.
        precision: of fp32 products, in Triton's words.
        codes_unit, codes_base, codes_stride: byte k of the codes (or plain numbers) of row r of unit u is at
            ``u * unit + base + r * stride + k``; likewise of scales and offsets.
    """

    dim: int
    heads: int
    tokens: int
    rows: int
    over: bool
    width: int
    plain: str
    floor: float
    limit: float
    precision: str
    codes_unit: int
    codes_base: int
    codes_stride: int
    scales_unit: int
    scales_base: int
    scales_stride: int
    offsets_unit: int
    offsets_base: int
    offsets_stride: int


@cache
def groups_recorded(region: Region) -> tuple[GroupsRecord, tuple[str, str, str]] | Declined:
    """The record of a part and the pools of its codes, scales and offsets, or why the kernels do not cover it."""
    named = f"format {region.format.name}"
    places = {place.field: place for place in region.unit.places}
    if any(place.split for place in places.values()):
        return Declined(f"layout {region.layout} stores the bytes of an element apart")
    if (region.steps[1] > 1 and region.heads > 1) or region.copies > 1:
        return Declined(f"layout {region.layout} stores the heads of a row apart, or rows twice")
    fields = {field.name: field for field in region.format.fields}
    value = region.format.fields[0]
    plain = value.code if len(fields) == 1 and value.code == "bf16" else ""
    coded = set(fields) == {"codes", "scales", "offsets"} and (value.code, value.scale) == ("uint4", "bf16")
    if not plain and not coded:
        return Declined(f"{named} beside one over tokens: kernels cover bf16 and int4 with offsets there")
    dim, tokens = (region.format.dim or 0) // region.tokens, region.tokens
    if dim != power_of_two(dim) or dim < 16:
        return Declined(f"{named} is over {tokens} tokens of {dim} channels, no power of two from 16 on")
    buffers = dict(region.unit.buffers)
    found = [places.get(name) or places[value.name] for name in (value.name, "scales", "offsets")]
    numbers = [number for one in found for number in (buffers[one.buffer], one.base, one.stride)]
    if any(number % 4 for number in numbers):
        return Declined(f"{named} in layout {region.layout} has rows off multiples of 4 bytes")
    limit = largest_kept(value.code, value.rule) if coded else 0.0
    shape = dim, region.heads, tokens, region.rows, region.format.tokens > 1, value.group or 0, plain
    record = GroupsRecord(*shape, region.format.amax_floor, limit, "tf32x3", *numbers)
    codes, scales, offsets = (region.buffers[one.buffer][0] for one in found)
    return record, (codes, scales, offsets)


def groups_fit(keys: GroupsRecord, values: GroupsRecord) -> bool:
    """True where ``attend_codes`` covers them: int4, keys over tokens, values over channels, on 16-byte boundaries."""
    coded = keys.over and not keys.plain and not values.over and not values.plain
    if not coded or keys.tokens not in (32, 64) or keys.dim < 64 or not 2 <= values.dim // values.width <= 16:
        return False
    numbers = [*keys[PLACES_FROM:], *values[PLACES_FROM:]]
    return GLUON and not any(number % 16 for number in numbers)


PLACES_FROM = GroupsRecord._fields.index("codes_unit")


@triton.jit
def scales_at(unit, row, scales_ptr, offsets_ptr, P: tl.constexpr):
    """(scales, offsets), pointers to bf16, of a row of a unit."""
    return (
        (scales_ptr + element_offsets(unit, row, P.scales_unit, P.scales_base, P.scales_stride, 1)).to(
            tl.pointer_type(tl.bfloat16)
        ),
        (offsets_ptr + element_offsets(unit, row, P.offsets_unit, P.offsets_base, P.offsets_stride, 1)).to(
            tl.pointer_type(tl.bfloat16)
        ),
    )


@triton.jit
def codes_at(unit, row, codes_ptr, P: tl.constexpr):
    """Byte pointer to the codes of a row of a unit."""
    return codes_ptr + element_offsets(unit, row, P.codes_unit, P.codes_base, P.codes_stride, 1)


@triton.jit
def nibbles(byte):
    """Bytes [a, b] -> the codes of each, the low one first, fp32 [a, 2 b]."""
    byte = byte.to(tl.int32)
    pair = tl.join(byte & 15, byte >> 4).to(tl.float32)
    return tl.reshape(pair, (byte.shape[0], 2 * byte.shape[1]))


@triton.jit
def load_tokens(unit, row, seen, codes_ptr, scales_ptr, offsets_ptr, P: tl.constexpr):
    """The tokens of one row as fp32 [tokens, dim]; zeros for those that are not ``seen`` [tokens]."""
    token = tl.arange(0, P.tokens)
    channel = tl.arange(0, P.dim)
    start = codes_at(unit, row, codes_ptr, P)
    if P.plain != "":
        at = start.to(tl.pointer_type(tl.bfloat16)) + token[:, None] * P.dim + channel[None, :]
        x = tl.load(at, mask=seen[:, None], other=0.0).to(tl.float32)
    else:
        scales, offsets = scales_at(unit, row, scales_ptr, offsets_ptr, P)
        if P.over:
            half = tl.arange(0, P.tokens // 2)
            byte = tl.load(start + channel[:, None] * (P.tokens // 2) + half[None, :])
            s = tl.load(scales + channel).to(tl.float32)
            o = tl.load(offsets + channel).to(tl.float32)
            x = tl.trans(nibbles(byte) * s[:, None] + o[:, None])
        else:
            half = tl.arange(0, P.dim // 2)
            byte = tl.load(start + token[:, None] * (P.dim // 2) + half[None, :])
            groups: tl.constexpr = P.dim // P.width
            at = token[:, None] * groups + tl.arange(0, groups)[None, :]
            s = tl.load(scales + at).to(tl.float32)
            o = tl.load(offsets + at).to(tl.float32)
            x = tl.reshape(nibbles(byte), (P.tokens, groups, P.width)) * s[:, :, None] + o[:, :, None]
            x = tl.reshape(x, (P.tokens, P.dim))
        x = tl.where(seen[:, None], x, 0.0)
    return x
