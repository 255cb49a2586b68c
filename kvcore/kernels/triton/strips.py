"""Rows between the pools and pages of an export: all strips of all pages in one launch for each width of words.

Pools differ from strip to strip, so their addresses are numbers in a table. What is copied is bytes; a table's sizes
are counted in words of the width that all its addresses are multiples of.
"""

import triton
import triton.language as tl

ENTRY = 14
"""Integers of a run of a strip's bytes: address of the pool (0: none, zeros), words from unit to unit, to the run in a
unit, from row to row, from head to head, of the run; to the run in a page, from row to row, from head to head there;
heads, rows a page, rows a unit, first row, rows in all."""

BLOCK = 1024
"""Words at a time."""


@triton.jit(do_not_specialize=["page_words", "entries", "first_page"])
def move_strips_kernel(
    pages_ptr, units_ptr, table_ptr, page_words, entries, first_page,
    STORE: tl.constexpr, ENTRY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy one run of one page's strip out of its unit, or with STORE into it; a unit of -1 is zeros, or left alone.

    Pages and units are those from ``first_page`` on.
    """
    # Runs of a page follow each other, so that rows that they share sectors of meet in the cache.
    page = tl.program_id(0) // entries
    entry = table_ptr + tl.program_id(0) % entries * ENTRY
    unit = tl.load(units_ptr + page).to(tl.int64)
    address = tl.load(entry)
    row_step, head_step = tl.load(entry + 3), tl.load(entry + 4)
    words = tl.load(entry + 5).to(tl.int32)
    page_row, page_head = tl.load(entry + 7).to(tl.int32), tl.load(entry + 8).to(tl.int32)
    heads, rows = tl.load(entry + 9).to(tl.int32), tl.load(entry + 10).to(tl.int32)
    ring, count = tl.load(entry + 11).to(tl.int32), tl.load(entry + 13).to(tl.int32)
    before = (first_page + page) * rows
    number = tl.load(entry + 12).to(tl.int32) + before
    total = tl.minimum(rows, tl.maximum(count - before, 0)) * heads * words
    there = tl.where(address != 0, tl.where(unit >= 0, total, 0), 0)
    inside = address.to(tl.pointer_type(pages_ptr.dtype.element_ty)) + unit * tl.load(entry + 1) + tl.load(entry + 2)
    outside = pages_ptr + page.to(tl.int64) * page_words + tl.load(entry + 6)
    for some in range(0, total, BLOCK):
        at = some + tl.arange(0, BLOCK)
        known = at < there
        line = at // words
        word = at - line * words
        row = line // heads
        head = line - row * heads
        source = inside + (((number + row) % ring).to(tl.int64) * row_step + head * head_step + word)
        target = outside + (row * page_row + head * page_head + word)
        if STORE:
            tl.store(source, tl.load(target, mask=known, other=0), mask=known)
        else:
            tl.store(target, tl.load(source, mask=known, other=0), mask=at < total)
