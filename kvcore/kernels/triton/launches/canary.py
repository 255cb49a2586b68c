"""The launch on check words."""

from functools import cache

from kvcore.kernels.triton import canary
from kvcore.kernels.triton.launches.launching import Array, Framework, Kernel, launch
from kvcore.kernels.triton.record import ceil_div

MOST = 64
"""Faults that one launch names."""

ROOM = 1 + MOST * canary.FAULT
"""Integers of what a launch tells: how many faults there are, then each."""

WARPS = 2

PROGRAMS = 4096
"""About as many are launched where rows of long requests are shared among several, and more only where roles and
requests are more."""


@cache
def _watch(narrow: bool) -> Kernel:
    constants = {
        "NARROW": narrow, "MOST": MOST, "NUMBERS": canary.NUMBERS, "SPANS": canary.SPANS, "ROLE": canary.ROLE,
        "PIECE": canary.PIECE, "FAULT": canary.FAULT, "ROWS": canary.ROWS, "WORDS": canary.WORDS,
    }  # fmt: skip
    return Kernel(canary.watch_kernel, constants, warps=WARPS, writes=("asked",))


@launch("asked")
def watch_rows(
    to: Framework, asked: Array, slots: Array, starts: Array, lengths: Array, block_table: Array, roles: Array,
    pieces: Array, requests: int, sample: int, most: int, turn: int, narrow: bool,
) -> None:  # fmt: skip
    """Compare sampled rows with their check words and give others theirs; both are found by addresses in tables.

    Args:
        asked: int32: of ``kvcore.ops.canary.Asked``, its numbers row by row; then ROOM zeros, in which faults are told.
        roles: [roles, ROLE] int64.
        pieces: [pieces, PIECE] int64.
        requests: of the index, in order; padding behind them is left alone.
        sample: one row in so many.
        most: sampled rows of a request, of the role that has most of them.
        turn: which part of them is compared, of as many parts as there are; -1: all are.
        narrow: whether pieces are of bytes, not of words of four.
    """
    count = roles.shape[0]
    if requests * count:
        splits = max(1, min(ceil_div(most, canary.ROWS), PROGRAMS // (requests * count)))
        arrays = asked, slots, starts, lengths, block_table, roles, pieces
        found = asked.shape[0] - ROOM
        numbers = requests, block_table.shape[1], count, splits, sample, turn, found
        to.run(_watch(narrow), ((count + 1) * requests * splits,), arrays, numbers)
