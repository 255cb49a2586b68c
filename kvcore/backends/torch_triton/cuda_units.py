"""Life cycle on CUDA: reset, poison, copies, digests, pages, rows that an abort puts back.

Nothing asks the device for a value. Fields that lie side by side both in a unit and in the canonical row are one run of
bytes, copied in the widest words that all its addresses are multiples of.
"""

from functools import cache
from itertools import product
from math import gcd
from typing import NamedTuple

import numpy as np
import torch
from torch.nn.functional import pad

from kvcore.backends.torch_triton.cuda import PLAIN, Kernel, Ready, name_of_kernels
from kvcore.backends.torch_triton.host_pages import CHUNK, CHUNKS, SMALLER_CHUNK, Buffers
from kvcore.backends.torch_triton.launch import calls
from kvcore.digest import MASK, region_salt
from kvcore.kernels.triton import checksum
from kvcore.kernels.triton.strips import ENTRY
from kvcore.ops.choices import Decision, Declined
from kvcore.plan import Region
from kvcore.pools import fresh_unit

WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
"""What pages are copied in, by bytes."""

MOST_SLOTS = 8
"""Slots that are reset with launches of their own each; more of them pool by pool."""

MOST_FRESH = 64 << 20
"""Bytes of a slot up to which what a fresh one holds is kept on the device; larger ones are filled pool by pool."""

FRESH_PAGE = ""
"""Beside the names of pools: what all of a fresh slot holds."""

MOST_POOLS = 3
"""Pools of a region that a launch on ring rows takes."""

ENTRY_FIRST, ENTRY_COUNT = 12, 13
"""Of an entry's integers: the first row, rows in all."""

DIGEST_FIRST, DIGEST_STEP, DIGEST_COUNT = 3, 4, 5
"""Of an entry of a digest: position of the first row, tokens a row, rows in all."""

MOST_TABLES = 64
"""That are kept of each kind: of pages of history there is one, of records there are several."""

SIZES = 9
"""Leading integers of an entry that are bytes before they become words; of a pool's address only multiples matter."""


def whole(growths=()):
    """A binding of a verb on whole units to (region, buffer, name of the pool) of all pools of some growth."""

    def bind(ops, layer):
        del layer
        given = tuple(
            tuple(
                (region, buffer, name)
                for region in ops.plan.stored
                if region.growth == growth
                for buffer, (name, _) in region.buffers.items()
            )
            for growth in growths
        )
        return Ready(given, decision=Decision(name_of_kernels(), "whole units are bytes, whatever their format"))

    return bind


def reset_slots(bound, ops, pools, slots):
    """Make slots [n] as if never used; -1 is ignored.

    Whoever is admitted asks: all pools of a slot in a launch for each width of words, as rows of a page of fresh units.
    """
    (buffers,), slots = bound, _units(ops, slots)
    many = torch.compiler.is_compiling() or len(slots) > MOST_SLOTS
    if many or sum(pools[name].shape[1] for _, _, name in buffers) > MOST_FRESH:
        for region, buffer, name in buffers:
            calls().fill_units(pools[name], slots, _fresh_unit(ops, region, buffer, name), 0)
        return pools
    page, tables = _fresh_page(ops, buffers, pools)
    for number in range(len(slots)):
        for width, table in tables:
            calls().move_strips(_words(page, WORDS[width]), slots[number : number + 1], table, 0, True)
    return pools


