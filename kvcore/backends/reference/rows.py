"""Where rows lie: from (request, position or entry) to a place in the pools, and canonical rows in and out of it.

An address is a pure function of the slot, the position and the block table. Nothing is counted on the way.
"""

from typing import Any

import numpy as np

from kvcore.backends.reference import encoding
from kvcore.ops import StepIndex
from kvcore.plan import Region
from kvcore.pools import Pools
from kvcore.spec import Place


def locate(region: Region, index: StepIndex, request: int, number: int) -> tuple[int, int]:
    """(unit, row in the unit) of row ``number`` of a request, or (-1, -1) if it has none.

    ``number`` is a position, or an entry's number in a paged component of compressed entries.
    """
    if request < 0 or number < 0:
        return -1, -1
    if region.growth == "slot":
        return int(index.slots[request]), number % region.rows
    column = number // region.rows
    if column >= index.block_table.shape[1]:
        return -1, -1
    return int(index.block_table[request, column]), number % region.rows


def load(pools: Pools, region: Region, unit: int, row: int) -> np.ndarray:
    """Canonical rows [heads, row_bytes] of one position or entry; zeros where the unit is -1."""
    rows = np.zeros((region.heads, region.format.row), np.uint8)
    if unit < 0:
        return rows
    for place in region.unit.places:
        first, last = region.format.byte_range(place.field)
        buffer = pools[region.buffers[place.buffer][0]][unit]
        for head in range(region.heads):
            stored = buffer[_bytes_of(region, place, row, head)]
            rows[head, first:last] = join_bytes(stored) if place.split else stored
    return rows


def store(pools: Pools, region: Region, unit: int, row: int, rows: np.ndarray) -> Pools:
    """Write canonical rows [heads, row_bytes] at one position or entry, in every copy; nothing where the unit is -1."""
    if unit < 0:
        return pools
    for place in region.unit.places:
        first, last = region.format.byte_range(place.field)
        buffer = pools[region.buffers[place.buffer][0]][unit]
        for head in range(region.heads):
            stored = rows[head, first:last]
            for copy in range(row, region.places, region.rows):
                buffer[_bytes_of(region, place, copy, head)] = split_bytes(stored) if place.split else stored
    return pools


def _bytes_of(region: Region, place: Place, row: int, head: int) -> Any:
    """Where a field of a head's row lies in a unit: a slice, or the number of every byte."""
    steps = place.steps
    if steps is None:
        row_step, head_step = region.steps
        start = place.base + (row * row_step + head * head_step) * place.stride
        return slice(start, start + place.nbytes)
    start = place.base + steps.start(row) + head * steps.head
    byte = np.arange(place.nbytes)
    return start + byte // steps.piece_bytes * steps.piece + byte % steps.piece_bytes


def split_bytes(stored: np.ndarray) -> np.ndarray:
    """Little-endian 16-bit elements -> all high bytes, then all low bytes."""
    return np.concatenate([stored[1::2], stored[0::2]])


def join_bytes(stored: np.ndarray) -> np.ndarray:
    """The inverse of ``split_bytes``."""
    half = len(stored) // 2
    return np.stack([stored[half:], stored[:half]], axis=1).reshape(-1)


def first_token(index: StepIndex, request: int) -> int:
    """Row of a request's first new token among the step's tokens: tokens come request by request."""
    return int((index.lengths[:request] - index.starts[:request]).sum())


def read(
    pools: Pools, region: Region, index: StepIndex, request: int, number: int, own: np.ndarray | None = None
) -> np.ndarray:
    """Canonical rows [heads, row_bytes] of position ``number``: from the step's ``own`` rows if it is new, else stored.

    Args:
        own: canonical rows [T, heads, row_bytes] of the step's tokens, or None to read everything from the pools.
    """
    start = int(index.starts[request])
    if own is not None and number >= start:
        return own[first_token(index, request) + number - start]
    return load(pools, region, *locate(region, index, request, number))


def append(pools: Pools, region: Region, index: StepIndex, rows: np.ndarray) -> Pools:
    """Store canonical rows [T, heads, row_bytes] of the step's tokens at their positions.

    More tokens than a ring holds: rows that a later token of the same step overwrites are left out, so each byte has
    one writer. Padding tokens write nowhere.
    """
    for token, (request, position) in enumerate(zip(index.request_index, index.positions, strict=True)):
        if request < 0:
            continue
        overwritten = region.growth == "slot" and position < index.lengths[request] - region.rows
        taken_over = region.growth == "block" and position < index.stored[request]
        if overwritten or taken_over:
            continue
        store(pools, region, *locate(region, index, int(request), int(position)), rows[token])
    return pools


def encode_rows(region: Region, values: np.ndarray, global_scale: float = 1.0) -> np.ndarray:
    """Values [n, d] or [n, heads, d] -> canonical rows [n, heads, row_bytes] of a region."""
    flat = values.reshape(len(values) * region.heads, region.format.dim or 0)
    return encoding.encode(region.format, flat, global_scale).reshape(len(values), region.heads, region.format.row)


def decode_rows(region: Region, rows: np.ndarray, global_scale: float = 1.0) -> np.ndarray:
    """Canonical rows [..., row_bytes] of a region -> values [..., dim]."""
    flat = encoding.decode(region.format, rows.reshape(-1, region.format.row), global_scale=global_scale)
    return flat.reshape(*rows.shape[:-1], region.format.dim or 0)
