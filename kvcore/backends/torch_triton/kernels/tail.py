"""The compressor's raw rows: kv and score of each token, side by side in a slot's ring, as fp32."""

from typing import NamedTuple

import triton
import triton.language as tl

from kvcore.backends.torch_triton.kernels.codes import float_bits, load_float
from kvcore.plan import Region
from kvcore.spec import Tail


class TailRecord(NamedTuple):
    """A tail at compile time.

    Attributes:
        width: channels of kv, and of score, in a row.
        dim: channels of one stream: width, or half of it with overlap.
        ratio: tokens of a window.
        rows: rows of a ring.
        slot: fp32 elements of a slot; a row is ``2 * width`` of them.
        overlap: rows hold the carry half, then the cur half.
    """

    width: int
    dim: int
    ratio: int
    rows: int
    slot: int
    overlap: bool


def tail_record(region: Region, component: Tail) -> TailRecord | None:
    """The record of a tail, or None in a layout that the kernels don't cover."""
    if region.layout != "packed":
        return None
    return TailRecord(
        width=component.width,
        dim=component.dim,
        ratio=component.ratio,
        rows=region.rows,
        slot=region.unit.nbytes // 4,
        overlap=component.overlap,
    )


@triton.jit
def save_rows(x, column, mask, slot, position, tail_ptr, T: tl.constexpr):
    """Store x [n, columns] at columns ``column`` [columns] of the ring rows of positions [n]; NaN as the quiet NaN."""
    at = slot.to(tl.int64) * T.slot + (position % T.rows).to(tl.int64) * (2 * T.width)
    bits = tl.where(x != x, 0x7FC00000, float_bits(x))
    tl.store(tail_ptr.to(tl.pointer_type(tl.int32)) + at[:, None] + column[None, :], bits, mask=mask)


@triton.jit(do_not_specialize=["count"])
def append_tail_kernel(
    kv_ptr,
    score_ptr,
    tail_ptr,
    positions_ptr,
    request_ptr,
    slots_ptr,
    lengths_ptr,
    count,
    T: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Store kv and score [count, width] of the step's tokens; only each ring's last positions are written."""
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = token < count
    position = tl.load(positions_ptr + token, mask=inside, other=-1)
    request = tl.load(request_ptr + token, mask=inside, other=-1)
    known = (request >= 0) & (position >= 0)
    slot = tl.load(slots_ptr + request, mask=known, other=-1)
    length = tl.load(lengths_ptr + request, mask=known, other=0)
    valid = (slot >= 0) & (position >= length - T.rows)
    column = tl.arange(0, COLUMNS)
    source = token.to(tl.int64)[:, None] * T.width + column[None, :]
    mask = valid[:, None] & (column < T.width)[None, :]
    position = tl.maximum(position, 0)
    kv = load_float(kv_ptr + source, mask)
    score = load_float(score_ptr + source, mask)
    save_rows(kv, column, mask, slot, position, tail_ptr, T)
    save_rows(score, column + T.width, mask, slot, position, tail_ptr, T)
