"""Pools as FlashMLA's key caches, rows as its physical indices; ``kvcore.interop.flash_mla`` says what those are."""

from typing import Any

import torch

from kvcore.errors import ShapeError
from kvcore.ops import PagedView, RingView

Array = Any
FORMAT = "v4_584"


def k_cache(view: RingView | PagedView) -> Array:
    """The pool as [pages, rows, 1, 584] uint8: the same memory, first stride the page's bytes."""
    if view.format.name != FORMAT or view.layout.layout != "packed":
        got = f"{view.format.name} in layout {view.layout.layout}"
        raise ShapeError(got=got, where="flash_mla.k_cache", allowed=f"{FORMAT} in layout packed")
    (pool,) = view.buffers.values()
    rows, size = view.layout.rows, view.format.row
    return pool.as_strided((pool.shape[0], rows, 1, size), (pool.stride(0), size, size, 1))


def window_indices(view: RingView, positions: Array, request_index: Array, window: int) -> Array:
    """[T, window] int32 ring rows of the last ``window`` positions up to each query, ascending, -1 beyond."""
    known = request_index >= 0
    slots = torch.where(known, view.slots[request_index.clamp(min=0).long()], -1)[:, None]
    first = (positions + 1 - window).clamp(min=0)[:, None]
    seen = first + torch.arange(window, dtype=positions.dtype, device=positions.device)
    rows = slots * view.slot_rows + seen % view.slot_rows
    return torch.where((seen <= positions[:, None]) & (slots >= 0), rows, -1).to(torch.int32)


def entry_indices(view: PagedView, selected: Array, positions: Array, request_index: Array) -> Array:
    """[T, k] int32 block rows of selected entries; -1 stays -1, and so does what lies beyond a request's entries."""
    request = request_index.clamp(min=0).long()[:, None]
    columns = view.block_table.shape[1]
    column = (selected.clamp(min=0) // view.block_rows).clamp(max=columns - 1).long()
    block = view.block_table[request, column]
    known = (selected >= 0) & (selected < view.counts[request]) & (request_index >= 0)[:, None] & (block >= 0)
    return torch.where(known & (positions >= 0)[:, None], block * view.block_rows + selected % view.block_rows, -1).to(
        torch.int32
    )
