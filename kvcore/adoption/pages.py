"""Windows and tails in pages of an engine: rings of the library's own that follow them.

A table lists the pages that a request has of a component, the one of its first tokens first and -1 for those that are
gone. Rows that later tokens need are copied into a ring as the request is admitted, and rows of a step or an import
into the pages before the request is known to have them: an engine that looks no further than a request's length sees
all of them or none. There are few: as many as a window has.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvcore.adoption.descriptor import Stretch
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


class Paged(NamedTuple):
    """A component in pages.

    Attributes:
        component: itself.
        rows, units: of a page, and how many there are.
        row_bytes: of a canonical row of all parts.
        fields: of all parts.
    """

    component: Component
    rows: int
    units: int
    row_bytes: int
    fields: tuple[Field, ...]

    def needed(self, start: int, length: int) -> range:
        """Columns of a table whose pages hold rows from ``start`` on that live at ``length``."""
        live = self.component.live(length)
        first = max(start, live.start)
        return range(first // self.rows, -(-live.stop // self.rows)) if live.stop > first else range(0)

    def read(self, table: Table, positions: Sequence[int]) -> np.ndarray[Any, Any]:
        """Canonical rows [n, row_bytes]."""
        found = np.zeros((len(positions), self.row_bytes), np.uint8)
        if len(positions):
            units, rows = self._places(table, positions)
            for field in self.fields:
                held = to_numpy(field.view[units, rows])
                for head in range(held.shape[1]):
                    begin = field.first + head * field.row
                    found[:, begin : begin + field.nbytes] = held[:, head]
        return found

    def write(self, table: Table, positions: Sequence[int], rows: np.ndarray[Any, Any]) -> None:
        """The inverse."""
        if not len(positions):
            return
        places = self._places(table, positions)
        for field in self.fields:
            begins = [field.first + head * field.row for head in range(field.view.shape[2])]
            given = np.stack([rows[:, begin : begin + field.nbytes] for begin in begins], axis=1)
            view: Any = field.view
            view[places] = given if isinstance(view, np.ndarray) else view.new_tensor(given)

    def _places(self, table: Table, positions: Sequence[int]) -> tuple[list[int], list[int]]:
        return [table[position // self.rows] for position in positions], [at % self.rows for at in positions]


class Pages:
    """All components in pages, and which pages requests have.

    Attributes:
        kinds: by (layer, role).
        tables: of live requests, by (layer, role); ``add`` and ``forget`` change them.
        coming: those of a request that is being admitted.
    """

    def __init__(self, plan: CachePlan, stretches: dict[tuple[Any, ...], Stretch], tensors: dict[str, Tensor]) -> None:
        self.kinds: dict[Key, Paged] = {}
        self.tables: dict[Request, dict[Key, Table]] = {}
        self.coming: dict[Key, Table] | None = None
        self._holders: dict[Key, Counter[int]] = defaultdict(Counter)
        components = {(layer, role): component for layer, role, component in plan.spec.components()}
        for stretch in stretches.values():
            if stretch.lines.kind != "page":
                continue
            region, key = stretch.region, (stretch.region.layer, stretch.region.role)
            parts = plan.region(*key)
            before = sum(part.heads * part.format.row for part in parts[: parts.index(region)])
            first, last = region.format.byte_range(stretch.lines.field)
            field = Field(
                before + first, last - first, region.format.row, field_view(stretch, tensors[stretch.lines.tensor])
            )
            one = self.kinds.get(key)
            size = sum(part.heads * part.format.row for part in parts)
            if one is not None and (one.rows, one.units) != (stretch.rows, stretch.units):
                raise ShapeError(
                    got=f"pages of {one.rows} and of {stretch.rows} rows",
                    where=f"layers[{region.layer}].{region.role}",
                    allowed="as many, and as large ones, for all fields of a row",
                )
            fields = (field,) if one is None else (*one.fields, field)
            self.kinds[key] = Paged(components[key], stretch.rows, stretch.units, size, fields)

    def read_tables(self, given: Mapping[str, Sequence[int]]) -> dict[Key, Table]:
        """Tables by (layer, role), of what was given for roles, or for one layer's as ``"L.role"``.

        Raises:
            ShapeError: a name of nothing in pages, or numbers of no pages.
        """
        names = {f"{layer}.{role}" for layer, role in self.kinds} | {role for _, role in self.kinds}
        for name in given:
            if name not in names:
                raise ShapeError(got=f"pages of {name!r}", where="pages", allowed=", ".join(sorted(names)) or "none")
        found: dict[Key, Table] = {}
        for (layer, role), kind in self.kinds.items():
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
        return {key: found.get(key, ()) for key in self.kinds}

    def check(self, tables: Mapping[Key, Table], start: int, length: int, where: str) -> None:
        """Refuse tables without the pages of rows from ``start`` on that live at ``length``.

        Raises:
            OutOfBlocks: naming what is missing.
        """
        for (layer, role), kind in self.kinds.items():
            table = tables[layer, role]
            for column in kind.needed(start, length):
                if column >= len(table) or table[column] < 0:
                    raise OutOfBlocks(
                        got=f"no page {column} of layers[{layer}].{role}",
                        where=where,
                        allowed=f"pages of {kind.rows} rows for tokens {start} to {length}",
                        hint="The engine allots pages: admit(pages=...), or cache.give(request, pages=...).",
                    )

    def check_alone(self, request: Request, start: int, length: int) -> None:
        """Refuse to write into pages that another request has.

        Raises:
            RequestError: naming the page.
        """
        own = self.tables_of(request)
        for key, kind in self.kinds.items():
            holders = self._holders[key]
            wanted = {page for column in kind.needed(start, length) if holders[page := own[key][column]] > 1}
            # Twice in a table of its own is nobody else's.
            for other, tables in self.tables.items() if wanted else ():
                if other != request and (both := wanted.intersection(tables[key])):
                    raise RequestError(
                        got=f"tokens of request {request.id} in page {min(both)} of layers[{key[0]}].{key[1]}, which "
                        "others have too",
                        where="step",
                        allowed="pages of its own for what is written",
                    )

    def content(self, tables: Mapping[Key, Table], length: int) -> dict[Key, HostRows]:
        """The rows that live at a length, as they lie in pages."""
        found: dict[Key, HostRows] = {}
        for key, kind in self.kinds.items():
            positions = list(kind.component.live(length))
            found[key] = HostRows(kind.read(tables[key], positions), positions)
        return found

    def follow(self, state: Any, request: Request, place: Any, start: int) -> None:
        """Copy a request's rows from ``start`` on out of its rings into its pages."""
        if self.coming is not None or not self.kinds or place.length <= start:
            return
        row = state.row_of(place)
        # A rollback goes back no further in rings.
        floor = max(start, place.floor, place.length - state.plan.max_draft_tokens)
        rows = read_rows(state.ops, state.pools, row, floor, growth="slot")
        tables = self.tables_of(request)
        for key, kind in self.kinds.items():
            held, positions = rows[key]
            table = tables[key]
            kept = [
                number
                for number, position in enumerate(positions)
                if position >= start and position // kind.rows < len(table) and table[position // kind.rows] >= 0
            ]
            kind.write(table, [positions[number] for number in kept], held[kept])
