"""Launches of the indexer: scores of encoded keys, and the best k of them without keeping all."""

from functools import cache
from typing import Any, NamedTuple

from kvcore.kernels.triton import scores
from kvcore.kernels.triton.device import INTERPRETED, DeviceProps, hopper
from kvcore.kernels.triton.launches.launching import BOUND, Array, Framework, Kernel, launch
from kvcore.kernels.triton.launches.topk import Lists, hopper_rows, rank_lists
from kvcore.kernels.triton.record import ceil_div, power_of_two
from kvcore.kernels.triton.scores import (
    HOPPER_KEYS,
    HOPPER_PROGRAMS,
    SIZES,
    ScoreConfig,
    fitted_tiles,
    hopper_takes,
    hopper_tiles,
    score_config,
    score_tiles,
    size_of,
)
from kvcore.kernels.triton.shape import tile
from kvcore.kernels.triton.topk import HOPPER_K, HOPPER_SLOTS, HopperLists, hopper_lists, workspace

RUN, MOST_RUNS = 8192, 128
"""Most keys of a program that keeps its best, and most programs of a query: longer contexts make longer runs still."""
FEWEST_RUNS = 8
"""Programs that a long query may have at any rate."""
RUNS_AT_ONCE = 2048
"""Runs whose lists are kept at a time, within a half: 40 MiB for 512 entries, and programs for some waves."""
ROUND = 1024
"""Keys of a run whose scores are kept at a time."""
REGISTERS: dict[str, Any] = {} if INTERPRETED else {"maxnreg": 168}
"""Of a thread of the same kernel, so that three programs of four warps share 64 Ki; cutting lists would take more."""
HOPPER_REGISTERS = 168
"""Of a thread of the kernel for Hopper where two queries share keys, so that three programs share 64 Ki."""
SEEN_REGISTERS = 128
"""The same of the one that goes as far as is seen, so that four programs do."""
LEAN_REGISTERS, LEAN_HEADS = 96, 64
"""The same where five programs do, for one query of at most so many heads and keys of four bits."""
CODES_REGISTERS, CODES_STAGES, CODES_PROGRAMS = 96, 3, 5
"""Of the kernel for queries in e4m3: registers of a thread and tiles in shared memory, so that so many programs share a
multiprocessor."""
NIBBLES_REGISTERS, NIBBLES_PROGRAMS = 120, 4
"""Of the kernel that spreads keys of four bits to codes of eight, likewise: fewer registers, and up to six programs,
took longer."""
FEWEST_NIBBLES = SIZES[0]
"""Scores from which on it is launched: of fewer the other kernel has sums in fp32, and need not wait for queries."""
NO_FLOOR = -(1 << 31)
"""Below every score's order."""
MOST_SCORES = 1 << 26
"""Scores that are kept whole: 256 MiB. Up to there lists of the best save little and take longer."""
NARROW = 8192
"""Columns up to which those that a query does not see cost less than to look for what it sees."""
SEEN_TILES, SEEN_PARTS = 16, 8
"""Fewest tiles of a program that takes part of what a query sees, and fewest programs of a query that sees much."""
MOST_BEST = 2048
"""Picks that a list of a run is made for: its cut holds twice as many pairs in registers."""


@cache
def _config(record: int, heads: int, *how: Any) -> tuple[ScoreConfig, dict[str, Any]]:
    return score_config(BOUND[record].record, heads, *how)


@cache
def _scores(record: int, heads: int, how: tuple[bool, bool, int], ratio: int, tiles: int) -> Kernel:
    config, constants = _config(record, heads, *how)
    constants = {**constants, "RATIO": ratio, "TILES": tiles}
    return Kernel(scores.scores_kernel, constants, config.warps, writes=("out",), fused=True)


