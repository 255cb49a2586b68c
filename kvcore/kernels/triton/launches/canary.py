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

PROGRAMS = 2048
"""About as many compare rows in one launch in turns."""

MOST_PROGRAMS = 1 << 15
"""The same of a launch that compares all of them at once."""


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
    pieces: Array, requests: int, sample: int, most: int, turn: int, seals: bool, narrow: bool,
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
        seals: whether some get words: then every role of every request has a program.
        narrow: whether pieces are of bytes, not of words of four.
    """
    count = roles.shape[0]
    if requests * count:
        pairs, programs = requests * count, MOST_PROGRAMS if turn < 0 else PROGRAMS
        splits = max(1, min(ceil_div(most, canary.ROWS), programs // pairs))
        parts = 1 if turn < 0 else ceil_div(pairs, programs)
        step = 1 if seals else parts
        # Of the last pairs some parts have one less.
        launched = ceil_div(pairs - turn % parts, step) if step > 1 else pairs
        arrays = asked, slots, starts, lengths, block_table, roles, pieces
        found = asked.shape[0] - ROOM
        numbers = requests, block_table.shape[1], launched, splits, step, parts, sample, turn, found
        to.run(_watch(narrow), (launched * splits + requests,), arrays, numbers)
