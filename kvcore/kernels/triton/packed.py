"""Rows of codes that ``attend_packed`` multiplies as they are: which these are, and how its calls are cut.

Kernels in Gluon are only imported where they can run; this is asked everywhere.
"""

from functools import cache
from math import lcm
from typing import NamedTuple

from kvcore.kernels.triton.attend_kv import TileConfig, splits_for
from kvcore.kernels.triton.device import DeviceProps
from kvcore.kernels.triton.record import RowRecord, ceil_div, power_of_two

HEADS = 8
"""Query heads of a program."""
LEVELS_TIMES = 317.97598
"""What NF4's levels are multiplied by: found by trial, so that an fp16 number, and the upper byte of one that has what
it lacks, come to 2^-18 of every level."""
BYTES, NIBBLES = TileConfig(32, 1, 2, 12), TileConfig(32, 1, 3, 12)
"""Programs for codes of a byte, and where there are some of four bits: a warp each. A third tile of codes of a byte in
shared memory would leave room for eight programs instead of twelve, which take 4 % longer on an H200."""
UNEVEN = 1 / 4
"""How much later than all others the last program ends, as a part of what one takes."""
LEAST_CAPABILITY = 89
"""Of devices that take e4m3 to fp16."""


class Packed(NamedTuple):
    """How rows of keys, or of values, are taken.

    Attributes:
        code: of their elements.
        parts: pairs of numbers that a register of codes makes, which are the codes of a halfword, too.
        fields: groups of channels with a scale each, of ``columns`` halfwords.
        twice: keys' numbers come as sums of two.
        factor: of every number, what its scale is to be multiplied by.
    """

    code: str
    parts: int
    fields: int
    columns: int
    twice: bool
    factor: float


def packed_of(record: RowRecord) -> Packed | None:
    """How rows of a record are taken; None where they are not."""
    parts = {"e4m3": 2, "int8": 2, "nf4": 4}.get(record.code, 0)
    whole = record.quant == record.dim and record.scale == "fp32" and record.paged and not record.hadamard
    if not parts or not whole or record.global_scale != 1.0 or record.dim != power_of_two(record.dim):
        return None
    columns, levels = record.dim // record.groups // parts, record.code == "nf4"
    codes = record.codes_unit, record.codes_base, record.codes_stride
    if columns < 16 or record.groups > 2 or record.dim > 128 or any(number % 16 for number in codes):
        return None
    return Packed(record.code, parts, record.groups, columns, levels, 1 / LEVELS_TIMES if levels else 1.0)


class PackedWork(NamedTuple):
    """How a call of a token per program is cut: sides of keys and of values, and what a program takes."""

    keys: Packed
    values: Packed
    config: TileConfig


@cache
def packed_work(keys: RowRecord, values: RowRecord, props: DeviceProps) -> PackedWork | None:
    """How calls are cut for a device; None where ``attend_packed`` does not take such rows there."""
    sides = packed_of(keys), packed_of(values)
    if props.capability < LEAST_CAPABILITY or sides[0] is None or sides[1] is None:
        return None
    config = NIBBLES if sides[0].twice or sides[1].twice else BYTES
    fits = keys.rows == values.rows and keys.rows % config.keys == 0
    return PackedWork(sides[0], sides[1], config) if fits else None


def programs_of(tokens: int, heads: int, key_heads: int, value_heads: int) -> int:
    """Programs of a call without splits."""
    groups = lcm(key_heads, value_heads)
    return tokens * groups * ceil_div(heads // groups, HEADS)


def splits_of(props: DeviceProps, programs: int, keys: int, config: TileConfig) -> int:
    """Programs that share a group's keys, of which there are at most ``keys``: as many as end the soonest.

    What bounds them is the memory, which they share unevenly: they end one by one, and the last ones do not fill it. So
    several turns of short programs take less than one of long ones.
    """
    return splits_for(props, programs, keys, config, UNEVEN)