@cache
def _hopper_scores(record: int, heads: int, taken: str, ratio: int, queries: int) -> Kernel:
    # Gluon is not loaded where it cannot run.
    from kvcore.kernels.triton.scores_hopper import hopper_scores_kernel

    known = BOUND[record].record
    whole = known.rows % HOPPER_KEYS == 0
    lean = whole and taken == "nibbles" and queries == 1 and heads <= LEAN_HEADS
    constants = {
        "R": known, "RATIO": ratio, "HEADS": max(16, power_of_two(heads)), "QUERIES": queries, "TAKEN": taken,
        "WHOLE": whole, "LEAN": lean,
    }  # fmt: skip
    options = {"maxnreg": HOPPER_REGISTERS if queries == 2 else LEAN_REGISTERS} if lean or queries == 2 else {}
    return Kernel(hopper_scores_kernel, constants, writes=("out",), fused=True, **options)


@cache
def _hopper_codes(record: int, heads: int, ratio: int, ahead: bool) -> Kernel:
    from kvcore.kernels.triton.scores_hopper import hopper_codes_kernel

    constants = {
        "R": BOUND[record].record, "RATIO": ratio, "HEADS": max(16, power_of_two(heads)), "STAGES": CODES_STAGES,
    }  # fmt: skip
    return Kernel(hopper_codes_kernel, constants, writes=("out",), fused=True, ahead=ahead, maxnreg=CODES_REGISTERS)


@cache
def _hopper_nibbles(record: int, heads: int, ratio: int, ahead: bool) -> Kernel:
    from kvcore.kernels.triton.scores_nibbles import hopper_nibbles_kernel

    constants = {"R": BOUND[record].record, "RATIO": ratio, "HEADS": max(16, power_of_two(heads))}
    return Kernel(hopper_nibbles_kernel, constants, writes=("out",), fused=True, ahead=ahead, maxnreg=NIBBLES_REGISTERS)


@cache
def _seen_scores(record: int, heads: int, taken: str, ratio: int) -> Kernel:
    # Gluon is not loaded where it cannot run.
    from kvcore.kernels.triton.scores_hopper import hopper_seen_scores_kernel

    known = BOUND[record].record
    whole = known.rows % HOPPER_KEYS == 0
    lean = whole and taken == "nibbles" and heads <= LEAN_HEADS
    constants = {
        "R": known, "RATIO": ratio, "HEADS": max(16, power_of_two(heads)), "TAKEN": taken, "WHOLE": whole, "LEAN": lean,
    }  # fmt: skip
    registers = LEAN_REGISTERS if lean else SEEN_REGISTERS
    return Kernel(hopper_seen_scores_kernel, constants, writes=("out", "counts"), fused=True, maxnreg=registers)


@cache
def _long_scores(record: int, heads: int, how: tuple[bool, bool, int], ratio: int, room: int, kept: int) -> Kernel:
    config, constants = _config(record, heads, *how)
    constants = {**constants, "RATIO": ratio, "ROUND": ROUND, "ROOM": room, "KEPT": kept}
    writes = "indices", "pairs", "scores"
    return Kernel(scores.long_scores_kernel, constants, config.warps, writes=writes, fused=True, **REGISTERS)


@cache
def _best_scores(record: int, heads: int, how: tuple[bool, bool, int], ratio: int, room: int, kept: int) -> Kernel:
    config, constants = _config(record, heads, *how)
    constants = {**constants, "RATIO": ratio, "ROUND": ROUND, "ROOM": room, "KEPT": kept}
    writes = "pairs", "counts", "scores", "floors"
    return Kernel(scores.best_scores_kernel, constants, config.warps, writes=writes, fused=True, **REGISTERS)


@cache
def _rotation(record: int, rows: int, warps: int, native: bool) -> Kernel:
    constants = {"R": BOUND[record].record, "ROWS": rows, "NATIVE": native}
    return Kernel(scores.rotate_kernel, constants, warps, writes=("out",))


def _rotated(to: Framework, q: Array, room: Array, number: int) -> Array:
    """Queries as keys of the format are stored: rotated where those are, into ``room``."""
    record = BOUND[number].record
    if not record.hadamard:
        return q
    count = q.shape[0] * q.shape[1]
    rotated = to.part(room, 0, q.shape, to.bfloat16)
    rows, warps = tile(record, count)
    to.run(_rotation(number, rows, warps, to.native(q)), (ceil_div(count, rows),), (rotated, q), (count,))
    return rotated


