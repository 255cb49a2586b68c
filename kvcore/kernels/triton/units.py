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


@triton.jit(do_not_specialize=["heads"])
def ring_rows_kernel(
    one_ptr, two_ptr, three_ptr, held_ptr, positions_ptr, request_ptr, slots_ptr, heads, FIELDS: tl.constexpr,
    COUNT: tl.constexpr, ROWS: tl.constexpr, COPIES: tl.constexpr, SIZE: tl.constexpr, BACK: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy the bytes of ring rows that the step's tokens take to ``held`` [tokens, heads, SIZE], or with BACK to them.

    FIELDS has for each of COUNT fields: number of its pool, bytes of a unit, its first byte there, bytes from row to
    row and from head to head, its bytes in all and the first of them in ``held``.
    """
    token, head = tl.program_id(0) // heads, (tl.program_id(0) % heads).to(tl.int64)
    position = tl.load(positions_ptr + token)
    request = tl.load(request_ptr + token)
    known = (request >= 0) & (position >= 0)
    slot = tl.load(slots_ptr + request, mask=known, other=-1).to(tl.int64)
    row = (tl.maximum(position, 0) % ROWS).to(tl.int64)
    at = tl.arange(0, BLOCK)
    for n in tl.static_range(COUNT):
        pool_ptr = one_ptr if FIELDS[n][0] == 0 else two_ptr if FIELDS[n][0] == 1 else three_ptr
        mask = at < tl.where(slot >= 0, FIELDS[n][5], 0)
        inside = pool_ptr + slot * FIELDS[n][1] + FIELDS[n][2] + row * FIELDS[n][3] + head * FIELDS[n][4] + at
        outside = held_ptr + tl.program_id(0).to(tl.int64) * SIZE + FIELDS[n][6] + at
        if BACK:
            content = tl.load(outside, mask=mask, other=0)
            for copy in tl.static_range(COPIES):
                tl.store(inside + copy * ROWS * FIELDS[n][3], content, mask=mask)
        else:
            tl.store(outside, tl.load(inside, mask=mask, other=0), mask=mask)
