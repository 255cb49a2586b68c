"""Launches of top-k: the best of every tile of a row, merged until one list is left, then ranked."""

from functools import cache
from typing import NamedTuple

from kvcore.kernels.triton import topk
from kvcore.kernels.triton.device import hopper
from kvcore.kernels.triton.launches.launching import Array, Framework, Kernel, launch
from kvcore.kernels.triton.record import ceil_div, power_of_two
from kvcore.kernels.triton.topk import (
    HOPPER_HANDS,
    HOPPER_K,
    HOPPER_PART,
    HOPPER_ROOM,
    HOPPER_SLOTS,
    OTHERS,
    RANKED,
    TOP_WARPS,
    HopperLists,
    HopperTile,
    Tile,
    aligned_to_four,
    enough,
    hopper_listed,
    hopper_lists,
    merges,
    room_for,
    rows_at_once,
    shares_for,
    sorts,
    tile_for,
)


class Lists(NamedTuple):
    """Lists of pairs: ``parts`` a row, ``room`` apart, no more than ``most`` pairs in each."""

    pairs: Array
    counts: Array
    parts: int
    room: int
    most: int


@cache
def _best(tile: Tile, room: int, most: int) -> Kernel:
    constants = {"TOPK": tile.topk, "HANDS": tile.hands, "DEEP": tile.deep, "ROOM": room, "LIST": most}
    return Kernel(topk.best_kernel, constants, tile.warps, writes=("pairs", "counts"), fused=True)


@cache
def _rank() -> Kernel:
    return Kernel(topk.rank_kernel, {"BLOCK": RANKED, "OTHERS": OTHERS}, writes=("indices",), fused=True)


@cache
def _sort(slots: int) -> Kernel:
    return Kernel(topk.sort_kernel, {"SLOTS": slots}, 16, writes=("indices",))


@cache
def _hopper_best(
    tile: HopperTile, room: int, lists: int, last: bool, one: bool, whole: bool, seen: bool = False
) -> Kernel:
    # Gluon is not loaded where it cannot run.
    from kvcore.kernels.triton.topk_hopper import hopper_top_kernel

    constants = {
        "WARPS": tile.warps, "DEEP": tile.deep, "HANDS": tile.hands, "BINS": 2048, "ROOM": room, "LIST": lists,
        "LAST": last, "ONE": one, "WHOLE": whole, "SEEN": seen,
    }  # fmt: skip
    writes = ("indices",) if last else ("pairs", "counts")
    return Kernel(hopper_top_kernel, constants, tile.warps, writes=writes, fused=True)


