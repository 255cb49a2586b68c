"""Launches of the gathers; each allocates what it returns."""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from kvcore.backends.torch_triton.launches.bound import BOUND, is_native, registered, tile
from kvcore.backends.torch_triton.run_triton import Launcher
from kvcore.kernels.triton import gather
from kvcore.kernels.triton.record import ceil_div


@cache
def _bound(kernel: Any, record: int, rows: int, warps: int, native: bool, **constants: Any) -> Launcher:
    return Launcher(kernel, {"R": BOUND[record].record, "ROWS": rows, "NATIVE": native, **constants}, warps)


def _window_out(
    slots: Tensor, lengths: Tensor, buffers: list[Tensor], record: int, window: int
) -> tuple[Tensor, Tensor]:
    shape = slots.shape[0], BOUND[record].record.rows
    return _dense(slots, (*shape, BOUND[record].record.dim), record), slots.new_empty(shape)


def _dense(like: Tensor, shape: tuple[int, ...], record: int) -> Tensor:
    return like.new_empty(shape, dtype=torch.bfloat16 if BOUND[record].record.exact else torch.float32)


@registered((), _window_out)
def gather_window_rows(
    slots: Tensor, lengths: Tensor, buffers: list[Tensor], record: int, window: int
) -> tuple[Tensor, Tensor]:
    """The last ``window`` rows of every request, decoded: [requests, ring rows, dim] and their positions."""
    bound = BOUND[record]
    out, positions = _window_out(slots, lengths, buffers, record, window)
    count = positions.numel()
    if count:
        rows, warps = tile(bound.record, count)
        _bound(gather.gather_window_kernel, record, rows, warps, is_native(out.device), WINDOW=window)(
            (ceil_div(count, rows),),
            (
                out,
                positions,
                buffers[bound.codes],
                buffers[bound.scales],
                buffers[bound.plain],
                slots,
                lengths,
            ),
            (count,),
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
    out = _dense(indices, (*indices.shape, BOUND[record].record.dim), record)
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
    bound = BOUND[record]
    out, valid = _picked_out(indices, request_index, lengths, block_table, buffers, record, ratio)
    count = indices.numel()
    if count:
        rows, warps = tile(bound.record, count)
        _bound(gather.gather_entries_kernel, record, rows, warps, is_native(out.device), RATIO=ratio)(
            (ceil_div(count, rows),),
            (
                out,
                valid.view(torch.int8),
                buffers[bound.codes],
                buffers[bound.scales],
                buffers[bound.plain],
                indices,
                request_index,
                lengths,
                block_table,
            ),
            (count, indices.shape[1], block_table.shape[1]),
        )
    return out, valid


def _all_out(
    lengths: Tensor, block_table: Tensor, buffers: list[Tensor], record: int, ratio: int, columns: int
) -> tuple[Tensor, Tensor, Tensor]:
    shape = lengths.shape[0], columns
    out = _dense(lengths, (*shape, BOUND[record].record.dim), record)
    return out, lengths.new_empty(lengths.shape), lengths.new_empty(shape)


@registered((), _all_out)
def gather_all_rows(
    lengths: Tensor, block_table: Tensor, buffers: list[Tensor], record: int, ratio: int, columns: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Every entry of every request: decoded [requests, columns, dim], counts [requests], positions."""
    bound = BOUND[record]
    out, counts, positions = _all_out(lengths, block_table, buffers, record, ratio, columns)
    count = positions.numel()
    if count == 0:
        return out, torch.div(lengths, ratio, rounding_mode="floor"), positions
    rows, warps = tile(bound.record, count)
    _bound(gather.gather_all_kernel, record, rows, warps, is_native(out.device), RATIO=ratio)(
        (ceil_div(count, rows),),
        (
            out,
            counts,
            positions,
            buffers[bound.codes],
            buffers[bound.scales],
            buffers[bound.plain],
            lengths,
            block_table,
        ),
        (count, columns, block_table.shape[1]),
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
    r = BOUND[record].record
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
    bound = BOUND[record]
    out, positions = _kv_out(slots, starts, lengths, block_table, buffers, record, columns, ring, window, chunk)
    count = positions.numel() * bound.record.heads
    if count:
        rows, warps = tile(bound.record, count)
        _bound(
            gather.gather_kv_kernel, record, rows, warps, is_native(out.device), RING=ring, WINDOW=window, CHUNK=chunk
        )(
            (ceil_div(count, rows),),
            (
                out,
                positions,
                buffers[bound.codes],
                buffers[bound.scales],
                buffers[bound.plain],
                slots,
                starts,
                lengths,
                block_table,
            ),
            (count, columns, block_table.shape[1]),
        )
    return out, positions


@registered(("out",))
def put_own_rows(
    out: Tensor,
    values: Tensor,
    positions: Tensor,
    request_index: Tensor,
    starts: Tensor,
    lengths: Tensor,
    record: int,
    last: bool,
    ring: bool,
    window: int,
    chunk: int,
) -> None:
    """Put values [tokens, heads, dim] of the step into what a gather gave, ``out`` [requests, columns, ...], as stored.

    ``last``: the gather was of what the step's last query sees, else of what any of its queries sees.
    """
    record_of = BOUND[record].record
    count = positions.shape[0] * record_of.heads
    if count == 0 or out.numel() == 0:
        return
    rows, warps = tile(record_of, count)
    _bound(
        gather.own_rows_kernel,
        record,
        rows,
        warps,
        is_native(out.device),
        LAST=last,
        RING=ring,
        WINDOW=window,
        CHUNK=chunk,
    )(
        (ceil_div(count, rows),),
        (
            out,
            values,
            positions,
            request_index,
            starts,
            lengths,
        ),
        (count, out.shape[1]),
    )
