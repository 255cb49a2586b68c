"""The check word of a row: 32 bits of its bytes and of the place that it holds, as every backend computes them.

A row's bytes, all parts and heads of it, are cut where they lie apart in a pool. Each piece is read as little-endian
32-bit words, with zeros at its end; every word is mixed with a key of its own, and all are summed modulo 2^32. The sum
is mixed with the layer's role and the row's number. So whatever changes in one word of a row, a flipped bit or all of
it, changes the check word; of changes in several, and of rows that lie where others should, one in 2^32 is missed. It
depends on no request, slot or block: rows may be shared and copied.

A block table has a hash of the same make: block numbers, each mixed with its column's key, in one sum.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from kvcore.digest import LANE_SEEDS, MASK, MIX_FACTORS, MIX_SHIFTS, POSITION_FACTOR, WORD, WORD_FACTOR

SEED = LANE_SEEDS[0]
Array = np.ndarray[Any, Any]


def mixed(values: Array) -> Array:
    """murmur3's 32-bit finaliser of uint32."""
    for shift, factor in zip(MIX_SHIFTS, (*MIX_FACTORS, 1), strict=True):
        values = (values ^ (values >> np.uint32(shift))) * np.uint32(factor)
    return values


@lru_cache(maxsize=256)
def keys(count: int) -> Array:
    """[count] uint32: of the first words of a row, or columns of a table."""
    return mixed(np.arange(count, dtype=np.uint32) * np.uint32(WORD_FACTOR) + np.uint32(SEED))


@lru_cache(maxsize=1024)
def places_of(pieces: tuple[tuple[int, int], ...]) -> Array | None:
    """[4 · words] the byte of a row that each byte of its words is, -1 for zeros; None where that is the row as it is.

    Args:
        pieces: (first byte, bytes) of each, in the order of the words.
    """
    at = 0
    for first, nbytes in pieces:
        if first != at or nbytes % WORD:
            break
        at += nbytes
    else:
        return None
    found = [np.full(-(-nbytes // WORD) * WORD, -1) for _, nbytes in pieces]
    for each, (first, nbytes) in zip(found, pieces, strict=True):
        each[:nbytes] = np.arange(first, first + nbytes)
    return np.concatenate(found)


def words_of(rows: Array, pieces: tuple[tuple[int, int], ...]) -> Array:
    """[n, words] uint32 of canonical rows [n, bytes] uint8."""
    places = places_of(pieces)
    if places is not None:
        rows = np.where(places < 0, np.uint8(0), rows[:, places])
    return np.ascontiguousarray(rows).view(np.dtype("<u4"))


def check_words(rows: Array, numbers: Array, salt: int, pieces: tuple[tuple[int, int], ...]) -> Array:
    """[n] uint32 of canonical rows [n, bytes] uint8 with numbers [n].

    Args:
        rows: of one role, all parts of a row side by side.
        numbers: of the rows: positions, or entries' numbers.
        salt: ``digest.region_salt`` of the layer's role.
        pieces: see ``places_of``.
    """
    words = words_of(rows, pieces)
    sums = mixed(words ^ keys(words.shape[1])).sum(axis=1, dtype=np.uint32)
    return mixed(sums ^ mixed(numbers.astype(np.uint32) * np.uint32(POSITION_FACTOR) + np.uint32(salt & MASK)))


def table_hashes(tables: Array) -> Array:
    """[n] uint32 of block tables [n, columns] int32, -1 where there is no block."""
    found = mixed(tables.astype(np.uint32) ^ keys(tables.shape[1]))
    return np.where(tables < 0, np.uint32(0), found).sum(axis=1, dtype=np.uint32)


def table_hash(blocks: Sequence[int]) -> int:
    """The hash of a request's blocks."""
    return int(table_hashes(np.array([blocks], np.int32).reshape(1, -1))[0])
