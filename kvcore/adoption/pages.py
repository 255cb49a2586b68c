"""Windows and tails in pages of an engine: rings of the library's own that follow them.

A table lists the pages that a request has of a component, the one of its first tokens first and -1 for those that are
gone; or the engine's map says where a token's rows lie, or a request's ring. Rows that later tokens need are copied
into a ring as the request is admitted, and rows of a step or an import into the pages before the request is known to
have them: an engine that looks no further than a request's length sees all of them or none. There are few: as many as a
window has.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvcore.adoption.descriptor import IndexMap, Stretch
from kvcore.adoption.maps import Index, Numbers
from kvcore.adoption.memory import Tensor
from kvcore.adoption.regions import field_view
from kvcore.arrays import to_numpy
from kvcore.counts import as_integer
from kvcore.errors import OutOfBlocks, RequestError, ShapeError
from kvcore.plan import CachePlan
from kvcore.portable.rows import HostRows, read_rows
from kvcore.requests.manager import Request
from kvcore.spec import Component

Table = tuple[int, ...]
Key = tuple[int, str]


class Field(NamedTuple):
    """A field of a part of a component: its bytes in the canonical row of all parts, and where they lie."""

    first: int
    nbytes: int
    row: int
    view: Any


class Held(NamedTuple):
    """What a request has: tables by (layer, role), blocks in order of history as the owner numbers them, and a slot."""

    tables: Mapping[Key, Table]
    blocks: Sequence[int]
    slot: int | None


class Paged(NamedTuple):
    """A component in pages, or in rings that are looked up.

    Attributes:
        component: itself.
        rows, units: of a page, and how many there are.
        row_bytes: of a canonical row of all parts.
        fields: of all parts.
        index: the map that places are looked up in; None: a table of pages.
        shifted: the newest row is the last one.
    """

    component: Component
    rows: int
    units: int
    row_bytes: int
    fields: tuple[Field, ...]
    index: Index | None
    shifted: bool = False

    def needed(self, start: int, length: int) -> range:
        """Positions from ``start`` on whose rows live at ``length``."""
        live = self.component.live(length)
        return range(min(max(start, live.start), live.stop), live.stop)

    def written(self, start: int, length: int, drafts: int) -> range:
        """Those that are written: what a rollback by ``drafts`` tokens needs, too, where it has a place."""
        needed = self.needed(start, length)
        return range(min(needed.start, self.needed(start, max(start, length - drafts)).start), needed.stop)

    def columns(self, positions: range) -> range:
        """Columns of a table whose pages hold some positions."""
        return range(positions.start // self.rows, -(-positions.stop // self.rows)) if positions else range(0)

    def places(self, table: Table, held: Held, positions: Sequence[int] | range, length: int) -> Numbers:
        """Where rows lie, page · rows of a page + row there; -1 where they have no place, or none that was checked.

        ``length``: of the request, whose newest row a shifted ring ends with.
        """
        rows = self.rows
        if self.index is None:
            units = [table[at // rows] if at // rows < len(table) else -1 for at in positions]
            pairs = zip(units, positions, strict=True)
            return np.array([-1 if unit < 0 else unit * rows + at % rows for unit, at in pairs], np.int64)
        at = np.array(positions, np.int64)
        numbers = numbers_of(self.index, held, at)
        found = self.index.places(numbers)
        known = self.index.known(numbers, found)
        page = self.index.said.page
        inside = at % rows if self.index.said.of == "slot" else found % page % rows
        inside = rows - length + at if self.shifted else inside
        return np.where(known, found // page * rows + inside, -1)

    @property
    def reuses(self) -> bool:
        """Whether a later row takes the place of an earlier one; there is room for those that a rollback needs."""
        of = None if self.index is None else self.index.said
        return of is not None and (of.of == "slot" or self.rows < of.page)

    def read(self, places: Numbers) -> np.ndarray[Any, Any]:
        """Canonical rows [n, row_bytes]."""
        found = np.zeros((len(places), self.row_bytes), np.uint8)
        if len(places):
            units, rows = self._split(places)
            for field in self.fields:
                held = to_numpy(field.view[units, rows])
                held = held.reshape(*held.shape[:2], field.nbytes)
                for head in range(held.shape[1]):
                    begin = field.first + head * field.row
                    found[:, begin : begin + field.nbytes] = held[:, head]
        return found

    def write(self, places: Numbers, rows: np.ndarray[Any, Any]) -> None:
        """The inverse."""
        if not len(places):
            return
        at = self._split(places)
        for field in self.fields:
            begins = [field.first + head * field.row for head in range(field.view.shape[2])]
            view: Any = field.view
            given = np.stack([rows[:, begin : begin + field.nbytes] for begin in begins], axis=1)
            given = given.reshape(*given.shape[:2], *view.shape[3:])
            view[at] = given if isinstance(view, np.ndarray) else view.new_tensor(given)

    def _split(self, places: Numbers) -> tuple[list[int], list[int]]:
        return (places // self.rows).tolist(), (places % self.rows).tolist()


class Rows(NamedTuple):
    """Canonical rows of a component, and the places that they go to."""

    kind: Paged
    places: Numbers
    rows: np.ndarray[Any, Any]


def numbers_of(index: Index, held: Held, positions: Numbers) -> Numbers:
    """The tokens of positions as a map numbers them, or as often the request's slot.

    Raises:
        ShapeError: its slot is not known. OutOfBlocks: it has no block of a token.
    """
    if index.said.of == "slot":
        if held.slot is None:
            raise _no_slot(index.said.name)
        return np.full(len(positions), held.slot, np.int64)
    columns = positions // index.block_tokens
    blocks = np.array(held.blocks, np.int64)
    if len(columns) and int(columns[-1]) >= len(blocks):
        allowed = f"a block for token {int(positions[-1])}, by which map {index.said.name!r} numbers it"
        raise OutOfBlocks(got=f"{len(blocks)} blocks", where="maps", allowed=allowed)
    return blocks[columns] * index.block_tokens + positions % index.block_tokens if len(columns) else positions


class Pages:
    """All components in pages, and which pages requests have.

    Attributes:
        kinds: by (layer, role).
        rings: whether there are any of the owner's, looked up or not.
        tables: of live requests, by (layer, role); ``add`` and ``forget`` change them.
        coming: those of a request that is being admitted.
    """

    def __init__(
        self,
        plan: CachePlan,
        stretches: dict[tuple[Any, ...], Stretch],
        tensors: dict[str, Tensor],
        said: Mapping[str, IndexMap],
        maps: Mapping[str, Any],
    ) -> None:
        self.kinds: dict[Key, Paged] = {}
        self.tables: dict[Request, dict[Key, Table]] = {}
        self.coming: dict[Key, Table] | None = None
        self._holders: dict[Key, Counter[int]] = defaultdict(Counter)
        self._drafts = plan.max_draft_tokens
        components = {(layer, role): component for layer, role, component in plan.spec.components()}
        looked_up = [stretch for stretch in stretches.values() if not stretch.lines.in_place]
        limits = {
            name: min((one.units * said[name].page for one in looked_up if one.lines.map == name), default=0)
            for name in said
        }
        indices = {name: Index(one, maps[name], plan.block_tokens, limits[name]) for name, one in said.items()}
        for stretch in looked_up:
            region, key = stretch.region, (stretch.region.layer, stretch.region.role)
            parts = plan.region(*key)
            before = sum(part.heads * part.format.row for part in parts[: parts.index(region)])
            first, last = region.format.byte_range(stretch.lines.field)
            field = Field(
                before + first, last - first, region.format.row, field_view(stretch, tensors[stretch.lines.tensor])
            )
            one = self.kinds.get(key)
            size = sum(part.heads * part.format.row for part in parts)
            index = indices.get(stretch.lines.map)
            alike = stretch.rows, stretch.units, index, stretch.lines.shifted
            if one is not None and (one.rows, one.units, one.index, one.shifted) != alike:
                raise ShapeError(
                    got=f"pages of {one.rows} and of {stretch.rows} rows",
                    where=f"layers[{region.layer}].{region.role}",
                    allowed="as many, as large, and as they are looked up, for all fields of a row",
                )
            fields = (field,) if one is None else (*one.fields, field)
            shifted = stretch.lines.shifted
            self.kinds[key] = Paged(components[key], stretch.rows, stretch.units, size, fields, index, shifted)
        self._tabled = {key: kind for key, kind in self.kinds.items() if kind.index is None}
        self._mapped = {key: (kind, kind.index) for key, kind in self.kinds.items() if kind.index is not None}
        self._by_slot = {
            kind.index.said.name: (kind.index, f"layers[{layer}].{role}")
            for (layer, role), kind in self.kinds.items()
            if kind.index is not None and kind.index.said.of == "slot"
        }
        self.rings = any(stretch.lines.kind == "ring" for stretch in stretches.values())

    def read_tables(self, given: Mapping[str, Sequence[int]]) -> dict[Key, Table]:
        """Tables by (layer, role), of what was given for roles, or for one layer's as ``"L.role"``.

        Raises:
            ShapeError: a name of nothing in pages, or numbers of no pages.
        """
        names = {f"{layer}.{role}" for layer, role in self._tabled} | {role for _, role in self._tabled}
        for name in given:
            if name not in names:
                raise ShapeError(got=f"pages of {name!r}", where="pages", allowed=", ".join(sorted(names)) or "none")
        found: dict[Key, Table] = {}
        for (layer, role), kind in self._tabled.items():
            pages = given.get(f"{layer}.{role}", given.get(role, ()))
            numbers = [as_integer(page) for page in pages]
            table = tuple(-1 if number is None else number for number in numbers)
            wrong = None in numbers or min(table, default=0) < -1
            there = [count for count in table if count >= 0]
            if wrong or max(there, default=0) >= kind.units or len(set(there)) < len(there):
                raise ShapeError(
                    got=f"pages {list(pages)!r} of layers[{layer}].{role}",
                    where="pages",
                    allowed=f"numbers below {kind.units}, each once, and -1 for pages that are gone",
                )
            found[layer, role] = table
        return found

    def add(self, request: Request, more: Mapping[Key, Table]) -> None:
        """A request has these pages too now, behind those that it had."""
        held = self.tables.setdefault(request, {})
        for key, table in more.items():
            held[key] = (*held.get(key, ()), *table)
            self._holders[key].update(table)

    def forget(self, request: Request) -> None:
        """A request has no pages any more."""
        for key, table in self.tables.pop(request, {}).items():
            self._holders[key].subtract(table)

    def tables_of(self, request: Request) -> dict[Key, Table]:
        """Those of a request, or of the one that is being admitted."""
        found = self.tables.get(request)
        if found is None:
            found = self.coming or {}
        return {key: found.get(key, ()) for key in self._tabled}

    def held(self, request: Request, blocks: Sequence[int], slot: int | None) -> Held:
        """What a live request has, or the one that is being admitted."""
        return Held(self.tables_of(request), blocks, slot)

    def numbered(self, layer: int, role: str) -> bool:
        """Whether rows of a component are looked up by the number of their token."""
        index = self.kinds[layer, role].index if (layer, role) in self.kinds else None
        return index is not None and index.said.of_tokens

    def check_any_slot(self) -> None:
        """Refuse a slot that nobody chose where rings are looked up by it: it may be another request's of the owner.

        Raises:
            ShapeError: naming the map.
        """
        if self._by_slot:
            raise _no_slot(next(iter(self._by_slot)))

    def check_slots(self, slots: Iterable[int], where: str) -> None:
        """Refuse slots whose rings have no place in a map, or one that cannot be.

        Raises:
            OutOfBlocks: naming what is missing. ShapeError: what a map says cannot be.
        """
        for slot in slots:
            for index, what in self._by_slot.values():
                _check_mapped(index, Held({}, (), slot), np.zeros(1, np.int64), where, what)

    def copy(self, source: int, target: int) -> None:
        """The rings of a slot into those of another that maps have; ``check_slots`` was called if there is a row."""
        numbers = np.array([source, target], np.int64)
        for kind, index in self._mapped.values():
            if index.said.of == "slot":
                places = index.places(numbers)
                if index.known(numbers, places).all():
                    first, second = places.tolist()
                    for field in kind.fields:
                        field.view[second] = field.view[first]

    def check(self, held: Held, start: int, length: int, where: str, *, writes: bool = True) -> None:
        """Refuse a request without places of the rows from ``start`` on that live at ``length``, or with others'.

        Where they are to be written, so are places of rows that a rollback needs, if there are any.

        Raises:
            OutOfBlocks: naming what is missing. ShapeError: what a map says cannot be.
        """
        for (layer, role), kind in self._tabled.items():
            table = held.tables[layer, role]
            for column in kind.columns(kind.needed(start, length)):
                if column >= len(table) or table[column] < 0:
                    raise OutOfBlocks(
                        got=f"no page {column} of layers[{layer}].{role}",
                        where=where,
                        allowed=f"pages of {kind.rows} rows for tokens {start} to {length}",
                        hint="The engine allots pages: admit(pages=...), or cache.give(request, pages=...).",
                    )
        # The same in all layers of a kind.
        seen: set[tuple[str, range, range]] = set()
        for (layer, role), (kind, index) in self._mapped.items():
            needed = kind.needed(start, length)
            some = kind.written(start, length, self._drafts) if writes else needed
            if not some or (index.said.name, needed, some) in seen:
                continue
            seen.add((index.said.name, needed, some))
            spare = np.arange(some.start, needed.start, dtype=np.int64)
            what = f"layers[{layer}].{role}"
            _check_mapped(index, held, spare, where, what, needed=False)
            if needed:
                _check_mapped(index, held, np.array(needed, np.int64), where, what)

    def check_alone(self, request: Request, start: int, length: int) -> None:
        """Refuse to write into pages that another request has in its tables; of maps that is known.

        Raises:
            RequestError: naming the page.
        """
        own = self.tables_of(request)
        for key, kind in self._tabled.items():
            holders = self._holders[key]
            columns = kind.columns(kind.written(start, length, self._drafts))
            wanted = {page for column in columns if holders[page := own[key][column]] > 1} - {-1}
            # Twice in a table of its own is nobody else's.
            for other, tables in self.tables.items() if wanted else ():
                if other != request and (both := wanted.intersection(tables[key])):
                    raise RequestError(
                        got=f"tokens of request {request.id} in page {min(both)} of layers[{key[0]}].{key[1]}, which "
                        "others have too",
                        where="step",
                        allowed="pages of its own for what is written",
                    )

    def content(self, held: Held, length: int) -> dict[Key, HostRows]:
        """The rows that live at a length, as they lie there; ``check`` was called."""
        found: dict[Key, HostRows] = {}
        for key, kind in self.kinds.items():
            live = kind.component.live(length)
            places = kind.places(held.tables.get(key, ()), held, live, length)
            found[key] = HostRows(kind.read(places), list(live))
        return found

    def follow(self, state: Any, moved: Iterable[tuple[Request, Any, int]]) -> None:
        """Copy rows of (request, place, its length before) out of rings into pages: of all requests, or of none."""
        write([rows for request, place, was in moved for rows in self.behind(state, request, place, was)])

    def behind(self, state: Any, request: Request, place: Any, was: int) -> list[Rows]:
        """What the owner's memory lacks of a request that had ``was`` tokens: new rows, and all that are shifted along.

        Raises:
            OutOfBlocks: a shorter request has no place of them any more. ShapeError: what a map says cannot be.
        """
        length, back = place.length, was > place.length
        kinds = {key: kind for key, kind in self.kinds.items() if kind.shifted or not back}
        if self.coming is not None or not kinds or length == was:
            return []
        # A rollback goes back no further in rings.
        floor = length if back else max(was, place.floor, length - state.plan.max_draft_tokens)
        content = read_rows(state.ops, state.pools, state.row_of(place), floor, growth="slot") if length else {}
        held = self.held(request, state.manager.numbers_given(request), place.slot)
        found: list[Rows] = []
        for key, kind in kinds.items():
            rows, positions = content.get(key) or HostRows(np.zeros((0, kind.row_bytes), np.uint8), ())
            at, first = np.array(positions, np.int64), was
            if kind.shifted:
                # All of them move. Before the first token there are zeros.
                first, missing = length - kind.rows, range(min(0, length - kind.rows), 0)
                at = np.concatenate([np.array(missing, np.int64), at])
                rows = np.concatenate([np.zeros((len(missing), kind.row_bytes), np.uint8), rows])
            rows, at = rows[at >= first], at[at >= first]
            if back and kind.index is not None:
                _check_mapped(kind.index, held, at, "truncate", "layers[{}].{}".format(*key))
            places = kind.places(held.tables.get(key, ()), held, at.tolist(), length)
            there = places >= 0
            if there.any():
                found.append(Rows(kind, places[there], rows[there]))
        return found


def write(copies: Sequence[Rows]) -> None:
    """Write all of them, or none: rows that may be needed are put back."""
    before = [one._replace(rows=one.kind.read(one.places)) for one in copies if one.kind.reuses]
    try:
        for one in copies:
            one.kind.write(one.places, one.rows)
    except BaseException:
        for one in before:
            one.kind.write(one.places, one.rows)
        raise


def _no_slot(name: str) -> ShapeError:
    allowed = f"the owner's number of the request, which is looked up in map {name!r}"
    return ShapeError(got="no slot", where="slot", allowed=allowed)


def _check_mapped(index: Index, held: Held, positions: Numbers, where: str, what: str, *, needed: bool = True) -> None:
    """Refuse positions whose rows have no place in a map, if they are ``needed``, or one that cannot be.

    Raises:
        OutOfBlocks: naming the first. ShapeError: as ``Index.check``.
    """
    numbers = numbers_of(index, held, positions)
    places = index.places(numbers)
    if needed and places.min() < 0:
        raise OutOfBlocks(
            got=f"no place of {index.what} {numbers[places < 0][0]} in map {index.said.name!r}",
            where=where,
            allowed=f"places of {what} for tokens {max(positions[0], 0)} to {positions[-1] + 1}",
            hint="The engine gives places out, and says so in the map, before tokens are written or read.",
        )
    index.check(numbers, places)
