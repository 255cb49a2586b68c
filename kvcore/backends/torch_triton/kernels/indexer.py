"""Launches of the indexer: scores of encoded keys, and the best k of every row."""

from functools import cache
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from kvcore.backends.torch_triton.kernels import scores, topk
from kvcore.backends.torch_triton.kernels.attention import multiprocessors
from kvcore.backends.torch_triton.kernels.bound import BOUND, INTERPRETED, is_native, options, registered, tile
from kvcore.backends.torch_triton.kernels.record import RowRecord, power_of_two, power_of_two_scaled

MOST_ROWS = 1024
"""Rows of scores that are ranked at a time: the workspace need not grow with a prompt."""


class ScoreParts(NamedTuple):
    """How a key is cut for the product; see ``attention.Parts``."""

    dim: int
    chunk: int
    chunks: int
    full: bool
    apart: bool


class ScoreCut(NamedTuple):
    """Keys of a tile, warps and the depth of the pipeline."""

    keys: int
    warps: int
    stages: int


CUTS = {True: ScoreCut(128, 4, 1), False: ScoreCut(64, 4, 3)}
"""By whether keys are nibbles."""


@cache
def score_parts(record: RowRecord) -> ScoreParts | None:
    """How keys are cut; None where the kernel does not cover them: codes are bf16 numbers, scales apart or exact."""
    chunk = min(64, power_of_two(record.dim))
    whole = record.quant % chunk == 0 and (record.width % chunk == 0 or chunk % record.width == 0)
    scaled = record.code in ("e4m3", "e2m1", "int8") and (
        record.groups == 1 or power_of_two_scaled(record) or (record.code, record.scale) == ("e2m1", "e4m3")
    )
    exact = (scaled or not record.quant) and record.plain in ("", "bf16")
    if chunk < 16 or not whole or not exact or record.heads != 1:
        return None
    return ScoreParts(record.dim, chunk, triton.cdiv(record.dim, chunk), INTERPRETED, True)


@cache
def nibbles(record: RowRecord) -> bool:
    """Four power-of-two scales in a word, sixteen bytes of codes each."""
    words = all(number % 4 == 0 for number in (record.scales_unit, record.scales_base, record.scales_stride))
    return (record.code, record.scale, record.groups, record.width) == ("e2m1", "e8m0", 4, 32) and words


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
    if out.numel():
        q = rotate(q, rotated, record)
        score_into(out, columns, 0, q, weights, positions, request_index, block_table, buffers, record, ratio, columns)
    return out


def rotate(q: Tensor, rotated: Tensor, number: int) -> Tensor:
    """Queries as keys of the format are stored: rotated where those are, into ``rotated``."""
    record = BOUND[number].record
    if not record.hadamard:
        return q
    count = q.numel() // record.dim
    rows, warps = tile(record, count)
    scores.rotate_kernel[(triton.cdiv(count, rows),)](
        rotated, q, count, record, rows, is_native(q.device), num_warps=warps, **options(q.device)
    )
    return rotated[: q.numel()].view(q.shape)


