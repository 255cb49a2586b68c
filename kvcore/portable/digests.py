"""What pages are verified by: one digest for every page of history, then one for each other section.

``xxh3_128`` and ``sha256`` are of the bytes, padding too, and need nothing but the bytes: the first finds damage at the
speed of memory, the second also tells who can be trusted with nothing. ``lanes`` are the two lanes of the structural
digest (``kvcore.digest``) of the rows, which a backend works out where pages lie (``digest_strips``) while others are
still on the way: what stays on a device is exported with those.
"""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import numpy as np
import xxhash

from kvcore.arrays import to_numpy
from kvcore.digest import (
    MASK,
    WORD,
    WORD_FACTOR,
    Rows,
    add_lanes,
    address_of,
    alike_lanes,
    native,
    region_salt,
    row_lanes,
)
from kvcore.native import Lanes
from kvcore.ops import Ops, Strip
from kvcore.ops.host import fields_in_place, rows_in_place, units_of
from kvcore.pools import Pools
from kvcore.portable.pages import HISTORY, Array, PageLayout, positions_of, ranged, rows_of, takes_chunks
from kvcore.portable.rows import digests_at, owned, page_places
from kvcore.spec.sizes import row_bytes
from kvcore.step import StepRequest

HASHES: dict[str, Callable[[Any], bytes]] = {
    "xxh3_128": xxhash.xxh3_128_digest,
    "sha256": lambda data: hashlib.sha256(data).digest(),
}
"""Digests of bytes by name; what is written has the first one. XXH3's is in its canonical form, big end first."""

SIZES = {"xxh3_128": 16, "sha256": 32, "lanes": 8}
"""Bytes of a digest of each kind."""

DEFAULT = "xxh3_128"
"""The kind of pages on the host."""


class Digests(Protocol):
    """Digests of one request's pages, as they come."""

    def add(self, pages: Array, first: int) -> None:
        """Pages from ``first`` on are here: begin with them."""
        ...

    def result(self, pages: Array) -> list[bytes]:
        """The digests of all pages, all of which are here."""
        ...


def digests_of(kind: str, ops: Ops, layout: PageLayout, known: Sequence[Array] = ()) -> Digests:
    """What works out digests of a kind of ``SIZES``; ``known``: lanes of history's pages and of the record, if any."""
    return ByteDigests(layout, kind) if kind in HASHES else LaneDigests(ops, layout, *known)


class ByteDigests:
    """A hash of every page of history, then of each other section."""

    def __init__(self, layout: PageLayout, kind: str) -> None:
        self._layout = layout
        self._hash = HASHES[kind]
        self._found: list[bytes] = []

    def add(self, pages: Array, first: int) -> None:
        """Pages of history that follow those that are done."""
        if first == len(self._found):
            self._found += map(self._of, _on_host(pages[: max(0, self._layout.blocks - first)]))

    def result(self, pages: Array) -> list[bytes]:
        """The digests of all pages."""
        done = len(self._found)
        self.add(pages[done:], done)
        others = self._layout.sections[1:]
        return [*self._found, *(self._of(_on_host(section.of(pages)).reshape(-1)) for section in others)]

    def _of(self, page: np.ndarray[Any, Any]) -> bytes:
        return self._hash(np.ascontiguousarray(page).data)


def _on_host(pages: Array) -> np.ndarray[Any, Any]:
    return cast("np.ndarray[Any, Any]", pages if isinstance(pages, np.ndarray) else to_numpy(pages))


