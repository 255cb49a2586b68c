"""Launches of the content digest of canonical rows and of pages."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvcore import digest
from kvcore.backends.torch_triton.launches.bound import options, registered
from kvcore.kernels.triton.checksum import BLOCK, ENTRY, ROWS, WORDS, digest_kernel, strips_kernel
from kvcore.kernels.triton.record import ceil_div


def _lanes(rows: Tensor, positions: Tensor, salt: int) -> Tensor:
    return rows.new_empty((rows.shape[0], 2), dtype=torch.int64)


@registered((), _lanes)
def digest_lanes(rows: Tensor, positions: Tensor, salt: int) -> Tensor:
    """Lanes [requests, 2] int64 of canonical rows [requests, columns, bytes] at positions [requests, columns]."""
    requests, columns, size = rows.shape
    lanes = torch.zeros((requests, 2), dtype=torch.int32, device=rows.device)
    if rows.numel():
        # A row's last word is filled up with zeros.
        words = pad(rows, (0, -size % 4)).contiguous().view(torch.int32)
        chunks = ceil_div(columns, ROWS)
        # Always within int32, so that one compiled kernel takes every salt.
        salt = salt - (1 << 32) if salt >= 1 << 31 else salt
        digest_kernel[(requests * chunks,)](
            lanes, words, positions, columns, words.shape[2], salt, chunks, ROWS, WORDS, **options(rows.device)
        )
    return lanes.long() & digest.MASK


def _page_lanes(pages: Tensor, table: Tensor, first_page: int) -> Tensor:
    return pages.new_empty((pages.shape[0], 2), dtype=torch.int64)


@registered((), _page_lanes)
def digest_strips(pages: Tensor, table: Tensor, first_page: int) -> Tensor:
    """Lanes [pages, 2] int64 of pages [pages, bytes] whose strips are described by table [strips, ENTRY] int32."""
    lanes = torch.zeros((pages.shape[0], 2), dtype=torch.int32, device=pages.device)
    if lanes.numel() and table.numel():
        words = pages.view(torch.int32)
        strips_kernel[(len(words), len(table))](
            lanes, words, table, words.shape[1], first_page, ENTRY, BLOCK, **options(pages.device)
        )
    return lanes.long() & digest.MASK
