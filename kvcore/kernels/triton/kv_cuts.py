"""How classic attention is cut up: how keys and values are multiplied, what a program takes, how many share keys."""

from collections.abc import Sequence
from functools import cache
from math import lcm
from typing import NamedTuple

from kvcore.kernels.triton.cut import own_record
from kvcore.kernels.triton.device import INTERPRETED, LARGE, Chip
from kvcore.kernels.triton.record import RowRecord, aligned, ceil_div, power_of_two
from kvcore.ops.choices import Declined
from kvcore.spec import Format

MOST_SPLITS = 128
MOST_ROWS = 64
"""Rows of the products: query heads of one group, times tokens."""
MOST_TOKENS = 8
"""Tokens that a program takes."""
START = 192
"""What a program costs before and after its keys, in keys."""


class Side(NamedTuple):
    """How rows of keys, or of values, are multiplied.

    Attributes:
        chunk: channels taken at a time, a power of two; ``chunks`` of them make a row.
        full: operands are fp32 and products as ``precision`` says; else they are bf16 and sums fp32.
        narrow: operands are bf16 numbers, whatever they are held in.
        apart: a chunk's only scale is not part of its operand.
        parts: tensors that a chunk is taken apart into, channel k into the one of k mod parts, by ``words``; or 1.
        twice: these have two halves that add up.
        precision: of fp32 products, in Triton's words.
    """

    chunk: int
    chunks: int
    full: bool
    narrow: bool
    apart: bool
    parts: int
    twice: bool
    precision: str


class Cut(NamedTuple):
    """What a program takes: keys a tile; its warps; the depth of the pipeline that loads rows.

    ``resident``: programs that a multiprocessor is to hold at once.
    """

    keys: int
    warps: int
    stages: int
    resident: int


NARROW = {80: Cut(64, 4, 2, 3), 90: Cut(64, 4, 3, 3), 100: Cut(64, 4, 3, 3)}
"""By compute capability: the newest that is not above the device's; for keys and values of up to WIDE channels."""
APART = {4: Cut(64, 2, 3, 4), 8: Cut(32, 1, 3, 8)}
"""By the parts that codes are taken apart into: these are narrow, and several warps would do the same work."""
FULL = Cut(32, 4, 1, 2)
"""For fp32 products."""
WIDE = 256


@cache
def sides_of(
    keys: RowRecord, values: RowRecord, own: tuple[RowRecord, RowRecord] | None, *, bf16: bool, native: bool
) -> tuple[Side, Side] | None:
    """How keys and values are multiplied, for queries in bf16 or not; None where ``multiplied`` declines."""
    found = multiplied(keys, values, own, bf16=bf16, native=native)
    return None if isinstance(found, Declined) else found


def multiplied(
    keys: RowRecord, values: RowRecord, own: tuple[RowRecord, RowRecord] | None, *, bf16: bool, native: bool
) -> tuple[Side, Side] | Declined:
    """How keys and values are multiplied, for queries in bf16 or not, or why the kernel does not cover them."""
    if (keys.rows, keys.paged) != (values.rows, values.paged):
        return Declined("units hold other numbers of keys than of values")
    own_keys, own_values = own or (keys, values)
    key_side = _side(keys, own_keys, bf16=bf16, native=native, values=False)
    value_side = _side(values, own_values, bf16=bf16, native=native, values=True)
    if isinstance(key_side, Declined) or isinstance(value_side, Declined):
        return key_side if isinstance(key_side, Declined) else value_side  # type: ignore[return-value]
    return key_side, value_side


