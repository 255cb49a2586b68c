"""What lies in pages: the rows of every component, and the digests that pages are verified by.

A backend may digest all strips of a page at once (``digest_strips``), on pages that others are still on the way to; for
the others the digests of components are summed.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from kvcore.arrays import to_numpy
from kvcore.content import HostRows, digests_at, page_places
from kvcore.digest import MASK, region_salt
from kvcore.handoff.layout import Array, PageLayout, Strip
from kvcore.ops import Ops

WORD = 4
"""Bytes of a word of the digest."""


def content_of(layout: PageLayout, pages: Array) -> dict[tuple[int, str], HostRows]:
    """The rows of everything in the pages, by (layer, role)."""
    return {(strip.layer, strip.role): held for _, strip, held in _components(layout, pages)}


def _components(layout: PageLayout, pages: Array) -> Iterator[tuple[int, Strip, HostRows]]:
    """(first page, strip, rows) of everything in the pages."""
    # One array for all layers of a ratio: a long request has many.
    places: dict[Any, Any] = {}
    (history, paged), (record, state) = layout.parts(pages)
    record = record if isinstance(record, np.ndarray) else to_numpy(record)
    for first, part, strips in ((0, history, paged), (layout.blocks, record, state)):
        for strip in strips:
            rows = part[:, strip.start : strip.stop].reshape(len(part) * strip.rows, strip.row_bytes)
            kind = strip.numbers, strip.tokens_per_row
            if kind not in places:
                places[kind] = strip.positions
            yield first, strip, HostRows(rows[: len(strip.numbers)], places[kind])


class PageDigests:
    """Two lanes for every page of history, then for the record, of one request's pages."""

    def __init__(self, ops: Ops, layout: PageLayout) -> None:
        self._ops = ops
        self._layout = layout
        # A verb that a backend may have, beside those that all have.
        self._at_once: Any = getattr(ops, "digest_strips", None)
        self._tables = None if self._at_once is None else strip_tables(ops, layout)
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
        self.add(pages[self._added :], self._added)
        _, (record, _) = self._layout.parts(pages)
        lanes = [*self._lanes, *([self._at_once(record, self._tables[1], 0)] if len(record) else [])]
        found = [pair for part in map(to_numpy, lanes) for pair in zip(*part.T.tolist(), strict=True)]
        return found if len(record) else [*found, (0, 0)]

    def _component_by_component(self, pages: Array) -> list[tuple[int, int]]:
        # Positions are the same in all layers of a ratio; lanes stay on the device until the last is there.
        places: dict[tuple[int, int], Any] = {}
        sums: dict[tuple[int, int], Any] = {}
        for first, strip, held in _components(self._layout, pages):
            if not len(held.positions):
                continue
            kind = id(held.positions), strip.rows
            if kind not in places:
                places[kind] = page_places(self._ops, held.positions, strip.rows)
            found = digests_at(self._ops, held.rows, places[kind], region_salt(strip.layer, strip.role))
            key = first, len(found)
            sums[key] = sums[key] + found if key in sums else found
        lanes = np.zeros((self._layout.blocks + 1, 2), np.int64)
        for (first, count), found in sums.items():
            lanes[first : first + count] += to_numpy(found).astype(np.int64)
        return [(int(a) & MASK, int(b) & MASK) for a, b in lanes]


def strip_tables(ops: Ops, layout: PageLayout) -> tuple[Array, Array] | None:
    """Strips of a page and of the record, as ``digest_strips`` takes them: [strips, 7] int32 each, on the device.

    Columns: first word, rows a page, words a row, first position, tokens a row, rows in all, salt. None where rows are
    not whole words, or the positions of a ring are not neighbours.
    """
    strips = *layout.paged, *layout.state
    sizes = [layout.page_bytes, *(size for strip in strips for size in (strip.start, strip.row_bytes))]
    if not layout.is_even or any(size % WORD for size in sizes):
        return None
    paged, state = (np.array([*map(_entry, part)], np.int64).reshape(-1, 7) for part in (layout.paged, layout.state))
    return tuple(ops.asarray(table.astype(np.uint32).view(np.int32)) for table in (paged, state))  # type: ignore[return-value]


def _entry(strip: Strip) -> tuple[int, ...]:
    step, count = strip.tokens_per_row, len(strip.numbers)
    first = strip.numbers[0] * step if count else 0
    salt = region_salt(strip.layer, strip.role)
    return strip.start // WORD, strip.rows, strip.row_bytes // WORD, first, step, count, salt
