"""The best k of every row of scores: each program keeps its columns' best, lists of those are merged, then ranked.

1. A program holds a tile of a row in its threads. The tile's columns are dealt out to many hands; the k-th largest of
   the hands' best is a lower bound of the tile's k-th largest score, and mostly a close one. What reaches it is kept.
2. Lists of a row are taken together in the same way until one is left.
3. Each score of that list is ranked by counting those above it, by several programs; where rows are so many that each
   has but one, it sorts. Equal scores rank by column, so ranks are distinct and the order in lists does not matter.

A score and its column are one 64-bit number, a pair: scores as integers of the same order, then columns, lowest first.

Map: ``Tile`` .. ``shares_for`` cut a call into tiles, lists of lists, and programs that rank the last one; the kernels
are behind them.
"""

from functools import cache, lru_cache
from typing import NamedTuple

import triton
import triton.language as tl

from kvcore.kernels.triton.codes import float_bits
from kvcore.kernels.triton.device import INTERPRETED
from kvcore.kernels.triton.record import ceil_div, power_of_two

LARGEST_K = 4096
"""Lists of two tiles of more entries than this would not fit into one."""
TILE = 16384
"""Scores or pairs that a program holds: 64 KiB of registers and more would spill."""
LISTS_AT_ONCE = 2048
"""Lists that are kept at a time: the workspace need not grow with a prompt."""
RANKED, OTHERS = 32, 128
"""Pairs that a program ranks at a time, and pairs that it compares them with."""
MOST_SORTED = 64 if INTERPRETED else 2048
"""Pairs that a program sorts in its registers; the interpreter compares them one by one, in Python."""


class Tile(NamedTuple):
    """What a program of ``best_kernel`` takes: groups of hands, hands, columns of a hand; its warps."""

    topk: int
    hands: int
    deep: int
    warps: int


