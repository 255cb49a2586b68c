"""Launches of recurrent layers: rows before a step's tokens, and the states that it ends at."""

from functools import cache
from typing import Any

from kvcore.kernels.triton import states
from kvcore.kernels.triton.launches.launching import BOUND, POOLS, Array, Bound, Framework, Kernel, Part, bind, launch
from kvcore.kernels.triton.record import RowRecord, ceil_div
from kvcore.kernels.triton.shape import tile
from kvcore.ops.choices import Declined


@cache
def _kernel(kernel: Any, record: int, rows: int, warps: int, native: bool, before: int = 0) -> Kernel:
    constants = {"R": BOUND[record].record, "ROWS": rows, "NATIVE": native}
    if before:
        return Kernel(kernel, {"BEFORE": before, **constants}, warps, writes=("out",))
    return Kernel(kernel, constants, warps, writes=POOLS)


def state_tile(record: RowRecord, count: int) -> tuple[int, int]:
    """(rows of a program, warps): pieces of states one by one, a warp for 1,024 channels; others as all rows are.

    Of 2,048 channels and two warps a copy takes 4 % longer on an H200.
    """
    size = record.tiles * record.width
    return (1, max(1, size // 1024)) if size > 512 else tile(record, count)


def bind_states(part: Part) -> Part | Declined:
    """A part as these launches and ``append_rows`` know it: in pieces, where it has any."""
    bound = BOUND[part.number]
    record = states.flattened(bound.record)
    if isinstance(record, Declined):
        return record
    return part._replace(number=bind(Bound(record, *bound[1:])))


def _before_out(to: Framework, slots: Array, record: int, shape: list[int]) -> Array:
    dtype = to.bfloat16 if BOUND[record].record.exact else to.float32
    return to.empty((slots.shape[0], *shape), dtype, slots)


@launch(outputs=_before_out)
def read_before_rows(
    to: Framework, slots: Array, starts: Array, buffers: list[Array], record: int, before: int, shape: list[int]
) -> Array:
    """The ``before`` rows before each request's new tokens, decoded: [requests, *shape]; zeros before position 0."""
    bound = BOUND[record]
    out = _before_out(to, slots, record, shape)
    count = slots.shape[0] * before * bound.record.heads
    if count:
        rows, warps = state_tile(bound.record, count)
        kernel = _kernel(states.read_before_kernel, record, rows, warps, to.native(slots), before)
        to.run(kernel, (ceil_div(count, rows),), (out, *bound.given(buffers), slots, starts), (count,))
    return out


@launch("buffers")
def write_last_states(
    to: Framework, values: Array, slots: Array, starts: Array, lengths: Array, buffers: list[Array], record: int,
    columns: int,
) -> None:  # fmt: skip
    """Store values [requests, ...], contiguous, after each request's last token; NaN after ``columns`` - 1 others."""
    bound = BOUND[record]
    count = slots.shape[0] * columns * bound.record.heads
    if count:
        rows, warps = state_tile(bound.record, count)
        kernel = _kernel(states.write_last_kernel, record, rows, warps, to.native(values))
        arrays = values, *bound.given(buffers), slots, starts, lengths
        to.run(kernel, (ceil_div(count, rows),), arrays, (count, columns))


@launch("buffers")
def select_state_rows(
    to: Framework, values: Array, slots: Array, starts: Array, lengths: Array, taken: Array, buffers: list[Array],
    record: int,
) -> None:  # fmt: skip
    """Of values [tokens, ...], contiguous, store the one after each request's ``taken``-th new token."""
    bound = BOUND[record]
    if values.shape[0] and slots.shape[0]:
        rows, warps = state_tile(bound.record, 0)  # few rows: a loop holds their places
        kernel = _kernel(states.select_state_kernel, record, rows, warps, to.native(values))
        arrays = values, *bound.given(buffers), slots, starts, lengths, taken
        to.run(kernel, (ceil_div(bound.record.heads, rows), slots.shape[0]), arrays, ())
