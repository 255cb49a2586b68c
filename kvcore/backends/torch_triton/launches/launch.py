"""Every launch under one name: from tensors and record numbers to one kernel call each.

A launch takes the pools' buffers it writes as one list, ``buffers``, and says so to torch; the record number tells
which of them holds codes, scales and plain channels. Grids depend on shapes alone. Called directly a launch costs one
kernel call; while ``torch.compile`` traces, callers go through ``torch.ops.kvcore``, where the same functions are
registered.
"""

import sys
from typing import Any

import torch

from kvcore.backends.torch_triton.launches.attention import attend_rows, turn_back_rows
from kvcore.backends.torch_triton.launches.bound import (
    BOUND,
    INTERPRETED,
    Bound,
    BoundTail,
    bind,
    bind_tail,
    is_native,
)
from kvcore.backends.torch_triton.launches.checksum import digest_lanes, digest_strips
from kvcore.backends.torch_triton.launches.compress import flush_rows
from kvcore.backends.torch_triton.launches.flash_index import flash_rows
from kvcore.backends.torch_triton.launches.indexer import score_rows, score_select_rows
from kvcore.backends.torch_triton.launches.kv_attention import attend_kv_rows
from kvcore.backends.torch_triton.launches.last_rows import append_last_rows
from kvcore.backends.torch_triton.launches.picks import select_rows
from kvcore.backends.torch_triton.launches.read import (
    gather_all_rows,
    gather_kv_rows,
    gather_picked_rows,
    gather_window_rows,
    put_own_rows,
)
from kvcore.backends.torch_triton.launches.shards import join_shards
from kvcore.backends.torch_triton.launches.units import copy_units, fill_units, move_ring_rows
from kvcore.backends.torch_triton.launches.write import append_rotated_rows, append_rows, append_tail_rows, store_rows

__all__ = [
    "BOUND",
    "INTERPRETED",
    "Bound",
    "BoundTail",
    "append_last_rows",
    "append_rotated_rows",
    "append_rows",
    "append_tail_rows",
    "attend_kv_rows",
    "attend_rows",
    "bind",
    "bind_tail",
    "calls",
    "copy_units",
    "digest_lanes",
    "digest_strips",
    "fill_units",
    "flash_rows",
    "flush_rows",
    "gather_all_rows",
    "gather_kv_rows",
    "gather_picked_rows",
    "gather_window_rows",
    "is_native",
    "join_shards",
    "move_ring_rows",
    "put_own_rows",
    "score_rows",
    "score_select_rows",
    "select_rows",
    "store_rows",
    "turn_back_rows",
]


def calls() -> Any:
    """The launches: directly in eager mode, as registered operators while ``torch.compile`` traces."""
    return torch.ops.kvcore if torch.compiler.is_compiling() else sys.modules[__name__]
