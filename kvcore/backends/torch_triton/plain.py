"""Rows of plain formats (bf16, fp16, fp32) on the CPU, read as they lie: by runs of neighbours, not row by row.

A decode step of a real model waits for this: what is copied is copied once, and what is only read is not copied.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from kvcore.backends.torch_triton.encoding import DTYPES, plain_code


class Lines(NamedTuple):
    """Every row of a pool as one array.

    Attributes:
        rows: view [lines, heads, dim]; row r of unit u is line ``u * unit + r``.
        unit: lines from a unit to the next.
    """

    rows: torch.Tensor
    unit: int


class Run(NamedTuple):
    """``count`` rows of neighbouring positions in neighbouring lines, the first of them ``line``."""

    line: int
    count: int


def lines(pools, region) -> Lines | None:
    """The rows of a region of a plain format, or None where rows must be decoded or don't lie evenly."""
    first, code = region.unit.places[0], plain_code(region.format)
    if code is None or first.split:
        return None
    pool, stored = pools[region.buffers[first.buffer][0]], DTYPES[code]
    size, (row, head) = stored.itemsize, (each * first.stride for each in region.steps)
    begin, step = pool.storage_offset() + first.base, pool.stride(0)
    if pool.is_cuda or begin % size or first.stride % size or step % row:
        return None
    count = (len(pool) - 1) * (step // row) + region.rows if len(pool) else 0
    shape, strides = (count, region.heads, region.format.dim), (row // size, head // size, 1)
    return Lines(pool.view(stored).as_strided(shape, strides, begin // size), step // row)


def complete(region, index) -> bool:
    """False where a page of some request's history is not in this pool: another context shard has it."""
    if region.growth == "slot":
        return True
    column = torch.arange(index.block_table.shape[1])
    return not bool(((index.block_table < 0) & (column * region.rows < index.lengths[:, None])).any())


def runs(region, index, request: int, first: int, last: int, unit: int) -> Iterator[Run]:
    """Where positions first .. last - 1 of a request lie, in order; ``unit`` lines are from a unit to the next."""
    if region.growth == "slot":
        blocks, base = None, int(index.slots[request]) * unit
    else:
        blocks, base = index.block_table[request].tolist(), 0
    line = count = 0
    while first < last:
        row = first % region.rows
        some = min(last - first, region.rows - row)
        start = (base if blocks is None else blocks[first // region.rows] * unit) + row
        if count and start == line + count:
            count += some
        else:
            if count:
                yield Run(line, count)
            line, count = start, some
        first += some
    if count:
        yield Run(line, count)


def dense(pools, region, index, positions) -> torch.Tensor | None:
    """Rows of ascending positions [Q, n], -1 at the end, as [Q, n, heads, dim]; None where that is not possible.

    In memory a head's rows are neighbours, as attention reads them.
    """
    stored = lines(pools, region)
    if stored is None or not complete(region, index):
        return None
    requests, columns = positions.shape
    dtype = DTYPES[region.format.value_code]
    out = torch.empty((requests, region.heads, columns, region.format.dim), dtype=dtype)
    firsts, counts = positions[:, 0].tolist() if columns else [], (positions >= 0).sum(dim=1).tolist()
    for request, first in enumerate(firsts):
        column = 0
        for run in runs(region, index, request, first, first + counts[request], stored.unit):
            rows = stored.rows[run.line : run.line + run.count]
            out[request, :, column : column + run.count].copy_(rows.transpose(0, 1))
            column += run.count
        out[request, :, column:].zero_()
    return out.transpose(1, 2)


MOST_REQUESTS = 16
"""Requests up to which a loop over them is quicker than addresses for every row."""


def counts(index) -> list[tuple[int, int, int]] | None:
    """(length before, after, tokens taken over) of every request; None for padded steps, and for many requests.

    None too where positions are not those from start to length: a context shard counts its own rows only.
    """
    if len(index.slots) > MOST_REQUESTS or index.slots.is_cuda:
        return None
    found = list(zip(index.starts.tolist(), index.lengths.tolist(), index.stored.tolist(), strict=True))
    new = sum(length - start for start, length, _ in found)
    if new != len(index.positions) or min(index.slots.tolist(), default=0) < 0:
        return None
    expected = [position for start, length, _ in found for position in range(start, length)]
    return found if index.positions.tolist() == expected else None


def append(pools, region, index, rows) -> bool:
    """Store canonical rows [T, heads, row_bytes] of the step's tokens, as ``rows.append`` does; False: not possible."""
    stored, requests = lines(pools, region), counts(index)
    if stored is None or requests is None or not complete(region, index):
        return False
    values, token = rows.view(stored.rows.dtype), 0
    for request, (start, length, taken_over) in enumerate(requests):
        # In a ring, what a later token overwrites is left out; in blocks, what was taken over.
        first = max(start, length - region.rows if region.growth == "slot" else taken_over)
        source = token + first - start
        for run in runs(region, index, request, first, length, stored.unit):
            stored.rows[run.line : run.line + run.count] = values[source : source + run.count]
            source += run.count
        token += length - start
    return True


def overwritten(pools, region, index) -> torch.Tensor | None:
    """Canonical rows [T, heads, row_bytes] that lie where the step's tokens belong; None: not possible."""
    stored, requests = lines(pools, region), counts(index)
    if stored is None or requests is None:
        return None
    found = [
        stored.rows[run.line : run.line + run.count]
        for request, (start, length, _) in enumerate(requests)
        for run in runs(region, index, request, start, length, stored.unit)
    ]
    if not found:
        return None
    return torch.cat(found).view(torch.uint8)


def borrow(pools, regions, index, columns):
    """Keys and values [Q, columns, heads, dim] as they lie in the pools, nothing copied; None if not possible.

    Possible where every request has ``columns`` rows in one run, and the runs are evenly spaced.
    """
    requests = counts(index)
    if not requests or any(length != columns for _, length, _ in requests) or not columns:
        return None
    found = []
    for region in regions:
        stored = lines(pools, region)
        if stored is None or not complete(region, index) or stored.rows.dtype != DTYPES[region.format.value_code]:
            return None
        begins = []
        for request in range(len(requests)):
            run, *more = runs(region, index, request, 0, columns, stored.unit)
            if more:
                return None
            begins.append(run.line)
        step = begins[1] - begins[0] if len(begins) > 1 else columns
        if step < 0 or any(begin != begins[0] + step * number for number, begin in enumerate(begins)):
            return None
        row, head, channel = stored.rows.stride()
        shape = (len(begins), columns, region.heads, region.format.dim)
        offset = stored.rows.storage_offset() + begins[0] * row
        found.append(stored.rows.as_strided(shape, (step * row, row, head, channel), offset))
    return tuple(found)
