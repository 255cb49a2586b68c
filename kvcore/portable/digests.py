"""What pages are verified by: one digest for every page of history, then one for each other section.

``sha256`` is of the bytes, padding too, and needs nothing but the bytes. ``lanes`` are the two lanes of the structural
digest (``kvcore.digest``) of the rows, which a backend works out where pages lie (``digest_strips``) while others are
still on the way: what stays on a device is exported with those.
"""

import hashlib
from typing import Any, Protocol, cast

import numpy as np

from kvcore.arrays import to_numpy
from kvcore.digest import MASK, region_salt
from kvcore.ops import Ops, Strip
from kvcore.portable.pages import HISTORY, Array, PageLayout, at_once, positions_of, rows_of
from kvcore.portable.rows import digests_at, page_places

SIZES = {"sha256": 32, "lanes": 8}
"""Bytes of a digest of each kind."""


class Digests(Protocol):
    """Digests of one request's pages, as they come."""

    def add(self, pages: Array, first: int) -> None:
        """Pages from ``first`` on are here: begin with them."""
        ...

    def result(self, pages: Array) -> list[bytes]:
        """The digests of all pages, all of which are here."""
        ...


def digests_of(kind: str, ops: Ops, layout: PageLayout) -> Digests:
    """What works out digests of a kind of ``SIZES``."""
    return ByteDigests(layout) if kind == "sha256" else LaneDigests(ops, layout)


class ByteDigests:
    """sha256 of every page of history, then of each other section."""

    def __init__(self, layout: PageLayout) -> None:
        self._layout = layout
        self._found: list[bytes] = []

    def add(self, pages: Array, first: int) -> None:
        """Pages of history that follow those that are done."""
        if first == len(self._found):
            self._found += map(_hash, _on_host(pages[: max(0, self._layout.blocks - first)]))

    def result(self, pages: Array) -> list[bytes]:
        """The digests of all pages."""
        done = len(self._found)
        self.add(pages[done:], done)
        others = self._layout.sections[1:]
        return [*self._found, *(_hash(_on_host(section.of(pages)).reshape(-1)) for section in others)]


def _hash(page: np.ndarray[Any, Any]) -> bytes:
    return hashlib.sha256(np.ascontiguousarray(page).data).digest()


def _on_host(pages: Array) -> np.ndarray[Any, Any]:
    return cast("np.ndarray[Any, Any]", pages if isinstance(pages, np.ndarray) else to_numpy(pages))


class LaneDigests:
    """The lanes of every page of history, then of each other section."""

    def __init__(self, ops: Ops, layout: PageLayout) -> None:
        self._ops = ops
        self._layout = layout
        # Lanes of the first pages, as far as they are here; on the device.
        self._lanes: list[Array] = []
        self._added = 0

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
            lanes = self._at_once(record, section.strips, 0)
            found.append([self._one_by_one(record, section.strips) if lanes is None else lanes])
        return [
            pair
            for section, parts in zip(self._layout.sections, found, strict=True)
            for pair in [packed for part in parts for packed in _packed(part)]
            or ([] if section.name == HISTORY else [bytes(SIZES["lanes"])])
        ]

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
    return [pair.tobytes() for pair in (to_numpy(lanes) & MASK).astype("<u4")]