def _on_hopper(to: Framework, props: DeviceProps, q: Array, record: int, scores: int, requests: int) -> str:
    """What ``hopper_scores_kernel`` takes of keys for these queries; "" where another one takes them.

    Large calls with queries in e4m3, and those with several a request, take FP8 tensor cores: half the products' work
    is worth more there than sums in fp32.
    """
    known = BOUND[record].record
    small = size_of(scores) < 2 and q.shape[0] < 2 * requests
    narrow = known.hadamard or q.dtype == to.bfloat16 or (q.dtype == to.e4m3 and small)
    return hopper_takes(known, q.shape[1]) if narrow and to.gluon and hopper(props) else ""


def as_they_are(to: Framework, q: Array, record: int, requests: int, scores: int) -> str:
    """What Hopper's FP8 tensor cores take of keys for queries in e4m3, one a request; "" where they do not."""
    known = BOUND[record].record
    few = q.shape[0] < 2 * requests and q.shape[1] <= LEAN_HEADS
    fits = few and known.rows % HOPPER_KEYS == 0 and not known.hadamard
    if not fits or q.dtype != to.e4m3 or not to.gluon or not hopper(to.props(q)):
        return ""
    taken = hopper_takes(known, q.shape[1])
    return "" if taken == "nibbles" and scores < FEWEST_NIBBLES else taken


def _scores_out(to: Framework, q: Array, columns: int) -> Array:
    return to.empty((q.shape[0], columns), to.float32, q)


@launch("rotated", outputs=_scores_out)
def score_rows(
    to: Framework, q: Array, weights: Array, positions: Array, request_index: Array, block_table: Array,
    buffers: list[Array], rotated: Array, record: int, ratio: int, columns: int,
) -> Array:  # fmt: skip
    """Scores [tokens, columns] of q [tokens, heads, dim] and weights [tokens, heads], all contiguous.

    Args:
        q: fp32 or bf16; e4m3 where the record ``takes_codes`` and the device is ``native``.
        buffers: the keys' pools.
        rotated: bf16, room for q where the format's keys are rotated.
    """
    out = _scores_out(to, q, columns)
    tokens, heads, _ = q.shape
    if not tokens * columns:
        return out
    stored = as_they_are(to, q, record, block_table.shape[0], tokens * columns)
    if stored:
        at_once = (CODES_PROGRAMS if stored == "codes" else NIBBLES_PROGRAMS) * to.props(q).multiprocessors
        tiles = fitted_tiles(at_once, tokens, columns)
        programs, (codes_of, scales_of, _) = (
            tokens * ceil_div(columns, HOPPER_KEYS * tiles),
            BOUND[record].given(buffers),
        )
        kernel = _hopper_codes if stored == "codes" else _hopper_nibbles
        to.run(
            kernel(record, heads, ratio, programs <= at_once),
            (programs,),
            (out, q, weights, codes_of, scales_of, positions, request_index, block_table),
            (tokens, heads, columns, block_table.shape[1], tiles),
        )
        return out
    size = size_of(tokens * columns)
    taken = _on_hopper(to, to.props(q), q, record, tokens * columns, block_table.shape[0])
    if taken:
        # Tokens in a row are mostly one request's where there are more of them than requests.
        queries = 2 if tokens >= 2 * block_table.shape[0] else 1
        groups, (codes_of, scales_of, _) = ceil_div(tokens, queries), BOUND[record].given(buffers)
        waves = 1 if size == 0 or (taken == "codes" and queries == 1) else 2
        tiles = hopper_tiles(to.props(q).multiprocessors, groups, columns, waves)
        to.run(
            _hopper_scores(record, heads, taken, ratio, queries),
            (groups * ceil_div(columns, HOPPER_KEYS * tiles),),
            (
                out,
                _rotated(to, q, rotated, record),
                weights,
                codes_of,
                scales_of,
                positions,
                request_index,
                block_table,
            ),
            (tokens, heads, columns, block_table.shape[1], tiles, 64, 4),
        )
        return out
    how = to.native(q), q.dtype == to.e4m3, size
    keys = _config(record, heads, *how)[0].keys
    tiles = score_tiles(to.props(q).multiprocessors, tokens, columns, keys)
    pools = BOUND[record].given(buffers)
    q = _rotated(to, q, rotated, record)
    to.run(
        _scores(record, heads, how, ratio, tiles),
        (tokens * ceil_div(columns, keys * tiles),),
        (out, q, weights, *pools, positions, request_index, block_table),
        (tokens, heads, columns, block_table.shape[1]),
    )
    return out


