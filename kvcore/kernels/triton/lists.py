"""How top-k is cut: the best of tiles as lists, lists of lists, and programs that rank the last one."""

from functools import cache, lru_cache
from typing import NamedTuple

from kvcore.kernels.triton.record import ceil_div, power_of_two

MOST_PICKS = 4096
"""Lists of two tiles of more picks than this would not fit into one."""
TILE = 16384
"""Scores or pairs that a program holds: 64 KiB of registers and more would spill."""
LISTS_AT_ONCE = 2048
"""Lists that are kept at a time: the workspace need not grow with a prompt."""
RANKED, OTHERS = 16, 128
"""Pairs that a program ranks at a time, and pairs that it compares them with."""


class Tile(NamedTuple):
    """What a program of ``best_kernel`` takes: groups of hands, hands, columns of a hand; its warps."""

    picks: int
    hands: int
    deep: int
    warps: int


@cache
def tile_for(k: int, slots: int) -> Tile:
    """Four hands for every pick: then about k + k / 7 of random scores reach the k-th largest of the hands."""
    picks = power_of_two(k)
    size = min(TILE, max(power_of_two(slots), picks, 1024))
    hands = min(size, max(4 * picks, 1024))
    return Tile(picks, hands, size // hands, max(4, size // 1024))


def enough(k: int) -> int:
    """Hands that may reach a bound: a closer one costs more looks for it, a looser one more pairs to rank."""
    return k + k // 8


def room_for(k: int) -> int:
    """Pairs that a tile may keep: twice what is wanted, so that a close bound does."""
    return max(1024, 2 * power_of_two(k))


def workspace(rows: int, parts: int, room: int, most: int, k: int) -> tuple[int, int]:
    """Pairs and counts that ``rank_lists`` needs for rows of ``parts`` lists, those lists included."""
    pairs, counts = rows * parts * room, aligned_to_four(rows * parts)
    while parts > 1:
        parts, room, most = ceil_div(parts, max(1, TILE // most)), room_for(k), room_for(k)
        pairs, counts = pairs + rows * parts * room, counts + aligned_to_four(rows * parts)
    return pairs, counts


@lru_cache(4096)
def select_workspace(rows: int, columns: int, k: int) -> tuple[int, int]:
    """Pairs and counts that ``select_rows`` needs."""
    parts = ceil_div(max(columns, 1), TILE)
    return workspace(min(rows, rows_at_once(parts)), parts, room_for(k), room_for(k), k)


def rows_at_once(parts: int) -> int:
    """Rows of ``parts`` lists that are ranked at a time."""
    return max(1, LISTS_AT_ONCE // parts)


def aligned_to_four(count: int) -> int:
    """Room for counts of a level of lists, so that the next level's start on 16 bytes."""
    return ceil_div(count, 4) * 4


class Merge(NamedTuple):
    """A level of lists: ``given`` lists a row, ``line`` apart with at most ``most`` pairs, become ``parts`` lists."""

    given: int
    line: int
    most: int
    parts: int
    room: int
    tile: Tile


@lru_cache(4096)
def merges(parts: int, room: int, most: int, k: int) -> tuple[Merge, ...]:
    """The levels from ``parts`` lists a row to one."""
    found = []
    while parts > 1:
        fan, kept = max(1, TILE // most), room_for(k)
        found.append(Merge(parts, room, most, ceil_div(parts, fan), kept, tile_for(k, min(parts, fan) * most)))
        parts, room, most = found[-1].parts, kept, kept
    return tuple(found)


def shares_for(multiprocessors: int, rows: int, most: int) -> int:
    """Programs that rank one row's list of at most ``most`` pairs."""
    return max(1, min(ceil_div(most, RANKED), 16 * multiprocessors // rows))
