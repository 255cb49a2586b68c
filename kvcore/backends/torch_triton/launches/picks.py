"""Launches of top-k: the best of every tile of a row, merged until one list is left, then ranked."""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from kvcore.backends.torch_triton.launches.attention import multiprocessors
from kvcore.backends.torch_triton.launches.bound import registered
from kvcore.backends.torch_triton.run_triton import Launcher
from kvcore.kernels.triton import topk
from kvcore.kernels.triton.lists import (
    OTHERS,
    RANKED,
    Tile,
    aligned_to_four,
    enough,
    merges,
    room_for,
    rows_at_once,
    shares_for,
    tile_for,
)
from kvcore.kernels.triton.record import ceil_div


class Lists(NamedTuple):
    """Lists of pairs in the workspace: ``parts`` a row, ``room`` apart, no more than ``most`` pairs in each."""

    pairs: Tensor
    counts: Tensor
    parts: int
    room: int
    most: int


@cache
def _best(tile: Tile, room: int, most: int) -> Launcher:
    constants = {"PICKS": tile.picks, "HANDS": tile.hands, "DEEP": tile.deep, "ROOM": room, "LIST": most}
    return Launcher(topk.best_kernel, constants, tile.warps, fused=True)


@cache
def _rank() -> Launcher:
    return Launcher(topk.rank_kernel, {"BLOCK": RANKED, "OTHERS": OTHERS}, 4, fused=True)


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
    parts = ceil_div(columns, tile.hands * tile.deep)
    for start in range(0, len(out), rows_at_once(parts)):
        rows, picks = scores[start : start + rows_at_once(parts)], out[start : start + rows_at_once(parts)]
        _best(tile, room, 0)(
            (len(rows) * parts,), (pairs, counts, rows, counts), (columns, columns, k, enough(k), parts)
        )
        rank_lists(picks, Lists(pairs, counts, parts, room, room), k)
    return out


def rank_lists(picks: Tensor, lists: Lists, k: int) -> None:
    """The best k of every row's lists -> picks [rows, k]; lists of fewer lists are written behind them."""
    rows = len(picks)
    pairs, counts, parts, room, most = lists
    for one in merges(parts, room, most, k):
        merged, numbers = pairs[rows * one.given * one.line :], counts[aligned_to_four(rows * one.given) :]
        _best(one.tile, one.room, one.most)(
            (rows * one.parts,), (merged, numbers, pairs, counts), (one.given, one.line, k, enough(k), one.parts)
        )
        pairs, counts, room, most = merged, numbers, one.room, one.room
    shares = shares_for(multiprocessors(picks.device), rows, most)
    _rank()((rows * shares,), (picks, pairs, counts), (room, k, shares))