def kept(k: int) -> int:
    """Pairs of a run that are handed on at most: cutting a list of few more than k takes longer than merging it."""
    return 2 * power_of_two(k)


def _list_room(k: int) -> int:
    """Pairs that a list of a run has room for: before it might not take another round it is cut."""
    return max(2 * ROUND, 2 * power_of_two(k))


class Runs(NamedTuple):
    """Runs of a query, keys of each; queries whose runs are kept at a time; pairs that a run's list has room for."""

    runs: int
    keys: int
    tokens: int
    room: int


def runs_of(props: DeviceProps, tokens: int, columns: int, run: int, k: int) -> Runs:
    """Runs of ``run`` keys: less where programs would be too few, more where a query would have too many runs.

    As many queries go at a time as there are, where they keep the device busy without so many runs of each.
    """
    keys = min(run, ceil_div(tokens * columns, 8 * props.multiprocessors))
    most = max(FEWEST_RUNS, min(MOST_RUNS, RUNS_AT_ONCE // tokens))
    runs = max(1, min(most, ceil_div(columns, max(keys, 16))))
    # A padded step's queries are a few more than a round number, which would be all that is left for another pass.
    passes = max(1, round(tokens * runs / RUNS_AT_ONCE))
    share = ceil_div(tokens, passes)
    # Programs are launched again on parts of arrays that begin on boundaries of 16 bytes.
    share += -share % 4 if share > 4 else 0
    return Runs(runs, ceil_div(columns, runs), min(tokens, share), _list_room(k))


def best_workspace(runs: Runs, k: int) -> tuple[int, int, int]:
    """Pairs, counts and scores that ``score_select_rows`` needs."""
    return *workspace(runs.tokens, runs.runs, runs.room, kept(k), k), runs.tokens * runs.runs * ROUND


def _score_select_out(to: Framework, q: Array, k: int) -> Array:
    return to.empty((q.shape[0], k), to.int32, q)


@launch("rotated", "pairs", "counts", "held", outputs=_score_select_out)
def score_select_rows(
    to: Framework, q: Array, weights: Array, positions: Array, request_index: Array, block_table: Array,
    buffers: list[Array], rotated: Array, pairs: Array, counts: Array, held: Array, record: int, ratio: int,
    columns: int, k: int, run: int,
) -> Array:  # fmt: skip
    """The best k <= MOST_BEST of the first ``columns`` entries of every query; scores are never all in memory.

    Args:
        pairs, counts, held: int64, int32 and fp32, as many as ``best_workspace`` says.
        run: entries of a program.
    """
    out = _score_select_out(to, q, k)
    tokens, heads, _ = q.shape
    if not tokens * k:
        return out
    runs = runs_of(to.props(q), tokens, columns, run, k)
    # As close as ``score_rows`` has them.
    codes = q.dtype == to.e4m3 and not _on_hopper(to, to.props(q), q, record, tokens * columns, block_table.shape[0])
    how = to.native(q), codes, size_of(tokens * columns)
    kernel = _best_scores(record, heads, how, ratio, runs.room, kept(k))
    pools, most = BOUND[record].given(buffers), min(k + k // 4, runs.room - ROUND)
    q = _rotated(to, q, rotated, record)
    for start in range(0, tokens, runs.tokens):
        some = min(runs.tokens, tokens - start)
        chosen = to.part(out, start, (some, k), to.int32)
        step = [
            to.part(each, start, (some, *each.shape[1:]), each.dtype) for each in (q, weights, positions, request_index)
        ]
        floors = to.filled((some,), NO_FLOOR, to.int32, chosen)
        to.run(
            kernel,
            (some * runs.runs,),
            (pairs, counts, held, floors, *step[:2], *pools, *step[2:], block_table),
            (some, heads, runs.runs, columns, block_table.shape[1], runs.keys, k, most),
        )
        lists = Lists(pairs, counts, runs.runs, runs.room, kept(k))
        rank_lists(to, chosen, some, lists, (pairs, counts), k)
    return out


class Seen(NamedTuple):
    """Scores of a query that there is room for, whole tiles, and how the best of them are found."""

    room: int
    lists: HopperLists


def seen_of(
    to: Framework, props: DeviceProps, q: Array, block_table: Array, record: int, columns: int, k: int
) -> Seen | None:
    """How ``seen_select_rows`` takes a call; None where whole rows of scores, or lists of runs, are as good or better.

    It is for steps of a token a request, whose tables may be far wider than what is seen. Products of e4m3 queries are
    summed in other ways, too, by how many there are.
    """
    tokens, requests = q.shape[0], block_table.shape[0]
    if columns <= NARROW or k > HOPPER_K or tokens >= 2 * requests or q.dtype == to.e4m3:
        return None
    room = ceil_div(min(columns, max(NARROW, MOST_SCORES // tokens)), HOPPER_KEYS) * HOPPER_KEYS
    if not _on_hopper(to, props, q, record, tokens * room, requests):
        return None
    lists = hopper_lists(props.multiprocessors, tokens, room, k)
    return Seen(room, lists) if lists.parts * lists.room <= HOPPER_SLOTS else None


def seen_workspace(seen: Seen, tokens: int, columns: int, k: int) -> tuple[int, int, int]:
    """Pairs, counts and scores that ``seen_select_rows`` needs."""
    parts = seen.lists.parts
    pairs, counts = (tokens * parts * seen.lists.room, tokens * parts) if parts > 1 else (0, 0)
    long = tokens if seen.room < columns else 0
    return max(pairs, long * _list_room(k)), counts, long * ROUND


@launch("rotated", "pairs", "counts", "held", outputs=_score_select_out)
def seen_select_rows(
    to: Framework, q: Array, weights: Array, positions: Array, request_index: Array, block_table: Array,
    buffers: list[Array], rotated: Array, pairs: Array, counts: Array, held: Array, record: int, ratio: int,
    columns: int, k: int,
) -> Array:  # fmt: skip
    """What ``score_select_rows`` gives, for calls that ``seen_of`` takes: work is on columns alone that queries see.

    Queries that see more than there is room for have a program each, which keeps their best.

    Args:
        pairs, counts, held: int64, int32 and fp32, as many as ``seen_workspace`` says.
    """
    out, props = _score_select_out(to, q, k), to.props(q)
    seen = seen_of(to, props, q, block_table, record, columns, k)
    assert seen is not None
    tokens, heads, _ = q.shape
    taken = _on_hopper(to, props, q, record, tokens * seen.room, block_table.shape[0])
    programs = max(SEEN_PARTS, ceil_div(2 * HOPPER_PROGRAMS * props.multiprocessors, tokens))
    kept_scores, numbers = to.empty((tokens, seen.room), to.float32, q), to.empty((tokens,), to.int32, q)
    pools, width = BOUND[record].given(buffers), block_table.shape[1]
    q = _rotated(to, q, rotated, record)
    # Before the others: a launch between the ranking and what reads its picks would keep that from coming up early.
    if seen.room < columns:
        how, room = (to.native(q), False, size_of(tokens * columns)), _list_room(k)
        to.run(
            _long_scores(record, heads, how, ratio, room, kept(k)),
            (tokens,),
            (out, pairs, held, q, weights, *pools, positions, request_index, block_table),
            (heads, columns, width, seen.room, k, min(k + k // 4, room - ROUND)),
        )
    to.run(
        _seen_scores(record, heads, taken, ratio),
        (tokens * programs,),
        (kept_scores, numbers, q, weights, *pools[:2], positions, request_index, block_table),
        (tokens, heads, columns, width, seen.room, SEEN_TILES, 64, 4),
    )
    hopper_rows(to, out, kept_scores, tokens, (pairs, counts), k, seen.lists, numbers)
    return out