def _fresh_page(ops, buffers, pools):
    """([1, bytes] of fresh units one after the other, [(bytes of a word, [pools, ENTRY] int64)] of where they go)."""
    places = tuple(pools[name].data_ptr() for _, _, name in buffers)
    kept = ops.fresh.get(FRESH_PAGE)
    if kept is None or kept[0] != places:
        sizes = [pools[name].shape[1] for _, _, name in buffers]
        starts = np.cumsum([0, *(-(-size // max(WORDS)) * max(WORDS) for size in sizes)])
        with torch.inference_mode(False):
            page = torch.zeros((1, int(starts[-1])), dtype=torch.uint8, device=ops.torch_device)
            for (region, buffer, _), start, size in zip(buffers, starts, sizes, strict=False):
                fresh = fresh_unit(region, buffer)
                if fresh is not None:
                    page[0, start : start + size] = ops.bytes_of(fresh)
            entries = [
                (place, pools[name].stride(0), 0, 0, 0, size, start, 0, 0, 1, 1, 1, 0, 1)
                for (_, _, name), place, start, size in zip(buffers, places, starts, sizes, strict=False)
                if size and len(pools[name])
            ]
            tables = [(width, ops.asarray(table)) for width, table, _ in _by_width(entries, page.shape[1])]
        kept = ops.fresh[FRESH_PAGE] = places, page, tables
    return kept[1:]


def _fresh_unit(ops, region, buffer, name):
    """What a unit holds before anything is written, on the device; None means zeros."""
    if name not in ops.fresh:
        fresh = fresh_unit(region, buffer)
        with torch.inference_mode(False):
            ops.fresh[name] = None if fresh is None else ops.bytes_of(fresh)
    return ops.fresh[name]


def poison(bound, ops, pools, slots, blocks):
    """Fill freed slots [n] and blocks [m] with 0xFF, NaN in every float code, so that a stale read is seen."""
    for buffers, units in zip(bound, (_units(ops, slots), _units(ops, blocks)), strict=True):
        for _, _, name in buffers:
            calls().fill_units(pools[name], units, None, 0xFF)
    return pools


def copy_units(bound, ops, pools, sources, targets):
    """Copy whole slots, or blocks; all sources are read before any target is written; pairs with a -1 are ignored."""
    sources, targets = _units(ops, sources), _units(ops, targets)
    for _, _, name in bound[0]:
        calls().copy_units(pools[name], sources, targets)
    return pools


def digest_rows(bound, ops, raw, salt):
    """Two 32-bit lanes for every request over its rows and positions -> [Q, 2] int64; see ``kvcore.digest``."""
    del bound, ops
    # A row's last word is filled up with zeros.
    words = pad(raw.rows, (0, -raw.rows.shape[2] % 4)).contiguous().view(torch.int32)
    return _unsigned(calls().digest_lanes(words, raw.positions.int().contiguous(), salt))


def _units(ops, numbers):
    return ops.asarray(numbers).int().contiguous()


class Ring(NamedTuple):
    """What a launch must know of a region whose units are rings.

    Attributes:
        names: of its pools.
        row: heads, and bytes of a head's row.
        fields: seven numbers a field, see ``ring_rows_kernel``.
        rows: of a ring, which lies ``copies`` times in its unit.
    """

    names: list[str]
    row: tuple[int, int]
    fields: list[int]
    rows: int
    copies: int

    @classmethod
    def of(cls, region):
        """A region's ring."""
        pools, fields = list(region.buffers), []
        for place in region.unit.places:
            steps = (step * place.stride for step in region.steps)
            first, _ = region.format.byte_range(place.field)
            _, unit = region.buffers[place.buffer]
            fields += pools.index(place.buffer), unit, place.base, *steps, place.nbytes, first
        names = [name for name, _ in region.buffers.values()]
        return cls(names, (region.heads, region.format.row), fields, region.rows, region.copies)

    def move(self, pools, index, held, *, back):
        """The rows that the step's tokens take -> ``held`` [tokens, heads, bytes], or ``back``."""
        place = index.positions, index.request_index, index.slots
        buffers = [pools[name] for name in self.names]
        calls().move_ring_rows(buffers, held, *place, self.fields, self.rows, self.copies, back)


def bind_rings(ops, layer):
    """{role: its rings, one a part; None where rows lie in blocks, or are not the kernel's} of a layer's roles."""
    rings, apart = {}, []
    for role, regions in ops.plan.layers[layer].regions.items():
        slots = all(region.growth == "slot" for region in regions)
        few = all(len(region.buffers) <= MOST_POOLS for region in regions)
        rings[role] = [Ring.of(region) for region in regions] if slots and few else None
        apart += [role] if slots and not few else []
    if apart:
        reason = f"a row of {' and '.join(apart)} lies in more than {MOST_POOLS} arrays"
        return Ready(rings, decision=Decision("torch", reason, slower=True))
    return Ready(rings, decision=Decision(name_of_kernels(), "one launch moves a part's rows, bytes as they are"))


def read_ring(bound, ops, pools, layer, role, index):
    """Raw bytes of the ring rows that the step's tokens will overwrite, for ``restore_ring``: a launch a part."""
    rings = bound[role]
    if rings is None:
        return PLAIN.read_ring(ops, pools, layer, role, index)
    tokens, saved = len(index.positions), []
    for ring in rings:
        held = torch.empty((tokens, *ring.row), dtype=torch.uint8, device=ops.device)
        ring.move(pools, index, held, back=False)
        saved.append(held)
    return saved


def restore_ring(bound, ops, pools, layer, role, index, saved):
    """Put back what ``read_ring`` saved."""
    rings = bound[role]
    if rings is None:
        return PLAIN.restore_ring(ops, pools, layer, role, index, saved)
    for ring, held in zip(rings, saved, strict=True):
        ring.move(pools, index, held, back=True)
    return pools


class Run(NamedTuple):
    """Neighbouring bytes of a row.

    Attributes:
        buffer: of the layout; "" for bytes that are not stored and read as zeros.
        base: first byte in a unit.
        stride: bytes from one format row of a unit to the next.
        first: first byte in the canonical row.
        nbytes: of the run.
    """

    buffer: str
    base: int
    stride: int
    first: int
    nbytes: int


def runs(region: Region) -> tuple[Run, ...] | None:
    """Runs of a region's rows, which together are the whole row; None where rows, or bytes of an element, lie apart."""
    return _runs(region.unit) if region.even else None


@cache
def _runs(unit):
    found: list[Run] = []
    end = 0
    for place in sorted(unit.places, key=lambda place: unit.format.byte_range(place.field)):
        first, last = unit.format.byte_range(place.field)
        if place.split:
            return None
        if first > end:
            found.append(Run("", 0, 0, end, first - end))
        run = Run(place.buffer, place.base, place.stride, first, place.nbytes)
        before = found[-1] if found else None
        if before and (before.buffer, before.stride, before.base + before.nbytes) == (run.buffer, run.stride, run.base):
            found[-1] = before._replace(nbytes=before.nbytes + run.nbytes)
        else:
            found.append(run)
        end = last
    if end < unit.format.row:
        found.append(Run("", 0, 0, end, unit.format.row - end))
    return tuple(found)


def movable(plan):
    """Whether no region stores the bytes of an element apart."""
    return all(runs(region) is not None for region in plan.regions)


def bind_move(ops, layer):
    """Where no layout stores the bytes of an element apart: there rows are moved component by component."""
    del layer
    if not ops.movable:
        return Declined(f"layout {ops.plan.layout} stores the bytes of an element apart")
    return Ready(None, decision=Decision(name_of_kernels(), "one launch moves all rows of a request"))


def move_strips(bound, ops, pools, pages, strips, units, *, store=False):
    """Copy a request's rows from the pools into pages, or with ``store`` back, in a launch for each width of words."""
    del bound
    if isinstance(pages, np.ndarray):
        if ops.device == "cpu":  # as pools under the interpreter are
            return PLAIN.move_strips(ops, pools, pages, strips, units, store=store)
        moving = through_device(ops, pools, pages, strips, units, store=store)
        if moving is not None:
            moving.wait()
        return moving is not None
    tables = _of_move(ops, pools, strips, _grain(pages), store=store)
    units, sent = _with_units(ops, units, [table for _, table, _ in tables])
    for (width, *_), table in zip(tables, sent, strict=True):
        calls().move_strips(_words(pages, WORDS[width]), units, table, 0, store)
    return True


def begin_pages(ops, pages):
    """Pages of the host on their way to buffers of the device, for ``through_device`` to go on with; None elsewhere."""
    if not ops.movable or not pages.flags.c_contiguous or not len(pages):
        return None
    buffers = Buffers(ops.torch_device, pages, _rows_of_chunk(pages), incoming=True)
    buffers.begin()
    return buffers


def through_device(ops, pools, pages, strips, units, *, store, digested=None, blank=False, begun=None):
    """The same of pages [n, bytes] in the host's memory, chunk by chunk; with the lanes of the strips ``digested``.

    Args:
        blank: bytes of pages that are no strip's become zeros.
        begun: with ``store``, from ``begin_pages`` of these pages, and of others behind them.

    Returns:
        ``Buffers``, for their lanes and for the end; None, and nothing is done, where there are no launches for such
        strips.
    """
    others = () if digested is None or digested is strips else digested
    unlike = any(isinstance(strip.numbers, tuple) for strip in (*strips, *others))
    if unlike or not ops.movable or not pages.flags.c_contiguous:
        return None
    rows = _rows_of_chunk(pages)
    buffers = Buffers(ops.torch_device, pages, rows, incoming=store) if begun is None else begun.of_first(len(pages))
    try:
        if store and begun is None:
            # Tables are made while pages are on the way.
            buffers.begin()
        _move_chunks(ops, pools, buffers, strips, units, store=store, digested=digested, blank=blank)
    except BaseException:
        buffers.wait()
        raise
    return buffers


def _move_chunks(ops, pools, buffers, strips, units, *, store, digested, blank):
    page_bytes = buffers.pages.shape[1]
    tables = _of_move(ops, pools, strips, page_bytes, store=store)
    units, sent = _with_units(ops, units, [table for _, table, _ in tables])
    moves = [(WORDS[width], table) for (width, *_), table in zip(tables, sent, strict=True)]
    whole, digests = _whole(strips, page_bytes), None
    for turn, some, room in buffers.chunks(incoming=store):
        if not store and some.stop > whole:
            part = max(some.start, whole)
            if blank:
                room[part - some.start :].zero_()
            else:
                buffers.add(turn, some, part)
        for dtype, table in moves:
            calls().move_strips(_words(room, dtype), units[some], table, some.start, store)
        if not store and digested is not None and buffers.is_late(some):
            buffers.hold(turn, some)
        elif not store:
            buffers.send(turn, some)
        if digested is not None and not some.start:
            # Not before the first chunk is on its way.
            table = _of_digest(ops, digested, page_bytes)
            digests = None if table is None else _sent(ops, [table])[0]
        if digests is not None:
            buffers.keep(calls().digest_strips(_words(room, torch.int32), digests, some.start))


def _rows_of_chunk(pages):
    chunk = min(CHUNK, max(SMALLER_CHUNK, pages.nbytes // CHUNKS))
    return max(1, chunk // max(1, pages.shape[1]))


def _with_units(ops, units, arrays):
    """Numbers of units, which may be on the device already, and arrays of integers."""
    if isinstance(units, torch.Tensor):
        return _units(ops, units), _sent(ops, arrays)
    units, *sent = _sent(ops, [np.ascontiguousarray(units, np.int32), *arrays])
    return units, sent


def _sent(ops, arrays):
    """Integers on the device, all in one copy, which nobody waits for."""
    sizes = [-(-array.nbytes // max(WORDS)) * max(WORDS) for array in arrays]
    ends = np.cumsum([0, *sizes]).tolist()[1:]
    staged = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=ops.torch_device.type == "cuda")
    host = staged.numpy()
    for array, size, end in zip(arrays, sizes, ends, strict=True):
        host[end - size : end - size + array.nbytes] = array.reshape(-1).view(np.uint8)
    sent = staged.to(ops.torch_device, non_blocking=True)
    return [
        sent[end - size : end - size + array.nbytes].view(WORDS[array.dtype.itemsize]).view(array.shape)
        for array, size, end in zip(arrays, sizes, ends, strict=True)
    ]


def _whole(strips, page_bytes):
    """How many pages from the first on strips fill, bytes and rows."""
    if sum(strip.nbytes for strip in strips) < page_bytes:
        return 0
    return min((len(strip.numbers) // max(1, strip.rows) for strip in strips), default=0)


def bind_digest(ops, layer):
    """Of pages of whole words."""
    del ops, layer
    why = "one launch digests pages of whole 4-byte words, else digest_rows role by role"
    return Ready(None, decision=Decision(name_of_kernels(), why))


def digest_strips(bound, ops, pages, strips, first_page):
    """Two lanes for every page -> [pages, 2] int64, in one launch; None where rows are not whole words."""
    del bound
    if isinstance(pages, np.ndarray):
        return PLAIN.digest_strips(ops, pages, strips, first_page)
    table = _of_digest(ops, strips, _grain(pages))
    if table is None:
        return None
    return _unsigned(calls().digest_strips(_words(pages, torch.int32), *_sent(ops, [table]), first_page))


def component_lanes(ops, pools, strips, units):
    """What ``digest_rows`` gives of every strip of a request, where its rows lie, in one launch: a list of pairs.

    None in the place of a strip whose rows are not whole words, and of all where bytes of an element lie apart.
    """
    if not ops.movable:
        return [None] * len(strips)
    # As if each were alone in its pages.
    strips = [strip._replace(start=0) for strip in strips]
    tables = _of_move(ops, pools, strips, checksum.WORD, store=False)
    unlike = np.concatenate([of for width, _, of in tables if width != checksum.WORD] or [[]])
    about = np.array([(one.tokens_per_row, region_salt(one.layer, one.role)) for one in strips], np.int64)
    lanes = torch.zeros((len(strips), 2), dtype=torch.int32, device=ops.torch_device)
    for width, table, of in tables:
        if width == checksum.WORD:
            table = np.concatenate([table, about[of], of[:, None]], axis=1)[~np.isin(of, unlike)]
            calls().digest_runs(lanes, *_sent(ops, [units, table]))
    found = lanes.cpu().numpy().view(np.uint32).tolist()
    return [None if number in unlike else tuple(pair) for number, pair in enumerate(found)]


def _words(pages, dtype):
    """Pages [n, bytes] as words."""
    # Tensors without elements may have strides that ``view`` refuses.
    return pages.view(dtype) if pages.numel() else pages.new_empty((len(pages), 0), dtype=dtype)


def _unsigned(lanes):
    return lanes.long() & MASK


def _of_move(ops, pools, strips, grain, *, store):
    """[(bytes of a word, [runs, ENTRY] int64, which strip each run is of)] of strips whose bytes lie together.

    ``grain``: bytes that all pages begin at multiples of. With ``store`` every copy of a row is moved to.
    """
    numbers, tables = _numbers(strips), []
    for width, table, of in _entries_of_move(ops, pools, strips, grain, store):
        table = table.copy()
        table[:, ENTRY_FIRST], table[:, ENTRY_COUNT] = numbers[of].T
        tables.append((width, table, of))
    return tables


def _entries_of_move(ops, pools, strips, grain, store):
    """The same without numbers of rows.

    They follow from where strips lie and from where the pools do, which stay there.
    """
    key = _places(strips), grain, store
    names, where, found = ops.moves.get(key, ((), None, None))
    if found is not None and [pools[name].data_ptr() for name in names] == where:
        return found
    entries, of, used = [], [], list[str]()
    for number, strip in enumerate(strips):
        offset = strip.start
        for region in ops.plan.region(strip.layer, strip.role):
            row_step, head_step = region.steps
            for run, copy in product(runs(region) or (), range(region.copies if store else 1)):
                pool = pools[region.buffers[run.buffer][0]] if run.buffer else None
                used += [region.buffers[run.buffer][0]] if run.buffer else []
                place = (0, 0) if pool is None else (pool.data_ptr(), pool.stride(0))
                base = run.base + copy * region.rows * row_step * run.stride
                inside = *place, base, row_step * run.stride, head_step * run.stride, run.nbytes
                outside = offset + run.first, strip.row_bytes, region.format.row
                entries.append((*inside, *outside, region.heads, strip.rows, region.rows, 0, 0))
                of.append(number)
            offset += region.heads * region.format.row
    of = np.array(of, np.int64)
    found = [(width, table, of[some]) for width, table, some in _by_width(entries, grain)]
    names = list(dict.fromkeys(used))
    _limit(ops.moves)
    ops.moves[key] = names, [pools[name].data_ptr() for name in names], found
    return found


def _by_width(entries, grain):
    """[(bytes of a word, [runs, ENTRY] int64, which entries)] of entries in bytes, in the widest words they allow."""
    whole = np.array(entries, np.int64).reshape(-1, ENTRY)
    if not len(whole):
        return []
    widths = np.gcd(np.gcd.reduce(whole[:, :SIZES], axis=1), np.gcd(grain, max(WORDS)))
    found = []
    for width in np.unique(widths).tolist():
        some = widths == width
        table = whole[some]
        table[:, 1:SIZES] //= width
        found.append((width, table, some))
    return found


def _of_digest(ops, strips, grain):
    """[strips, ENTRY] int32 of ``kernels.checksum``; None where rows are not whole words of the digest."""
    places = _places(strips)
    if (places, grain) not in ops.digests:
        _limit(ops.digests)
        ops.digests[places, grain] = _entries_of_digest(strips, grain)
    table = ops.digests[places, grain]
    if table is None:
        return None
    table = table.copy()
    first, count = _numbers(strips).T
    table[:, DIGEST_FIRST], table[:, DIGEST_COUNT] = first * table[:, DIGEST_STEP], count
    return table


def _entries_of_digest(strips, grain):
    """The same without numbers of rows."""
    sizes = [grain, *(size for strip in strips for size in (strip.start, strip.row_bytes))]
    if any(size % checksum.WORD for size in sizes):
        return None
    entries = [
        (
            *(strip.start // checksum.WORD, strip.rows, strip.row_bytes // checksum.WORD),
            *(0, strip.tokens_per_row, 0, region_salt(strip.layer, strip.role)),
        )
        for strip in strips
    ]
    return np.array(entries, np.int64).reshape(-1, checksum.ENTRY).astype(np.uint32).view(np.int32)


def _places(strips):
    """Where strips lie in pages, whichever rows they hold."""
    return tuple([(layer, role, start, rows, size, step) for layer, role, start, rows, size, _, step in strips])


def _numbers(strips):
    """(first row, rows) of strips whose rows are neighbours: [strips, 2]."""
    return np.array([(strip.numbers.start, len(strip.numbers)) for strip in strips], np.int64).reshape(-1, 2)


def _limit(tables):
    """Room for one more table."""
    if len(tables) >= MOST_TABLES:
        tables.clear()


def _grain(pages):
    """Bytes that the pages' beginnings are multiples of: a record may lie behind pages of fewer."""
    return gcd(pages.shape[1], pages.storage_offset())


KERNELS = {
    "reset_slots": Kernel(reset_slots, whole(("slot",))),
    "poison": Kernel(poison, whole(("slot", "block"))),
    "copy_slots": Kernel(copy_units, whole(("slot",))),
    "copy_blocks": Kernel(copy_units, whole(("block",))),
    "digest_rows": Kernel(digest_rows, whole()),
    "move_strips": Kernel(move_strips, bind_move),
    "digest_strips": Kernel(digest_strips, bind_digest),
    "read_ring": Kernel(read_ring, bind_rings),
    "restore_ring": Kernel(restore_ring, bind_rings),
}
"""Verbs on whole units and raw rows."""
