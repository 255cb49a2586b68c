"""The launches of keys and values in formats over tokens: attention, and appends that close groups."""

from functools import cache, lru_cache
from importlib import import_module
from math import lcm
from typing import Any

from kvcore.kernels.triton import append_groups, attend_groups
from kvcore.kernels.triton.attend import LOG2_E
from kvcore.kernels.triton.groups import GroupsRecord
from kvcore.kernels.triton.launches.attention import merge, parts_for
from kvcore.kernels.triton.launches.launching import GROUPS, Array, Framework, Kernel, bound_record, launch
from kvcore.kernels.triton.record import ceil_div

HEADS, HEADS_OF_CODES = 16, 8
"""Query heads of a program: products take sixteen rows, of which a head has two where codes are multiplied."""
RESIDENT = 8
"""Programs of one warp that a multiprocessor holds at once."""
START = 4
"""What a program costs before and after its groups, in groups."""
MOST_SPLITS = 128
PIECE, APPEND_WARPS = 128, 4
"""Channels of a program that appends, and its warps: many, since the few programs that code a group are waited for."""
APPEND_REGISTERS = 64
"""Of its threads, so that a step in which 64 requests close a group each has all programs on an H200 at once."""
CLOSE_WARPS = 2
"""Of a program that codes a group of a long step."""


def _outputs(to: Framework, q: Array, records: list[int]) -> tuple[Array, Array]:
    shape = *q.shape[:2], GROUPS[records[1]].record.dim
    return to.empty(shape, q.dtype, q), to.empty(q.shape[:2], to.float32, q)


@launch("workspace", outputs=_outputs)
def attend_groups_rows(
    to: Framework, q: Array, sink: Array | None, positions: Array, request_index: Array, slots: Array,
    block_table: Array, left_padding: Array | None, keys: list[Array], values: list[Array], tails: list[Array],
    workspace: Array, records: list[int], sizes: list[int], scale: float, fast: bool,
) -> tuple[Array, Array]:  # fmt: skip
    """Attention of q [tokens, heads, key dim], contiguous: out [tokens, heads, value dim] and lse [tokens, heads].

    Args:
        keys, values: the pools' buffers; ``tails``: that of raw keys, and of raw values.
        workspace: fp32, for ``splits`` · tokens · heads · (value dim + 1) numbers where ``splits`` > 1.
        records: of groups of keys and of values, then of raw keys and values.
        sizes: window and chunk (0 without), splits.
        fast: queries are bf16, and codes are multiplied as such.
    """
    out, lse = _outputs(to, q, records)
    tokens, heads, _ = q.shape
    if not tokens:
        return out, lse
    window, chunk, splits = sizes
    native = to.native(q)
    programs, kernel = _attend(*records, heads, left_padding is not None, fast, native)
    beside, parts = lse if sink is None else sink, parts_for(to, workspace, out, lse, splits)
    to.run(
        kernel,
        (tokens * programs * splits,),
        (
            out, lse, *parts, q, beside, *GROUPS[records[0]].given(keys), *GROUPS[records[1]].given(values),
            *tails, positions, request_index, slots,
            block_table, positions if left_padding is None else left_padding,
        ),
        (heads, window, chunk, sink is not None, block_table.shape[1], splits, scale * LOG2_E),
    )  # fmt: skip
    merge(to, out, lse, parts, beside, positions, positions, splits, sunk=sink is not None, native=native)
    return out, lse


