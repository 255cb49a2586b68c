"""Rows on the CPU, read as they lie where they can be: by runs of neighbours, views in place of copies.

What a decode step of a real model waits for: rows of plain formats (bf16, fp16, fp32) that are copied are copied once,
and what is only read is not copied. Which rows can be read as views is one question, ``BlockLayout.supports_views``.
From top to bottom: a step's numbers on the host; memory that is used again; where rows lie; gathering and appending
them; views; which of it a layer can have.
"""

import math
from collections.abc import Iterator
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias
from weakref import ref

import torch

from kvcore.backends.torch_triton import rows as place
from kvcore.backends.torch_triton.encoding import DTYPES, plain_code, reinterpret, within
from kvcore.ops import StepIndex
from kvcore.ops.choices import Decision
from kvcore.pools import Pools

MOST_REQUESTS = 16
"""Requests up to which a loop over them is quicker than addresses for every row."""


SEVERAL = 3
"""Single rows up to which copying one by one is quicker than by addresses."""


class HostStep:
    """Lists by request of what a ``StepIndex`` holds, and what follows from them.

    Attributes:
        kept: what was worked out for one layer of the step and holds for others, by its kind and what it depends on.
    """

    def __init__(self, index: StepIndex) -> None:
        self._index = index
        self._tables: dict[int, list[int]] = {}
        self._whole: dict[int, bool] = {}
        self.kept: dict[Any, Any] = {}
        self.starts: list[int] = index.starts.tolist()
        self.lengths: list[int] = index.lengths.tolist()
        self.stored: list[int] = index.stored.tolist()
        self.slots: list[int] = index.slots.tolist()
        self.padding: list[int] = [0] * len(self.slots) if index.left_padding is None else index.left_padding.tolist()

    @cached_property
    def regular(self) -> bool:
        """True if the tokens are those from start to length, request by request: no padding, and no context shard.

        A shard counts its own rows only, and has fewer than there are new tokens, none among them.
        """
        if min(self.slots, default=0) < 0 or min(self.starts, default=0) < 0:
            return False
        expected = [
            position
            for start, length in zip(self.starts, self.lengths, strict=True)
            for position in range(start, length)
        ]
        return len(expected) == len(self._index.positions) and self._index.positions.tolist() == expected

    @cached_property
    def few(self) -> bool:
        """True if it is a regular step of few requests."""
        return len(self.slots) <= MOST_REQUESTS and self.regular

    def table(self, request: int) -> list[int]:
        """Block numbers of a request."""
        if request not in self._tables:
            self._tables[request] = self._index.block_table[request].tolist()
        return self._tables[request]

    def whole(self, rows: int) -> bool:
        """False where a block of some request's history is not in this pool: another context shard has it."""
        if rows not in self._whole:
            self._whole[rows] = not any(
                block < 0
                for request, length in enumerate(self.lengths)
                for block in self.table(request)[: -(-length // rows)]
            )
        return self._whole[rows]


class Memory:
    """Remembers the last index's numbers, until ``forget``: one that stays where it is was written anew."""

    def __init__(self) -> None:
        self._kept: tuple[Any, Any] = None, None

    def forget(self) -> None:
        """Read the next index, even if it is the last one."""
        self._kept = None, None

    def of(self, index: StepIndex) -> HostStep:
        """The index's numbers on the host."""
        kept, found = self._kept
        if kept is not index:
            found = HostStep(index)
            self._kept = index, found
        return found


class Spare:
    """Memory of outputs that nobody holds any more, written again for the next ones: one buffer for every name.

    A decode step copies every layer's rows in turn. Memory that was just read by attention is in the processor's cache;
    fresh memory is not, and writing to it costs as much as all the rest.
    """

    def __init__(self) -> None:
        # Name -> memory, and the array that all tensors on it hold, their views included.
        self._kept: dict[str, tuple[Any, ref[Any]]] = {}

    def empty(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor with any content, that shares its memory with no other tensor in use."""
        size = math.prod(shape) * dtype.itemsize
        if not size:
            return torch.empty(shape, dtype=dtype)
        kept = self._kept.get(name)
        if kept is None or kept[1]() is not None or not size <= kept[0].nbytes <= 4 * size:
            # An eighth more, since a history grows by every step.
            memory = torch.empty(size + size // 8, dtype=torch.uint8).numpy()
        else:
            memory = kept[0]
        held = memory[:size]
        self._kept[name] = memory, ref(held)
        return torch.from_numpy(held).view(dtype).view(shape)


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


class RowIndex(NamedTuple):
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
    if first.split or not region.even or pool.is_cuda:
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
        there = None if stored is None else row_indices(region, ops.host(index), stored, every=False)
        if stored is None or there is None:
            left.append((region, values))
            continue
        scattered = single_rows(ops.host(index), stored, there)
        if scattered is None:
            write(values, stored.rows, there)
        else:
            write_scattered(values, stored.rows, scattered)
    return left


def append_rows(ops, pools, region, index, rows) -> None:
    """``rows.append`` of canonical rows [T, heads, row_bytes]; where they go is worked out once for layers alike."""
    host = None if index.slots.is_cuda else ops.host(index)
    key = append_rows, region.growth, region.rows
    if host is not None and key not in host.kept:
        unit, row = place.locate(region, index, index.request_index, index.positions)
        least = index.lengths - region.rows if region.growth == "slot" else index.stored
        stored = (unit >= 0) & (index.positions >= place.of_request(least, index.request_index))
        host.kept[key] = (unit, row) if len(unit) and bool(stored.all()) else None
    places = None if host is None else host.kept[key]
    if places is None:
        place.append(pools, region, index, rows)
        return
    unit, row = places
    for part in region.unit.places:
        first, last = region.format.byte_range(part.field)
        view, window = place.field(pools, region, part)
        given = place.split_bytes(rows[:, :, first:last]) if part.split else rows[:, :, first:last]
        for copy in range(region.copies):
            at = window(unit, row + copy * region.rows if copy else row)
            view.index_copy_(0, at, reinterpret(given, view.dtype).unflatten(2, view.shape[2:]))


def single_rows(host, stored: Lines, places: list[RowIndex]) -> torch.Tensor | None:
    """The lines of a step's tokens where each of several requests brings one row; None where runs are copied."""
    key = single_rows, stored.kind
    if key not in host.kept:
        each = len(places) > SEVERAL and all(one.count == 1 and one.token == at for at, one in enumerate(places))
        once = all(len(one.copies[0]) == stored.rows.ndim for one in places)
        every = each and once and len(places) == sum(host.lengths) - sum(host.starts)
        host.kept[key] = torch.tensor([one.line for one in places]) if every else None
    return host.kept[key]


def write_scattered(values, rows, lines_of_rows) -> None:
    """As ``write``, of values [T, heads, dim] that lie in as many lines, by one operation for all."""
    if values.dtype == rows.dtype:
        numbers = torch.nan_to_num(values, nan=torch.nan, posinf=torch.inf, neginf=-torch.inf)
    else:
        numbers = within(values, PLAIN[rows.dtype]).to(rows.dtype)
        numbers.nan_to_num_(nan=torch.nan, posinf=torch.inf, neginf=-torch.inf)
    rows.index_copy_(0, lines_of_rows, numbers)


def append_and_view(ops, pools, layer, index, k, v, columns):
    """``append`` of a layer's keys and values, then ``view``; None: one is not possible, and nothing was written."""
    if not columns or index.slots.is_cuda:
        return None
    regions, component = ops.plan.region(layer, "kv"), ops.plan.spec.all_layers[layer].kv
    keys, values = lines(ops, pools, regions[0]), lines(ops, pools, regions[1])
    if keys is None or values is None:
        return None
    host = ops.host(index)
    key = append_and_view, keys.kind, values.kind, component, columns
    if key not in host.kept:
        parts = list(zip(regions, (keys, values), strict=True))
        there = [row_indices(region, host, stored, every=False) for region, stored in parts]
        seen = [seen_place(region, host, component, stored, columns) for region, stored in parts]
        host.kept[key] = None if None in there or None in seen else (*there, *seen)
    places = host.kept[key]
    if places is None:
        return None
    new_keys, new_values, seen_keys, seen_values = places
    write(k, keys.rows, new_keys)
    write(v, values.rows, new_values)
    return keys.rows.as_strided(*seen_keys), values.rows.as_strided(*seen_values)


class InTurn(NamedTuple):
    """A step of one token a request, whose keys and values layers alike store one after the other, and hand views out.

    Attributes:
        layers: layer -> lines of keys and of values.
        written: where new keys and values lie, [copies or requests, heads, 1, dim].
        seen: where those lie that queries see, [requests, heads, columns, dim].
    """

    layers: dict[int, tuple[torch.Tensor, torch.Tensor]]
    written: tuple[Place, Place]
    seen: tuple[Place, Place]

    def __call__(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Store k and v [requests, heads, 1, dim] of the lines' dtype, as ``write`` does; what queries see of both."""
        (keys, values), (new_keys, new_values), (all_keys, all_values) = self.layers[layer], self.written, self.seen
        if new_keys[0][0] != k.shape[0]:
            k, v = k.expand(new_keys[0]), v.expand(new_values[0])
        torch.nan_to_num(k, nan=torch.nan, posinf=torch.inf, neginf=-torch.inf, out=keys.as_strided(*new_keys))
        torch.nan_to_num(v, nan=torch.nan, posinf=torch.inf, neginf=-torch.inf, out=values.as_strided(*new_values))
        return keys.as_strided(*all_keys), values.as_strided(*all_values)


def in_turn(ops, pools, layer, index, k, v, columns) -> InTurn | None:
    """What follows for layers alike once a layer's k and v [T, heads, dim] went through ``append_and_view``.

    None: their numbers are stored otherwise, or in rows that are not evenly spaced.
    """
    regions, component = ops.plan.region(layer, "kv"), ops.component(layer, "kv")
    keys, values = lines(ops, pools, regions[0]), lines(ops, pools, regions[1])
    if keys is None or values is None or (keys.rows.dtype, values.rows.dtype) != (k.dtype, v.dtype):
        return None
    host, kinds = ops.host(index), (keys.kind, values.kind)
    key = in_turn, *kinds, component, columns
    if key not in host.kept:
        host.kept[key] = places_in_turn(host, host.kept.get((append_and_view, *kinds, component, columns)))
    found = host.kept[key]
    return None if found is None else InTurn(lines_alike(ops, pools, kinds, component), *found)


def places_in_turn(host, places) -> tuple[tuple[Place, Place], tuple[Place, Place]] | None:
    """``written`` and ``seen`` of layers alike, of what ``append_and_view`` has worked out; None: not possible."""
    if places is None:
        return None
    keys, values = (new_token_place(each, len(host.slots)) for each in places[:2])
    return None if keys is None or values is None else ((keys, values), (by_head(places[2]), by_head(places[3])))


def new_token_place(some: list[RowIndex], requests: int) -> Place | None:
    """Where one token of each request lies, [copies or requests, heads, 1, dim]; None: not evenly spaced."""
    if len(some) != requests or any(one.count != 1 for one in some):
        return None
    shape, strides, begin = some[0].copies
    if requests == 1:
        return by_head((shape, strides, begin) if len(shape) == 4 else ((1, *shape), (0, *strides), begin))
    step = some[1].copies[2] - begin
    if len(shape) == 4 or step < 0 or any(one.copies[2] != begin + step * at for at, one in enumerate(some)):
        return None
    return by_head(((requests, *shape), (step, *strides), begin))


def by_head(where: Place) -> Place:
    """The same with heads before rows."""
    (batch, count, heads, dim), (apart, row, head, channel), begin = where
    return (batch, heads, count, dim), (apart, head, row, channel), begin


def lines_alike(ops, pools, kinds, component) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Lines of keys and values of all layers of equal components whose rows lie as ``kinds`` say."""
    kept = ops.lines_alike.get((kinds, component))
    if kept is not None and kept[0] is pools:
        return kept[1]
    found: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for number in range(len(ops.layers)):
        if ops.component(number, "kv") == component:
            keys, values = (lines(ops, pools, region) for region in ops.plan.region(number, "kv"))
            if keys is not None and values is not None and (keys.kind, values.kind) == kinds:
                found[number] = keys.rows, values.rows
    ops.lines_alike[kinds, component] = pools, found
    return found


def write(values, rows, places: list[RowIndex]) -> None:
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


def row_indices(region, host, stored: Lines, *, every: bool) -> list[RowIndex] | None:
    """Where a regular step's tokens lie, in order: ``every`` one, or those that an append writes; None: not possible.

    Worked out once for all layers whose rows lie alike.
    """
    key = row_indices, stored.kind, every
    if key not in host.kept:
        possible = host.few and complete(region, host)
        host.kept[key] = list(new_row_indices(region, host, stored, every=every)) if possible else None
    return host.kept[key]


def new_row_indices(region, host, stored: Lines, *, every: bool) -> Iterator[RowIndex]:
    """What ``row_indices`` keeps."""
    (row, *others), begin, token = stored.rows.stride(), stored.rows.storage_offset(), 0
    apart = (region.rows * row,) if region.copies > 1 else ()
    for request, (start, length) in enumerate(zip(host.starts, host.lengths, strict=True)):
        # In a ring, what a later token overwrites is left out; in blocks, what was taken over.
        least = length - region.rows if region.growth == "slot" else host.stored[request]
        first = start if every else max(start, least)
        source = token + first - start
        for run in runs(region, host, request, first, length, stored.unit, region.rows):
            shape = (*(region.copies for _ in apart), run.count, *stored.rows.shape[1:])
            yield RowIndex(run.line, source, run.count, (shape, (*apart, row, *others), begin + run.line * row))
            source += run.count
        token += length - start


def overwritten(ops, pools, region, index) -> torch.Tensor | None:
    """Rows [T, heads, dim] as stored that lie where the step's tokens belong; None: not possible."""
    stored = lines(ops, pools, region)
    some = None if stored is None else row_indices(region, ops.host(index), stored, every=True)
    if stored is None or not some:
        return None
    found = [stored.rows.narrow(0, spot.line, spot.count) for spot in some]
    return torch.cat(found) if len(found) > 1 else found[0].clone(memory_format=torch.contiguous_format)


def view(ops, pools, regions, component, index, columns):
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
    if not region.unit.supports_views or not host.few or not complete(region, host):
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


def unlike(keys, values) -> str:
    """Why keys and values are not attended to in pieces; "" where they are."""
    alike = (keys.heads, keys.format.dim) == (values.heads, values.format.dim)
    return "" if alike else "keys and values have different heads or dims: all rows are gathered, then attended to"


def decide(ops: Any, layer: Any, verb: str) -> Decision:
    """How a layer's verbs on keys and values run on the CPU; "torch" is said of what copies."""
    regions = ops.plan.region(layer, "kv")
    declined = dict.fromkeys(f"{region.format.name} in layout {region.layout}" for region in regions if _copied(region))
    if verb in ("kv_view", "append_kv_view"):
        if declined:
            return Decision("none" if verb == "kv_view" else "torch", f"no views of {' and '.join(declined)}")
        return Decision(
            "views", "rows are read where they lie; none where requests see unevenly many, or not in one run"
        )
    if ops.layers[layer].over_tokens:
        why = "groups of tokens are coded and decoded whole, beside the raw rows of the open one"
        if verb == "attend_kv" and not unlike(*regions):
            why += "; one new token of each request attends to them a piece at a time"
            if ops.layers[layer].is_decoded_in_c:
                why += ", to those coded in C where that is worth it and there is a compiler"
        return Decision("torch", why)
    if verb == "attend_kv":
        why = unlike(*regions) or (
            "torch's fused attention over pieces of the rows; all rows are gathered first where k and v are given, in "
            "a padded step, and where a number is not finite"
        )
        if declined and ops.layers[layer].is_decoded_in_c:
            why += "; one new token of each request attends in C where that is worth it and there is a compiler"
        return Decision("torch", why)
    if declined:
        return Decision("torch", f"rows are moved one by one: {' and '.join(declined)}")
    return Decision("torch", "runs of rows are copied as they lie; one by one in a padded step or one of many requests")


def _copied(region) -> bool:
    return not region.unit.supports_views
