"""How launches are cut into programs: from a record and the number of rows to rows, parts and warps of a program.

No framework of arrays is imported here, so that all that launch the kernels cut them alike.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from kvcore.kernels.triton.record import RowRecord, power_of_two
from kvcore.kernels.triton.tail import TailRecord


def tile(record: RowRecord, count: int) -> tuple[int, int]:
    """(rows of a program, warps): 2,048 channels, or 512 while that would leave too few programs to fill a GPU.

    Two shapes only, since each is compiled once for every kernel and record.
    """
    size = record.tiles * record.width
    rows = max(1, 2048 // size)
    if count < 1024 * rows:
        rows = max(1, 512 // size)
    return rows, max(1, min(4, rows * size // 1024))


FEW = 256
"""Rows that are written by a program each."""


def written_tile(record: RowRecord, count: int) -> tuple[int, int]:
    """``tile`` of rows that are written; few take one row each, and a warp for every 128 channels."""
    if count <= FEW:
        return 1, max(1, min(4, record.tiles * record.width // 128))
    return tile(record, count)


class FlushShape(NamedTuple):
    """How a flush is cut into programs: tokens and channel parts of a program, rows pooled at a time, warps.

    Warps are such that, with 16-byte loads, a thread holds all rows of its channels where the window is short. A
    request's border has programs of its own, one for each of ``boundary`` parts of the channels: long windows in many.
    """

    tokens: int
    parts: int
    chunk: int
    warps: int
    boundary: int


SHORT = 16384
"""Cells (rows times channels) of a window that one program pools."""
MOST_BESIDE_BOUNDARY = 8192


def one_token_programs(count: int, requests: int) -> bool:
    """True where a step of ``count`` tokens looks like decode: few new tokens a request."""
    return count <= 4 * requests or count <= 64


def flush_shape(record: RowRecord, tail_record: TailRecord, count: int, requests: int, given_bytes: int) -> FlushShape:
    """One program a token in decode, one or two windows in prefill; windows of many rows are split over channels.

    The figures were measured on an H100 (``records/``): few warps, each thread with whole columns of short windows or
    with few rows at a time of long ones, so that registers leave room for four programs on a multiprocessor.
    """
    decode = one_token_programs(count, requests)
    ratio = tail_record.ratio
    tokens = 1 if decode else power_of_two(ratio)
    size = record.tiles * record.width
    rows = window_rows(tail_record)
    if rows * size <= SHORT:
        warps = max(1, min(4, size * given_bytes // 512))
        return FlushShape(tokens if count < 8192 * ratio else 2 * tokens, 1, min(rows, max(1, 4096 // size)), warps, 1)
    # (parts, warps, rows that a thread takes at a time)
    if decode:
        parts, warps, each = (8, 2, given_bytes) if count <= 128 else (1, 8, given_bytes // 2)
    elif count < 256 * ratio:
        parts, warps, each = (16, 1, 4) if given_bytes == 2 else (16, 2, 1)
    else:
        parts, warps, each = 1, given_bytes, 8 // given_bytes
    parts = max(1, min(parts, size // 32))
    at_once = warps * 32 * (16 // given_bytes) // (size // parts)
    boundary = max(1, min(8, size // 32))
    return FlushShape(tokens, parts, min(rows, max(2, each * at_once)), warps, boundary)


def tails_apart(tail_record: TailRecord, count: int, requests: int, given_bytes: int) -> bool:
    """True where launches of their own write the tails sooner: a long prefill's short windows in bf16.

    Beside a border their programs take 0.4 ns a token longer on an H200, and a launch for few rows costs 2 us.
    """
    if count <= MOST_BESIDE_BOUNDARY or given_bytes != 2 or one_token_programs(count, requests):
        return False
    return window_rows(tail_record) * power_of_two(tail_record.dim) <= SHORT


def boundary_chunk(tail_record: TailRecord, size: int, parts: int) -> int:
    """Rows that a border's program pools at a time: few, since it takes each from one of two places."""
    return min(window_rows(tail_record), max(2, 256 // (size // parts)))


def window_rows(tail_record: TailRecord) -> int:
    """Rows of a window's tile."""
    return power_of_two(2 * tail_record.ratio if tail_record.overlap else tail_record.ratio)


class Stream(NamedTuple):
    """One stream of a flush: what is stored, what it is pooled from, and whether it is normed."""

    record: RowRecord
    tail: TailRecord
    normed: bool


class FlushConfig(NamedTuple):
    """A launch of the flush kernel but for its arrays.

    Attributes:
        programs: of the second stream, which may need fewer than the grid's first axis has.
        windows: rows of scratch and counters of arrivals, for every window that can close at once.
        constants: the kernel's ``constexpr`` arguments.
    """

    grid: tuple[int, int]
    warps: int
    programs: int
    windows: int
    constants: dict[str, Any]


def flush_config(
    streams: Sequence[Stream], count: int, requests: int, given_bytes: int, *, append: bool, beside: bool, pairs: int,
    native: bool,
) -> FlushConfig:  # fmt: skip
    """How a flush of one or two streams of ``count`` tokens of ``requests`` requests is launched.

    Args:
        given_bytes: of an element of the streams.
        append: write the step's own rows to the tails, too.
        beside: they replace none that a window closing in this step needs, so any program may write them at any time.
        pairs: of channels that are rotated.
    """
    first, second = streams[0], streams[-1]
    shape = flush_shape(first.record, first.tail, count, requests, given_bytes)
    chunks = -(-count // shape.tokens)
    bordered = append and (shape.tokens > 1 or not beside)
    boundary, index_border = (shape.boundary, 1) if bordered else (0, 0)
    size, index_size = (stream.record.tiles * stream.record.width for stream in (first, second))
    constants = {
        "T": first.tail, "R": first.record, "NORM": first.normed, "ROWS": window_rows(first.tail), "CHUNK": shape.chunk,
        "PARTS": shape.parts, "BOUNDARY": boundary, "BOUNDARY_CHUNK": boundary_chunk(first.tail, size, shape.boundary),
        "IT": second.tail, "IR": second.record, "INDEX_NORM": second.normed, "INDEX_ROWS": window_rows(second.tail),
        "INDEX_CHUNK": min(window_rows(second.tail), max(1, 4096 // index_size)), "INDEX_BOUNDARY": index_border,
        "INDEX_BOUNDARY_CHUNK": boundary_chunk(second.tail, index_size, 1), "INDEX": len(streams) > 1, "PAIRS": pairs,
        "TOKENS": shape.tokens, "APPEND": append, "NATIVE": native,
    }  # fmt: skip
    return FlushConfig(
        (chunks * shape.parts + requests * boundary, len(streams)), shape.warps, chunks + requests * index_border,
        count // first.tail.ratio + requests + 1, constants,
    )  # fmt: skip
