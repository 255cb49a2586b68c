"""Launches of the write path: append, store entries, append raw tail rows."""

from functools import cache

from kvcore.kernels.triton import append, flush, tail
from kvcore.kernels.triton.launches.launching import BOUND, POOLS, TAILS, Array, Framework, Kernel, launch
from kvcore.kernels.triton.record import ceil_div, power_of_two
from kvcore.kernels.triton.shape import written_tile


@cache
def _append(record: int, rows: int, warps: int, ahead: bool, native: bool) -> Kernel:
    constants = {"R": BOUND[record].record, "ROWS": rows, "NATIVE": native}
    return Kernel(append.append_kernel, constants, warps, writes=POOLS, ahead=ahead)


@cache
def _append_rotated(
    record: int, rows: int, warps: int, norm: bool, pairs: int, ahead: bool, native: bool
) -> Kernel:  # fmt: skip
    constants = {"R": BOUND[record].record, "ROWS": rows, "NORM": norm, "PAIRS": pairs, "NATIVE": native}
    return Kernel(append.append_rotated_kernel, constants, warps, writes=POOLS, ahead=ahead)


@cache
def _store(
    record: int, rows: int, warps: int, ratio: int, requests: int, spread: bool, ahead: bool, native: bool
) -> Kernel:  # fmt: skip
    constants = {"RATIO": ratio, "REQUESTS": requests, "SPREAD": spread, "ROWS": rows, "NATIVE": native}
    constants["R"] = BOUND[record].record
    return Kernel(append.store_entries_kernel, constants, warps, writes=POOLS, ahead=ahead)


@cache
def _append_tail(record: int, rows: int, columns: int) -> Kernel:
    constants = {"T": TAILS[record].record, "ROWS": rows, "COLUMNS": columns}
    warps = max(1, min(8, rows * columns // 256))
    return Kernel(tail.append_tail_kernel, constants, warps, writes=("kv_tail", "score_tail"))


@cache
def _append_last(record: int) -> tuple[Kernel, int]:
    """The kernel, and its programs of a request."""
    bound, rows = TAILS[record].record, flush.LAST_ROWS
    columns = power_of_two(bound.width)
    constants = {"T": bound, "ROWS": rows, "COLUMNS": columns}
    warps = max(1, min(8, rows * columns // 256))
    kernel = Kernel(flush.append_last_kernel, constants, warps, writes=("kv_tail", "score_tail"))
    return kernel, ceil_div(bound.rows, rows)


@launch("buffers")
def append_rows(
    to: Framework, values: Array, positions: Array, request_index: Array, slots: Array, bound: Array,
    block_table: Array, buffers: list[Array], record: int,
) -> None:  # fmt: skip
    """Encode values [tokens, heads, dim] or [tokens, dim], contiguous, and store them at the tokens' positions."""
    b = BOUND[record]
    count = positions.shape[0] * b.record.heads
    if count == 0:
        return
    rows, warps = written_tile(b.record, count)
    programs = ceil_div(count, rows)
    to.run(
        _append(record, rows, warps, programs * warps <= to.ahead(values), to.native(values)),
        (programs,),
        (values, *b.given(buffers), positions, request_index, slots, bound, block_table),
        (count, block_table.shape[1]),
    )


@launch("buffers")
def append_rotated_rows(
    to: Framework, values: Array, positions: Array, request_index: Array, slots: Array, bound: Array,
    block_table: Array, norm_weight: Array | None, frequencies: Array, buffers: list[Array], record: int, eps: float,
) -> None:  # fmt: skip
    """``append_rows`` of one head with a norm, if it has a weight, and a rotation in front."""
    b = BOUND[record]
    count = positions.shape[0]
    if count == 0:
        return
    rows, warps = written_tile(b.record, count)
    programs = ceil_div(count, rows)
    norm = values if norm_weight is None else to.dense(norm_weight)
    to.run(
        _append_rotated(
            record,
            rows,
            warps,
            norm_weight is not None,
            frequencies.shape[0],
            programs * warps <= to.ahead(values),
            to.native(values),
        ),
        (programs,),
        (values, *b.given(buffers), positions, request_index, slots, bound, block_table, norm, frequencies),
        (count, block_table.shape[1], eps),
    )


@launch("buffers")
def store_rows(
    to: Framework, values: Array, starts: Array, lengths: Array, stored: Array, block_table: Array,
    buffers: list[Array], record: int, ratio: int,
) -> None:  # fmt: skip
    """Encode values [count, dim], contiguous, and store them as the entries that the step completes."""
    bound = BOUND[record]
    count = values.shape[0]
    if count == 0:
        return
    rows, warps = written_tile(bound.record, count)
    requests, programs = starts.shape[0], ceil_div(count, rows)
    some, spread = 64 if requests <= 64 else 256, count < 2 * requests
    to.run(
        _store(record, rows, warps, ratio, some, spread, programs * warps <= to.ahead(values), to.native(values)),
        (programs,),
        (values, *bound.given(buffers), starts, lengths, stored, block_table),
        (count, requests, block_table.shape[1]),
    )


@launch("buffers")
def append_tail_rows(
    to: Framework, kv: Array, score: Array, positions: Array, request_index: Array, slots: Array, lengths: Array,
    buffers: list[Array], record: int,
) -> None:  # fmt: skip
    """Store kv and score [tokens, width], contiguous, in the tail's ring."""
    count = positions.shape[0]
    if count == 0:
        return
    bound = TAILS[record]
    columns = power_of_two(bound.record.width)
    rows = 1 if count <= 2048 else max(1, 2048 // columns)
    to.run(
        _append_tail(record, rows, columns),
        (ceil_div(count, rows),),
        (kv, score, *bound.given(to, buffers), positions, request_index, slots, lengths),
        (count,),
    )


@launch("buffers")
def append_last_rows(
    to: Framework, kv: Array, score: Array, slots: Array, starts: Array, lengths: Array, buffers: list[Array],
    record: int,
) -> None:  # fmt: skip
    """Store what a ring keeps of kv and score [tokens, width], contiguous, which come request by request."""
    kernel, programs = _append_last(record)
    tails = TAILS[record].given(to, buffers)
    to.run(kernel, (slots.shape[0] * programs,), (kv, score, *tails, slots, starts, lengths), ())
