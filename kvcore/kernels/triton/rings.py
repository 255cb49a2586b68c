"""Rows of many rings at once: what a step's tokens take the place of, in one launch for all layers.

Pools differ from ring to ring, so their addresses are numbers in a table, counted in words of the width that all of
them are multiples of.
"""

import triton
import triton.language as tl

ENTRY = 9
"""Integers of a run of a ring's bytes: address of the pool, words from unit to unit, to the run in a unit, from row to
row, from head to head, of the run; to the run in a token's line of what is held, from head to head there, heads. The
rows of a ring are in a table of their own."""

BLOCK = 1024
"""Words at a time."""


@triton.jit(do_not_specialize=["line", "entries"])
def move_rings_kernel(
    held_ptr,
    positions_ptr,
    request_ptr,
    slots_ptr,
    lengths_ptr,
    table_ptr,
    rows_ptr,
    line,
    entries,
    BACK: tl.constexpr,
    ENTRY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy one run of the row that a token takes to the token's line of ``held``, or with BACK to the ring.

    Padding takes none, nor do tokens whose row a later one of the step takes.
    """
    token, number = tl.program_id(0) // entries, tl.program_id(0) % entries
    entry = table_ptr + number * ENTRY
    position = tl.load(positions_ptr + token)
    request = tl.load(request_ptr + token)
    known = (request >= 0) & (position >= 0)
    slot = tl.load(slots_ptr + request, mask=known, other=-1).to(tl.int64)
    length = tl.load(lengths_ptr + request, mask=known, other=0)
    rows = tl.load(rows_ptr + number)
    words, heads = tl.load(entry + 5).to(tl.int32), tl.load(entry + 8).to(tl.int32)
    head_step, held_step = tl.load(entry + 4), tl.load(entry + 7)
    total = words * heads
    there = tl.where((slot >= 0) & (length - position <= rows), total, 0)
    row = (tl.maximum(position, 0) % rows).to(tl.int64)
    pool = tl.load(entry).to(tl.pointer_type(held_ptr.dtype.element_ty))
    inside = pool + slot * tl.load(entry + 1) + tl.load(entry + 2) + row * tl.load(entry + 3)
    outside = held_ptr + token.to(tl.int64) * line + tl.load(entry + 6)
    for some in range(0, total, BLOCK):
        at = some + tl.arange(0, BLOCK)
        mask = at < there
        head = at // words
        word = at - head * words
        one, other = inside + (head * head_step + word), outside + (head * held_step + word)
        if BACK:
            tl.store(one, tl.load(other, mask=mask, other=0), mask=mask)
        else:
            tl.store(other, tl.load(one, mask=mask, other=0), mask=mask)
