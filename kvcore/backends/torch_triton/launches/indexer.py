"""Launches of the indexer: scores of encoded keys, and the best k of them without keeping all."""

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvcore.backends.torch_triton.launches import picks
from kvcore.backends.torch_triton.launches.attention import multiprocessors
from kvcore.backends.torch_triton.launches.bound import BOUND, INTERPRETED, is_native, registered, tile
from kvcore.backends.torch_triton.run_triton import Launcher
from kvcore.kernels.triton import scores
from kvcore.kernels.triton.lists import workspace
from kvcore.kernels.triton.record import ceil_div, power_of_two
from kvcore.kernels.triton.score_cut import ScoreCut, score_cut, score_tiles

RUN, MOST_RUNS = 8192, 128
"""Most keys of a program that keeps its best, and most programs of a query: longer contexts make longer runs still."""
RUNS_AT_ONCE = 2048
"""Runs whose lists are kept at a time: 40 MiB for 512 picks, and programs for some waves."""
ROUND = 1024
"""Keys of a run whose scores are kept at a time."""
REGISTERS: dict[str, Any] = {} if INTERPRETED else {"maxnreg": 168}
"""Of a thread of the same kernel, so that three programs of four warps share 64 Ki; cutting lists would take more."""
NO_FLOOR = -(1 << 31)
"""Below every score's order."""
MOST_BEST = 2048
"""Picks that a list of a run is made for: its cut holds twice as many pairs in registers."""


def _scores_out(
    q: Tensor,
    weights: Tensor,
    positions: Tensor,
    request_index: Tensor,
    block_table: Tensor,
    buffers: list[Tensor],
    rotated: Tensor,
    record: int,
    ratio: int,
    columns: int,
) -> Tensor:
    return q.new_empty((q.shape[0], columns), dtype=torch.float32)


@registered(("rotated",), _scores_out)
def score_rows(
    q: Tensor,
    weights: Tensor,
    positions: Tensor,
    request_index: Tensor,
    block_table: Tensor,
    buffers: list[Tensor],
    rotated: Tensor,
    record: int,
    ratio: int,
    columns: int,
) -> Tensor:
    """Scores [tokens, columns] of q [tokens, heads, dim] and weights [tokens, heads], all contiguous.

    Args:
        buffers: the keys' pools.
        rotated: bf16, room for q where the format's keys are rotated.
    """
    out = _scores_out(q, weights, positions, request_index, block_table, buffers, rotated, record, ratio, columns)
    if not out.numel():
        return out
    tokens, heads = q.shape[:2]
    keys = _cut(record, heads, q.device)[0].keys
    tiles = score_tiles(multiprocessors(q.device), tokens, columns, keys)
    given = rotate(q, rotated, record), weights, *_three(record, buffers), positions, request_index, block_table
    _scores(record, heads, q.device, ratio, tiles)(
        (tokens * ceil_div(columns, keys * tiles),),
        (out, *given),
        (tokens, heads, columns, block_table.shape[1]),
    )
    return out


