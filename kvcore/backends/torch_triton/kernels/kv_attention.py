"""Launches of classic attention: how keys and values are multiplied, how a step's work is cut up."""

from collections.abc import Sequence
from functools import cache
from math import lcm
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from kvcore.backends.torch_triton.kernels import attend_kv, merge
from kvcore.backends.torch_triton.kernels.attention import LARGE, LOG2_E, multiprocessors, own_record
from kvcore.backends.torch_triton.kernels.bound import BOUND, INTERPRETED, Bound, is_native, registered
from kvcore.backends.torch_triton.kernels.record import RowRecord, aligned, power_of_two
from kvcore.spec import Format

MOST_SPLITS = 128
MOST_ROWS = 64
"""Rows of the products: query heads of one group, times tokens."""
MOST_TOKENS = 8
"""Tokens that a program takes."""
RESIDENT = 2
"""Programs that a multiprocessor holds at once."""
START = 192
"""What a program costs before and after its keys, in keys."""


class Side(NamedTuple):
    """How rows of keys, or of values, are multiplied.

    Attributes:
        chunk: channels taken at a time, a power of two; ``chunks`` of them make a row.
        full: operands are fp32 and products as ``precision`` says; else they are bf16 and sums fp32.
        narrow: operands are bf16 numbers, whatever they are held in.
        apart: a chunk's only scale is not part of its operand.
        words: codes are taken from words, as ``words`` says.
        precision: of fp32 products, in Triton's words.
    """

    chunk: int
    chunks: int
    full: bool
    narrow: bool
    apart: bool
    words: bool
    precision: str


class Cut(NamedTuple):
    """What a program takes: keys a tile; its warps; the depth of the pipeline that loads rows."""

    keys: int
    warps: int
    stages: int


NARROW = {80: Cut(64, 4, 2), 90: Cut(64, 4, 3), 100: Cut(64, 4, 3)}
"""By compute capability: the newest that is not above the device's; for keys and values of up to WIDE channels."""
FULL = Cut(32, 4, 1)
"""For fp32 products."""
WIDE = 256


def sides_of(
    keys: RowRecord, values: RowRecord, own: tuple[RowRecord, RowRecord] | None, *, bf16: bool, native: bool
) -> tuple[Side, Side] | None:
    """How keys and values are multiplied, for queries in bf16 or not; None where the kernel does not cover them."""
    if (keys.rows, keys.paged) != (values.rows, values.paged):
        return None
    own_keys, own_values = own or (keys, values)
    found = (
        _side(keys, own_keys, bf16=bf16, native=native, values=False),
        _side(values, own_values, bf16=bf16, native=native, values=True),
    )
    return None if None in found else found  # type: ignore[return-value]


@cache
def _side(record: RowRecord, own: RowRecord, *, bf16: bool, native: bool, values: bool) -> Side | None:
    chunk = record.dim & -record.dim
    if chunk < 32 and not record.quant:
        chunk = power_of_two(record.dim)
    chunk = min(128, max(chunk, 16))
    words = bf16 and native and record.quant == record.dim and _in_words(record) and _in_words(own)
    words = words and record.code in ("int8", "nf4", "e2m1") and chunk % 8 == 0
    if words and record.code == "nf4":
        chunk = min(chunk, record.width)
    # A chunk must not lie in two fields, nor in parts of two groups.
    whole = record.quant % chunk == 0 and (record.width % chunk == 0 or chunk % record.width == 0)
    if not whole or record.hadamard or record.global_scale != 1.0:
        return None
    apart = record.groups == 1 and record.quant == record.dim and record.scale == "fp32"
    # Codes of one byte are bf16 numbers; so are values whose scales are powers of two, and bf16 rows.
    narrow = bf16 and (words or record.exact or (apart and record.code in ("e4m3", "int8")))
    precision = "tf32x3"
    if bf16 and record.plain == "fp16" and not record.quant:
        # Both operands are tf32 numbers, or as values of a bf16 result need not be more.
        precision = "tf32"
    elif bf16 and values:
        # NF4 levels are rounded as the weights are; fp32 values keep more.
        narrow, precision = narrow or bool(record.quant), "tf32"
    chunks = triton.cdiv(record.dim, chunk)
    apart = apart or (words and record.code == "nf4")
    return Side(chunk, chunks, INTERPRETED or not narrow, narrow, apart, words, precision)


def _in_words(record: RowRecord) -> bool:
    return all(number % 4 == 0 for number in (record.codes_unit, record.codes_base, record.codes_stride))


def own_records(keys: Bound, values: Bound, formats: Sequence[Format]) -> tuple[RowRecord, RowRecord] | None:
    """The records of canonical rows [tokens, heads, row_bytes] of keys and values; None where they are not aligned."""
    found = [own_record(bound.record, format) for bound, format in zip((keys, values), formats, strict=True)]
    return (found[0], found[1]) if all(aligned(record) for record in found) else None


def cut_for(device: torch.device, sides: tuple[Side, Side]) -> Cut:
    """The cut for a device."""
    if INTERPRETED:
        return FULL
    few = torch.cuda.get_device_properties(device).shared_memory_per_block_optin < LARGE
    return cut_of(10 * torch.cuda.get_device_capability(device)[0], sides, few=few)


