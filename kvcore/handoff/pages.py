"""What lies in pages: the rows of every component, and the digests that pages are verified by.

A backend may digest all strips of a page at once (``digest_strips``), on pages that others are still on the way to; for
the others the digests of components are summed.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from kvcore.arrays import to_numpy
from kvcore.content import HostRows, digests_at, kept_positions, page_places
from kvcore.digest import MASK, region_salt
from kvcore.handoff.layout import PageLayout
from kvcore.spec import CacheSpec, Component

if TYPE_CHECKING:
    from kvcore.base import CacheBase

Array = Any
"""uint8 [pages, page_bytes]: NumPy, or a torch tensor on any device."""

WORD = 4
"""Bytes of a word of the digest."""


def content_of(
    spec: CacheSpec, layout: PageLayout, pages: Array, floor: int, length: int
) -> Iterator[tuple[Any, HostRows]]:
    """((layer, role), rows) of everything in the pages, component by component."""
    # Arrays, and one for all layers of a ratio: a long request has many, and lists of them cost more than the rows.
    places: dict[tuple[int, int], Any] = {}
    for strip in layout.paged:
        component = getattr(spec.all_layers[strip.layer], strip.role)
        count, step = len(component.live(length)), component.tokens_per_row
        rows = pages[: layout.blocks, strip.start : strip.stop].reshape(layout.blocks * strip.rows, strip.row_bytes)
        if (count, step) not in places:
            places[count, step] = np.arange(count) * step
        yield (strip.layer, strip.role), HostRows(rows[:count], places[count, step])
    record = pages[layout.blocks :].reshape(-1)
    record = record if isinstance(record, np.ndarray) else to_numpy(record)
    for strip in layout.state:
        component = getattr(spec.all_layers[strip.layer], strip.role)
        rows = record[strip.start : strip.stop].reshape(strip.rows, strip.row_bytes)
        yield (strip.layer, strip.role), HostRows(rows, kept_positions(component, floor, length))


class PageDigests:
    """Two lanes for every page of history, then for the record, of one request's pages."""

    def __init__(self, cache: "CacheBase", layout: PageLayout, floor: int, length: int) -> None:
        self._cache = cache
        self._layout = layout
        self._floor = floor
        self._length = length
        # A verb that a backend may have, beside those that all have.
        self._at_once: Any = getattr(cache.ops, "digest_strips", None)
        self._tables = None if self._at_once is None else strip_tables(cache, layout, floor, length)
        # Lanes of the first pages, as far as they are here; on the device.
        self._lanes: list[Array] = []
        self._added = 0

    def add(self, pages: Array, first: int) -> None:
        """Pages from ``first`` on are here: begin with them, if the backend can and they are on its device."""
        history = pages[: max(0, self._layout.blocks - first)]
        if self._tables is None or isinstance(pages, np.ndarray) or first != self._added or not len(history):
            return
        self._lanes.append(self._at_once(history, self._tables[0], first))
        self._added += len(history)

    def result(self, pages: Array) -> list[tuple[int, int]]:
        """The digests of all pages, all of which are here."""
        if self._tables is None or isinstance(pages, np.ndarray):
            return self._component_by_component(pages)
        blocks = self._layout.blocks
        self.add(pages[self._added :], self._added)
        record = pages[blocks:].reshape(1, -1)
        lanes = [*self._lanes, *([self._at_once(record, self._tables[1], 0)] if len(pages) > blocks else [])]
        found = [pair for part in map(to_numpy, lanes) for pair in zip(*part.T.tolist(), strict=True)]
        return found if len(pages) > blocks else [*found, (0, 0)]

    def _component_by_component(self, pages: Array) -> list[tuple[int, int]]:
        layout, ops = self._layout, self._cache.ops
        paged = {(strip.layer, strip.role): strip.rows for strip in layout.paged}
        # Positions are the same in all layers of a ratio; lanes stay on the device until the last is there.
        places: dict[tuple[int, int], Any] = {}
        sums: dict[tuple[int, int], Any] = {}
        for (layer, role), held in content_of(self._cache.spec, layout, pages, self._floor, self._length):
            count = len(held.positions)
            if not count:
                continue
            if (layer, role) in paged:
                first, shape = 0, (count, paged[layer, role])
                if shape not in places:
                    places[shape] = page_places(ops, held.positions, shape[1])
                at = places[shape]
            else:
                first, at = layout.blocks, page_places(ops, held.positions, count)
            found = digests_at(ops, held.rows, at, region_salt(layer, role))
            key = first, len(found)
            sums[key] = sums[key] + found if key in sums else found
        lanes = np.zeros((layout.blocks + 1, 2), np.int64)
        for (first, count), found in sums.items():
            lanes[first : first + count] += to_numpy(found).astype(np.int64)
        return [(int(a) & MASK, int(b) & MASK) for a, b in lanes]


def strip_tables(cache: "CacheBase", layout: PageLayout, floor: int, length: int) -> tuple[Array, Array] | None:
    """Strips of a page and of the record, as ``digest_strips`` takes them: [strips, 7] int32 each, on the device.

    Columns: first word, rows a page, words a row, first position, tokens a row, rows in all, salt. None where rows are
    not whole words, or the positions of a ring are not neighbours.
    """
    paged, state = [], []
    for strip in layout.paged:
        component = getattr(cache.spec.all_layers[strip.layer], strip.role)
        paged.append((strip, 0, component.tokens_per_row, len(component.live(length))))
    firsts: dict[Component, int] = {}
    for strip in layout.state:
        component = getattr(cache.spec.all_layers[strip.layer], strip.role)
        if strip.rows and component not in firsts:
            positions, step = kept_positions(component, floor, length), component.tokens_per_row
            if positions != list(range(positions[0], positions[0] + len(positions) * step, step)):
                return None
            firsts[component] = positions[0]
        if strip.rows:
            state.append((strip, firsts[component], component.tokens_per_row, strip.rows))
    if any(size % WORD for strip, *_ in [*paged, *state] for size in (strip.start, strip.row_bytes, layout.page_bytes)):
        return None
    first, second = (
        np.array(
            [
                (strip.start // WORD, strip.rows, strip.row_bytes // WORD, *rest, region_salt(strip.layer, strip.role))
                for strip, *rest in strips
            ],
            np.int64,
        ).reshape(-1, 7)
        for strips in (paged, state)
    )
    return tuple(cache.ops.asarray(table.astype(np.uint32).view(np.int32)) for table in (first, second))  # type: ignore[return-value]