def _three(number: int, buffers: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    bound = BOUND[number]
    return buffers[bound.codes], buffers[bound.scales], buffers[bound.plain]


@cache
def _scores(number: int, heads: int, device: torch.device, ratio: int, tiles: int) -> Launcher:
    cut, constants = _cut(number, heads, device)
    return Launcher(scores.scores_kernel, {**constants, "RATIO": ratio, "TILES": tiles}, cut.warps, fused=True)


@cache
def _best_scores(number: int, heads: int, device: torch.device, ratio: int, room: int) -> Launcher:
    cut, constants = _cut(number, heads, device)
    constants = {**constants, "RATIO": ratio, "ROUND": ROUND, "ROOM": room}
    return Launcher(scores.best_scores_kernel, constants, cut.warps, fused=True, **REGISTERS)


@cache
def _rotation(number: int, rows: int, warps: int, native: bool) -> Launcher:
    constants = {"R": BOUND[number].record, "ROWS": rows, "NATIVE": native}
    return Launcher(scores.rotate_kernel, constants, warps)


@cache
def _cut(number: int, heads: int, device: torch.device) -> tuple[ScoreCut, dict[str, Any]]:
    return score_cut(BOUND[number].record, heads, is_native(device))


def rotate(q: Tensor, rotated: Tensor, number: int) -> Tensor:
    """Queries as keys of the format are stored: rotated where those are, into ``rotated``."""
    record = BOUND[number].record
    if not record.hadamard:
        return q
    count = q.numel() // record.dim
    rows, warps = tile(record, count)
    _rotation(number, rows, warps, is_native(q.device))((ceil_div(count, rows),), (rotated, q), (count,))
    return rotated[: q.numel()].view(q.shape)


class Runs(NamedTuple):
    """Runs of a query, keys of each; queries whose runs are kept at a time; pairs that a run's list has room for."""

    runs: int
    keys: int
    tokens: int
    room: int


def runs_of(tokens: int, columns: int, run: int, k: int, device: torch.device) -> Runs:
    """Runs of ``run`` keys: less where programs would be too few, more where a query would have too many runs."""
    keys = min(run, ceil_div(tokens * columns, 8 * multiprocessors(device)))
    runs = max(1, min(MOST_RUNS, ceil_div(columns, max(keys, 16))))
    room = max(2 * ROUND, 2 * power_of_two(k))
    return Runs(runs, ceil_div(columns, runs), min(tokens, max(1, RUNS_AT_ONCE // runs)), room)


def best_workspace(runs: Runs, k: int) -> tuple[int, int, int]:
    """Pairs, counts and scores that ``score_select_rows`` needs."""
    return *workspace(runs.tokens, runs.runs, runs.room, power_of_two(k), k), runs.tokens * runs.runs * ROUND


def _score_select_out(
    q: Tensor,
    weights: Tensor,
    positions: Tensor,
    request_index: Tensor,
    block_table: Tensor,
    buffers: list[Tensor],
    rotated: Tensor,
    pairs: Tensor,
    counts: Tensor,
    held: Tensor,
    record: int,
    ratio: int,
    columns: int,
    k: int,
    run: int,
) -> Tensor:
    return q.new_empty((q.shape[0], k), dtype=torch.int32)


@registered(("rotated", "pairs", "counts", "held"), _score_select_out)
def score_select_rows(
    q: Tensor,
    weights: Tensor,
    positions: Tensor,
    request_index: Tensor,
    block_table: Tensor,
    buffers: list[Tensor],
    rotated: Tensor,
    pairs: Tensor,
    counts: Tensor,
    held: Tensor,
    record: int,
    ratio: int,
    columns: int,
    k: int,
    run: int,
) -> Tensor:
    """The best k <= MOST_BEST of the first ``columns`` entries of every query; scores are never all in memory.

    Args:
        pairs, counts, held: int64, int32 and fp32, as many as ``best_workspace`` says.
        run: entries of a program.
    """
    out = _score_select_out(
        q, weights, positions, request_index, block_table, buffers, rotated, pairs, counts, held, record, ratio,
        columns, k, run,
    )  # fmt: skip
    if not out.numel():
        return out
    heads = q.shape[1]
    runs = runs_of(len(q), columns, run, k, q.device)
    launch = _best_scores(record, heads, q.device, ratio, runs.room)
    q = rotate(q, rotated, record)
    for start in range(0, len(q), runs.tokens):
        some = slice(start, start + runs.tokens)
        chosen = out[some]
        floors = chosen.new_full((len(chosen),), NO_FLOOR)
        given = q[some], weights[some], *_three(record, buffers), positions[some], request_index[some], block_table
        launch(
            (len(chosen) * runs.runs,),
            (pairs, counts, held, floors, *given),
            (
                len(chosen),
                heads,
                runs.runs,
                columns,
                block_table.shape[1],
                runs.keys,
                k,
                min(k + k // 4, runs.room - ROUND),
            ),
        )
        picks.rank_lists(chosen, picks.Lists(pairs, counts, runs.runs, runs.room, power_of_two(k)), k)
    return out
