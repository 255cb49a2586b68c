"""Where rows lie: from (request, position or entry) to places in the pools, and canonical rows in and out of them.

An address is a pure function of the slot, the position and the block table. Nothing is counted on the way, and nothing
asks the device for a value: on a GPU a step can be queued, or captured, without waiting.
"""

import math
from collections.abc import Callable

import torch

from kvcore.backends.torch_triton import encoding
from kvcore.ops import StepIndex
from kvcore.plan import Region
from kvcore.pools import Pools
from kvcore.spec import Place

ELEMENTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

TEMPORARY_ELEMENTS = 1 << 23
"""Elements that a temporary array of the wider verbs may have: 32 MiB in fp32."""


def locate(
    region: Region, index: StepIndex, request: torch.Tensor, number: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(unit, row in the unit) of row ``number`` of a request, int64, in the arguments' common shape; unit -1 if none.

    ``number`` is a position, or an entry's number in a paged component of compressed entries.
    """
    request, number = torch.broadcast_tensors(request, number)
    known = (request >= 0) & (number >= 0)
    number = number.clamp(min=0).long()
    row = number % region.rows
    if not len(index.slots):
        return torch.full_like(number, -1), row
    request = request.clamp(min=0).long()
    if region.growth == "slot":
        return torch.where(known, index.slots[request], -1).long(), row
    column = number // region.rows
    columns = index.block_table.shape[1]
    unit = index.block_table[request, column.clamp(max=columns - 1)]
    return torch.where(known & (column < columns), unit, -1).long(), row


def field(pools: Pools, region: Region, place: Place) -> tuple[torch.Tensor, Callable[..., torch.Tensor]]:
    """(view [n, heads, pieces, elements] of a field's bytes, number of the window at a unit and a row).

    A window of the view is the field at that place, in the widest elements that its addresses are multiples of.
    Windows overlap: read and write them by window number only.
    """
    pool, steps = pools[region.buffers[place.buffer][0]], place.steps
    unit_bytes, first = pool.stride(0), pool.storage_offset() + place.base
    if steps is None:
        row_bytes, head_bytes = (step * place.stride for step in region.steps)
        wide = place.stride, place.nbytes
        chunk_rows, chunk, piece_bytes, piece = region.places, 0, place.nbytes, 0
    else:
        row_bytes, head_bytes = steps.row, steps.head
        chunk_rows, chunk, piece_bytes, piece = steps.chunk_rows, steps.chunk, steps.piece_bytes, steps.piece
        wide = row_bytes, head_bytes, chunk, piece_bytes, piece
    width = math.gcd(first, unit_bytes, *wide, 8)
    grain = math.gcd(unit_bytes, row_bytes, chunk)
    span = (region.places - 1) // chunk_rows * chunk + (min(region.places, chunk_rows) - 1) * row_bytes
    windows = ((len(pool) - 1) * unit_bytes + span) // grain + 1 if len(pool) else 0
    pieces = place.nbytes // max(1, piece_bytes)
    view = pool.view(ELEMENTS[width]).as_strided(
        (windows, region.heads, pieces, piece_bytes // width),
        (grain // width, head_bytes // width, piece // width, 1),
        first // width,
    )

    def window(unit: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        if not chunk:
            return unit * (unit_bytes // grain) + row * (row_bytes // grain)
        inside = row // chunk_rows * (chunk // grain) + row % chunk_rows * (row_bytes // grain)
        return unit * (unit_bytes // grain) + inside

    return view, window


def numbers(pools: Pools, region: Region, place: Place, stored: torch.dtype) -> torch.Tensor | None:
    """View [units, rows, heads, numbers] of a field whose numbers lie as they are in memory; None where they do not."""
    pool, size = pools[region.buffers[place.buffer][0]], stored.itemsize
    first = pool.storage_offset() + place.base
    if place.split or not region.even or first % size or place.stride % size or pool.stride(0) % size:
        return None
    row, head = (each * place.stride // size for each in region.steps)
    return pool.view(stored).as_strided(
        (len(pool), region.rows, region.heads, place.nbytes // size),
        (pool.stride(0) // size, row, head, 1),
        first // size,
    )


def load(pools: Pools, region: Region, unit: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    """Canonical rows [..., heads, row_bytes] at places of shape [...]; zeros where the unit is -1."""
    known = (unit >= 0).reshape(-1)
    unit, row, shape = unit.clamp(min=0).reshape(-1), row.reshape(-1), unit.shape
    rows = unit.new_zeros((len(unit), region.heads, region.format.row), dtype=torch.uint8)
    for place in region.unit.places:
        first, last = region.format.byte_range(place.field)
        view, window = field(pools, region, place)
        stored = view.index_select(0, window(unit, row)).flatten(2).view(torch.uint8)
        stored = join_bytes(stored) if place.split else stored
        if place.nbytes == region.format.row:
            rows = stored
        else:
            rows[:, :, first:last] = stored
    return rows.masked_fill_(~known[:, None, None], 0).reshape(*shape, region.heads, region.format.row)


def store(pools: Pools, region: Region, unit: torch.Tensor, row: torch.Tensor, rows: torch.Tensor) -> Pools:
    """Write canonical rows [n, heads, row_bytes] at places [n], in every copy; nothing happens where the unit is -1.

    Picking the valid rows out would need their number, which only the device knows. So an invalid row repeats a valid
    one, to the same place with the same bytes; if there is no valid one, place (0, 0) gets back what it holds.
    """
    if not len(unit):
        return pools
    valid = unit >= 0
    some = valid.any()
    source = torch.where(valid, torch.arange(len(unit), device=unit.device), valid.int().argmax(dim=0, keepdim=True))
    unit, row, rows = torch.where(some, unit[source], 0), torch.where(some, row[source], 0), rows[source]
    for place in region.unit.places:
        first, last = region.format.byte_range(place.field)
        view, window = field(pools, region, place)
        stored = split_bytes(rows[:, :, first:last]) if place.split else rows[:, :, first:last]
        stored = encoding.reinterpret(stored, view.dtype).unflatten(2, view.shape[2:])
        stored = torch.where(some, stored, view[:1])
        for copy in range(region.copies):
            view.index_copy_(0, window(unit, row + copy * region.rows), stored)
    return pools


def split_bytes(stored: torch.Tensor) -> torch.Tensor:
    """Little-endian 16-bit elements -> all high bytes, then all low bytes, along the last axis."""
    return torch.cat([stored[..., 1::2], stored[..., 0::2]], dim=-1)


def join_bytes(stored: torch.Tensor) -> torch.Tensor:
    """The inverse of ``split_bytes``."""
    half = stored.shape[-1] // 2
    return torch.stack([stored[..., half:], stored[..., :half]], dim=-1).flatten(-2)


def of_request(values, request):
    """Each row's request's entry of values [Q, ...]; for padding (request -1) some entry, or zeros if Q is 0."""
    if not len(values):
        return values.new_zeros((*request.shape, *values.shape[1:]))
    return values[request.clamp(min=0).long()]


def first_token(index: StepIndex, request: torch.Tensor) -> torch.Tensor:
    """Row of each request's first new token among the step's tokens: tokens come request by request."""
    new = (index.lengths - index.starts).long()
    return of_request(new.cumsum(0) - new, request)


def read(
    pools: Pools,
    region: Region,
    index: StepIndex,
    request: torch.Tensor,
    number: torch.Tensor,
    own: torch.Tensor | None = None,
) -> torch.Tensor:
    """Canonical rows [..., heads, row_bytes] of positions ``number``: from the step's ``own`` rows if new, else stored.

    Args:
        own: canonical rows [T, heads, row_bytes] of the step's tokens, or None to read everything from the pools.
    """
    request, number = torch.broadcast_tensors(request, number)
    stored = load(pools, region, *locate(region, index, request, number))
    if own is None or not len(own):
        return stored
    new, token = own_token(index, request, number, len(own))
    return torch.where(new[..., None, None], own[token], stored)


def own_token(index, request, number, tokens):
    """(whether a row is of the step itself, which of the step's ``tokens`` then brings it)."""
    since = number.long() - of_request(index.starts, request)
    new = (request >= 0) & (number >= 0) & (since >= 0)
    return new, torch.where(new, first_token(index, request) + since, 0).clamp(max=tokens - 1)


def append(pools: Pools, region: Region, index: StepIndex, rows: torch.Tensor) -> Pools:
    """Store canonical rows [T, heads, row_bytes] of the step's tokens at their positions.

    More tokens than a ring holds: rows that a later token of the same step overwrites are left out, so each byte has
    one writer. Padding tokens write nowhere.
    """
    unit, row = locate(region, index, index.request_index, index.positions)
    # In a ring, what a later token overwrites; in blocks, what was taken over.
    least = index.lengths - region.rows if region.growth == "slot" else index.stored
    left_out = index.positions < of_request(least, index.request_index)
    return store(pools, region, torch.where(left_out, -1, unit), row, rows)


def encode_rows(region: Region, values: torch.Tensor, global_scale: float = 1.0) -> torch.Tensor:
    """Values [n, d] or [n, heads, d] -> canonical rows [n, heads, row_bytes] of a region."""
    code = encoding.plain_code(region.format)
    if code is not None and len(values):
        same = values.dtype == encoding.DTYPES[code]
        rows = encoding.to_bytes(values if same else values.to(torch.float32), code)
        return rows.reshape(len(values), region.heads, region.format.row)
    flat = values.reshape(len(values) * region.heads, region.format.dim or 0)
    return encoding.encode(region.format, flat, global_scale).reshape(len(values), region.heads, region.format.row)


def decode_rows(region: Region, rows: torch.Tensor, global_scale: float = 1.0) -> torch.Tensor:
    """Canonical rows [..., row_bytes] of a region -> values [..., d]."""
    flat = encoding.decode(region.format, rows.reshape(-1, region.format.row), global_scale=global_scale)
    return flat.reshape(*rows.shape[:-1], region.format.dim or 0)


def numbers_from(first, count, columns):
    """[Q, columns] int64 row numbers first .. first + count - 1 of every request, then -1."""
    column = torch.arange(columns, device=first.device)
    return torch.where(column < count[:, None], first[:, None].long() + column, -1)


def maximum(values, least):
    """The larger of each value of a tensor and ``least``, a number or a tensor: what components' rules are given."""
    return values.clamp(min=least)


def blank(values, valid):
    """Exact zeros where not valid, in place; ``valid`` has the leading axes of values, which may be NaN there."""
    return values.masked_fill_(~valid.reshape(*valid.shape, *[1] * (values.ndim - valid.ndim)), 0)


def portions(count: int, elements: int):
    """Slices that cover ``count`` rows of ``elements`` each, none larger than a temporary array may be."""
    size = max(1, TEMPORARY_ELEMENTS // max(1, elements))
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]