@cache
def _side(record: RowRecord, own: RowRecord, *, bf16: bool, native: bool, values: bool) -> Side | Declined:
    chunk = record.dim & -record.dim
    if chunk < 32 and not record.quant:
        chunk = power_of_two(record.dim)
    chunk = min(128, max(chunk, 16))
    words = bf16 and native and record.quant == record.dim and _in_words(record) and _in_words(own)
    parts = {"int8": 4, "e4m3": 4, "e2m1": 8, "nf4": 8}.get(record.code, 1) if words else 1
    if parts > 1 and record.code == "nf4":
        chunk = min(chunk, record.width)
    # A chunk must not lie in two fields, nor in parts of two groups.
    whole = record.quant % chunk == 0 and (record.width % chunk == 0 or chunk % record.width == 0)
    if not whole:
        return Declined(f"a chunk of {chunk} channels would lie in two fields, or in parts of two groups")
    if record.hadamard or record.global_scale != 1.0:
        return Declined("attention covers rows that are neither rotated nor under a global scale")
    apart = record.groups == 1 and record.quant == record.dim and record.scale == "fp32"
    twice = parts > 1 and record.code == "nf4" and not values
    # Products take 16 channels at least.
    if chunk // parts * (2 if twice else 1) < (8 if values else 16) or (parts == 4 and not apart):
        parts, twice = 1, False
    # Codes of one byte are bf16 numbers; so are values whose scales are powers of two, and bf16 rows.
    narrow = bf16 and (parts > 1 or record.exact or (apart and record.code in ("e4m3", "int8")))
    precision = "tf32x3"
    if bf16 and record.plain == "fp16" and not record.quant:
        # Both operands are tf32 numbers, or as values of a bf16 result need not be more.
        precision = "tf32"
    elif bf16 and values:
        # NF4 levels are rounded as the weights are; fp32 values keep more.
        narrow, precision = narrow or bool(record.quant), "tf32"
    chunks = ceil_div(record.dim, chunk)
    apart = apart or (parts > 1 and record.code == "nf4")
    return Side(chunk, chunks, INTERPRETED or not narrow, narrow, apart, parts, twice, precision)


def _in_words(record: RowRecord) -> bool:
    return all(number % 4 == 0 for number in (record.codes_unit, record.codes_base, record.codes_stride))


def own_records(
    keys: RowRecord, values: RowRecord, formats: Sequence[Format]
) -> tuple[RowRecord, RowRecord] | Declined:
    """The records of canonical rows [tokens, heads, row_bytes] of keys and values, or that they are not aligned."""
    found = [own_record(record, format) for record, format in zip((keys, values), formats, strict=True)]
    if all(aligned(record) for record in found):
        return found[0], found[1]
    return Declined("canonical rows have elements off their own alignment")


def cut_for(chip: Chip, sides: tuple[Side, Side]) -> Cut:
    """The cut for a GPU."""
    return FULL if INTERPRETED else cut_of(chip.capability, sides, few=chip.shared < LARGE)


def cut_of(capability: int, sides: tuple[Side, Side], *, few: bool = False) -> Cut:
    """The cut for a compute capability, with ``few`` for blocks with less than LARGE bytes of shared memory."""
    keys, values = sides
    cut = NARROW[max([80, *(known for known in NARROW if known <= capability)])]
    cut = APART.get(max(keys.parts, values.parts), cut)
    if keys.full or values.full:
        cut = FULL
    channels = power_of_two(keys.chunk * keys.chunks + values.chunk * values.chunks)
    tile = max(16, (cut.keys >> few) // max(1, channels // WIDE))
    return cut._replace(keys=tile, stages=min(cut.stages, 2) if few else cut.stages)


class Work(NamedTuple):
    """How a step is shared out.

    Attributes:
        groups: groups of query heads that share a key head and a value head.
        heads: heads of a group that a program takes, a power of two.
        each: tokens that a program takes.
        programs: programs without splits.
    """

    groups: int
    heads: int
    each: int
    programs: int


@cache
def work_for(tokens: int, requests: int, heads: int, key_heads: int, value_heads: int) -> Work:
    """The work of a step of ``tokens`` tokens, which as a rule are shared out evenly among ``requests`` requests."""
    groups = lcm(key_heads, value_heads)
    size = heads // groups
    some = min(power_of_two(size), MOST_ROWS)
    room = MOST_ROWS // some
    each = max(1, min(ceil_div(tokens, max(requests, 1)), MOST_TOKENS, room)) if room >= span_of(2) else 1
    return Work(groups, some, each, ceil_div(tokens, each) * groups * ceil_div(size, some))


def span_of(each: int) -> int:
    """Tokens that a program has room for: few numbers, since each is compiled."""
    return 1 if each == 1 else max(4, power_of_two(each))


@cache
def splits_for(chip: Chip, programs: int, keys: int, cut: Cut) -> int:
    """Programs that share a group's keys, of which there are at most ``keys``: as many as end the soonest."""
    slots, tiles = cut.resident * chip.multiprocessors, max(1, ceil_div(keys, cut.keys))
    best, least = 1, 0
    for splits in range(1, min(MOST_SPLITS, tiles) + 1):
        # What a program takes and what it costs, so many times in turn; then the parts are merged.
        turn = ceil_div(tiles, splits) * cut.keys + START
        time = ceil_div(programs * splits, slots) * turn + splits
        if splits == 1 or time < least:
            best, least = splits, time
    return best


def whole_tiles(record: RowRecord, cut: Cut) -> bool:
    """True if tiles that begin at multiples of their size lie in one block each."""
    return record.paged and record.rows % cut.keys == 0