@cache
def programs_of(heads: int, key_heads: int, value_heads: int, fast: bool) -> tuple[int, int, int]:
    """(programs of a token without splits, groups of heads that share a key head and a value head, heads of one)."""
    groups = lcm(key_heads, value_heads)
    some = HEADS_OF_CODES if fast else HEADS
    return groups * ceil_div(heads // groups, some), groups, some


@cache
def splits_of(multiprocessors: int, programs: int, groups: int) -> int:
    """Programs that share ``groups`` groups of tokens, at most: as many as end the soonest."""
    slots = RESIDENT * multiprocessors
    best, least = 1, 0
    for splits in range(1, min(MOST_SPLITS, max(1, groups)) + 1):
        time = ceil_div(programs * splits, slots) * (ceil_div(groups, splits) + START)
        if splits == 1 or time < least:
            best, least = splits, time
    return best


@lru_cache(4096)
def _attend(
    keys: int, values: int, key_tail: int, tail: int, heads: int, left: bool, fast: bool, native: bool
) -> tuple[int, Kernel]:
    k, v = GROUPS[keys].record, GROUPS[values].record
    programs, groups, some = programs_of(heads, k.heads, v.heads, fast)
    constants: dict[str, Any] = {
        "K": k, "V": v, "TK": bound_record(key_tail), "TV": bound_record(tail), "LEFT": left, "GROUPS": groups,
    }  # fmt: skip
    writes = "out", "lse", "partial", "partial_lse"
    if fast:
        codes = import_module("kvcore.kernels.triton.attend_codes")
        return programs, Kernel(
            codes.attend_codes_kernel, constants | {"DEPTH": codes.STAGES[k.tokens]}, 1, writes=writes, fused=True
        )
    constants |= {"HEADS": some, "NATIVE": native}
    return programs, Kernel(attend_groups.attend_groups_kernel, constants, 4, writes=writes, fused=True)


@launch("keys", "values", "tails")
def append_groups_rows(
    to: Framework, k: Array, v: Array, positions: Array, request_index: Array, starts: Array, lengths: Array,
    slots: Array, stored: Array, block_table: Array, keys: list[Array], values: list[Array], tails: list[Array],
    records: list[int], most: int,
) -> None:  # fmt: skip
    """Code the groups that the step's rows complete; of a short step write the raw rows, too.

    Args:
        k, v: [tokens, heads, dim], contiguous.
        keys, values, tails, records: as in ``attend_groups_rows``.
        most: groups that may close in a long step, in programs of their own; 0 for a short one.
    """
    requests, tokens = starts.shape[0], k.shape[0]
    if not requests or not tokens:
        return
    keys_of, values_of = GROUPS[records[0]], GROUPS[records[1]]
    heads, native = keys_of.record.heads + values_of.record.heads, to.native(k)
    arrays = k, v, *keys_of.given(keys), *values_of.given(values), *tails
    place = starts, lengths, slots, stored, block_table
    if most:
        kernel = _close(*records, 64 if requests <= 64 else 256, native)
        to.run(kernel, (most, heads), (*arrays, *place), (requests, block_table.shape[1]))
        return
    pieces = min(pieces_of(keys_of.record), pieces_of(values_of.record))
    programs = tokens * heads * pieces
    kernel = _append(*records, pieces, programs <= to.ahead(k), native)
    given = *arrays, positions, request_index, *place
    to.run(kernel, (tokens, heads * pieces), given, (block_table.shape[1],))


@cache
def pieces_of(record: GroupsRecord) -> int:
    """Programs that share a row's channels in a short step: pieces are whole groups of channels."""
    return max(1, record.dim // max(PIECE, record.width if not record.over else 0))


@cache
def _append(keys: int, values: int, key_tail: int, tail: int, pieces: int, ahead: bool, native: bool) -> Kernel:
    constants = _parts(keys, values, key_tail, tail) | {"PIECES": pieces, "NATIVE": native}
    writes = *CODED, "key_tail", "tail"
    few = native and GROUPS[keys].record.tokens <= append_groups.HELD.value
    registers = {"maxnreg": APPEND_REGISTERS} if few else {}
    return Kernel(append_groups.append_groups_kernel, constants, APPEND_WARPS, writes=writes, ahead=ahead, **registers)


@cache
def _close(keys: int, values: int, key_tail: int, tail: int, requests: int, native: bool) -> Kernel:
    constants = _parts(keys, values, key_tail, tail) | {"REQUESTS": requests, "NATIVE": native}
    return Kernel(append_groups.close_groups_kernel, constants, CLOSE_WARPS, writes=CODED)


def _parts(keys: int, values: int, key_tail: int, tail: int) -> dict[str, Any]:
    return {
        "K": GROUPS[keys].record, "V": GROUPS[values].record, "TK": bound_record(key_tail), "TV": bound_record(tail),
    }  # fmt: skip


CODED = "key_codes", "key_scales", "key_plain", "codes", "scales", "plain"
"""What kernels call the buffers of both parts' groups."""
