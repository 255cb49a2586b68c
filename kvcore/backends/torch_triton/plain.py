"""Rows of plain formats (bf16, fp16, fp32) on the CPU, read as they lie: by runs of neighbours, not row by row.

A decode step of a real model waits for this: what is copied is copied once, and what is only read is not copied.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple, TypeAlias

import torch

from kvcore.backends.torch_triton.encoding import DTYPES, plain_code, within
from kvcore.pools import Pools


class Lines(NamedTuple):
    """Every row of a pool as one array.

    Attributes:
        rows: view [lines, heads, dim]; row r of unit u is line ``u * unit + r``.
        unit: lines from a unit to the next.
        kind: a number that pools share whose rows lie alike: what is where in one of them holds for the others.
    """

    rows: torch.Tensor
    unit: int
    kind: int


class Kept(NamedTuple):
    """The lines of a region as found in ``pools``, and what tells whether they are those of other pools, too."""

    pools: Pools
    name: str
    pool: torch.Tensor
    lines: Lines | None


Place: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], Any]
"""Shape, strides and offset of a view of ``Lines.rows``, as ``as_strided`` takes them."""


class Spot(NamedTuple):
    """Where ``count`` of a step's tokens lie: from token ``token`` on, and from line ``line`` on.

    ``copies`` are all places of theirs: [copies, count, heads, dim], or [count, heads, dim] of a pool without copies.
    """

    line: int
    token: int
    count: int
    copies: Place


class Run(NamedTuple):
    """``count`` rows of neighbouring positions in neighbouring lines, the first of them ``line``."""

    line: int
    count: int


PLAIN = {DTYPES[code]: code for code in ("fp32", "bf16", "fp16")}

KINDS: dict[Any, int] = {}
"""What ``Lines.kind`` numbers: how a pool grows, rows and copies of a unit, its lines, and the rows' view."""


