"""The best k of every row of scores, in three launches.

1. A row's columns are dealt out to many hands; each hand keeps its largest.
2. The k-th largest of these is a lower bound of the k-th largest score, and mostly a close one. Scores that reach it
   are collected, in any order.
3. Each collected score is ranked by counting those above it. Equal scores rank by column, so ranks are distinct and
   the order of collection does not matter.

A score and its column are one 64-bit number: scores as integers of the same order, then columns, lowest first.
"""

import triton
import triton.language as tl

from kvcore.backends.torch_triton.kernels.codes import float_bits

LOWEST = tl.constexpr(-2139095041)
"""``order_of`` of -inf: what is never picked."""


@triton.jit
def order_of(score):
    """fp32 -> int32 of the same order; NaN counts as -inf, -0 as 0."""
    bits = float_bits(tl.where(score != score, float("-inf"), score + 0.0))
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def pair_of(order, column):
    """(order, column) as one int64: higher scores first, then lower columns."""
    return (order.to(tl.int64) << 32) | (0x7FFFFFFF - column).to(tl.int64)


@triton.jit(do_not_specialize=["n", "line"])
def largest_kernel(
    largest_ptr, counts_ptr, scores_ptr, n, line, HANDS: tl.constexpr, BLOCK: tl.constexpr, DEEP: tl.constexpr
):
    """Hand h of row t keeps the largest of columns h, h + HANDS, ... of scores [rows, line] -> int32 [rows, HANDS]."""
    token, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    hand = block * BLOCK + tl.arange(0, BLOCK)
    best = tl.full([BLOCK], LOWEST, tl.int32)
    for first in range(0, n, HANDS * DEEP):
        column = first + tl.arange(0, DEEP)[:, None] * HANDS + hand[None, :]
        score = tl.load(scores_ptr + token * line + column, mask=column < n, other=float("-inf"))
        best = tl.maximum(best, tl.max(order_of(score), axis=0))
    tl.store(largest_ptr + token * HANDS + hand, best)
    if block == 0:
        tl.store(counts_ptr + token, 0)


@triton.jit
def bound_of(order, k, most):
    """An int32 that at least k of ``order`` reach, and not many more than ``most``, if there are k."""
    unsigned = (order ^ -2147483648).to(tl.uint32, bitcast=True)
    bound = tl.full([], 0, tl.uint32)
    reached = tl.full([], 2147483647, tl.int32)
    bit = tl.full([], 31, tl.int32)
    while (bit >= 0) & (reached > most):
        higher = bound | (tl.full([], 1, tl.uint32) << bit.to(tl.uint32))
        count = tl.sum((unsigned >= higher).to(tl.int32), axis=0)
        enough = count >= k
        bound = tl.where(enough, higher, bound)
        reached = tl.where(enough, count, reached)
        bit -= 1
    return bound.to(tl.int32, bitcast=True) ^ -2147483648


