"""FlashMLA's indices of a step's queries, window and entries in one launch; see ``flash``."""

import triton
import triton.language as tl

from kvcore.kernels.triton.address import begin


@triton.jit(do_not_specialize=["topk", "line", "table_columns"])
def flash_index_kernel(
    window_ptr, entries_ptr, positions_ptr, request_ptr, slots_ptr, table_ptr, selected_ptr, topk, line, table_columns,
    WINDOW: tl.constexpr, LINE: tl.constexpr, RING: tl.constexpr, ROWS: tl.constexpr, RATIO: tl.constexpr,
    ALL: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """One query: ring rows of its window -> [tokens, LINE], block rows of entries -> [tokens, line], or -1.

    ALL: of every entry, else of those that are selected.
    """
    begin(AHEAD)
    token = tl.program_id(0).to(tl.int64)
    request = tl.load(request_ptr + token)
    position = tl.where(request >= 0, tl.load(positions_ptr + token), -1)
    request = tl.maximum(request, 0)
    slot = tl.load(slots_ptr + request)
    n = tl.arange(0, WIDTH)
    number = tl.maximum(position + 1 - WINDOW, 0) + n
    seen = (n < WINDOW) & (number <= position) & (slot >= 0)
    tl.store(window_ptr + token * LINE + n, tl.where(seen, slot * RING + number % RING, -1), mask=n < LINE)
    if RATIO:
        visible = (position + 1) // RATIO
        for first in range(0, line, BLOCK):
            nth = first + tl.arange(0, BLOCK)
            entry = nth
            if not ALL:
                entry = tl.load(selected_ptr + token * topk + nth, mask=nth < topk, other=-1)
            column = entry // ROWS
            known = (entry >= 0) & (entry < visible) & (column < table_columns)
            block = tl.load(table_ptr + request.to(tl.int64) * table_columns + column, mask=known, other=-1)
            row = tl.where(block >= 0, block * ROWS + entry % ROWS, -1)
            tl.store(entries_ptr + token * line + nth, row, mask=nth < line)
