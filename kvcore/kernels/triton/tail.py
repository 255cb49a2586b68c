"""The compressor's raw rows: kv and score of each token in a slot's ring, as fp32.

They lie in one buffer, side by side, or in two that are alike; kernels take a pointer for each, and where the buffer is
one leave the second aside, so that a row has one address.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from kvcore.kernels.triton.codes import float_bits, load_float
from kvcore.ops.choices import Declined
from kvcore.plan import Region
from kvcore.spec import Tail


class TailRecord(NamedTuple):
    """A tail at compile time.

    Attributes:
        width: channels of kv, and of score, in a row.
        dim: channels of one stream: width, or half of it with overlap.
        ratio: tokens of a window.
        rows: rows of a ring.
        overlap: rows hold the carry half, then the cur half.
        slot, row, kv, score: channel c of the kv of row r of slot s is fp32 element ``s * slot + r * row + kv + c`` of
            its buffer, and likewise of the score.
        apart: kv and score lie in two buffers.
    """

    width: int
    dim: int
    ratio: int
    rows: int
    overlap: bool
    slot: int
    row: int
    kv: int
    score: int
    apart: bool


class TailBuffers(NamedTuple):
    """Keys in the pools of the buffers that hold kv and score: the same, unless they lie apart."""

    kv: str
    score: str


def tail_recorded(region: Region, component: Tail) -> tuple[TailRecord, TailBuffers] | Declined:
    """The record of a tail and its pools' names, or why the kernels do not cover its layout."""
    places = {place.field: place for place in region.unit.places}
    kv, score = places["kv"], places["score"]
    sizes = dict(region.unit.buffers)
    # Rows and slots are as far apart in both, so that one offset serves both.
    alike = (sizes[kv.buffer], kv.stride) == (sizes[score.buffer], score.stride)
    whole = not any(n % 4 for place in (kv, score) for n in (sizes[place.buffer], place.stride, place.base))
    if kv.split or score.split:
        return Declined(f"layout {region.layout} stores the bytes of an element apart")
    if not (alike and whole):
        return Declined(f"kv and score lie differently in layout {region.layout}, or off fp32 alignment")
    record = TailRecord(
        width=component.width, dim=component.dim, ratio=component.ratio, rows=region.rows, overlap=component.overlap,
        slot=sizes[kv.buffer] // 4, row=kv.stride // 4, kv=kv.base // 4, score=score.base // 4,
        apart=kv.buffer != score.buffer,
    )  # fmt: skip
    return record, TailBuffers(*(region.buffers[place.buffer][0] for place in (kv, score)))


@triton.jit
def tail_pointers(kv_ptr, score_ptr, T: tl.constexpr):
    """Pointers of the buffers that hold kv and score. Of one buffer the compiler must see one pointer."""
    return kv_ptr, score_ptr if T.apart else kv_ptr


@triton.jit
def ring_rows(position, slot, T: tl.constexpr):
    """Offsets (64-bit) of the ring rows of positions, in elements: of kv ``T.kv`` more, of the score ``T.score``."""
    return slot.to(tl.int64) * T.slot + (position % T.rows).to(tl.int64) * T.row


@triton.jit
def save_rows(x, column, mask, slot, position, tail_ptr, T: tl.constexpr):
    """Store x [n, columns] at ``column`` [columns] behind the ring rows of positions [n]; NaN as the quiet NaN."""
    at = ring_rows(position, slot, T)
    bits = tl.where(x != x, 0x7FC00000, float_bits(x))
    tl.store(tail_ptr.to(tl.pointer_type(tl.int32)) + at[:, None] + column[None, :], bits, mask=mask)


@triton.jit(do_not_specialize=["count"])
def append_tail_kernel(
    kv_ptr, score_ptr, kv_tail_ptr, score_tail_ptr, positions_ptr, request_ptr, slots_ptr, lengths_ptr, count,
    T: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
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
    kv_tail, score_tail = tail_pointers(kv_tail_ptr, score_tail_ptr, T)
    save_rows(kv, column + T.kv, mask, slot, position, kv_tail, T)
    save_rows(score, column + T.score, mask, slot, position, score_tail, T)