class LaneDigests:
    """The lanes of every page of history, then of each other section."""

    def __init__(self, ops: Ops, layout: PageLayout, history: Array = None, record: Array = None) -> None:
        self._ops = ops
        self._layout = layout
        # Lanes of the first pages, as far as they are here; on the device.
        self._lanes: list[Array] = [] if history is None else [history]
        self._added = 0 if history is None else layout.blocks
        self._record = record

    def add(self, pages: Array, first: int) -> None:
        """Begin with them, if the backend can and they are on its device."""
        history = pages[: max(0, self._layout.blocks - first)]
        if first == self._added and len(history):
            lanes = self._at_once(history, self._layout.history.strips, first)
            if lanes is not None:
                self._lanes.append(lanes)
                self._added += len(history)

    def result(self, pages: Array) -> list[bytes]:
        """The digests of all pages, all of which are here."""
        history, paged = self._layout.history.of(pages), self._layout.history.strips
        self.add(history[self._added :], self._added)
        found = [self._lanes if self._added == len(history) else [self._one_by_one(history, paged)]]
        for section in self._layout.sections[1:]:
            record = section.of(pages)
            if section is self._layout.record and self._record is not None:
                found.append([self._record])
                continue
            lanes = self._at_once(record, section.strips, 0)
            found.append([self._one_by_one(record, section.strips) if lanes is None else lanes])
        digests: list[bytes] = []
        for section, parts in zip(self._layout.sections, found, strict=True):
            packed = [one for part in parts for one in _packed(part)]
            digests += packed or ([] if section.name == HISTORY else [bytes(SIZES["lanes"])])
        return digests

    def _at_once(self, part: Array, strips: tuple[Strip, ...], first: int) -> Array | None:
        return self._ops.digest_strips(part, ranged(strips), first)

    def _one_by_one(self, part: Array, strips: tuple[Strip, ...]) -> np.ndarray[Any, Any]:
        """Lanes [pages, 2] int64, component by component; they stay on the device until the last is there."""
        places: dict[Any, Array] = {}
        sums: dict[int, Array] = {}
        for strip in strips:
            if strip.numbers:
                # The same in all layers of a ratio.
                kind = strip.numbers, strip.tokens_per_row, strip.rows
                if kind not in places:
                    places[kind] = page_places(self._ops, positions_of(strip), strip.rows)
                salt = region_salt(strip.layer, strip.role)
                found = digests_at(self._ops, rows_of(part, strip), places[kind], salt)
                sums[len(found)] = sums[len(found)] + found if len(found) in sums else found
        lanes = np.zeros((len(part), 2), np.int64)
        for count, found in sums.items():
            lanes[:count] += to_numpy(found).astype(np.int64)
        return lanes


def _packed(lanes: Array) -> list[bytes]:
    """Every pair of lanes as two little-endian words."""
    words = (to_numpy(lanes) & MASK).astype("<u4").tobytes()
    return [words[first : first + SIZES["lanes"]] for first in range(0, len(words), SIZES["lanes"])]


AT_ONCE = 1 << 19
"""Bytes of rows that are digested at a time: they stay in a core's cache from the pools to the digest."""


