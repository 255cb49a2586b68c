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


def lines(ops, pools, region) -> Lines | None:
    """The rows of a region of a plain format, or None where rows must be decoded or don't lie evenly."""
    code = plain_code(region.format)
    if code is None:
        return None
    pool = pools[region.buffers[region.unit.places[0].buffer][0]]
    kept = ops.lines.get(id(region))
    if kept is not None and kept[0] is pool:
        return kept[1]
    # A view made in inference mode could not be written to outside it.
    with torch.inference_mode(False):
        found = lines_of(pool, region, DTYPES[code])
    ops.lines[id(region)] = pool, found
    return found


def lines_of(pool, region, stored: torch.dtype) -> Lines | None:
    """The rows of a pool of ``stored`` elements."""
    (first,) = region.unit.places
    if first.split or pool.is_cuda:
        return None
    size, (row, head) = stored.itemsize, (each * first.stride for each in region.steps)
    begin, step = pool.storage_offset() + first.base, pool.stride(0)
    if begin % size or first.stride % size or step % row:
        return None
    count = (len(pool) - 1) * (step // row) + region.rows if len(pool) else 0
    shape, strides = (count, region.heads, region.format.dim), (row // size, head // size, 1)
    return Lines(pool.view(stored).as_strided(shape, strides, begin // size), step // row)


def complete(region, host) -> bool:
    """False where a page of some request's history is not in this pool: another context shard has it."""
    return region.growth == "slot" or host.whole(region.rows)


def runs(region, host, request: int, first: int, last: int, unit: int) -> Iterator[Run]:
    """Where positions first .. last - 1 of a request lie, in order; ``unit`` lines are from a unit to the next."""
    blocks = None if region.growth == "slot" else host.table(request)
    base = host.slots[request] * unit
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


def gather(ops, pools, regions, component, index, columns):
    """Keys, values [Q, columns, heads, dim] and positions [Q, columns] as ``gather_kv``; None if not possible.

    In memory a head's rows are neighbours, as attention reads them.
    """
    stored = [lines(ops, pools, region) for region in regions]
    if any(found is None for found in stored):
        return None
    host = ops.host(index)
    if not all(complete(region, host) for region in regions):
        return None
    requests = zip(host.starts, host.lengths, host.padding, strict=True)
    seen = [component.visible(*request)[:columns] for request in requests]
    dense = [filled(ops, region, rows, host, seen, columns) for region, rows in zip(regions, stored, strict=True)]
    positions = torch.full((len(seen), columns), -1, dtype=torch.int32)
    for request, rows in enumerate(seen):
        torch.arange(rows.start, rows.stop, out=positions[request, : len(rows)])
    return *dense, positions


def filled(ops, region, stored, host, seen, columns):
    """The rows ``seen`` of every request, then zeros: [Q, columns, heads, dim]."""
    dtype = DTYPES[region.format.value_code]
    out = ops.spare.empty(region.part, (len(seen), region.heads, columns, region.format.dim), dtype)
    by_head = stored.rows.transpose(0, 1)
    for request, rows in enumerate(seen):
        column = 0
        for run in runs(region, host, request, rows.start, rows.stop, stored.unit):
            out[request].narrow(1, column, run.count).copy_(by_head.narrow(1, run.line, run.count))
            column += run.count
        if column < columns:
            out[request, :, column:].zero_()
    return out.transpose(1, 2)


def append(ops, pools, region, index, values) -> bool:
    """Store values [T, heads, dim] of the step's tokens, as ``rows.append`` their rows; False: not possible."""
    stored = lines(ops, pools, region)
    if stored is None:
        return False
    host = ops.host(index)
    if not host.few or not complete(region, host):
        return False
    values, token = canonical(values, stored.rows.dtype), 0
    for request, (start, length) in enumerate(zip(host.starts, host.lengths, strict=True)):
        # In a ring, what a later token overwrites is left out; in blocks, what was taken over.
        least = length - region.rows if region.growth == "slot" else host.stored[request]
        first = max(start, least)
        source = token + first - start
        for run in runs(region, host, request, first, length, stored.unit):
            stored.rows.narrow(0, run.line, run.count).copy_(values.narrow(0, source, run.count))
            source += run.count
        token += length - start
    return True


def canonical(values, stored: torch.dtype):
    """Values as they are stored: rounded to nearest even, NaN as the code's one NaN."""
    found = values if values.dtype == stored else values.to(torch.float32).to(stored)
    return found.nan_to_num(nan=torch.nan, posinf=torch.inf, neginf=-torch.inf)


def overwritten(ops, pools, region, index) -> torch.Tensor | None:
    """Canonical rows [T, heads, row_bytes] that lie where the step's tokens belong; None: not possible."""
    stored = lines(ops, pools, region)
    if stored is None:
        return None
    host = ops.host(index)
    if not host.few:
        return None
    found = [
        stored.rows[run.line : run.line + run.count]
        for request, (start, length) in enumerate(zip(host.starts, host.lengths, strict=True))
        for run in runs(region, host, request, start, length, stored.unit)
    ]
    if not found:
        return None
    return (torch.cat(found) if len(found) > 1 else found[0].clone(memory_format=torch.contiguous_format)).view(
        torch.uint8
    )


def borrow(ops, pools, regions, index, columns):
    """Keys and values [Q, columns, heads, dim] as they lie in the pools, nothing copied; None if not possible.

    Possible where every request has ``columns`` rows in one run, and the runs are evenly spaced.
    """
    if index.slots.is_cuda or not columns:
        return None
    host, found = ops.host(index), []
    if not host.lengths or any(length != columns for length in host.lengths) or not host.few:
        return None
    for region in regions:
        stored = lines(ops, pools, region)
        if stored is None or stored.rows.dtype != DTYPES[region.format.value_code] or not complete(region, host):
            return None
        begins = []
        for request in range(len(host.lengths)):
            run, *more = runs(region, host, request, 0, columns, stored.unit)
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