def cut_of(capability: int, sides: tuple[Side, Side], *, few: bool = False) -> Cut:
    """The cut for a compute capability, with ``few`` for blocks with less than LARGE bytes of shared memory."""
    keys, values = sides
    cut = NARROW[max((known for known in NARROW if known <= capability), default=80)]
    if keys.full or values.full:
        cut = FULL
    channels = power_of_two(keys.chunk * keys.chunks + values.chunk * values.chunks)
    return Cut(max(16, (cut.keys >> few) // max(1, channels // WIDE)), cut.warps, min(cut.stages, 2 if few else 3))


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
    each = max(1, min(triton.cdiv(tokens, max(requests, 1)), MOST_TOKENS, room)) if room >= span_of(2) else 1
    return Work(groups, some, each, triton.cdiv(tokens, each) * groups * triton.cdiv(size, some))


def span_of(each: int) -> int:
    """Tokens that a program has room for: few numbers, since each is compiled."""
    return 1 if each == 1 else max(4, power_of_two(each))


@cache
def splits_for(device: torch.device, programs: int, keys: int, tile: int) -> int:
    """Programs that share a group's keys, of which there are at most ``keys``: as many as end the soonest."""
    slots = RESIDENT * multiprocessors(device)
    best, least = 1, 0
    for splits in range(1, max(1, min(MOST_SPLITS, triton.cdiv(keys, tile))) + 1):
        keys_in_turn = triton.cdiv(programs * splits, slots) * (triton.cdiv(keys, splits) + START)
        if splits == 1 or keys_in_turn < least:
            best, least = splits, keys_in_turn
    return best


def _attend_out(
    q: Tensor, sink: Any, own_keys: Any, own_values: Any, positions: Any, request_index: Any, slots: Any, starts: Any,
    block_table: Any, keys: Any, values: Any, workspace: Any, records: list[int], *_: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return _outputs(q, records[1])


def _outputs(q: Tensor, values: int) -> tuple[Tensor, Tensor]:
    return q.new_empty((*q.shape[:2], BOUND[values].record.dim)), q.new_empty(q.shape[:2], dtype=torch.float32)


@registered(("workspace",), _attend_out)
def attend_kv_rows(
    q: Tensor,
    sink: Tensor | None,
    own_keys: Tensor | None,
    own_values: Tensor | None,
    positions: Tensor,
    request_index: Tensor,
    slots: Tensor,
    starts: Tensor,
    block_table: Tensor,
    keys: list[Tensor],
    values: list[Tensor],
    workspace: Tensor,
    records: list[int],
    sizes: list[int],
    scale: float,
    bf16: bool,
) -> tuple[Tensor, Tensor]:
    """Attention of q [tokens, heads, key dim], contiguous: out [tokens, heads, value dim] and lse [tokens, heads].

    Args:
        own_keys, own_values: [tokens, heads, row_bytes] canonical rows of the step where the pools do not hold them.
        keys, values: the pools' buffers.
        workspace: fp32, for ``splits`` · tokens · heads · (value dim + 1) numbers where ``splits`` > 1.
        records: of the keys, the values, the own keys and values; -1 where there are none.
        sizes: window and chunk (0 without), splits.
        bf16: operands may be multiplied in bf16 where they are bf16 numbers.
    """
    k, v, *own = (BOUND[number] for number in records if number >= 0)
    out, lse = _outputs(q, records[1])
    tokens, heads, _ = q.shape
    if not tokens:
        return out, lse
    own_records = (own[0].record, own[1].record) if own else None
    sides = sides_of(k.record, v.record, own_records, bf16=bf16, native=is_native(q.device))
    assert sides is not None
    window, chunk, splits = sizes
    work = work_for(tokens, len(slots), heads, k.record.heads, v.record.heads)
    cut = cut_for(q.device, sides)
    span = span_of(work.each)
    partial = workspace if splits > 1 else out
    sums = workspace[splits * out.numel() :] if splits > 1 else lse
    attend_kv.attend_kv_kernel[(work.programs * splits,)](
        out, lse, partial, sums, q, lse if sink is None else sink,
        keys[k.codes], keys[k.scales], keys[k.plain], values[v.codes], values[v.scales], values[v.plain],
        positions if own_keys is None else own_keys, positions if own_values is None else own_values,
        positions, request_index, slots, starts, block_table,
        tokens, heads, work.each, window, chunk, sink is not None, block_table.shape[1], splits, scale * LOG2_E,
        k.record, v.record, *(own_records or (k.record, v.record)), *sides,
        bool(own), work.groups, work.heads, span, max(16, work.heads * span), cut.keys,
        whole_tiles(k.record, cut), cut.stages, max(1, 32 * cut.warps // cut.keys),
        is_native(q.device), num_warps=cut.warps,
    )  # fmt: skip
    if splits > 1:
        dim = out.shape[2]
        merge.merge_kernel[(tokens * heads,)](
            out, lse, partial, sums, lse if sink is None else sink, heads, splits,
            dim, power_of_two(dim), min(8, power_of_two(splits)), power_of_two(splits), sink is not None,
            is_native(q.device), num_warps=4,
        )  # fmt: skip
    return out, lse


def whole_tiles(record: RowRecord, cut: Cut) -> bool:
    """True if tiles that begin at multiples of their size lie in one block each."""
    return record.paged and record.rows % cut.keys == 0