def request_lanes(ops: Ops, pools: Pools, row: StepRequest) -> Sequence[tuple[int, int] | None]:
    """The two lanes of every pool of one request in canonical order; None where they are to be had by gathering.

    One pass over the live rows, which are never all in one place.
    """
    if takes_chunks(ops):
        return _lanes_on_device(ops, pools, row)
    # Hundreds of pools are looked at often: what that costs is paid once.
    seen: Any = getattr(ops, "host_pools", None)
    pools = cast("Pools", pools if seen is None else seen(pools))
    found: list[tuple[int, int]] = []
    run = native(0)
    if run is None:
        run = native(sum(len(one.live(row.length)) * row_bytes(one) for _, _, one in owned(ops.plan.spec)))
    direct = {} if run is None else _lanes_in_place(run, ops, pools, row)
    kept = np.empty(AT_ONCE, np.uint8)
    small = _small_lanes(ops, pools, row, kept, direct)
    if small is None:
        return [None] * len(owned(ops.plan.spec))
    for layer, role, component in owned(ops.plan.spec):
        if (layer, role) in small:
            found.append(small[layer, role])
            continue
        live, width = component.live(row.length), row_bytes(component)
        paged = component.growth == "block"
        rows = ops.plan.region(layer, role)[0].rows if paged else 1
        step = max(1, AT_ONCE // (rows * width)) * rows
        units = row.blocks if paged else (row.slot,)
        runs = _runs(row.blocks[: -(-len(live) // rows)]) if paged and not live.start else []
        near = rows_in_place(ops.plan, pools, layer, role) if len(runs) * LEAST <= len(live) * width else None
        if runs and near is not None:
            found.append(_in_place(near, runs, len(live), region_salt(layer, role), component.tokens_per_row))
            continue
        lanes, needed = np.zeros(2, np.int64), min(step, -(-len(live) // rows) * rows) * width
        room = kept if needed <= len(kept) else np.empty(needed, np.uint8)
        for first in range(0, len(live), step):
            some = live[first : first + step]
            pages = -(-len(some) // rows) if paged else 1
            strip = Strip(layer, role, 0, rows if paged else len(some), width, some, component.tokens_per_row)
            part = room[: pages * strip.nbytes].reshape(pages, -1)
            at = np.array(units[first // rows : first // rows + pages] if paged else units, np.int32)
            if not ops.move_strips(pools, part, (strip,), at):
                return [None] * len(owned(ops.plan.spec))
            held = part.reshape(1, -1, width)[:, : len(some)]
            lanes += row_lanes(held, positions_of(strip)[None], region_salt(layer, role))[0]
        found.append((int(lanes[0]) & MASK, int(lanes[1]) & MASK))
    return found


def _lanes_on_device(ops: Ops, pools: Pools, row: StepRequest) -> list[tuple[int, int] | None]:
    """The same where kernels read rows as they lie: a launch for what lies in blocks, and one for the slot."""
    found: dict[tuple[int, str], tuple[int, int] | None] = {}
    kernels: Any = ops
    for growth, units in (("block", row.blocks), ("slot", (row.slot,))):
        strips: list[Strip] = []
        for layer, role, component in owned(ops.plan.spec):
            live = component.live(row.length)
            # Pages begin with row 0.
            if component.growth == growth and not (growth == "block" and live.start):
                rows = ops.plan.region(layer, role)[0].rows if growth == "block" else len(live)
                strips.append(Strip(layer, role, 0, rows, row_bytes(component), live, component.tokens_per_row))
        if strips:
            lanes = kernels.component_lanes(pools, strips, np.array(units, np.int32))
            found |= {(one.layer, one.role): pair for one, pair in zip(strips, lanes, strict=True)}
    return [found.get((layer, role)) for layer, role, _ in owned(ops.plan.spec)]


def _lanes_in_place(run: Lanes, ops: Ops, pools: Pools, row: StepRequest) -> dict[tuple[int, str], tuple[int, int]]:
    """The lanes of components whose fields can be read where they lie, all in one call."""
    found: dict[tuple[int, str], int] = {}
    units = {"block": np.array(row.blocks, np.int64), "slot": np.array((row.slot,), np.int64)}
    bounds = {growth: (int(some.min()), int(some.max())) if len(some) else (-1, -1) for growth, some in units.items()}
    lanes = np.zeros((len(owned(ops.plan.spec)), 2), np.uint32)
    sums = address_of(lanes)
    all_rows: list[Rows] = []
    # The same in all layers of a ratio.
    lives: dict[int, range] = {}
    places: dict[Any, tuple[Array, Array, int, int]] = {}
    for number, (layer, role, component) in enumerate(owned(ops.plan.spec)):
        live = lives.get(id(component))
        if live is None:
            live = lives[id(component)] = component.live(row.length)
        fields = fields_in_place(ops.plan, layer, role) if len(live) else None
        if fields is None:
            continue
        region, (least, most) = ops.plan.region(layer, role)[0], bounds[component.growth]
        some: list[Rows] = []
        for field in fields:
            pool = units_of(pools[field.pool])
            if pool is None or least < 0 or most >= pool.units:
                break
            kind = component.growth, live, component.tokens_per_row, region.rows, pool.apart, field.step
            if kind not in places:
                numbers = np.arange(live.start, live.stop)
                unit = units["block"][numbers // region.rows] if component.growth == "block" else row.slot
                offsets = unit * pool.apart + numbers % region.rows * field.step
                positions = numbers * component.tokens_per_row
                places[kind] = offsets, positions, address_of(offsets), address_of(positions)
            _, _, at, where = places[kind]
            salt = region_salt(layer, role) + field.first // WORD * WORD_FACTOR & MASK
            sum_at = sums + number * lanes.strides[0]
            some.append(Rows(pool.address + field.base, 0, at, where, 1, len(live), field.nbytes, salt, sum_at))
        if len(some) == len(fields):
            all_rows += some
            found[layer, role] = number
    if all_rows:
        add_lanes(run, all_rows)
    pairs = lanes.tolist()
    return {key: (pairs[number][0], pairs[number][1]) for key, number in found.items()}


def _small_lanes(
    ops: Ops,
    pools: Pools,
    row: StepRequest,
    room: np.ndarray[Any, Any],
    found: dict[tuple[int, str], tuple[int, int]],
) -> dict[tuple[int, str], tuple[int, int]] | None:
    """The lanes of components of few rows, those of equal shape in one pass; None where the pools lie on a device.

    ``found``: what is there already, to which they are added.
    """
    kinds: dict[tuple[Any, ...], list[tuple[int, str]]] = {}
    most = min(SMALL, len(room))
    for layer, role, component in owned(ops.plan.spec):
        live, width = component.live(row.length), row_bytes(component)
        rows = ops.plan.region(layer, role)[0].rows if component.growth == "block" else max(1, len(live))
        if (
            (layer, role) not in found
            and len(live)
            and not width % WORD
            and -(-len(live) // rows) * rows * width <= most
        ):
            kind = component.growth, live, width, component.tokens_per_row, rows
            kinds.setdefault(kind, []).append((layer, role))
    for (growth, live, width, tokens_per_row, rows), members in kinds.items():
        pages = -(-len(live) // rows)
        size = pages * rows * width
        units = row.blocks[live.start // rows :][:pages] if growth == "block" else (row.slot,)
        positions = cast("np.ndarray[Any, Any]", np.arange(live.start, live.stop) * tokens_per_row)
        at = np.array(units, np.int32)
        step = len(room) // size
        for first in range(0, len(members), step):
            some, page = members[first : first + step], rows * width
            strips = [Strip(*one, place * page, rows, width, live, tokens_per_row) for place, one in enumerate(some)]
            part = room[: len(some) * size].reshape(pages, len(some) * page)
            if not ops.move_strips(pools, part, strips, at):
                return None
            # Blocks are outermost in pages; of a slot there is one.
            held = part.reshape(pages, len(some), page).swapaxes(0, 1).reshape(len(some), -1, width)[:, : len(live)]
            lanes = alike_lanes(held, positions, [region_salt(*one) for one in some])
            found |= {one: (int(a) & MASK, int(b) & MASK) for one, (a, b) in zip(some, lanes, strict=True)}
    return found


SMALL = 1 << 17
"""Bytes of a component's rows that are digested together with others of the same shape."""

LEAST = 1 << 16
"""Bytes of rows that are worth a call of their own; fewer that are neighbours go through one place."""


def _runs(blocks: Sequence[int]) -> list[tuple[int, int, int]]:
    """(first column, columns, first block) of blocks that are neighbours."""
    found: list[tuple[int, int, int]] = []
    for column, block in enumerate(blocks):
        if found and block == found[-1][2] + found[-1][1]:
            found[-1] = (found[-1][0], found[-1][1] + 1, block - found[-1][1])
        else:
            found.append((column, 1, block))
    return found


def _in_place(
    parts: Sequence[tuple[np.ndarray[Any, Any], int]],
    runs: list[tuple[int, int, int]],
    count: int,
    salt: int,
    tokens_per_row: int,
) -> tuple[int, int]:
    """The lanes of rows that lie in the pools as canonical rows do, run by run of neighbouring blocks."""
    lanes, size = np.zeros(2, np.int64), parts[0][0].shape[1]
    for column, columns, block in runs:
        end = min((column + columns) * size, count)
        positions = cast("np.ndarray[Any, Any]", np.arange(column * size, end)[None] * tokens_per_row)
        for view, offset in parts:
            held = view[block : block + columns].reshape(1, -1, view.shape[2])[:, : positions.shape[1]]
            # The salt and a word's place in the row are parts of one sum.
            lanes += row_lanes(held, positions, salt + offset // WORD * WORD_FACTOR)[0]
    return int(lanes[0]) & MASK, int(lanes[1]) & MASK
