"""Launches of the gathers; each allocates what it returns."""

from functools import cache
from typing import Any

from kvcore.kernels.triton import gather
from kvcore.kernels.triton.launches.launching import BOUND, Array, Framework, Kernel, launch
from kvcore.kernels.triton.record import ceil_div
from kvcore.kernels.triton.shape import tile


@cache
def _gather(kernel: Any, record: int, rows: int, warps: int, native: bool, *writes: str, **constants: Any) -> Kernel:
    constants = {"R": BOUND[record].record, "ROWS": rows, "NATIVE": native, **constants}
    return Kernel(kernel, constants, warps, writes=("out", *writes))


def _dense(to: Framework, shape: tuple[int, ...], record: int, like: Array) -> Array:
    """Room for decoded rows."""
    bound = BOUND[record].record
    return to.empty((*shape, bound.dim), to.bfloat16 if bound.exact else to.float32, like)


def _window_out(to: Framework, slots: Array, record: int) -> tuple[Array, Array]:
    shape = slots.shape[0], BOUND[record].record.rows
    return _dense(to, shape, record, slots), to.empty(shape, to.int32, slots)


@launch(outputs=_window_out)
def gather_window_rows(
    to: Framework, slots: Array, lengths: Array, buffers: list[Array], record: int, window: int
) -> tuple[Array, Array]:
    """The last ``window`` rows of every request, decoded: [requests, ring rows, dim] and their positions."""
    bound = BOUND[record]
    out, positions = _window_out(to, slots, record)
    count = slots.shape[0] * bound.record.rows
    if count:
        rows, warps = tile(bound.record, count)
        to.run(
            _gather(gather.gather_window_kernel, record, rows, warps, to.native(slots), "positions_out", WINDOW=window),
            (ceil_div(count, rows),),
            (out, positions, *bound.given(buffers), slots, lengths),
            (count,),
        )
    return out, positions


def _selected_out(to: Framework, indices: Array, record: int) -> tuple[Array, Array]:
    return _dense(to, indices.shape, record, indices), to.empty(indices.shape, to.flag, indices)


@launch(outputs=_selected_out)
def gather_selected_rows(
    to: Framework, indices: Array, request_index: Array, lengths: Array, block_table: Array, buffers: list[Array],
    record: int, ratio: int,
) -> tuple[Array, Array]:  # fmt: skip
    """Entries by index [tokens, k], contiguous: decoded [tokens, k, dim], and whether each exists."""
    bound = BOUND[record]
    out, valid = _selected_out(to, indices, record)
    tokens, topk = indices.shape
    count = tokens * topk
    if count:
        rows, warps = tile(bound.record, count)
        to.run(
            _gather(gather.gather_entries_kernel, record, rows, warps, to.native(out), "valid_out", RATIO=ratio),
            (ceil_div(count, rows),),
            (out, to.view(valid, to.int8), *bound.given(buffers), indices, request_index, lengths, block_table),
            (count, topk, block_table.shape[1]),
        )
    return out, valid


def _all_out(to: Framework, lengths: Array, record: int, columns: int) -> tuple[Array, Array, Array]:
    shape = lengths.shape[0], columns
    out, counts = _dense(to, shape, record, lengths), to.empty(lengths.shape, to.int32, lengths)
    return out, counts, to.empty(shape, to.int32, lengths)


@launch(outputs=_all_out)
def gather_all_rows(
    to: Framework, lengths: Array, block_table: Array, buffers: list[Array], record: int, ratio: int, columns: int
) -> tuple[Array, Array, Array]:
    """Every entry of every request: decoded [requests, columns, dim], counts [requests], positions."""
    bound = BOUND[record]
    out, counts, positions = _all_out(to, lengths, record, columns)
    count = lengths.shape[0] * columns
    if count == 0:
        return out, lengths // ratio, positions  # type: ignore[operator]
    rows, warps = tile(bound.record, count)
    to.run(
        _gather(
            gather.gather_all_kernel, record, rows, warps, to.native(lengths), "counts_out", "positions_out",
            RATIO=ratio,
        ),
        (ceil_div(count, rows),),
        (out, counts, positions, *bound.given(buffers), lengths, block_table),
        (count, columns, block_table.shape[1]),
    )  # fmt: skip
    return out, counts, positions


def _kv_out(to: Framework, slots: Array, record: int, columns: int) -> tuple[Array, Array]:
    shape = slots.shape[0], columns
    return _dense(to, (*shape, BOUND[record].record.heads), record, slots), to.empty(shape, to.int32, slots)


@launch(outputs=_kv_out)
def gather_kv_rows(
    to: Framework, slots: Array, starts: Array, lengths: Array, block_table: Array, buffers: list[Array],
    record: int, columns: int, ring: bool, window: int, chunk: int,
) -> tuple[Array, Array]:  # fmt: skip
    """Rows that a query of the step may see: decoded [requests, columns, heads, dim], and their positions."""
    bound = BOUND[record]
    out, positions = _kv_out(to, slots, record, columns)
    count = slots.shape[0] * columns * bound.record.heads
    if count:
        rows, warps = tile(bound.record, count)
        to.run(
            _gather(
                gather.gather_kv_kernel, record, rows, warps, to.native(slots), "positions_out", RING=ring,
                WINDOW=window, CHUNK=chunk,
            ),
            (ceil_div(count, rows),),
            (out, positions, *bound.given(buffers), slots, starts, lengths, block_table),
            (count, columns, block_table.shape[1]),
        )  # fmt: skip
    return out, positions


@launch("out")
def put_own_rows(
    to: Framework, out: Array, values: Array, positions: Array, request_index: Array, starts: Array, lengths: Array,
    record: int, last: bool, ring: bool, window: int, chunk: int,
) -> None:  # fmt: skip
    """Put values [tokens, heads, dim] of the step into what a gather gave, ``out`` [requests, columns, ...], as stored.

    ``last``: the gather was of what the step's last query sees, else of what any of its queries sees.
    """
    record_of = BOUND[record].record
    count = positions.shape[0] * record_of.heads
    if count == 0 or 0 in out.shape:
        return
    rows, warps = tile(record_of, count)
    to.run(
        _gather(
            gather.own_rows_kernel, record, rows, warps, to.native(values), LAST=last, RING=ring, WINDOW=window,
            CHUNK=chunk,
        ),
        (ceil_div(count, rows),),
        (out, values, positions, request_index, starts, lengths),
        (count, out.shape[1]),
    )  # fmt: skip
