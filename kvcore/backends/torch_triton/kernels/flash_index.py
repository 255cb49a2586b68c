"""FlashMLA's indices of a step's queries, window and entries in one launch; see ``flash_pages``."""

import triton
import triton.language as tl
from torch import Tensor

from kvcore.backends.torch_triton.kernels.bound import registered
from kvcore.backends.torch_triton.kernels.record import power_of_two


@triton.jit(do_not_specialize=["picks", "line", "table_columns"])
def flash_index_kernel(
    window_ptr, entries_ptr, positions_ptr, request_ptr, slots_ptr, table_ptr, selected_ptr, picks, line, table_columns,
    WINDOW: tl.constexpr, LINE: tl.constexpr, RING: tl.constexpr, ROWS: tl.constexpr, RATIO: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One query: ring rows of its window -> [tokens, LINE], block rows of its picks -> [tokens, line]; -1 elsewhere."""
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
            pick = first + tl.arange(0, BLOCK)
            entry = tl.load(selected_ptr + token * picks + pick, mask=pick < picks, other=-1)
            column = entry // ROWS
            known = (entry >= 0) & (entry < visible) & (column < table_columns)
            block = tl.load(table_ptr + request.to(tl.int64) * table_columns + column, mask=known, other=-1)
            row = tl.where(block >= 0, block * ROWS + entry % ROWS, -1)
            tl.store(entries_ptr + token * line + pick, row, mask=pick < line)


def _flash_out(
    positions: Tensor,
    request_index: Tensor,
    slots: Tensor,
    block_table: Tensor,
    selected: Tensor | None,
    sizes: list[int],
) -> tuple[Tensor, Tensor]:
    tokens, aligned = positions.shape[0], sizes[-1]
    picks = 0 if selected is None else selected.shape[1]
    window, entries = (triton.cdiv(size, aligned) * aligned for size in (sizes[0], picks))
    return positions.new_empty((tokens, window)), positions.new_empty((tokens, entries))


@registered((), _flash_out)
def flash_rows(
    positions: Tensor,
    request_index: Tensor,
    slots: Tensor,
    block_table: Tensor,
    selected: Tensor | None,
    sizes: list[int],
) -> tuple[Tensor, Tensor]:
    """Physical rows [tokens, window] and [tokens, picks] int32, padded with -1.

    Args:
        selected: [tokens, picks] entries, contiguous, or None.
        sizes: window, rows of a ring, rows of a block, ratio, what lengths are multiples of.
    """
    window, entries = _flash_out(positions, request_index, slots, block_table, selected, sizes)
    span, ring, rows, ratio, _ = sizes
    if len(positions):
        line = entries.shape[1]
        flash_index_kernel[(len(positions),)](
            window, entries, positions, request_index, slots, block_table,
            positions if selected is None else selected, 0 if selected is None else selected.shape[1], line,
            block_table.shape[1], span, window.shape[1], ring, rows, ratio if line else 0,
            power_of_two(window.shape[1]), max(16, min(512, power_of_two(line))), num_warps=4,
        )  # fmt: skip
    return window, entries