def score_into(
    out: Tensor,
    line: int,
    first: int,
    q: Tensor,
    weights: Tensor,
    positions: Tensor,
    request_index: Tensor,
    block_table: Tensor,
    buffers: list[Tensor],
    number: int,
    ratio: int,
    columns: int,
) -> None:
    """Scores of entries first .. first + columns to out, whose rows are ``line`` apart."""
    bound = BOUND[number]
    parts = score_parts(bound.record)
    assert parts is not None
    tokens, heads = q.shape[:2]
    packed = nibbles(bound.record) and is_native(q.device)
    cut = CUTS[packed]
    most = triton.cdiv(columns, cut.keys)
    # Enough programs to fill the GPU a few times; beyond that longer runs, which load their queries once.
    tiles = power_of_two(max(1, min(64, most * tokens // (8 * multiprocessors(q.device)))))
    scores.scores_kernel[(tokens * triton.cdiv(most, tiles),)](
        out, q, weights, buffers[bound.codes], buffers[bound.scales], buffers[bound.plain], positions, request_index,
        block_table, tokens, heads, first, columns, block_table.shape[1], line, bound.record, parts, ratio,
        max(16, power_of_two(heads)), cut.keys, tiles, cut.stages, packed, is_native(q.device), num_warps=cut.warps,
    )  # fmt: skip


class Ranking(NamedTuple):
    """Sizes of a top-k: hands that keep a row's largest, room for pairs."""

    hands: int
    room: int


@cache
def ranking(k: int, columns: int) -> Ranking:
    """Four hands for every pick: then about k + k / 7 scores of random rows reach the k-th largest of the hands."""
    hands = min(max(4 * power_of_two(k), 1024), power_of_two(columns), 16384)
    return Ranking(max(hands, 128), max(2048, 8 * power_of_two(k)))


def _select_out(scores: Tensor, numbers: Tensor, pairs: Tensor, k: int) -> Tensor:
    return scores.new_empty((scores.shape[0], k), dtype=torch.int32)


@registered(("numbers", "pairs"), _select_out)
def select_rows(scores: Tensor, numbers: Tensor, pairs: Tensor, k: int) -> Tensor:
    """The best k of scores [tokens, columns], contiguous -> [tokens, k].

    Args:
        numbers: int32, room for the hands and a count of as many rows as are ranked at a time.
        pairs: int64, room for the pairs of as many rows.
    """
    out = _select_out(scores, numbers, pairs, k)
    if not scores.shape[1]:
        return out.fill_(-1)
    if out.numel():
        select_into(out, scores, scores.shape[1], numbers, pairs, k)
    return out


def select_into(out: Tensor, given: Tensor, columns: int, numbers: Tensor, pairs: Tensor, k: int) -> None:
    """The best k of the first ``columns`` of every row of ``given`` [tokens, line]."""
    hands, room = ranking(k, columns)
    line = given.stride(0)
    for start in range(0, len(out), MOST_ROWS):
        rows, picks = given[start : start + MOST_ROWS], out[start : start + MOST_ROWS]
        count = len(rows)
        largest, counts = numbers[: count * hands], numbers[count * hands : count * (hands + 1)]
        block = 128
        topk.largest_kernel[(count, hands // block)](
            largest, counts, rows, columns, line, hands, block, min(8, power_of_two(triton.cdiv(columns, hands))),
            num_warps=4,
        )  # fmt: skip
        wide = 2048
        programs = max(1, min(triton.cdiv(columns, wide), 4 * multiprocessors(given.device) // count))
        run = triton.cdiv(triton.cdiv(columns, programs), wide) * wide
        topk.collect_kernel[(count, triton.cdiv(columns, run))](
            pairs, counts, largest, rows, columns, line, k, k + k // 4, run, hands, room, wide, num_warps=8
        )
        parts = max(1, min(triton.cdiv(power_of_two(k) * 2, 64), 4 * multiprocessors(given.device) // count))
        topk.rank_kernel[(count, parts)](picks, pairs, counts, rows, columns, line, k, parts, room, 64, 64, num_warps=4)


def _score_select_out(
    q: Tensor,
    weights: Tensor,
    positions: Tensor,
    request_index: Tensor,
    block_table: Tensor,
    buffers: list[Tensor],
    rotated: Tensor,
    lines: Tensor,
    numbers: Tensor,
    pairs: Tensor,
    record: int,
    ratio: int,
    columns: int,
    k: int,
    run: int,
) -> Tensor:
    return q.new_empty((q.shape[0], k), dtype=torch.int32)


@registered(("rotated", "lines", "numbers", "pairs"), _score_select_out)
def score_select_rows(
    q: Tensor,
    weights: Tensor,
    positions: Tensor,
    request_index: Tensor,
    block_table: Tensor,
    buffers: list[Tensor],
    rotated: Tensor,
    lines: Tensor,
    numbers: Tensor,
    pairs: Tensor,
    record: int,
    ratio: int,
    columns: int,
    k: int,
    run: int,
) -> Tensor:
    """The best k entries of every query, whose scores are taken ``run`` columns at a time.

    Args:
        lines: fp32, for tokens · (k + run) scores: the best so far, then those of a run.
    """
    picks = _score_select_out(
        q, weights, positions, request_index, block_table, buffers, rotated, lines, numbers, pairs, record, ratio,
        columns, k, run,
    )  # fmt: skip
    if not picks.numel():
        return picks
    tokens, line = len(q), k + run
    scores_of = lines[: tokens * line].view(tokens, line)
    scores_of[:, :k] = -torch.inf
    entries = torch.empty_like(picks)
    q = rotate(q, rotated, record)
    for first in range(0, columns, run):
        some = min(run, columns - first)
        score_into(
            scores_of[:, k:], line, first, q, weights, positions, request_index, block_table, buffers, record, ratio,
            some,
        )  # fmt: skip
        select_into(picks, scores_of, k + some, numbers, pairs, k)
        topk.carry_kernel[(tokens,)](picks, entries, scores_of, first, k, line, power_of_two(k), num_warps=4)
    return entries