def lines(ops, pools, region) -> Lines | None:
    """The rows of a region of a plain format, or None where rows must be decoded or don't lie evenly."""
    kept = ops.lines.get(id(region))
    if kept is not None and (pools is kept.pools or pools[kept.name] is kept.pool):
        return kept.lines
    code, name = plain_code(region.format), region.buffers[region.unit.places[0].buffer][0]
    # A view made in inference mode could not be written to outside it.
    with torch.inference_mode(False):
        found = None if code is None else lines_of(pools[name], region, DTYPES[code])
    ops.lines[id(region)] = Kept(pools, name, pools[name], found)
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
    count = (len(pool) - 1) * (step // row) + region.places if len(pool) else 0
    shape, strides = (count, region.heads, region.format.dim), (row // size, head // size, 1)
    kind = stored, region.growth, region.rows, region.copies, step // row, shape, strides, begin // size
    rows = pool.view(stored).as_strided(shape, strides, begin // size)
    return Lines(rows, step // row, KINDS.setdefault(kind, len(KINDS)))


def complete(region, host) -> bool:
    """False where a page of some request's history is not in this pool: another context shard has it."""
    return region.growth == "slot" or host.whole(region.rows)


def runs(region, host, request: int, first: int, last: int, unit: int, rows: int) -> Iterator[Run]:
    """Where positions first .. last - 1 of a request lie, in order; ``unit`` lines are from a unit to the next.

    ``rows`` is how many of a unit may be used: all ``places`` to read in as few runs as there can be, ``region.rows``
    to name the first copy of every row.
    """
    blocks = None if region.growth == "slot" else host.table(request)
    base = host.slots[request] * unit
    line = count = 0
    while first < last:
        row = first % region.rows
        some = min(last - first, rows - row)
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
        for run in runs(region, host, request, rows.start, rows.stop, stored.unit, region.places):
            out[request].narrow(1, column, run.count).copy_(by_head.narrow(1, run.line, run.count))
            column += run.count
        if column < columns:
            out[request, :, column:].zero_()
    return out.transpose(1, 2)


def append(ops, pools, regions, index, arrays) -> list[tuple[Any, Any]]:
    """Store values [T, heads, dim] of the step's tokens in each region, as ``rows.append`` their rows.

    Returns:
        The regions where this is not possible, with their values.
    """
    left = []
    for region, values in zip(regions, arrays, strict=True):
        stored = lines(ops, pools, region)
        there = None if stored is None else spots(region, ops.host(index), stored, every=False)
        if stored is None or there is None:
            left.append((region, values))
        else:
            write(values, stored.rows, there)
    return left


def append_and_borrow(ops, pools, layer, index, k, v, columns):
    """``append`` of a layer's keys and values, then ``borrow``; None: one is not possible, and nothing was written."""
    if not columns or index.slots.is_cuda:
        return None
    regions, component = ops.plan.region(layer, "kv"), ops.plan.spec.all_layers[layer].kv
    keys, values = lines(ops, pools, regions[0]), lines(ops, pools, regions[1])
    if keys is None or values is None:
        return None
    host = ops.host(index)
    key = append_and_borrow, keys.kind, values.kind, component, columns
    if key not in host.kept:
        parts = list(zip(regions, (keys, values), strict=True))
        there = [spots(region, host, stored, every=False) for region, stored in parts]
        seen = [seen_place(region, host, component, stored, columns) for region, stored in parts]
        host.kept[key] = None if None in there or None in seen else (*there, *seen)
    places = host.kept[key]
    if places is None:
        return None
    new_keys, new_values, seen_keys, seen_values = places
    write(k, keys.rows, new_keys)
    write(v, values.rows, new_values)
    return keys.rows.as_strided(*seen_keys), values.rows.as_strided(*seen_values)


def write(values, rows, places: list[Spot]) -> None:
    """Store values [T, heads, dim] in all their copies: clamped, rounded to nearest even, NaN as the code's one NaN.

    In place, and in one operation where no number has to be rounded: a decode step's rows cost what calls cost.
    """
    for _, token, count, copies in places:
        there = rows.as_strided(*copies)
        mine = values if count == values.shape[0] else values.narrow(0, token, count)
        if mine.dtype != rows.dtype:
            there.copy_(within(mine, PLAIN[rows.dtype])).nan_to_num_(nan=torch.nan, posinf=torch.inf, neginf=-torch.inf)
            continue
        mine = mine if mine.ndim == there.ndim else mine.as_strided(there.shape, (0, *mine.stride()))
        torch.nan_to_num(mine, nan=torch.nan, posinf=torch.inf, neginf=-torch.inf, out=there)


def spots(region, host, stored: Lines, *, every: bool) -> list[Spot] | None:
    """Where a regular step's tokens lie, in order: ``every`` one, or those that an append writes; None: not possible.

    Worked out once for all layers whose rows lie alike.
    """
    key = spots, stored.kind, every
    if key not in host.kept:
        possible = host.few and complete(region, host)
        host.kept[key] = list(new_spots(region, host, stored, every=every)) if possible else None
    return host.kept[key]


def new_spots(region, host, stored: Lines, *, every: bool) -> Iterator[Spot]:
    """What ``spots`` keeps."""
    (row, *others), begin, token = stored.rows.stride(), stored.rows.storage_offset(), 0
    apart = (region.rows * row,) if region.copies > 1 else ()
    for request, (start, length) in enumerate(zip(host.starts, host.lengths, strict=True)):
        # In a ring, what a later token overwrites is left out; in blocks, what was taken over.
        least = length - region.rows if region.growth == "slot" else host.stored[request]
        first = start if every else max(start, least)
        source = token + first - start
        for run in runs(region, host, request, first, length, stored.unit, region.rows):
            shape = (*(region.copies for _ in apart), run.count, *stored.rows.shape[1:])
            yield Spot(run.line, source, run.count, (shape, (*apart, row, *others), begin + run.line * row))
            source += run.count
        token += length - start


def overwritten(ops, pools, region, index) -> torch.Tensor | None:
    """Rows [T, heads, dim] as stored that lie where the step's tokens belong; None: not possible."""
    stored = lines(ops, pools, region)
    some = None if stored is None else spots(region, ops.host(index), stored, every=True)
    if stored is None or not some:
        return None
    found = [stored.rows.narrow(0, spot.line, spot.count) for spot in some]
    return torch.cat(found) if len(found) > 1 else found[0].clone(memory_format=torch.contiguous_format)


def borrow(ops, pools, regions, component, index, columns):
    """Keys and values [Q, columns, heads, dim] as they lie in the pools, nothing copied; None if not possible.

    Possible where every request's queries see ``columns`` rows in one run, and the runs are evenly spaced.
    """
    if not columns or index.slots.is_cuda:
        return None
    host, found = ops.host(index), []
    for region in regions:
        stored = lines(ops, pools, region)
        if stored is None:
            return None
        seen = seen_place(region, host, component, stored, columns)
        if seen is None:
            return None
        found.append(stored.rows.as_strided(*seen))
    return tuple(found)


def seen_place(region, host, component, stored: Lines, columns: int) -> Place | None:
    """Where the rows [Q, columns, heads, dim] lie that the requests' queries see; None: not possible.

    Worked out once for all layers of equal components whose rows lie alike.
    """
    key = seen_place, stored.kind, component, columns
    if key not in host.kept:
        host.kept[key] = new_seen_place(region, host, component, stored, columns)
    return host.kept[key]


def new_seen_place(region, host, component, stored: Lines, columns: int) -> Place | None:
    """What ``seen_place`` keeps."""
    if not region.format.is_plain or not host.few or not complete(region, host):
        return None
    requests = zip(host.starts, host.lengths, host.padding, strict=True)
    seen = [component.visible(*request) for request in requests]
    if not seen or any(len(rows) != columns for rows in seen):
        return None
    begins = []
    for request, rows in enumerate(seen):
        run, *more = runs(region, host, request, rows.start, rows.stop, stored.unit, region.places)
        if more:
            return None
        begins.append(run.line)
    step = begins[1] - begins[0] if len(begins) > 1 else columns
    if step < 0 or any(begin != begins[0] + step * number for number, begin in enumerate(begins)):
        return None
    (row, *others), begin = stored.rows.stride(), stored.rows.storage_offset()
    return (len(seen), columns, *stored.rows.shape[1:]), (step * row, row, *others), begin + begins[0] * row
