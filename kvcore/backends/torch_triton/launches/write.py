"""Launches of the write path: append, store entries, append raw tail rows."""

from functools import cache

from torch import Tensor

from kvcore.backends.torch_triton.launches.bound import BOUND, TAILS, is_native, registered, tile
from kvcore.backends.torch_triton.run_triton import Launcher
from kvcore.kernels.triton import append, tail
from kvcore.kernels.triton.record import ceil_div, power_of_two


@cache
def _append(record: int, rows: int, warps: int, native: bool) -> Launcher:
    return Launcher(append.append_kernel, {"R": BOUND[record].record, "ROWS": rows, "NATIVE": native}, warps)


@cache
def _append_rotated(record: int, rows: int, warps: int, norm: bool, pairs: int, native: bool) -> Launcher:
    constants = {"R": BOUND[record].record, "ROWS": rows, "NORM": norm, "PAIRS": pairs, "NATIVE": native}
    return Launcher(append.append_rotated_kernel, constants, warps)


@cache
def _store(record: int, rows: int, warps: int, ratio: int, requests: int, spread: bool, native: bool) -> Launcher:
    constants = {"RATIO": ratio, "REQUESTS": requests, "SPREAD": spread, "ROWS": rows, "NATIVE": native}
    return Launcher(append.store_entries_kernel, {"R": BOUND[record].record, **constants}, warps)


@cache
def _append_tail(record: int, rows: int, columns: int) -> Launcher:
    constants = {"T": TAILS[record].record, "ROWS": rows, "COLUMNS": columns}
    return Launcher(tail.append_tail_kernel, constants, max(1, min(8, rows * columns // 256)))


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
    b = BOUND[record]
    count = positions.shape[0] * b.record.heads
    if count == 0:
        return
    rows, warps = tile(b.record, count)
    _append(record, rows, warps, is_native(values.device))(
        (ceil_div(count, rows),),
        (
            values,
            buffers[b.codes],
            buffers[b.scales],
            buffers[b.plain],
            positions,
            request_index,
            slots,
            bound,
            block_table,
        ),
        (count, block_table.shape[1]),
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
    b = BOUND[record]
    count = positions.shape[0]
    if count == 0:
        return
    rows, warps = tile(b.record, count)
    _append_rotated(record, rows, warps, norm_weight is not None, len(frequencies), is_native(values.device))(
        (ceil_div(count, rows),),
        (
            values,
            buffers[b.codes],
            buffers[b.scales],
            buffers[b.plain],
            positions,
            request_index,
            slots,
            bound,
            block_table,
            values if norm_weight is None else norm_weight.contiguous(),
            frequencies,
        ),
        (count, block_table.shape[1], eps),
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
    bound = BOUND[record]
    count = values.shape[0]
    if count == 0:
        return
    rows, warps = tile(bound.record, count)
    requests = starts.shape[0]
    some, spread = 64 if requests <= 64 else 256, count < 2 * requests
    _store(record, rows, warps, ratio, some, spread, is_native(values.device))(
        (ceil_div(count, rows),),
        (
            values,
            buffers[bound.codes],
            buffers[bound.scales],
            buffers[bound.plain],
            starts,
            lengths,
            stored,
            block_table,
        ),
        (count, requests, block_table.shape[1]),
    )


@registered(("buffers",))
def append_tail_rows(
    kv: Tensor,
    score: Tensor,
    positions: Tensor,
    request_index: Tensor,
    slots: Tensor,
    lengths: Tensor,
    buffers: list[Tensor],
    record: int,
) -> None:
    """Store kv and score [tokens, width], contiguous, in the tail's ring."""
    count = positions.shape[0]
    if count == 0:
        return
    bound = TAILS[record]
    columns = power_of_two(bound.record.width)
    rows = 1 if count <= 2048 else max(1, 2048 // columns)
    _append_tail(record, rows, columns)(
        (ceil_div(count, rows),),
        (kv, score, *bound.given(buffers), positions, request_index, slots, lengths),
        (count,),
    )
