"""The content digest: what two caches hold, as numbers that every backend can compute.

Bytes are read as little-endian 32-bit words. Each word is mixed with the place it holds (region, position, word of the
row), and the mixed words are summed modulo 2^32, in two lanes with different seeds. Sums do not depend on order, so
any backend can compute them in parallel; neither 64-bit integers nor unsigned shifts are needed. It detects damage
and mix-ups; it is not cryptographic. The mixer is murmur3's 32-bit finaliser.

``row_lanes`` computes it of rows in the host's memory, at the speed of memory. A word costs some 38 operations as it is
defined, and each is a pass over an array here. What makes it fast: the arrays of a pass stay in a core's cache; the
position's part of a key is one pattern for many rows, moved by one number, since positions are evenly spaced; and where
two mixers meet, the last step of one and the first of the other are the same shift, x ^ (x >> 16), whose square is the
identity. So the key is left one step early, the word is taken one step on, and both lanes share that.

A process that digests much does it in C, wherever a compiler is found (``kvcore.native``), ten times as fast.
"""

import hashlib
import zlib
from collections.abc import Sequence
from functools import lru_cache
from threading import local
from typing import Any, NamedTuple, cast

import numpy as np

from kvcore.native import Lanes, Native

LANE_SEEDS = (0x2545F491, 0x9E6C63D0)
MIX_SHIFTS = (16, 13, 16)
MIX_FACTORS = (0x85EBCA6B, 0xC2B2AE35)
WORD_FACTOR = 0x9E3779B1
POSITION_FACTOR = 0x7FEB352D
MASK = 0xFFFFFFFF

WORD = 4
"""Bytes of a word of the digest."""

AT_ONCE = 1 << 16
"""Words of a pass: four arrays of them fit into a core's second cache."""

Array = np.ndarray[Any, Any]

# Arrays of no axes: NumPy converts its own scalars anew in every call.
_FIRST, _SECOND, _LAST = (np.array(shift, np.uint32) for shift in MIX_SHIFTS)
_FACTORS = tuple(np.array(factor, np.uint32) for factor in MIX_FACTORS)


@lru_cache(maxsize=1 << 12)
def region_salt(layer: int, role: str) -> int:
    """32 bits that tell a layer's role from all others."""
    return zlib.crc32(f"{layer}.{role}".encode())


