"""The launch that copies rows between pools and pages of an export."""

import torch
from torch import Tensor

from kvcore.backends.torch_triton.launches.bound import options
from kvcore.kernels.triton.strips import BLOCK, ENTRY, move_strips_kernel

WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def move_strips(pages: Tensor, units: Tensor, table: Tensor, width: int, store: bool) -> None:
    """Copy the runs of ``table`` [runs, ENTRY] int64 between pages [pages, bytes] and units [pages] int32 of pools."""
    # Tensors without elements may have strides that ``view`` refuses.
    if pages.numel() and table.numel():
        words = pages.view(WORDS[width])
        move_strips_kernel[(len(words) * len(table),)](
            words, units, table, words.shape[1], len(table), store, ENTRY, BLOCK, **options(pages.device)
        )
