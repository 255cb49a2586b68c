"""Launches: from tensors and record numbers to one kernel call each, registered with ``torch.library``.

Every function takes the pools' buffers it writes as one list, ``buffers``, and says so to torch; the record number tells
which of them holds codes, scales and plain channels. Grids depend on shapes alone. Called directly they cost one launch;
while ``torch.compile`` traces, callers go through ``torch.ops.kvcore`` instead.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from kvcore.backends.torch_triton.kernels import append, flush, gather, tail
from kvcore.backends.torch_triton.kernels.record import RowRecord, native, power_of_two
from kvcore.backends.torch_triton.kernels.tail import TailRecord

INTERPRETED = bool(triton.knobs.runtime.interpret)


class Bound(NamedTuple):
    """A record with the places of its codes, scales and plain buffers in the list that a launch is given."""

    record: RowRecord
    codes: int
    scales: int
    plain: int


_bound: list[Bound] = []
_tails: list[TailRecord] = []


def bind(bound: Bound) -> int:
    """The number of a bound record; equal ones share a number."""
    if bound not in _bound:
        _bound.append(bound)
    return _bound.index(bound)


def bind_tail(record: TailRecord) -> int:
    """The number of a tail record; equal ones share a number."""
    if record not in _tails:
        _tails.append(record)
    return _tails.index(record)


@cache
def options(device: torch.device) -> dict[str, Any]:
    """What every launch on a device is given: no contraction of products and sums, so that stored bits are the same."""
    return {} if INTERPRETED else {"enable_fp_fusion": False}


@cache
def is_native(device: torch.device) -> bool:
    """``record.native``, looked up once a device."""
    return not INTERPRETED and native(device)


def tile(record: RowRecord, count: int) -> tuple[int, int]:
    """(rows of a program, warps): at most 2,048 channels, and fewer while that leaves too few programs to fill a GPU."""
    size = record.tiles * record.width
    rows = max(1, 256 // size)
    while rows * size < 2048 and rows * 2048 <= count:
        rows *= 2
    return rows, max(1, min(4, rows * size // 256))


def registered(mutates: tuple[str, ...], fake: Callable[..., Any] | None = None) -> Callable[[Any], Any]:
    """Register a launch as ``torch.ops.kvcore.<name>`` and leave the function itself as it is."""

    def wrap(function: Any) -> Any:
        op = torch.library.custom_op(f"kvcore::{function.__name__}", function, mutates_args=mutates)
        op.register_fake(fake or (lambda *args: None))
        return function

    return wrap


@registered(("buffers",))
def append_rows(
    values: Tensor,
    positions: Tensor,
    request_index: Tensor,
    slots: Tensor,
    bound: Tensor,
    block_table: Tensor,
    buffers: list[Tensor],
    record: int,
) -> None:
    """Encode values [tokens, heads, dim] or [tokens, dim], contiguous, and store them at the tokens' positions."""
    b = _bound[record]
    count = positions.shape[0] * b.record.heads
    if count == 0:
        return
    rows, warps = tile(b.record, count)
    append.append_kernel[(triton.cdiv(count, rows),)](
        values,
        buffers[b.codes],
        buffers[b.scales],
        buffers[b.plain],
        positions,
        request_index,
        slots,
        bound,
        block_table,
        count,
        block_table.shape[1],
        b.record,
        rows,
        is_native(values.device),
        num_warps=warps,
        **options(values.device),
    )


@registered(("buffers",))
def append_rotated_rows(
    values: Tensor,
    positions: Tensor,
    request_index: Tensor,
    slots: Tensor,
    bound: Tensor,
    block_table: Tensor,
    norm_weight: Tensor | None,
    frequencies: Tensor,
    buffers: list[Tensor],
    record: int,
    eps: float,
) -> None:
    """``append_rows`` of one head with a norm, if it has a weight, and a rotation in front."""
    b = _bound[record]
    count = positions.shape[0]
    if count == 0:
        return
    rows, warps = tile(b.record, count)
    append.append_rotated_kernel[(triton.cdiv(count, rows),)](
        values,
        buffers[b.codes],
        buffers[b.scales],
        buffers[b.plain],
        positions,
        request_index,
        slots,
        bound,
        block_table,
        values if norm_weight is None else norm_weight,
        frequencies,
        count,
        block_table.shape[1],
        eps,
        norm_weight is not None,
        frequencies.shape[0],
        b.record,
        rows,
        is_native(values.device),
        num_warps=warps,
        **options(values.device),
    )


