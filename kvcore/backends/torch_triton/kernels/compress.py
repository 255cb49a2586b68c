"""The launch of the flush, and how it is cut into programs."""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from kvcore.backends.torch_triton.kernels import flush
from kvcore.backends.torch_triton.kernels.bound import BOUND, TAILS, is_native, options, registered
from kvcore.backends.torch_triton.kernels.record import RowRecord, power_of_two
from kvcore.backends.torch_triton.kernels.tail import TailRecord


class FlushShape(NamedTuple):
    """How a flush is cut into programs: tokens and channel parts of a program, rows pooled at a time, warps.

    Warps are such that, with 16-byte loads, a thread holds all rows of its channels where the window is short. A
    request's border has programs of its own, one for each of ``border`` parts of the channels: long windows in many.
    """

    tokens: int
    parts: int
    chunk: int
    warps: int
    border: int


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
    if rows * size <= 16384:
        warps = max(1, min(4, size * given_bytes // 512))
        return FlushShape(tokens if count < 8192 * ratio else 2 * tokens, 1, min(rows, max(1, 4096 // size)), warps, 1)
    # (parts, warps, rows that a thread takes at a time)
    if decode:
        parts, warps, each = (8, 2, given_bytes) if count <= 128 else (2, 4, given_bytes // 2)
    else:
        parts, warps, each = (16, 2, 1) if count < 256 * ratio else (1, given_bytes, 2)
    parts = max(1, min(parts, size // 32))
    at_once = warps * 32 * (16 // given_bytes) // (size // parts)
    border = max(1, min(8, size // 32))
    return FlushShape(tokens, parts, min(rows, max(2, each * at_once)), warps, border)


def border_chunk(tail_record: TailRecord, size: int, parts: int) -> int:
    """Rows that a border's program pools at a time: few, since it takes each from one of two places."""
    return min(window_rows(tail_record), max(2, 256 // (size // parts)))


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
    lengths: Tensor,
    stored: Tensor,
    block_table: Tensor,
    scratch: Tensor,
    arrivals: Tensor,
    records: list[int],
    eps: float,
    append: bool,
    beside: bool,
) -> None:
    """Pool, norm, rotate, encode and store every entry that the step completes, and its index key.

    Args:
        records: numbers of the entries' record and tail, then of the index keys' record and tail where there are any.
        append: write the step's own rows to the tails, too.
        beside: they replace none that a window closing in this step needs, so any program may write them at any time.
    """
    count = positions.shape[0]
    if count == 0:
        return
    bound, t = BOUND[records[0]], TAILS[records[1]]
    with_index = len(records) > 2
    index_bound, it = (BOUND[records[2]], TAILS[records[3]]) if with_index else (bound, t)
    kv, score = aligned(kv), aligned(score)
    index_kv = None if index_kv is None else aligned(index_kv)
    index_score = None if index_score is None else aligned(index_score)
    shape = flush_shape(bound.record, t, count, slots.shape[0], kv.itemsize)
    requests = slots.shape[0]
    chunks = triton.cdiv(count, shape.tokens)
    bordered = append and (shape.tokens > 1 or not beside)
    border, index_border = (shape.border, 1) if bordered else (0, 0)
    size, index_size = (record.tiles * record.width for record in (bound.record, index_bound.record))
    tail_values = tail_buffer.view(torch.float32)
    index_tail_values = tail_values if index_tail_buffer is None else index_tail_buffer.view(torch.float32)
    index_buffers = index_buffers or buffers
    flush.flush_kernel[(chunks * shape.parts + requests * border, 2 if with_index else 1)](
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
        lengths,
        stored,
        block_table,
        scratch,
        arrivals,
        count,
        requests,
        block_table.shape[1],
        chunks + requests * index_border,
        eps,
        t,
        bound.record,
        norm_weight is not None,
        window_rows(t),
        shape.chunk,
        shape.parts,
        border,
        border_chunk(t, size, shape.border),
        it,
        index_bound.record,
        index_norm_weight is not None,
        window_rows(it),
        min(window_rows(it), max(1, 4096 // index_size)),
        index_border,
        border_chunk(it, index_size, 1),
        with_index,
        0 if frequencies is None else frequencies.shape[0],
        shape.tokens,
        append,
        is_native(kv.device),
        num_warps=shape.warps,
        **options(kv.device),
    )


def aligned(values: Tensor) -> Tensor:
    """Contiguous values that start on a 16-byte boundary, as wide loads need; a copy only where they don't.

    Asked inside the operator: while ``torch.compile`` traces, nobody knows where a tensor starts.
    """
    values = values.contiguous()
    return values.clone() if values.storage_offset() * values.itemsize % 16 else values