def combine(requests: Sequence[tuple[int, Sequence[tuple[int, int]]]]) -> int:
    """One 64-bit number for requests in order, each (length, lanes of its regions in canonical order)."""
    text = ";".join(f"{length}:" + ",".join(f"{a:08x}{b:08x}" for a, b in lanes) for length, lanes in requests)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def row_lanes(rows: Array, positions: Array, salt: int) -> Array:
    """Two 32-bit lanes for every request over its rows and positions.

    Args:
        rows: [requests, columns, bytes] uint8, of any strides.
        positions: [requests, columns] integers; rows at negative ones are not there.
        salt: of the region.

    Returns:
        [requests, 2] int64.
    """
    requests, columns, size = rows.shape
    lanes = np.zeros((requests, 2), np.uint32)
    words = -(-size // WORD)
    if not requests or not columns or not words:
        return lanes.astype(np.int64)
    # C reads as many positions as there are rows; NumPy refuses fewer.
    fits = rows.strides[2] == 1 and positions.shape == (requests, columns)
    if fits and (run := native(rows.nbytes)) is not None:
        offsets, places = (np.ascontiguousarray(some, np.int64) for some in (_evenly(rows), positions))
        whole = Rows(
            *(address_of(rows), rows.strides[0], address_of(offsets), address_of(places)),
            *(requests, columns, size, salt & MASK, address_of(lanes)),
        )
        add_lanes(run, [whole])
        return lanes.astype(np.int64)
    work = _work(max(AT_ONCE // words, 1), words)
    if columns > work.rows:
        parts = [
            (slice(q, q + 1), slice(c, c + work.rows)) for q in range(requests) for c in range(0, columns, work.rows)
        ]
    else:
        step = max(1, work.rows // columns)
        parts = [(slice(q, q + step), slice(None)) for q in range(0, requests, step)]
    for some, of_them in parts:
        at = positions[some, of_them]
        lanes[some] += work.lanes(rows[some, of_them], at.reshape(-1), salt).T
    return lanes.astype(np.int64)


def alike_lanes(rows: Array, positions: Array, salts: Sequence[int]) -> Array:
    """The lanes of the rows of several regions at the same positions: ``row_lanes`` of each, in fewer passes.

    Args:
        rows: [regions, columns, bytes] uint8.
        positions: [columns] integers, none of them negative.
        salts: of the regions.

    Returns:
        [regions, 2] int64.
    """
    regions, columns, size = rows.shape
    words = -(-size // WORD)
    lanes = np.zeros((regions, 2), np.uint32)
    fits = rows.strides[2] == 1 and len(positions) == columns
    run = native(0) if fits else None
    if run is not None and columns:
        offsets, places = (np.ascontiguousarray(some, np.int64) for some in (_evenly(rows), positions))
        first, at, where, sums = map(address_of, (rows, offsets, places, lanes))
        apart = rows.strides[0]
        alike = [
            Rows(first + number * apart, 0, at, where, 1, columns, size, salt & MASK, sums + number * lanes.strides[0])
            for number, salt in enumerate(salts)
        ]
        add_lanes(run, alike)
        return lanes.astype(np.int64)
    step = AT_ONCE // max(1, columns * words)
    if not step or not columns or not words:
        each = (row_lanes(one[None], positions[None], salt) for one, salt in zip(rows, salts, strict=True))
        return np.concatenate([*each]) if regions else lanes.astype(np.int64)
    work = _work(max(AT_ONCE // words, 1), words)
    for first in range(0, regions, step):
        some = slice(first, first + step)
        lanes[some] = work.lanes(rows[some], positions, np.array(salts[some], np.uint32)).T
    return lanes.astype(np.int64)


class Rows(NamedTuple):
    """Rows of which C adds the lanes: row c of request q begins at ``base + q * apart + offsets[c]``.

    Attributes:
        base: address.
        apart: bytes from one request to the next.
        offsets: address of int64 [columns]: bytes, of a request's rows.
        positions: address of int64 [requests, columns]; rows at negative ones are not there.
        requests, columns: how many.
        nbytes: of a row; zeros follow in its last word.
        salt: of the region, 32 bits.
        lanes: address of uint32 [requests, 2], to which they are added.
    """

    base: int
    apart: int
    offsets: int
    positions: int
    requests: int
    columns: int
    nbytes: int
    salt: int
    lanes: int


def address_of(array: Array) -> int:
    """Where an array begins; it has to be kept for as long as the address is used."""
    return array.__array_interface__["data"][0]


def add_lanes(run: Lanes, rows: Sequence[Rows]) -> None:
    """Add the lanes of all of them, in one call."""
    table = np.array(rows, np.int64)
    run(address_of(table), len(rows))


def _evenly(rows: Array) -> Array:
    """Offsets of rows [requests, columns, bytes] in a request."""
    return cast("Array", np.arange(rows.shape[1]) * rows.strides[1])


def _right(run: Lanes) -> bool:
    """Whether a function gives what NumPy does: of rows of every kind of length, and where there are none."""
    for size in (4, 7, 28, 64, 580, 581, 582):
        rows, words = np.arange(3 * 5 * size, dtype=np.uint32).astype(np.uint8).reshape(3, 5, -1), -(-size // WORD)
        positions = np.arange(15).reshape(3, 5) * 3 - 2
        found, offsets, places = np.zeros((3, 2), np.uint32), _evenly(rows), positions.astype(np.int64)
        first, at, where, sums = map(address_of, (rows, offsets, places, found))
        add_lanes(run, [Rows(first, rows.strides[0], at, where, 3, 5, size, 0xC0FFEE, sums)])
        work = _Work(15, words, np.empty((3, 15 * words), np.uint32))
        if (work.lanes(rows, positions.reshape(-1), 0xC0FFEE) != found.T).any():
            return False
    return True


native = Native(_right)

_kept = local()


def _work(rows: int, words: int) -> "_Work":
    """The arrays of a thread: memory that is new costs more than what is done in it."""
    kept: _Work | None = getattr(_kept, "work", None)
    if kept is not None and kept.words == words:
        return kept
    arrays = (
        kept.arrays
        if kept is not None and rows * words <= AT_ONCE
        else np.empty((3, max(rows * words, AT_ONCE)), np.uint32)
    )
    work = _Work(rows, words, arrays)
    if rows * words <= AT_ONCE:
        _kept.work = work
    return work


class _Work:
    """The arrays of a pass over ``rows`` rows of ``words`` words."""

    def __init__(self, rows: int, words: int, arrays: Array) -> None:
        self.rows, self.words, self.arrays = rows, words, arrays
        self._places = np.arange(words, dtype=np.uint32) * np.uint32(WORD_FACTOR)
        # (distance of positions, what a key has of the place in the pass).
        self._pattern: tuple[int, Array] | None = None

    def lanes(self, rows: Array, positions: Array, salt: int | Array) -> Array:
        """[2, requests] of rows [requests, columns, bytes].

        ``positions`` are of all of them one after another under one salt, or of each alike under salts of their own.
        """
        requests, each = len(rows), len(positions) * self.words
        count = each if isinstance(salt, int) else requests * each
        stored, value, shifted = self.arrays[:, :count]
        words = self._words_of(rows)
        # The word, one step on.
        np.right_shift(words, _FIRST, out=stored.reshape(words.shape))
        np.bitwise_xor(stored.reshape(words.shape), words, out=stored.reshape(words.shape))
        missing = positions < 0
        pattern, first = self._keys(positions, holes := bool(missing.any()))
        found = np.empty((2, requests), np.uint32)
        for lane, seed in enumerate(LANE_SEEDS):
            if isinstance(salt, int):
                np.add(pattern, np.array((first + salt + seed) & MASK, np.uint32), value)
            else:
                added = salt + np.uint32((first + seed) & MASK)
                np.add(pattern, added[:, None], value.reshape(requests, each))
            for shift, factor in zip((_FIRST, _SECOND), _FACTORS, strict=True):
                np.right_shift(value, shift, shifted)
                np.bitwise_xor(value, shifted, value)
                np.multiply(value, factor, value)
            np.bitwise_xor(value, stored, value)
            np.multiply(value, _FACTORS[0], value)
            np.right_shift(value, _SECOND, shifted)
            np.bitwise_xor(value, shifted, value)
            np.multiply(value, _FACTORS[1], value)
            np.right_shift(value, _LAST, shifted)
            np.bitwise_xor(value, shifted, value)
            if holes:
                value.reshape(-1, self.words)[missing] = 0
            np.add.reduce(value.reshape(requests, -1), axis=1, dtype=np.uint32, out=found[lane])
        return found

    def _words_of(self, rows: Array) -> Array:
        """Rows as words, [n, ...] uint32: as they lie where that can be."""
        size = rows.shape[2]
        starts = (size, *rows.strides[:2], rows.__array_interface__["data"][0])
        if rows.strides[2] == 1 and not any(start % WORD for start in starts):
            return rows.view(np.dtype("<u4"))
        padded = np.zeros((*rows.shape[:2], self.words * WORD), np.uint8)
        padded[:, :, :size] = rows
        return padded.view(np.dtype("<u4"))

    def _keys(self, positions: Array, holes: bool) -> tuple[Array, int]:
        """(flat pattern, what is added to all of it) of the position's and the place's part of every key."""
        count, step = len(positions), int(positions[1]) - int(positions[0]) if len(positions) > 1 else 0
        if holes or (count > 2 and (positions[1:] - positions[:-1] != step).any()):
            row_of = positions.astype(np.uint32) * np.uint32(POSITION_FACTOR)
            return (row_of[:, None] + self._places).reshape(-1), 0
        if self._pattern is None or self._pattern[0] != step:
            row_of = np.arange(self.rows, dtype=np.uint32) * np.uint32(step * POSITION_FACTOR & MASK)
            self._pattern = step, (row_of[:, None] + self._places).reshape(-1)
        return self._pattern[1][: count * self.words], int(positions[0]) * POSITION_FACTOR
