"""What lies in pages: the rows of every component, and the digests that pages are verified by.

A backend may digest all strips of a page at once (``digest_strips``), on pages that others are still on the way to; for
the others the digests of components are summed.
"""

from typing import Any

import numpy as np

from kvcore.arrays import to_numpy
from kvcore.digest import MASK, region_salt
from kvcore.ops import Ops, Strip
from kvcore.portable.pages import Array, PageLayout, at_once
from kvcore.portable.rows import HostRows, digests_at, page_places


def content_of(layout: PageLayout, pages: Array) -> dict[tuple[int, str], HostRows]:
    """The rows of everything in the pages, by (layer, role)."""
    # One array for all layers of a ratio: a long request has many, and lists of them cost more than the rows.
    places: dict[Any, Any] = {}
    content: dict[tuple[int, str], HostRows] = {}
    (history, paged), (record, state) = layout.parts(pages)
    record = record if isinstance(record, np.ndarray) else to_numpy(record)
    for part, strips in ((history, paged), (record, state)):
        for strip in strips:
            kind = strip.numbers, strip.tokens_per_row
            if kind not in places:
                places[kind] = _positions(strip)
            content[strip.layer, strip.role] = HostRows(_rows(part, strip), places[kind])
    return content


def _rows(part: Array, strip: Strip) -> Array:
    """A strip's rows [n, row_bytes]."""
    rows = part[:, strip.start : strip.stop].reshape(len(part) * strip.rows, strip.row_bytes)
    return rows[: len(strip.numbers)]


def _positions(strip: Strip) -> Any:
    """Their positions: NumPy integers [n]."""
    numbers = strip.numbers
    found = np.arange(numbers.start, numbers.stop) if isinstance(numbers, range) else np.array(numbers)
    return found * strip.tokens_per_row


class PageDigests:
    """Two lanes for every page of history, then for the record, of one request's pages."""

    def __init__(self, ops: Ops, layout: PageLayout) -> None:
        self._ops = ops
        self._layout = layout
        # Lanes of the first pages, as far as they are here; on the device.
        self._lanes: list[Array] = []
        self._added = 0

    def add(self, pages: Array, first: int) -> None:
        """Pages from ``first`` on are here: begin with them, if the backend can and they are on its device."""
        history = pages[: max(0, self._layout.blocks - first)]
        if first == self._added and len(history):
            lanes = self._at_once(history, self._layout.paged, first)
            if lanes is not None:
                self._lanes.append(lanes)
                self._added += len(history)

    def result(self, pages: Array) -> list[tuple[int, int]]:
        """The digests of all pages, all of which are here."""
        (history, paged), (record, state) = self._layout.parts(pages)
        self.add(history[self._added :], self._added)
        lanes = self._lanes if self._added == len(history) else [self._one_by_one(history, paged)]
        last = self._at_once(record, state, 0)
        lanes = [*lanes, self._one_by_one(record, state) if last is None else last]
        found = [pair for part in lanes for pair in zip(*(to_numpy(part).T & MASK).tolist(), strict=True)]
        return found if len(record) else [*found, (0, 0)]

    def _at_once(self, part: Array, strips: tuple[Strip, ...], first: int) -> Array | None:
        return self._ops.digest_strips(part, strips, first) if at_once(part, strips) else None

    def _one_by_one(self, part: Array, strips: tuple[Strip, ...]) -> np.ndarray[Any, Any]:
        """Lanes [pages, 2] int64, component by component; they stay on the device until the last is there."""
        places: dict[Any, Array] = {}
        sums: dict[int, Array] = {}
        for strip in strips:
            if strip.numbers:
                # The same in all layers of a ratio.
                kind = strip.numbers, strip.tokens_per_row, strip.rows
                if kind not in places:
                    places[kind] = page_places(self._ops, _positions(strip), strip.rows)
                salt = region_salt(strip.layer, strip.role)
                found = digests_at(self._ops, _rows(part, strip), places[kind], salt)
                sums[len(found)] = sums[len(found)] + found if len(found) in sums else found
        lanes = np.zeros((len(part), 2), np.int64)
        for count, found in sums.items():
            lanes[:count] += to_numpy(found).astype(np.int64)
        return lanes
