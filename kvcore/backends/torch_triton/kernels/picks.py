"""Launches of top-k: the best of every tile of a row, merged until one list is left, then ranked."""

from functools import cache
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from kvcore.backends.torch_triton.kernels import topk
from kvcore.backends.torch_triton.kernels.attention import multiprocessors
from kvcore.backends.torch_triton.kernels.bound import registered
from kvcore.backends.torch_triton.kernels.record import power_of_two

MOST_PICKS = 4096
"""Lists of two tiles of more picks than this would not fit into one."""
TILE = 16384
"""Scores or pairs that a program holds: 64 KiB of registers and more would spill."""
LISTS_AT_ONCE = 2048
"""Lists that are kept at a time: the workspace need not grow with a prompt."""


RANKED, OTHERS = 16, 128
"""Pairs that a program ranks at a time, and pairs that it compares them with."""
MANY_ROWS, MOST_SORTED = 16, 2048
"""So many rows with no more pairs than this are sorted, by a program each."""


class Tile(NamedTuple):
    """What a program of ``best_kernel`` takes: groups of hands, hands, columns of a hand; its warps."""

    picks: int
    hands: int
    deep: int
    warps: int


class Lists(NamedTuple):
    """Lists of pairs in the workspace: ``parts`` a row, ``room`` apart, no more than ``most`` pairs in each."""

    pairs: Tensor
    counts: Tensor
    parts: int
    room: int
    most: int


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
    pairs, counts = rows * parts * room, _aligned(rows * parts)
    while parts > 1:
        parts, room, most = triton.cdiv(parts, max(1, TILE // most)), room_for(k), room_for(k)
        pairs, counts = pairs + rows * parts * room, counts + _aligned(rows * parts)
    return pairs, counts


def select_workspace(rows: int, columns: int, k: int) -> tuple[int, int]:
    """Pairs and counts that ``select_rows`` needs."""
    parts = triton.cdiv(max(columns, 1), TILE)
    return workspace(min(rows, _at_once(parts)), parts, room_for(k), room_for(k), k)


def _at_once(parts: int) -> int:
    return max(1, LISTS_AT_ONCE // parts)


def _aligned(count: int) -> int:
    return triton.cdiv(count, 4) * 4


def _select_out(scores: Tensor, pairs: Tensor, counts: Tensor, k: int) -> Tensor:
    return scores.new_empty((scores.shape[0], k), dtype=torch.int32)


@registered(("pairs", "counts"), _select_out)
def select_rows(scores: Tensor, pairs: Tensor, counts: Tensor, k: int) -> Tensor:
    """The best k <= MOST_PICKS of scores [tokens, columns], contiguous -> [tokens, k].

    Args:
        pairs, counts: int64 and int32, as many as ``select_workspace`` says.
    """
    out = _select_out(scores, pairs, counts, k)
    columns = scores.shape[1]
    if not columns:
        return out.fill_(-1)
    if not out.numel():
        return out
    tile, room = tile_for(k, columns), room_for(k)
    parts = triton.cdiv(columns, tile.hands * tile.deep)
    for start in range(0, len(out), _at_once(parts)):
        rows, picks = scores[start : start + _at_once(parts)], out[start : start + _at_once(parts)]
        topk.best_kernel[(len(rows) * parts,)](
            pairs, counts, rows, counts, columns, columns, k, enough(k), parts,
            tile.picks, tile.hands, tile.deep, room, 0, num_warps=tile.warps,
        )  # fmt: skip
        rank_lists(picks, Lists(pairs, counts, parts, room, room), k)
    return out


def rank_lists(picks: Tensor, lists: Lists, k: int) -> None:
    """The best k of every row's lists -> picks [rows, k]; lists of fewer lists are written behind them."""
    rows = len(picks)
    pairs, counts, parts, room, most = lists
    while parts > 1:
        fan = max(1, TILE // most)
        tile = tile_for(k, min(parts, fan) * most)
        fewer, kept = triton.cdiv(parts, fan), room_for(k)
        merged, numbers = pairs[rows * parts * room :], counts[_aligned(rows * parts) :]
        topk.best_kernel[(rows * fewer,)](
            merged, numbers, pairs, counts, parts, room, k, enough(k), fewer,
            tile.picks, tile.hands, tile.deep, kept, most, num_warps=tile.warps,
        )  # fmt: skip
        pairs, counts, parts, room, most = merged, numbers, fewer, kept, kept
    if rows >= MANY_ROWS and most <= MOST_SORTED:
        topk.sort_kernel[(rows,)](picks, pairs, counts, room, k, most, num_warps=max(4, most // 256))
        return
    shares = max(1, min(triton.cdiv(most, RANKED), 16 * multiprocessors(picks.device) // rows))
    topk.rank_kernel[(rows * shares,)](picks, pairs, counts, room, k, shares, RANKED, OTHERS, num_warps=4)
