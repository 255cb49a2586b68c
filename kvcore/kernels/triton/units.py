"""Whole units (slots, blocks) of a pool: filled and copied. Offsets are 64-bit; a unit of -1 is left alone.

A pool is taken as elements of 4 bytes where a unit is a multiple of that, else as bytes.
"""

import triton
import triton.language as tl

BLOCK = 2048
"""Elements that a program moves."""


@triton.jit(do_not_specialize=["size", "chunks"])
def fill_units_kernel(
    pool_ptr, units_ptr, unit_ptr, size, chunks, FROM_UNIT: tl.constexpr, VALUE: tl.constexpr, BLOCK: tl.constexpr
):
    """Write one unit's content, or VALUE, over ``units`` of a pool; ``size`` elements each."""
    unit = tl.load(units_ptr + tl.program_id(0) // chunks).to(tl.int64)
    at = tl.program_id(0) % chunks * BLOCK + tl.arange(0, BLOCK)
    mask = at < tl.where(unit >= 0, size, 0)
    content = tl.load(unit_ptr + at, mask=mask, other=0) if FROM_UNIT else tl.full([BLOCK], VALUE, tl.int32)
    tl.store(pool_ptr + unit * size + at, content.to(pool_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["size", "chunks"])
def take_units_kernel(pool_ptr, units_ptr, others_ptr, held_ptr, size, chunks, BACK: tl.constexpr, BLOCK: tl.constexpr):
    """Copy ``units`` of a pool to rows of ``held``, or with BACK the rows to the units; not where the other is -1."""
    pair = tl.program_id(0) // chunks
    unit = tl.load(units_ptr + pair).to(tl.int64)
    other = tl.load(others_ptr + pair)
    at = tl.program_id(0) % chunks * BLOCK + tl.arange(0, BLOCK)
    mask = at < tl.where((unit >= 0) & (other >= 0), size, 0)
    inside, outside = pool_ptr + unit * size + at, held_ptr + pair.to(tl.int64) * size + at
    if BACK:
        tl.store(inside, tl.load(outside, mask=mask, other=0), mask=mask)
    else:
        tl.store(outside, tl.load(inside, mask=mask, other=0), mask=mask)
