"""The launch of FlashMLA's indices; see ``flash_pages``."""

from torch import Tensor

from kvcore.backends.torch_triton.launches.bound import registered
from kvcore.kernels.triton.flash_index import flash_index_kernel
from kvcore.kernels.triton.record import ceil_div, power_of_two


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
    window, entries = (ceil_div(size, aligned) * aligned for size in (sizes[0], picks))
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