@registered(("buffers",))
def store_rows(
    values: Tensor,
    starts: Tensor,
    lengths: Tensor,
    stored: Tensor,
    block_table: Tensor,
    buffers: list[Tensor],
    record: int,
    ratio: int,
) -> None:
    """Encode values [count, dim], contiguous, and store them as the entries that the step completes."""
    bound = _bound[record]
    count = values.shape[0]
    if count == 0:
        return
    rows, warps = tile(bound.record, count)
    append.store_entries_kernel[(triton.cdiv(count, rows),)](
        values,
        buffers[bound.codes],
        buffers[bound.scales],
        buffers[bound.plain],
        starts,
        lengths,
        stored,
        block_table,
        count,
        starts.shape[0],
        block_table.shape[1],
        bound.record,
        ratio,
        min(64, power_of_two(starts.shape[0])),
        rows,
        is_native(values.device),
        num_warps=warps,
        **options(values.device),
    )


@registered(("buffer",))
def append_tail_rows(
    kv: Tensor,
    score: Tensor,
    positions: Tensor,
    request_index: Tensor,
    slots: Tensor,
    lengths: Tensor,
    buffer: Tensor,
    record: int,
) -> None:
    """Store kv and score [tokens, width], contiguous, in the tail's ring."""
    count = positions.shape[0]
    if count == 0:
        return
    columns = power_of_two(_tails[record].width)
    rows = 1 if count <= 2048 else max(1, 2048 // columns)
    tail.append_tail_kernel[(triton.cdiv(count, rows),)](
        kv,
        score,
        buffer.view(torch.float32),
        positions,
        request_index,
        slots,
        lengths,
        count,
        _tails[record],
        rows,
        columns,
        num_warps=max(1, min(8, rows * columns // 256)),
        **options(kv.device),
    )


def _window_out(slots: Tensor, lengths: Tensor, buffers: list[Tensor], record: int, window: int) -> tuple[Tensor, Tensor]:
    shape = slots.shape[0], _bound[record].record.rows
    return _dense(slots, (*shape, _bound[record].record.dim), record), slots.new_empty(shape)


def _dense(like: Tensor, shape: tuple[int, ...], record: int) -> Tensor:
    return like.new_empty(shape, dtype=torch.bfloat16 if _bound[record].record.exact else torch.float32)


@registered((), _window_out)
def gather_window_rows(
    slots: Tensor, lengths: Tensor, buffers: list[Tensor], record: int, window: int
) -> tuple[Tensor, Tensor]:
    """The last ``window`` rows of every request, decoded: [requests, ring rows, dim] and their positions."""
    bound = _bound[record]
    out, positions = _window_out(slots, lengths, buffers, record, window)
    count = positions.numel()
    if count:
        rows, warps = tile(bound.record, count)
        gather.gather_window_kernel[(triton.cdiv(count, rows),)](
            out,
            positions,
            buffers[bound.codes],
            buffers[bound.scales],
            buffers[bound.plain],
            slots,
            lengths,
            count,
            window,
            bound.record,
            rows,
            is_native(out.device),
            num_warps=warps,
            **options(out.device),
        )
    return out, positions


def _picked_out(
    indices: Tensor,
    request_index: Tensor,
    lengths: Tensor,
    block_table: Tensor,
    buffers: list[Tensor],
    record: int,
    ratio: int,
) -> tuple[Tensor, Tensor]:
    out = _dense(indices, (*indices.shape, _bound[record].record.dim), record)
    return out, indices.new_empty(indices.shape, dtype=torch.bool)


@registered((), _picked_out)
def gather_picked_rows(
    indices: Tensor,
    request_index: Tensor,
    lengths: Tensor,
    block_table: Tensor,
    buffers: list[Tensor],
    record: int,
    ratio: int,
) -> tuple[Tensor, Tensor]:
    """Entries by index [tokens, k], contiguous: decoded [tokens, k, dim], and whether each exists."""
    bound = _bound[record]
    out, valid = _picked_out(indices, request_index, lengths, block_table, buffers, record, ratio)
    count = indices.numel()
    if count:
        rows, warps = tile(bound.record, count)
        gather.gather_entries_kernel[(triton.cdiv(count, rows),)](
            out,
            valid.view(torch.int8),
            buffers[bound.codes],
            buffers[bound.scales],
            buffers[bound.plain],
            indices,
            request_index,
            lengths,
            block_table,
            count,
            indices.shape[1],
            block_table.shape[1],
            ratio,
            bound.record,
            rows,
            is_native(out.device),
            num_warps=warps,
            **options(out.device),
        )
    return out, valid


def _all_out(
    lengths: Tensor, block_table: Tensor, buffers: list[Tensor], record: int, ratio: int, columns: int
) -> tuple[Tensor, Tensor, Tensor]:
    shape = lengths.shape[0], columns
    out = _dense(lengths, (*shape, _bound[record].record.dim), record)
    return out, lengths.new_empty(lengths.shape), lengths.new_empty(shape)


@registered((), _all_out)
def gather_all_rows(
    lengths: Tensor, block_table: Tensor, buffers: list[Tensor], record: int, ratio: int, columns: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Every entry of every request: decoded [requests, columns, dim], counts [requests], positions."""
    bound = _bound[record]
    out, counts, positions = _all_out(lengths, block_table, buffers, record, ratio, columns)
    count = positions.numel()
    if count == 0:
        return out, torch.div(lengths, ratio, rounding_mode="floor"), positions
    rows, warps = tile(bound.record, count)
    gather.gather_all_kernel[(triton.cdiv(count, rows),)](
        out,
        counts,
        positions,
        buffers[bound.codes],
        buffers[bound.scales],
        buffers[bound.plain],
        lengths,
        block_table,
        count,
        columns,
        block_table.shape[1],
        ratio,
        bound.record,
        rows,
        is_native(out.device),
        num_warps=warps,
        **options(out.device),
    )
    return out, counts, positions


def _kv_out(
    slots: Tensor,
    starts: Tensor,
    lengths: Tensor,
    block_table: Tensor,
    buffers: list[Tensor],
    record: int,
    columns: int,
    ring: bool,
    window: int,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    r = _bound[record].record
    shape = slots.shape[0], columns
    return _dense(slots, (*shape, r.heads, r.dim), record), slots.new_empty(shape)


@registered((), _kv_out)
def gather_kv_rows(
    slots: Tensor,
    starts: Tensor,
    lengths: Tensor,
    block_table: Tensor,
    buffers: list[Tensor],
    record: int,
    columns: int,
    ring: bool,
    window: int,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    """Rows that a query of the step may see: decoded [requests, columns, heads, dim], and their positions."""
    bound = _bound[record]
    out, positions = _kv_out(
        slots, starts, lengths, block_table, buffers, record, columns, ring, window, chunk
    )
    count = positions.numel() * bound.record.heads
    if count:
        rows, warps = tile(bound.record, count)
        gather.gather_kv_kernel[(triton.cdiv(count, rows),)](
            out,
            positions,
            buffers[bound.codes],
            buffers[bound.scales],
            buffers[bound.plain],
            slots,
            starts,
            lengths,
            block_table,
            count,
            columns,
            block_table.shape[1],
            ring,
            window,
            chunk,
            bound.record,
            rows,
            is_native(out.device),
            num_warps=warps,
            **options(out.device),
        )
    return out, positions


class FlushShape(NamedTuple):
    """How a flush is cut into programs: tokens and channel parts of a program, rows pooled at a time, warps.

    Warps are such that, with 16-byte loads, a thread holds all rows of its channels where the window is short.
    """

    tokens: int
    parts: int
    chunk: int
    warps: int


def one_token_programs(count: int, requests: int) -> bool:
    """True where a step of ``count`` tokens looks like decode: few new tokens a request."""
    return count <= 4 * requests or count <= 64


def flush_shape(record: RowRecord, tail_record: TailRecord, count: int, requests: int, given_bytes: int) -> FlushShape:
    """One program a token in decode, one a window in prefill; windows of many rows are split over channels.

    The figures were measured on an H100 (``records/``); a thread that holds all rows of its channels wins where it can.
    """
    decode = one_token_programs(count, requests)
    tokens = 1 if decode else power_of_two(tail_record.ratio)
    size = record.tiles * record.width
    rows = window_rows(tail_record)
    if rows * size <= 16384:
        return FlushShape(tokens, 1, min(rows, max(1, 4096 // size)), max(1, min(4, size * given_bytes // 512)))
    if not decode and count // tail_record.ratio >= 256:
        return FlushShape(tokens, 1, min(rows, max(1, 2048 // size)), 4)
    parts = max(1, min(8, size // 64))
    few = count <= 128 or not decode
    return FlushShape(tokens, parts, min(rows, max(1, (2048 if few else 1024) // (size // parts))), 4 if few else 2)


def window_rows(tail_record: TailRecord) -> int:
    """Rows of a window's tile."""
    return power_of_two(2 * tail_record.ratio if tail_record.overlap else tail_record.ratio)


@registered(("buffers", "index_buffers", "tail_buffer", "index_tail_buffer", "scratch", "arrivals"))
def flush_rows(
    kv: Tensor,
    score: Tensor,
    tail_buffer: Tensor,
    buffers: list[Tensor],
    norm_weight: Tensor | None,
    index_kv: Tensor | None,
    index_score: Tensor | None,
    index_tail_buffer: Tensor | None,
    index_buffers: list[Tensor],
    index_norm_weight: Tensor | None,
    frequencies: Tensor | None,
    positions: Tensor,
    request_index: Tensor,
    slots: Tensor,
    starts: Tensor,
    stored: Tensor,
    block_table: Tensor,
    scratch: Tensor,
    arrivals: Tensor,
    records: list[int],
    eps: float,
    append_rows: bool,
) -> None:
    """Pool, norm, rotate, encode and store every entry that the step completes, and its index key.

    ``records``: numbers of the entries' record and tail, then of the index keys' record and tail where there are any.
    """
    count = positions.shape[0]
    if count == 0:
        return
    bound, t = _bound[records[0]], _tails[records[1]]
    with_index = len(records) > 2
    index_bound, it = (_bound[records[2]], _tails[records[3]]) if with_index else (bound, t)
    shape = flush_shape(bound.record, t, count, slots.shape[0], kv.itemsize)
    chunks = triton.cdiv(count, shape.tokens)
    tail_values = tail_buffer.view(torch.float32)
    index_tail_values = tail_values if index_tail_buffer is None else index_tail_buffer.view(torch.float32)
    index_buffers = index_buffers or buffers
    flush.flush_kernel[(chunks * shape.parts, 2 if with_index else 1)](
        kv,
        score,
        tail_values,
        buffers[bound.codes],
        buffers[bound.scales],
        buffers[bound.plain],
        kv if norm_weight is None else norm_weight,
        kv if index_kv is None else index_kv,
        score if index_score is None else index_score,
        index_tail_values,
        index_buffers[index_bound.codes],
        index_buffers[index_bound.scales],
        index_buffers[index_bound.plain],
        kv if index_norm_weight is None else index_norm_weight,
        scratch if frequencies is None else frequencies,
        positions,
        request_index,
        slots,
        starts,
        stored,
        block_table,
        scratch,
        arrivals,
        count,
        block_table.shape[1],
        chunks,
        eps,
        t,
        bound.record,
        norm_weight is not None,
        window_rows(t),
        shape.chunk,
        shape.parts,
        it,
        index_bound.record,
        index_norm_weight is not None,
        window_rows(it),
        min(window_rows(it), max(1, 4096 // (index_bound.record.tiles * index_bound.record.width))),
        with_index,
        0 if frequencies is None else frequencies.shape[0],
        shape.tokens,
        append_rows,
        is_native(kv.device),
        num_warps=shape.warps,
        **options(kv.device),
    )