@triton.jit(do_not_specialize=["n", "line", "k", "most", "run"])
def collect_kernel(
    pairs_ptr, counts_ptr, largest_ptr, scores_ptr, n, line, k, most, run,
    HANDS: tl.constexpr, ROOM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Pairs of columns whose scores reach the hands' bound -> pairs [rows, ROOM], their number -> counts [rows].

    A program takes ``run`` columns. More pairs than there is room for are counted and not kept.
    """
    token = tl.program_id(0).to(tl.int64)
    bound = bound_of(tl.load(largest_ptr + token * HANDS + tl.arange(0, HANDS)), k, most)
    bound = tl.maximum(bound, LOWEST + 1)
    first = tl.program_id(1) * run
    last = tl.minimum(first + run, n)
    for start in range(first, last, BLOCK):
        column = start + tl.arange(0, BLOCK)
        score = tl.load(scores_ptr + token * line + column, mask=column < last, other=float("-inf"))
        order = order_of(score)
        kept = order >= bound
        # A place each, in any order: pairs are ranked by what they are.
        counter = counts_ptr + token + tl.zeros([BLOCK], tl.int32)
        at = tl.atomic_add(counter, tl.full([BLOCK], 1, tl.int32), mask=kept, sem="relaxed")
        tl.store(pairs_ptr + token * ROOM + at, pair_of(order, column), mask=kept & (at < ROOM))


@triton.jit
def collect_exactly(pairs_ptr, scores_ptr, n, k, BLOCK: tl.constexpr):
    """One program's way where the bound lets too many pass: a row's k best pairs, in column order; their number."""
    bound = tl.full([], 0, tl.uint32)
    for step in range(32):
        higher = bound | (tl.full([], 2147483648, tl.uint32) >> step)
        count = tl.full([], 0, tl.int32)
        for start in range(0, n, BLOCK):
            column = start + tl.arange(0, BLOCK)
            order = order_of(tl.load(scores_ptr + column, mask=column < n, other=float("-inf")))
            reaches = (order ^ -2147483648).to(tl.uint32, bitcast=True) >= higher
            count += tl.sum((reaches & (column < n)).to(tl.int32), axis=0)
        bound = tl.where(count >= k, higher, bound)
    least = tl.maximum(bound.to(tl.int32, bitcast=True) ^ -2147483648, LOWEST + 1)
    above = tl.full([], 0, tl.int32)
    for start in range(0, n, BLOCK):
        column = start + tl.arange(0, BLOCK)
        order = order_of(tl.load(scores_ptr + column, mask=column < n, other=float("-inf")))
        above += tl.sum((order > least).to(tl.int32), axis=0)
    found = tl.full([], 0, tl.int32)
    equal = tl.full([], 0, tl.int32)
    for start in range(0, n, BLOCK):
        column = start + tl.arange(0, BLOCK)
        order = order_of(tl.load(scores_ptr + column, mask=column < n, other=float("-inf")))
        same = (order == least).to(tl.int32)
        ahead = above + equal + tl.cumsum(same, axis=0) - same
        kept = ((order > least) | ((order == least) & (ahead < k))).to(tl.int32)
        at = found + tl.cumsum(kept, axis=0) - kept
        tl.store(pairs_ptr + at, pair_of(order, column), mask=kept == 1)
        equal += tl.sum(same, axis=0)
        found += tl.sum(kept, axis=0)
    return found


@triton.jit(do_not_specialize=["n", "line", "k", "parts"])
def rank_kernel(
    picks_ptr, pairs_ptr, counts_ptr, scores_ptr, n, line, k, parts,
    ROOM: tl.constexpr, BLOCK: tl.constexpr, OTHERS: tl.constexpr,
):  # fmt: skip
    """Columns by rank -> picks [rows, k], -1 beyond the last; ``parts`` programs share a row's pairs."""
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    count = tl.load(counts_ptr + token)
    pairs_ptr += token * ROOM
    if count > ROOM:
        count = 0
        if part == 0:
            count = collect_exactly(pairs_ptr, scores_ptr + token * line, n, k, 1024)
            tl.debug_barrier()
        parts = 1
    for first in range(part * BLOCK, count, parts * BLOCK):
        at = first + tl.arange(0, BLOCK)
        mine = tl.load(pairs_ptr + at, mask=at < count, other=0)
        above = tl.zeros([BLOCK, OTHERS], tl.int32)
        for start in range(0, count, OTHERS):
            other_at = start + tl.arange(0, OTHERS)
            other = tl.load(pairs_ptr + other_at, mask=other_at < count, other=-9223372036854775808)
            above += (other[None, :] > mine[:, None]).to(tl.int32)
        rank = tl.sum(above, axis=1)
        column = 0x7FFFFFFF - (mine & 0xFFFFFFFF).to(tl.int32)
        tl.store(picks_ptr + token * k + rank, column, mask=(at < count) & (rank < k))
    if part == 0:
        for first in range(tl.load(counts_ptr + token), k, BLOCK):
            at = first + tl.arange(0, BLOCK)
            tl.store(picks_ptr + token * k + at, tl.full([BLOCK], -1, tl.int32), mask=at < k)


@triton.jit(do_not_specialize=["first_column", "k", "line"])
def carry_kernel(picks_ptr, columns_ptr, scores_ptr, first_column, k, line, WIDTH: tl.constexpr):
    """Best scores and their entries so far, to the front of the next run's line.

    picks [rows, k] number columns of scores [rows, line]: the first k are the best of earlier runs, whose entries are
    columns [rows, k]; the others are entries from ``first_column`` on. Both are replaced by what was picked.
    """
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, WIDTH)
    pick = tl.load(picks_ptr + token * k + at, mask=at < k, other=-1)
    score = tl.load(scores_ptr + token * line + pick, mask=pick >= 0, other=float("-inf"))
    earlier = tl.load(columns_ptr + token * k + pick, mask=(pick >= 0) & (pick < k), other=-1)
    entry = tl.where(pick < k, earlier, first_column + pick - k)
    tl.debug_barrier()
    tl.store(scores_ptr + token * line + at, score, mask=at < k)
    tl.store(columns_ptr + token * k + at, entry, mask=at < k)