@cache
def tile_for(k: int, slots: int) -> Tile:
    """Four hands for every one of k: then about k + k / 7 of random scores reach the k-th largest of the hands."""
    topk = power_of_two(k)
    size = min(TILE, max(power_of_two(slots), topk, 1024))
    hands = min(size, max(4 * topk, 1024))
    return Tile(topk, hands, size // hands, max(4, size // 1024))


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
    rows = min(rows, rows_at_once(parts))
    pairs, counts = workspace(rows, parts, room_for(k), room_for(k), k)
    programs = ceil_div(max(columns, 1), HOPPER_PART)
    # The last rows of many are few.
    few = min(rows, HOPPER_LISTED // programs)
    if few and hopper_listed(few, columns, k):
        pairs = max(pairs, few * HOPPER_SLOTS)
        counts = max(counts, aligned_to_four(few) + few * programs * HOPPER_HANDS)
    return pairs, counts


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


def sorts(multiprocessors: int, rows: int, most: int) -> bool:
    """True where a program a row fills the device, and lists of at most ``most`` pairs fit into its registers."""
    return 3 * rows >= multiprocessors and most <= MOST_SORTED


def shares_for(multiprocessors: int, rows: int, most: int) -> int:
    """Programs that rank one row's list of at most ``most`` pairs."""
    return max(1, min(ceil_div(most, RANKED), 16 * multiprocessors // rows))


HOPPER_K = 1024
"""Most of a row that the kernel for Hopper picks, whose lists lie in shared memory."""
HOPPER_SLOTS = TILE
"""Most pairs that a row's lists have room for, which one program goes through; of more, levels of lists take less."""
HOPPER_ROOM = 2048
"""Pairs that its list has room for where a program goes through several tiles; cutting it costs as much as a tile."""


TOP_WARPS = 16
"""Warps of its programs."""
HOPPER_PART, HOPPER_HANDS = 2048, 64
"""Scores of a program that looks at part of a row for a bound, and hands that it deals them out to."""
HOPPER_LISTED = 128
"""Most such programs of a call; where they are more, lists of parts take less."""


class HopperTile(NamedTuple):
    """What a program of the kernel for Hopper holds: its warps, scores of a thread, hands of a thread."""

    warps: int
    deep: int
    hands: int


class HopperLists(NamedTuple):
    """Parts of a row, columns of each, pairs of a list; tiles of the launch that takes rows and of that of lists."""

    parts: int
    run: int
    room: int
    first: HopperTile
    last: HopperTile


def hopper_tile(slots: int, deepest: int) -> HopperTile:
    """The least tile that holds so many slots; no thread more than ``deepest``."""
    deep = deepest
    while deep > 4 and slots <= 256 * deep:
        deep //= 2
    return HopperTile(TOP_WARPS, deep, 4)


def hopper_listed(rows: int, columns: int, k: int) -> bool:
    """True where rows are long and few: one list a row, of what reaches a bound from the hands of all of it."""
    parts = ceil_div(columns, HOPPER_PART)
    hands = parts * HOPPER_HANDS
    return 2 * k <= hands <= 16 * 32 * TOP_WARPS and rows * parts <= HOPPER_LISTED


@lru_cache(4096)
def hopper_lists(multiprocessors: int, rows: int, columns: int, k: int) -> HopperLists:
    """Tiles of rows are parts where rows are few; else as many parts as occupy the device, with room for two tiles'."""
    most, room = ceil_div(columns, TILE), room_for(k)
    parts = min(most, max(1, 2 * multiprocessors // rows))
    if parts < most:
        parts, room = max(1, min(parts, most // 2)), max(room, HOPPER_ROOM)
    run = ceil_div(ceil_div(columns, parts), 4) * 4
    parts = ceil_div(columns, run)
    first, last = hopper_tile(run, 32 if run <= TILE else 16), hopper_tile(parts * room, 32)
    return HopperLists(parts, run, room, first, last)


LOWEST = tl.constexpr(-2139095041)
"""``order_of`` of -inf: what is never selected."""

NO_PAIR = tl.constexpr(-9223372036854775808)
"""Below every pair."""


@triton.jit
def order_of(score):
    """fp32 -> int32 of the same order; NaN counts as -inf, -0 as 0."""
    bits = float_bits(tl.where(score != score, float("-inf"), score + 0.0))
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def pair_of(order, column):
    """(order, column) as one int64: higher scores first, then lower columns."""
    return (order.to(tl.int64) << 32) | (0x7FFFFFFF - column).to(tl.int64)


@triton.jit
def middle_of(low, high):
    """Halfway between two integers, rounded up, without overflow."""
    return (low | high) - ((low ^ high) >> 1)


@triton.jit
def bound_of(order, low, high, k, most):
    """A number from low to high that at least k of ``order`` [n] reach, given that as many reach ``low``.

    It is raised until no more than ``most`` reach it, or until one step more would leave fewer than k.
    """
    reached = tl.full([], 2147483647, tl.int32)
    while (low < high) & (reached > most):
        middle = middle_of(low, high)
        count = tl.sum((order >= middle).to(tl.int32), axis=0)
        enough = count >= k
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle - 1)
        reached = tl.where(enough, count, reached)
    return low


@triton.jit
def hands_bound(hands, k, most, TOPK: tl.constexpr):
    """A bound that at least k of the hands [n] reach; of all that are above -inf if those are fewer than k."""
    n: tl.constexpr = hands.shape[0]
    high = tl.max(hands, axis=0)
    # Every one of TOPK >= k groups of hands has a best: the least of them is reached by as many.
    low = tl.min(tl.max(tl.reshape(hands, (TOPK, n // TOPK)), axis=1), axis=0)
    if low <= LOWEST:
        low = tl.full([], LOWEST + 1, tl.int32)
        if tl.sum((hands >= low).to(tl.int32), axis=0) < k:
            high = low
    return bound_of(hands, low, high, k, most)


@triton.jit
def load_orders(
    given_ptr, given_counts_ptr, part, n, line, HANDS: tl.constexpr, DEEP: tl.constexpr, LIST: tl.constexpr
):
    """Orders of a tile's scores or pairs, DEEP vectors [HANDS]; see ``best_kernel``."""
    orders = ()
    for d in tl.static_range(DEEP):
        at = (part * DEEP + d) * HANDS + tl.arange(0, HANDS)
        if LIST:
            number, slot = at // LIST, at % LIST
            count = tl.load(given_counts_ptr + number, mask=number < n, other=0)
            # The high half of a pair.
            half_ptr = given_ptr.to(tl.pointer_type(tl.int32)) + 1
            order = tl.load(half_ptr + 2 * (number * line + slot), mask=slot < count, other=LOWEST)
        else:
            order = order_of(tl.load(given_ptr + at, mask=at < n, other=float("-inf")))
        orders = orders + (order,)
    return orders


@triton.jit
def pairs_of(
    d: tl.constexpr, order, least, given_ptr, part, line, HANDS: tl.constexpr, DEEP: tl.constexpr, LIST: tl.constexpr
):
    """Pairs of vector ``d`` of a tile; of lists, only those that might reach ``least`` are right, others are below it.

    What is read again was read before and is near; kept in registers it would not fit.
    """
    at = (part * DEEP + d) * HANDS + tl.arange(0, HANDS)
    if LIST:
        place = at // LIST * line + at % LIST
        pair = tl.load(given_ptr + place, mask=order >= (least >> 32).to(tl.int32), other=NO_PAIR)
    else:
        pair = pair_of(order, at)
    return pair


@triton.jit
def reaching(orders, least, given_ptr, part, line, HANDS: tl.constexpr, DEEP: tl.constexpr, LIST: tl.constexpr):
    """How many pairs of every hand reach ``least``."""
    count = tl.zeros([HANDS], tl.int32)
    for d in tl.static_range(DEEP):
        count += (pairs_of(d, orders[d], least, given_ptr, part, line, HANDS, DEEP, LIST) >= least).to(tl.int32)
    return count


@triton.jit(do_not_specialize=["n", "line", "k", "most", "parts"])
def best_kernel(
    pairs_ptr, counts_ptr, given_ptr, given_counts_ptr, n, line, k, most, parts,
    TOPK: tl.constexpr, HANDS: tl.constexpr, DEEP: tl.constexpr, ROOM: tl.constexpr, LIST: tl.constexpr,
):  # fmt: skip
    """The best k or somewhat more of part of a row -> pairs [rows, parts, ROOM], their numbers -> counts [rows, parts].

    LIST 0: given are scores, n columns of [rows, line]. Else n lists of pairs a row, ``line`` apart, with at most LIST
    pairs each and as many as their counts [rows, n] say.
    """
    part, token = tl.program_id(0) % parts, (tl.program_id(0) // parts).to(tl.int64)
    if LIST:
        given_ptr += token * n * line
        given_counts_ptr += token * n
    else:
        given_ptr += token * line
    orders = load_orders(given_ptr, given_counts_ptr, part, n, line, HANDS, DEEP, LIST)
    hands = tl.full([HANDS], LOWEST, tl.int32)
    for d in tl.static_range(DEEP):
        hands = tl.maximum(hands, orders[d])
    bound = hands_bound(hands, k, most, TOPK)
    count = tl.zeros([HANDS], tl.int32)
    for d in tl.static_range(DEEP):
        count += (orders[d] >= bound).to(tl.int32)
    total = tl.sum(count, axis=0)
    least = bound.to(tl.int64) << 32
    if total > ROOM:
        # Pairs are distinct: some bound is reached by exactly k.
        high = (tl.max(hands, axis=0).to(tl.int64) << 32) | 0x7FFFFFFF
        while total != k:
            middle = middle_of(least, high)
            some = tl.sum(reaching(orders, middle, given_ptr, part, line, HANDS, DEEP, LIST), axis=0)
            enough = some >= k
            least, high = tl.where(enough, middle, least), tl.where(enough, high, middle - 1)
            total = tl.where(enough, some, total)
        count = reaching(orders, least, given_ptr, part, line, HANDS, DEEP, LIST)
    place = tl.cumsum(count, axis=0) - count
    out_ptr = pairs_ptr + tl.program_id(0).to(tl.int64) * ROOM
    for d in tl.static_range(DEEP):
        pair = pairs_of(d, orders[d], least, given_ptr, part, line, HANDS, DEEP, LIST)
        kept = pair >= least
        tl.store(out_ptr + place, pair, mask=kept)
        place += kept.to(tl.int32)
    tl.store(counts_ptr + tl.program_id(0), total)


@triton.jit
def truncate_list(list_ptr, count, bound, k, most, ROOM: tl.constexpr):
    """Cut a list of more than k pairs in column order, all above ``bound``, to its best k or up to ``most`` of them.

    Returns (bound, count): no later column belongs to the best k unless it is above the bound, which k of the list
    reach. The list keeps its order.
    """
    at = tl.arange(0, ROOM)
    pair = tl.load(list_ptr + at, mask=at < count, other=NO_PAIR)
    order = (pair >> 32).to(tl.int32)
    bound = bound_of(order, bound + 1, tl.max(order, axis=0), k, most)
    above = (order > bound).to(tl.int32)
    equal = (order == bound).to(tl.int32)
    ahead = tl.sum(above, axis=0) + tl.cumsum(equal, axis=0) - equal
    kept = above | (equal & (ahead < k).to(tl.int32))
    # All are read before any is overwritten.
    tl.debug_barrier()
    tl.store(list_ptr + tl.cumsum(kept, axis=0) - kept, pair, mask=kept == 1)
    return bound, tl.sum(kept, axis=0)


@triton.jit(do_not_specialize=["line", "k", "parts"])
def rank_kernel(indices_ptr, pairs_ptr, counts_ptr, line, k, parts, BLOCK: tl.constexpr, OTHERS: tl.constexpr):
    """Columns by rank -> indices [rows, k], -1 beyond the last; ``parts`` programs share a row's pairs.

    Pairs are [rows, line], as many of them as counts [rows] say.
    """
    token, part = (tl.program_id(0) // parts).to(tl.int64), tl.program_id(0) % parts
    count = tl.load(counts_ptr + token)
    pairs_ptr += token * line
    for first in range(part * BLOCK, count, parts * BLOCK):
        at = first + tl.arange(0, BLOCK)
        mine = tl.load(pairs_ptr + at, mask=at < count, other=0)
        # A thread compares its own pair with others that a warp reads as one: nothing is exchanged but counts of warps.
        above = tl.zeros([OTHERS, BLOCK], tl.int32)
        for start in range(0, count, OTHERS):
            other_at = start + tl.arange(0, OTHERS)
            other = tl.load(pairs_ptr + other_at, mask=other_at < count, other=NO_PAIR)
            above += (other[:, None] > mine[None, :]).to(tl.int32)
        rank = tl.sum(above, axis=0)
        column = 0x7FFFFFFF - (mine & 0xFFFFFFFF).to(tl.int32)
        tl.store(indices_ptr + token * k + rank, column, mask=(at < count) & (rank < k))
    if part == 0:
        for first in range(count, k, BLOCK):
            at = first + tl.arange(0, BLOCK)
            tl.store(indices_ptr + token * k + at, tl.full([BLOCK], -1, tl.int32), mask=at < k)


@triton.jit
def store_sorted(indices_ptr, pairs_ptr, count, k, SLOTS: tl.constexpr):
    """Columns of ``count`` <= SLOTS pairs by rank -> indices [k <= SLOTS], -1 beyond the last."""
    at = tl.arange(0, SLOTS)
    pair = tl.sort(tl.load(pairs_ptr + at, mask=at < count, other=NO_PAIR), descending=True)
    column = 0x7FFFFFFF - (pair & 0xFFFFFFFF).to(tl.int32)
    tl.store(indices_ptr + at, tl.where(at < count, column, -1), mask=at < k)


@triton.jit(do_not_specialize=["line", "k"])
def sort_kernel(indices_ptr, pairs_ptr, counts_ptr, line, k, SLOTS: tl.constexpr):
    """Columns by rank -> indices [rows, k <= SLOTS], -1 beyond the last; a program sorts a row's pairs.

    Pairs are [rows, line], as many of them as counts [rows] say, SLOTS at most.
    """
    token = tl.program_id(0).to(tl.int64)
    store_sorted(indices_ptr + token * k, pairs_ptr + token * line, tl.load(counts_ptr + token), k, SLOTS)