@cache
def _hopper_listed(held: int, whole: bool) -> tuple[Kernel, Kernel, Kernel]:
    """What finds the hands of rows, lists what reaches a bound from them, and ranks the lists."""
    from kvcore.kernels.triton import topk_hopper as kernels

    part = {"WARPS": TOP_WARPS, "DEEP": HOPPER_PART // (32 * TOP_WARPS), "WHOLE": whole}
    listed = {**part, "HELD": held, "BINS": 2048, "ROOM": HOPPER_SLOTS}
    last = {"WARPS": TOP_WARPS, "BINS": 2048, "GIVEN": HOPPER_SLOTS, "ROOM": HOPPER_ROOM, "WHOLE": whole}
    return (
        Kernel(kernels.hopper_hands_kernel, part, TOP_WARPS, writes=("hands", "counts"), fused=True),
        Kernel(kernels.hopper_list_kernel, listed, TOP_WARPS, writes=("pairs", "counts"), fused=True),
        Kernel(kernels.hopper_last_kernel, last, TOP_WARPS, writes=("indices",), fused=True),
    )


def _hopper_long_rows(
    to: Framework, indices: Array, scores: Array, rows: int, space: tuple[Array, Array], k: int
) -> None:
    """The best k of so few long rows of scores -> indices; one list a row in ``space``."""
    columns = scores.shape[1]
    parts = ceil_div(columns, HOPPER_PART)
    hands = (rows, parts, HOPPER_HANDS)
    held = max(4, power_of_two(ceil_div(parts * HOPPER_HANDS, 32 * TOP_WARPS)))
    find, gather, rank = _hopper_listed(held, columns % 4 == 0)
    pairs, counts = to.part(space[0], 0, (rows, HOPPER_SLOTS), to.int64), to.part(space[1], 0, (rows,), to.int32)
    best = to.part(space[1], aligned_to_four(rows), hands, to.int32)
    to.run(find, (rows * parts,), (best, counts, scores), (columns, parts))
    to.run(gather, (rows * parts,), (pairs, counts, best, scores), (columns, k, parts))
    to.run(rank, (rows,), (indices, pairs, counts, scores), (columns, k, k + k // 4))


def hopper_rows(
    to: Framework, indices: Array, scores: Array, rows: int, space: tuple[Array, Array], k: int, lists: HopperLists,
    seen: Array | None = None,
) -> None:  # fmt: skip
    """The best k of so many rows of scores -> indices; lists of their parts in ``space``, where rows have several.

    Args:
        seen: by row, scores that count; -1 for rows whose indices stay as they are.
    """
    columns, room, most = scores.shape[1], lists.room, k + k // 4
    alone, slots = lists.parts == 1, 32 * lists.first.warps * lists.first.deep
    pairs, counts = _lists(to, space, 0, 0, (rows, lists.parts, room))
    to.run(
        _hopper_best(lists.first, room, 0, alone, lists.run <= slots, columns % 4 == 0, seen is not None),
        (rows * lists.parts,),
        (indices, pairs, counts, scores, counts if seen is None else seen),
        (columns, columns, k, most, lists.parts, lists.run),
    )
    if not alone:
        slots = 32 * lists.last.warps * lists.last.deep
        to.run(
            _hopper_best(lists.last, room, room, True, lists.parts * room <= slots, True, seen is not None),
            (rows,),
            (indices, pairs, counts, pairs, counts),
            (lists.parts, room, k, most, 1, lists.parts * room),
        )


def _lists(to: Framework, room: tuple[Array, Array], pairs: int, counts: int, shape: tuple[int, int, int]):
    """Lists of that shape, rows, parts, room, behind so many pairs and counts in ``room``: pairs and counts."""
    return to.part(room[0], pairs, shape, to.int64), to.part(room[1], counts, shape[:2], to.int32)


def _select_out(to: Framework, scores: Array, k: int) -> Array:
    return to.empty((scores.shape[0], k), to.int32, scores)


@launch("pairs", "counts", outputs=_select_out)
def select_rows(to: Framework, scores: Array, pairs: Array, counts: Array, k: int) -> Array:
    """The best k <= LARGEST_K of scores [tokens, columns], contiguous -> [tokens, k].

    Args:
        pairs, counts: int64 and int32, as many as ``select_workspace`` says.
    """
    tokens, columns = scores.shape
    if not columns:
        return to.filled((tokens, k), -1, to.int32, scores)
    out = _select_out(to, scores, k)
    if not tokens * k:
        return out
    tile, room, props = tile_for(k, columns), room_for(k), to.props(scores)
    parts = ceil_div(columns, tile.hands * tile.deep)
    most = rows_at_once(parts)
    for start in range(0, tokens, most):
        some = min(most, tokens - start)
        rows, indices = to.part(scores, start, (some, columns), to.float32), to.part(out, start, (some, k), to.int32)
        lists = hopper_lists(props.multiprocessors, some, columns, k)
        if k <= HOPPER_K and hopper_listed(some, columns, k) and to.gluon and hopper(props):
            _hopper_long_rows(to, indices, rows, some, (pairs, counts), k)
            continue
        if k <= HOPPER_K and lists.parts * lists.room <= HOPPER_SLOTS and to.gluon and hopper(props):
            hopper_rows(to, indices, rows, some, (pairs, counts), k, lists)
            continue
        best, numbers = _lists(to, (pairs, counts), 0, 0, (some, parts, room))
        to.run(
            _best(tile, room, 0),
            (some * parts,),
            (best, numbers, rows, numbers),
            (columns, columns, k, enough(k), parts),
        )
        rank_lists(to, indices, some, Lists(best, numbers, parts, room, room), (pairs, counts), k)
    return out


def rank_lists(to: Framework, indices: Array, rows: int, lists: Lists, space: tuple[Array, Array], k: int) -> None:
    """The best k of every row's lists -> indices [rows, k]; lists of fewer lists are written behind in ``space``."""
    pairs, counts, parts, room, most = lists
    before, counted = 0, 0
    for one in merges(parts, room, most, k):
        before, counted = before + rows * one.given * one.line, counted + aligned_to_four(rows * one.given)
        merged, numbers = _lists(to, space, before, counted, (rows, one.parts, one.room))
        to.run(
            _best(one.tile, one.room, one.most),
            (rows * one.parts,),
            (merged, numbers, pairs, counts),
            (one.given, one.line, k, enough(k), one.parts),
        )
        pairs, counts, room, most = merged, numbers, one.room, one.room
    multiprocessors = to.props(indices).multiprocessors
    if sorts(multiprocessors, rows, most):
        to.run(_sort(max(16, power_of_two(most))), (rows,), (indices, pairs, counts), (room, k))
    else:
        shares = shares_for(multiprocessors, rows, most)
        to.run(_rank(), (rows * shares,), (indices, pairs, counts), (room, k, shares))
